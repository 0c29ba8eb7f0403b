"""The run that a job waits for: `submit.py --after RUN_DIR` makes the scheduler start it once that run is finished."""

import os
import sys
from pathlib import Path

from hpc.config.errors import ConfigError, make_printable
from hpc.config.sections import Config
from hpc.jobs import job_states
from hpc.run import history
from hpc.run.history import RunRecord
from hpc.submit.options import AwaitedRun
from hpc.system import home

OPTION = "--after"


def find_awaited_run(folder: str) -> AwaitedRun | None:
    """Return the run in a directory; None, with a note, if it is finished and nothing must be waited for.

    Raises:
        ConfigError: there is no such run, it has no job, or it is one whose end no job can wait for.
    """
    run_dir = Path(os.path.realpath(home.expand(folder)))
    run = history.find_run(run_dir)
    if run is None:
        rule = "must be the directory of one run that submit.py has queued"
        raise ConfigError(OPTION, run_dir, rule, f"{OPTION} runs/NAME; of a sweep, one of its runs")
    if run.is_finished:
        note = f"note: {run_dir} is finished already, so the job waits for no other one"
        print(make_printable(note), file=sys.stderr)
        return None
    job, scheduler = _find_active_job(run)
    return AwaitedRun(_list_awaited(run), scheduler, job)


def reject_other_scheduler(awaited: AwaitedRun, cfg: Config) -> None:
    """Raise `ConfigError` if the job would go to another scheduler, to which the awaited job's number means nothing."""
    if cfg.cluster.scheduler != awaited.scheduler:
        rule = f"must be a run of the same scheduler; that of cluster={cfg.cluster.name} is {cfg.cluster.scheduler}"
        fix = f"a cluster= with {awaited.scheduler}, or without {OPTION} when that run is finished"
        raise ConfigError(OPTION, f"{awaited.run_dirs[0]} ({awaited.scheduler})", rule, fix)


def _find_active_job(run: RunRecord) -> tuple[str, str]:
    """Return the queued or running job that will finish a run, and its scheduler. Raise `ConfigError` if none will."""
    scheduler = run.submitted.get("scheduler") or history.config_word(run, "cluster", "scheduler")
    resume = f"python submit.py resume={run.path}, then the same with {OPTION} again"
    if scheduler not in job_states.QUERY_COMMAND or not run.jobs:
        raise ConfigError(OPTION, run.path, "must be a run that has a job, and this one was never queued", resume)
    states = job_states.query_states(scheduler, run.jobs, owners={run.owner})
    if states is None:  # no answer: the scheduler itself will say whether there is such a job
        return run.jobs[-1], scheduler
    active = [job for job in run.jobs if job in states and states[job].is_active]
    if not active:
        state = states[run.job].name if run.job in states else f"unknown to {job_states.QUERY_COMMAND[scheduler]}"
        rule = f"must be a run whose job is queued or running; job {run.job} is {state}, and the run is not finished"
        raise ConfigError(OPTION, run.path, rule, resume)
    if scheduler == "pbs" and ("[" in active[-1] or history.config_word(run, "cluster", "chain") not in ("", "1")):
        rule = "cannot be a part of a job array or a chain of jobs: PBS has no dependency on its end"
        raise ConfigError(OPTION, run.path, rule, f"the same without {OPTION}, when that run is finished")
    return active[-1], scheduler


def _list_awaited(run: RunRecord) -> tuple[Path, ...]:
    """Return the directories of an unfinished run, of the one that its job waits for, and so on."""
    run_dirs: list[Path] = []
    awaited: RunRecord | None = run
    while awaited and not awaited.is_finished and awaited.path not in run_dirs:
        run_dirs.append(awaited.path)
        after = awaited.submitted.get("after")
        awaited = history.find_run(Path(after)) if after else None
    return tuple(run_dirs)
