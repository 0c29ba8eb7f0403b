"""Queue many runs as one job array: all combinations of a sweep, or the members of a search."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from tqdm import tqdm

from hpc.config import project
from hpc.config.errors import ConfigError
from hpc.config.sections import Config
from hpc.jobs.job import Job
from hpc.jobs.shared_node import share_node
from hpc.run import directory, frozen_config, snapshot
from hpc.studies import search, sweep
from hpc.submit import feasibility, queue_run
from hpc.submit.options import SubmitOptions
from hpc.submit.scripts import make_job, render_script, write_job_script
from hpc.submit.submission import exit_if_job_failed, submit_and_report


def submit_sweep(words: Sequence[str], *, at_once: int | None, options: SubmitOptions) -> None:
    """Queue a run for each combination of `key=a,b`. All configs are checked before anything is written."""
    folder = directory.choose_run_dir(None, "sweep", now=datetime.now(), environ={})
    members = sweep.compose_members(words, folder)
    array_fields = {"members_file": folder / "members", "num_members": len(members), "at_once": at_once}
    progress = tqdm(members, "checking", unit="run", disable=None, leave=False, delay=1)
    cfgs = [queue_run.check_submission(node, typed, awaited=options.awaited) for node, typed in progress]
    jobs = [share_node(make_job(cfg, **array_fields), cfg.cluster) for cfg in cfgs]
    sweep.reject_different_requests(jobs)
    first_cfg = cfgs[0]
    if options.dry_run:
        print(render_script(jobs[0], first_cfg), end="")
        return
    run_dirs = [cfg.run_path for cfg in cfgs]
    with _new_array(first_cfg, folder, job=jobs[0], run_dirs=run_dirs, wait=options.wait) as start:
        for cfg, (_, overrides), run_dir in zip(cfgs, members, run_dirs, strict=True):
            frozen_config.create_or_replace(run_dir, cfg.node, words=overrides)
            # For submit.py resume= of this member alone.
            write_job_script(make_job(cfg, run_dir=run_dir), cfg, folder=run_dir)
        write_job_script(jobs[0], first_cfg, folder=folder)
        command = submit_and_report(first_cfg, folder, options=options, start=start, array_job=jobs[0])
    exit_if_job_failed(command, options)


def submit_search(
    words: Sequence[str], *, sampler: str, trials: int, at_once: int | None, options: SubmitOptions
) -> None:
    """Queue a search. Its members get their values when they start; here the corners of its space are checked."""
    folder = directory.choose_run_dir(None, "search", now=datetime.now(), environ={})
    corners = search.compose_corners(words, folder)
    cfgs = [queue_run.check_submission(node, typed, awaited=options.awaited) for node, typed in corners]
    settings = search.make_search(words, cfgs, sampler=sampler, trials=trials)
    array_fields = {
        "members_file": folder / "members",
        "num_members": trials,
        "at_once": at_once,
        "is_search_trial": True,
    }
    jobs = [share_node(make_job(cfg, **array_fields), cfg.cluster) for cfg in cfgs]
    sweep.reject_different_requests(jobs)
    if options.dry_run:
        print(render_script(jobs[0], cfgs[0]), end="")
        return
    run_dirs = search.member_run_dirs(folder, trials)
    with _new_array(cfgs[0], folder, job=jobs[0], run_dirs=run_dirs, wait=options.wait) as start:
        search.save_search(folder, settings)
        for run_dir in run_dirs:
            write_job_script(make_job(cfgs[0], run_dir=run_dir), cfgs[0], folder=run_dir)
        write_job_script(jobs[0], cfgs[0], folder=folder)
        command = submit_and_report(cfgs[0], folder, options=options, start=start, array_job=jobs[0])
    exit_if_job_failed(command, options)


@contextmanager
def _new_array(
    cfg: Config, folder: Path, *, job: Job, run_dirs: Sequence[Path], wait: bool
) -> Iterator[datetime | None]:
    """Make the folder of a job array with its code and a run directory per member, which shares that code.

    It is removed again if the array is not submitted.

    Yields:
        When the scheduler expects to start the job; None if that is not known.
    """
    queue_run.prepare_submission(cfg, project.PROJECT, wait=wait)
    snapshot.reject_unsuitable_code(cfg.dirty_tree)
    start = feasibility.reject_impossible_job(job, cfg, render_script(job, cfg))
    with queue_run.remove_unless_submitted(folder, lambda: _reserve(folder, run_dirs)):
        snapshot.copy_code(folder)
        for run_dir in run_dirs:
            directory.create_run_dir(run_dir, free_bytes=0)
            (run_dir / "code").symlink_to(folder / "code")
        yield start


def _reserve(folder: Path, run_dirs: Sequence[Path]) -> None:
    """Make the folder of a job array with the list of its members. Raise `ConfigError` if another array uses it."""
    directory.create_run_dir(folder)
    try:
        with (folder / "members").open("x", encoding="utf-8") as members:
            members.writelines(f"{run_dir}\n" for run_dir in run_dirs)
    except FileExistsError:  # a process with the same number on another node, in the same second
        raise ConfigError("run_dir", folder, "must not hold another array", "submit again") from None
