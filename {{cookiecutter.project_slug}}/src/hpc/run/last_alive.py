"""When an attempt was last alive, by what it alone writes: other files are touched by the next start, too."""

import math
from collections.abc import Iterator
from pathlib import Path

from hpc.run import causes, job_logs
from hpc.system.files import parse_json

SILENT = 60  # seconds without a beat, of which there is one each 2 s: a file server shows some of them late


def last(run_dir: Path, attempt: int, start: float, host: str = "", until: float = math.inf) -> float:
    """The last of its signs up to `until`, when the next one began; its start, where it left none. Unix times.

    Args:
        host: of rank 0.
    """
    signs = [beat(run_dir, attempt), *_phases(run_dir, attempt), *_samples(run_dir, attempt, host)]
    signs += [cause.time for cause in causes.read(run_dir, attempt)]
    return max((sign for sign in signs if start <= sign <= until), default=start)


def beat(run_dir: Path, attempt: int) -> float:
    """The last beat of its heart; 0: it has left none."""
    try:
        return (run_dir / "claims" / f"{attempt:06}.beat").stat().st_mtime
    except OSError:
        return 0.0


def _phases(run_dir: Path, attempt: int) -> Iterator[float]:
    for line in job_logs.text(run_dir / "monitor" / "phases.jsonl").splitlines():
        try:
            note = parse_json(line)
            if note["attempt"] == attempt:
                yield float(note["end"])
        except (ValueError, KeyError, TypeError, OverflowError):
            continue


def _samples(run_dir: Path, attempt: int, host: str) -> Iterator[float]:
    """When one node was sampled: the sampler ends with the run."""
    for line in job_logs.text(run_dir / "monitor" / f"{Path(host).name}.csv").splitlines():
        when, _, rest = line.partition(",")
        if rest.startswith(f"{attempt},"):
            try:
                yield float(when)
            except ValueError:
                continue
