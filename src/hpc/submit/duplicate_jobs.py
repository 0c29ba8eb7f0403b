"""Keep a run from having two jobs: one submission at a time, and none while a job is queued or running."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from hpc.config.errors import ConfigError
from hpc.jobs import job_states
from hpc.run import history
from hpc.submit.scheduler import CANCEL_COMMAND


@contextmanager
def lock_submission(run_dir: Path) -> Iterator[None]:
    """Hold the run's lock, so that only one of several `submit.py resume=` at the same time submits a job.

    If the file cannot be opened or the storage has no locks, continue without: later steps report what cannot be
    written.

    Raises:
        ConfigError: another process holds the lock.
    """
    with ExitStack() as stack:
        try:
            # This file is never replaced by another one. A member of an array has none yet.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(run_dir / "submitted.json", flags, 0o666)
            stack.callback(os.close, descriptor)
            stack.callback(_remove_if_empty, run_dir / "submitted.json")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released by the kernel, however this process ends
        except BlockingIOError:
            rule = "Another submit.py is submitting this run, and a run can have only one job at a time"
            raise ConfigError("resume", run_dir, rule, f"wait a moment, then: python report.py {run_dir}") from None
        except OSError:
            pass
        yield


def _remove_if_empty(file: Path) -> None:
    """Remove the file of a member of an array that was not submitted."""
    with suppress(OSError):
        if not file.stat().st_size:
            file.unlink()


def reject_queued_run(run_dir: Path) -> None:
    """Raise `ConfigError` if the scheduler has a job of this run. Accept the run if the scheduler does not answer."""
    run = history.read_run(run_dir, run_dir.name)
    scheduler = run.submitted.get("scheduler")
    if scheduler not in job_states.QUERY_COMMAND or not run.jobs:
        return
    states = job_states.query_states(scheduler, run.jobs, owners={run.owner}) or {}
    # Not those of other members of the array, nor one that goes on with them alone.
    active = [
        job
        for job in run.jobs
        if job in states and states[job].is_active and history.end_before_neighbours(run, job) != "failed"
    ]
    if active:
        rule = f"Its job {active[0]} is {states[active[0]].name}, and a run can have only one job at a time"
        fix = f"wait for job {active[-1]}, or {CANCEL_COMMAND[scheduler]} {' '.join(active)}"
        raise ConfigError("resume", run_dir, rule, fix)
