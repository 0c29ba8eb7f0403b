"""A scaling study from its command line to its table: check all points, submit missing ones, wait, report."""

import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from hpc.config import compose, preflight
from hpc.config.errors import ConfigError
from hpc.config.project import PROJECT
from hpc.jobs import job
from hpc.plan import memory_check
from hpc.run import directory
from hpc.studies import scaling_jobs, scaling_points, scaling_results, scaling_submission, scaling_table
from hpc.studies.scaling_points import ScalingPoint, ScalingStudy
from hpc.submit import scheduler
from hpc.system import home

RECORD_FILE = "study.json"  # in the study's folder: what its points share


def run_study(words: Sequence[str], *, dry_run: bool = False, retry_failed: bool = False, wait: bool = True) -> int:
    """Do what a command line asks for, and return the exit code. Called again, it continues.

    Args:
        dry_run: print the points and the first job, and write nothing.
        retry_failed: submit failed points again.
        wait: until no job of the study is queued or running.

    Returns:
        0: finished, queued or running; 1: a point has failed; 130: interrupted by Ctrl-C, which cancels no job.

    Raises:
        ConfigError: a point cannot run, or the folder holds something else.
    """
    try:
        return _run_study(words, dry_run=dry_run, retry_failed=retry_failed, wait=wait)
    except KeyboardInterrupt:
        command = scaling_results.study_command(words)
        print(f"\ninterrupted: queued jobs keep running; to continue, type\n  {command}", file=sys.stderr)
        return 130


def _run_study(words: Sequence[str], *, dry_run: bool, retry_failed: bool, wait: bool) -> int:
    study = scaling_points.parse_study(words)
    points, cfgs = compose_points(study)
    folder = choose_folder(study, cfgs[0])
    table = "\n".join(scaling_table.submission_table(study, points, jobs=[job.job_from_config(cfg) for cfg in cfgs]))
    if dry_run:
        print(table, flush=True)
        return scaling_submission.print_first_job(folder, points[0])
    scheduler_name = cfgs[0].cluster.scheduler
    missing = scaling_jobs.jobs_to_submit(folder, points, scheduler=scheduler_name, retry_failed=retry_failed)
    if missing:
        scheduler.find_submit_command(scheduler_name)
    create_folder(folder, study, first_cfg=cfgs[0])
    print(table, flush=True)
    scaling_submission.submit_points(folder, missing)
    jobs = scaling_submission.poll_jobs(folder, points, cfgs=cfgs, wait=wait)
    return scaling_results.report_results(study, jobs, folder=folder, words=words)


def compose_points(study: ScalingStudy) -> tuple[list[ScalingPoint], list[DictConfig]]:
    """Return all points and their checked configs. Raises `ConfigError` if one of them cannot run."""
    first = compose.compose_overrides(study.first_overrides)
    try:
        preflight.check_job(first)
    except ConfigError as error:
        if error.key != scaling_points.BATCH:  # `plan_points` checks the batch for all points at once
            raise
    points = scaling_points.plan_points(study, first)
    cfgs = [compose.compose_overrides(point.words) for point in points]
    for cfg in cfgs:
        preflight.check_job(cfg)
    preflight.check_and_fill_from_files(cfgs[0])  # all points have the same data
    memory_check.reject_too_big(cfgs[0], points[0].words)  # no device needs more memory on more nodes
    return points, cfgs


def choose_folder(study: ScalingStudy, first_cfg: DictConfig) -> Path:
    """Return the study's folder, which may not exist yet. Raises `ConfigError` if it holds something else."""
    folder = home.expand(study.out or PROJECT / "runs" / f"scaling_{first_cfg.name}_{study.digest}").absolute()
    if folder.exists() and not folder.is_dir():
        raise ConfigError("out", folder, "must be a folder, but is a file", "out=<a new folder>")
    record_file = folder / RECORD_FILE
    record = record_file.read_text(encoding="utf-8") if record_file.is_file() else None
    if folder.is_dir() and any(folder.iterdir()) and record != scaling_points.study_record(study, first_cfg):
        rule = "must be empty or hold this study, but it holds something else: perhaps a study of other words, or of a "
        raise ConfigError("out", folder, f"{rule}config that was changed since", "out=<a new folder>")
    return folder


def create_folder(folder: Path, study: ScalingStudy, *, first_cfg: DictConfig) -> None:
    """Create the folder, and record there what the points share. Raises `ConfigError` if it cannot be written."""
    try:
        directory.create_run_dir(folder, group_readable=first_cfg.group_readable)
    except ConfigError as error:  # names run_dir, which nobody has typed
        raise ConfigError(
            "out", error.value, error.rule, "out=<a folder>, or make room (quotas count files, too)"
        ) from None
    (folder / RECORD_FILE).write_text(scaling_points.study_record(study, first_cfg), encoding="utf-8")
