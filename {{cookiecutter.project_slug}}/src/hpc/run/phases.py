"""When a run did what, a line for each phase in monitor/phases.jsonl: the report lays them over what the nodes did."""

import time
from contextlib import suppress
from pathlib import Path

from hpc.run import directory


def note(run_dir: Path, attempt: int, what: str, begin: float, step: int) -> None:
    """A phase that ends now, at this step. Nothing where the run has no monitor; what a full disk takes is lost.

    Args:
        what: start, epoch, validation, checkpoint or test.
        begin: unix time.
    """
    phase = {"what": what, "begin": round(begin, 3), "end": round(time.time(), 3), "attempt": attempt, "step": step}
    with suppress(OSError):
        directory.note(run_dir / "monitor" / "phases.jsonl", phase)
