"""One job for a run: of several submissions at once one goes on, and none while a job is queued."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hpc.config.errors import ConfigError
from hpc.jobs import job_states
from hpc.run import history

CANCEL = {"slurm": "scancel", "pbs": "qdel"}


@contextmanager
def alone(run_dir: Path) -> Iterator[None]:
    """Of several `submit.py resume=` of one run at once, one asks the scheduler and hands the job over.

    Where nothing can be written, or the storage knows no locks, each goes on; the former is told in another place.

    Raises:
        ConfigError: another one is at it.
    """
    with ExitStack() as held:
        try:
            # It is never replaced by another file. A member of an array has none yet.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            lock = os.open(run_dir / "submitted.json", flags, 0o640)
            held.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel gives it back, however this process ends
        except BlockingIOError:
            rule = "another submit.py hands a job of this run over just now; two jobs cannot go on with one run"
            raise ConfigError("resume", run_dir, rule, f"wait a moment, then: python report.py {run_dir}") from None
        except OSError:
            pass
        yield


def reject_queued(run_dir: Path) -> None:
    """Raise `ConfigError` where the scheduler has a job of this run. One that does not answer is not waited for."""
    run = history.read_run(run_dir, run_dir.name)
    scheduler = run.submitted.get("scheduler")
    if scheduler not in job_states.COMMAND or not run.jobs:
        return
    told = job_states.ask(scheduler, run.jobs, {run.owner}) or {}
    active = [job for job in run.jobs if job in told and told[job].active]  # not another member of the array
    if active:
        rule = f"its job {active[0]} is {told[active[0]].word}; two jobs cannot go on with one run"
        raise ConfigError(
            "resume", run_dir, rule, f"wait for job {active[-1]}, or {CANCEL[scheduler]} {' '.join(active)}"
        )
