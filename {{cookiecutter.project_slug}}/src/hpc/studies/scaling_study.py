"""A scaling study from its words to its table: check all points, submit those that are missing, wait, conclude."""

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
from hpc.studies.scaling_points import Point, Study
from hpc.submit import scheduler
from hpc.system import home

NOTE = "study.json"  # in the study's folder: what its points have in common


def run(words: Sequence[str], *, dry_run: bool = False, again: bool = False, wait: bool = True) -> int:
    """Do all that these words ask for, and return the exit code. Called again, it goes on where it was.

    Args:
        dry_run: print the points and the first job, and write nothing.
        again: submit points that have failed once more.
        wait: till no job of the study is on its way.

    Returns:
        0: done or on its way; 1: a point has failed; 130: interrupted, and no job is ended.

    Raises:
        ConfigError: a point that cannot run, or a folder that holds something else.
    """
    try:
        return _run(words, dry_run=dry_run, again=again, wait=wait)
    except KeyboardInterrupt:
        goes_on = scaling_results.command(words)
        print(f"\ninterrupted: queued jobs go on, and so does this with\n  {goes_on}", file=sys.stderr)
        return 130


def _run(words: Sequence[str], *, dry_run: bool, again: bool, wait: bool) -> int:
    study = scaling_points.read(words)
    points, cfgs = check(study)
    folder = place(study, cfgs[0])
    table = "\n".join(scaling_table.asked(study, points, [job.job_from_config(cfg) for cfg in cfgs]))
    if dry_run:
        print(table, flush=True)
        return scaling_submission.dry_run(folder, points[0])
    missing = scaling_jobs.missing(folder, points, cfgs[0].cluster.scheduler, again)
    if missing:
        scheduler.find_submit_command(cfgs[0].cluster.scheduler)
    make(folder, study, first=cfgs[0])
    print(table, flush=True)
    scaling_submission.submit(folder, missing)
    tries = scaling_submission.wait(folder, points, cfgs=cfgs, patient=wait)
    return scaling_results.conclude(study, tries, folder=folder, words=words)


def check(study: Study) -> tuple[list[Point], list[DictConfig]]:
    """Return all points and their configs, each of which would run. Raises `ConfigError`."""
    first = compose.compose_overrides(study.first)
    try:
        preflight.check_job(first)
    except ConfigError as rejected:
        if rejected.key != scaling_points.BATCH:  # told below, for all points at once
            raise
    points = scaling_points.points(study, first)
    cfgs = [compose.compose_overrides(point.words) for point in points]
    for cfg in cfgs:
        preflight.check_job(cfg)
    preflight.check_files(cfgs[0])  # the data of all
    memory_check.reject_too_big(cfgs[0], points[0].words)  # on more nodes no device holds more
    return points, cfgs


def place(study: Study, first: DictConfig) -> Path:
    """Return the study's folder, made or to be made. Raises `ConfigError` where there is something else."""
    folder = home.expand(study.out or PROJECT / "runs" / f"scaling_{first.name}_{study.digest}").absolute()
    if folder.exists() and not folder.is_dir():
        raise ConfigError("out", folder, "is a file", "out=<a new folder>")
    note = folder / NOTE
    known = note.read_text(encoding="utf-8") if note.is_file() else None
    if folder.is_dir() and any(folder.iterdir()) and known != scaling_points.record(study, first):
        rule = "holds something else, or a study of other words or of a config that was changed since"
        raise ConfigError("out", folder, rule, "out=<a new folder>")
    return folder


def make(folder: Path, study: Study, *, first: DictConfig) -> None:
    """Make the folder, and note there what the points have in common. Raises `ConfigError` where one cannot write."""
    try:
        directory.create(folder, first.group_readable)
    except ConfigError as rejected:  # of a run_dir that nobody has typed
        raise ConfigError("out", folder, rejected.rule, "out=<a folder>, or make room (files count, too)") from None
    (folder / NOTE).write_text(scaling_points.record(study, first), encoding="utf-8")
