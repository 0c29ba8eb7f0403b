"""All about one run: in the terminal, and as report.html in its directory."""

import os
from pathlib import Path

from hpc.report import page, run_data, terminal
from hpc.report.run_table import clean
from hpc.report.story import story
from hpc.run.history import RunRecord

NAME = "report.html"


def made(run: RunRecord) -> list[str]:
    """Write the page; the lines for the terminal, the last of which says where it is."""
    sections = story(run_data.measure(run))
    return [*terminal.lines(sections), "", written(run.path, page.html(sections))]


def written(run_dir: Path, text: str) -> str:
    """Whole or not at all; what became of it. Somebody else's run is read-only, and a disk may be full."""
    aside = run_dir / f".{NAME}-{os.getpid()}"
    try:
        try:
            aside.write_text(text, encoding="utf-8", errors="replace")
            aside.replace(run_dir / NAME)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        return clean(f"no page was written: {error.strerror}: {run_dir}")
    return clean(f"page: {run_dir / NAME}")
