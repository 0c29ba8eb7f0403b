"""The phases of a run, a line for each in monitor/phases.jsonl: the report draws them above what the nodes did."""

import time
from contextlib import suppress
from pathlib import Path

from hpc.run import attempt_log


def record_phase(run_dir: Path, attempt: int, *, kind: str, begin_time: float, step: int) -> None:
    """Record a phase that ends now, at this step, if the run has a monitor; on a full disk it is lost.

    Args:
        kind: start, epoch, validation, checkpoint or test.
        begin_time: unix time.
    """
    times = {"begin": round(begin_time, 3), "end": round(time.time(), 3)}
    with suppress(OSError):
        line = {"what": kind, **times, "attempt": attempt, "step": step}
        attempt_log.append_json_line(run_dir / "monitor" / "phases.jsonl", line)
