"""The time when an attempt was last alive.

From files that only this attempt writes; later attempts also modify the others.
"""

import math
from collections.abc import Iterator
from pathlib import Path

from hpc.run import causes, job_logs
from hpc.system.files import parse_json

SILENT_SECONDS = 60  # without a heartbeat, of which there is one every 2 s: a file server shows some of them late


def last_sign(run_dir: Path, attempt: int, *, start: float, host: str = "", until: float = math.inf) -> float:
    """Return the unix time of an attempt's last sign of life; its start, if it left no other.

    Args:
        start: unix time.
        host: name of rank 0's node.
        until: unix time when the next attempt started.
    """
    signs = [last_beat(run_dir, attempt), *_phase_ends(run_dir, attempt), *_sample_times(run_dir, attempt, host)]
    signs += [cause.time for cause in causes.read_causes(run_dir, attempt)]
    return max((sign for sign in signs if start <= sign <= until), default=start)


def last_beat(run_dir: Path, attempt: int) -> float:
    """Return the unix time of the last heartbeat; 0 if there is none."""
    try:
        return (run_dir / "claims" / f"{attempt:06}.beat").stat().st_mtime
    except OSError:
        return 0.0


def _phase_ends(run_dir: Path, attempt: int) -> Iterator[float]:
    for line in job_logs.read_tail(run_dir / "monitor" / "phases.jsonl").splitlines():
        try:
            phase = parse_json(line)
            if phase["attempt"] == attempt:
                yield float(phase["end"])
        except (ValueError, KeyError, TypeError, OverflowError):
            continue


def _sample_times(run_dir: Path, attempt: int, host: str) -> Iterator[float]:
    """Yield when one node was sampled: the sampler ends with the run."""
    for line in job_logs.read_tail(run_dir / "monitor" / f"{Path(host).name}.csv").splitlines():
        time, _, rest = line.partition(",")
        if rest.startswith(f"{attempt},"):
            try:
                yield float(time)
            except ValueError:
                continue
