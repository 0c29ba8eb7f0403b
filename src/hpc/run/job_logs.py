"""The logs of a job, and the first line in them that names an error."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpc.system.files import open_regular_file

MAX_BYTES = 4 * 2**20  # of a log that are read, from its end
LABEL = re.compile(r"(?:\s*(\d+): ?)?(?:\[rank\d+\]: ?)?")  # before each line: srun's, and torch's
# After this line of a log comes another attempt of the same job. The second form is of a run that shares its node.
REQUEUED = re.compile(
    r"CANCELLED AT \S+ DUE TO (JOB REQUEUE|PREEMPTION|NODE FAILURE)|^job \S+: not finished .* when the other runs"
)
# Errors that the programs around the ranks print.
ERROR = re.compile(r"(slurmstepd|srun|job\.sh): error|.*CANCELLED AT .* DUE TO TIME LIMIT|.*PBS: job killed")


def job_log_paths(run_dir: Path, job: str | None) -> list[Path]:
    """Return the logs of one job: of its nodes (PBS), then of its script.

    An array's are in the sweep's folder; runs that share a node have logs of their own, too.
    """
    number = re.match(r"\d+", job or "")
    if not number or not job:
        return []
    scripts = [run_dir / f"job-{job}.log", run_dir.parent / f"job-{job}.log"]
    scripts = scripts if "_" in job else [run_dir / f"job-{number[0]}.log"]
    nodes = sorted(run_dir.glob(f"node-*-{number[0]}.log"), key=lambda path: (len(path.name), path.name))  # 2 before 10
    return [*nodes, *scripts]


def first_logged_error(run_dir: Path, job: str | None) -> str:
    """Return the first line of the job's logs, after its last requeue, that names an error; "" if there is none."""
    for path in job_log_paths(run_dir, job):
        lines = [line for line in read_tail(path).splitlines() if line.strip()]
        start = max((number + 1 for number, line in enumerate(lines) if REQUEUED.search(line)), default=0)
        # srun, which is not buffered, reports that a rank has ended before that rank's own last lines arrive.
        if error := min(_errors(lines[start:]), key=lambda error: error.startswith("srun: error"), default=""):
            return error
    return ""


def read_tail(path: Path, *, max_bytes: int = MAX_BYTES) -> str:
    """Return the end of a text file, at most `max_bytes` of it; "" if it cannot be read."""
    try:
        with open_regular_file(path) as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - max_bytes))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""


def _errors(lines: Sequence[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        rank, message = _without_label(line)
        if message.startswith(("ConfigError:", "Traceback (most recent")):
            # The ranks of an srun print in between: only the next lines of this rank count.
            following = (text for other, text in map(_without_label, lines[number + 1 :]) if other == rank)
            if message.startswith("Traceback"):
                yield next((text for text in following if text.strip() and not text.startswith(" ")), message)
            else:
                yield message
        elif ERROR.match(message):
            yield message


def _without_label(line: str) -> tuple[str | None, str]:
    """Return the rank that printed a line, as far as srun says it, and the line without that label."""
    label = LABEL.match(line)
    return (label[1], line[label.end() :]) if label else (None, line)
