"""The report of one run: lines for the terminal, and report.html in its directory."""

import os
from pathlib import Path

from hpc.report import page, run_data, terminal
from hpc.report.run_sections import run_sections
from hpc.report.run_table import one_line
from hpc.run.history import RunRecord

PAGE = "report.html"


def write_report(run: RunRecord) -> list[str]:
    """Write the page, and return the lines for the terminal, the last of which names the page."""
    sections = run_sections(run_data.read_run_data(run))
    return [*terminal.render_lines(sections), "", _write_page(run.path, page.render_html(sections))]


def _write_page(run_dir: Path, html: str) -> str:
    """Write the page whole or not at all, and return a line on the outcome.

    It may fail: another user's run directory is read-only, and a disk may be full.
    """
    path, temporary = run_dir / PAGE, run_dir / f".{PAGE}-{os.getpid()}"
    try:
        try:
            temporary.write_text(html, encoding="utf-8", errors="replace")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        return one_line(f"cannot write {path}: {error.strerror}")
    return one_line(f"page: {path}")
