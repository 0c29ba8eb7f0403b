"""What a job's logs tell: the first line that names an error."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpc.system.files import open_regular_file

TAIL = 4 * 2**20  # bytes of a log that are read
LABEL = re.compile(r"(?:\s*(\d+): ?)?(?:\[rank\d+\]: ?)?")  # before each line: srun's, and torch's
# After this line of a log comes another attempt of the same job.
REQUEUED = re.compile(r"CANCELLED AT \S+ DUE TO (JOB REQUEUE|PREEMPTION|NODE FAILURE)")
# What the programs around the ranks say.
ERROR = re.compile(r"(slurmstepd|srun|job\.sh): error|.*CANCELLED AT .* DUE TO TIME LIMIT|.*PBS: job killed")


def files(run_dir: Path, job: str | None) -> list[Path]:
    """Those of one job: of its nodes (PBS), of its script; of a member of a Slurm array, in the sweep's folder."""
    number = re.match(r"\d+", job or "")
    if not number or not job:
        return []
    script = run_dir.parent / f"job-{job}.log" if "_" in job else run_dir / f"job-{number[0]}.log"
    nodes = sorted(run_dir.glob(f"node-*-{number[0]}.log"), key=lambda path: (len(path.name), path.name))  # 2 before 10
    return [*nodes, script]


def first_error(run_dir: Path, job: str | None) -> str:
    """The first line of the job's logs, after its last requeue, that tells an error."""
    for path in files(run_dir, job):
        lines = [line for line in text(path).splitlines() if line.strip()]
        start = max((number + 1 for number, line in enumerate(lines) if REQUEUED.search(line)), default=0)
        # srun, which is not buffered, tells that a rank has ended before that rank's own last words arrive.
        if said := min(_errors(lines[start:]), key=lambda said: said.startswith("srun: error"), default=""):
            return said
    return ""


def text(path: Path) -> str:
    """The end of a text file; nothing where there is none."""
    try:
        with open_regular_file(path) as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""


def _errors(text: Sequence[str]) -> Iterator[str]:
    for number, line in enumerate(text):
        label, said = _unlabelled(line)
        if said.startswith(("ConfigError:", "Traceback (most recent")):
            # The ranks of an srun talk in between: only what this one says next counts.
            rest = (more for other, more in map(_unlabelled, text[number + 1 :]) if other == label and more.strip())
            if said.startswith("Traceback"):
                yield next((more for more in rest if not more.startswith(" ")), said)
            else:
                yield said
        elif ERROR.match(said):
            yield said


def _unlabelled(line: str) -> tuple[str | None, str]:
    """The rank that says it, as far as srun tells, and what it says."""
    found = LABEL.match(line)
    return (found[1], line[found.end() :]) if found else (None, line)
