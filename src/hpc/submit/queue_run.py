"""Queue one run: check its config, make its run directory with a copy of the code, write its job script, submit it."""

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from omegaconf import DictConfig

from hpc.config import arguments, project
from hpc.config.errors import ConfigError
from hpc.config.parse import parse
from hpc.config.sections import Config
from hpc.run import directory, frozen_config, snapshot
from hpc.submit import scheduler
from hpc.submit.options import AwaitedRun, SubmitOptions
from hpc.submit.scripts import make_job, render_script, write_job_script


def submit_run(node: DictConfig, words: Sequence[str], *, options: SubmitOptions, program: str = "train.py") -> Path:
    """Queue a job whose ranks run `program`, and return its run directory. With --wait, exit with the job's exit code.

    Args:
        words: overrides as typed; they are stored beside the config.
    """
    cfg = check_submission(node, words if program == "train.py" else None, awaited=options.awaited)
    cfg.run_dir = str(directory.choose_run_dir(cfg.run_dir, cfg.name, now=datetime.now(), environ={}))
    run_dir = cfg.run_path
    job = make_job(cfg, run_dir=run_dir, program=program)
    script = render_script(job, cfg)
    if options.dry_run:
        print(script, end="")
        return run_dir
    from hpc.submit.feasibility import reject_impossible_job  # only here: a dry run needs neither
    from hpc.submit.submission import exit_if_job_failed, submit_and_report

    prepare_submission(cfg, project.PROJECT, wait=options.wait)
    snapshot.reject_unsuitable_code(cfg.dirty_tree)
    directory.reject_used(run_dir)
    start = reject_impossible_job(job, cfg, script)

    def reserve() -> None:
        directory.create_run_dir(run_dir)
        frozen_config.create_exclusively(run_dir, cfg.node, words=list(words))

    with remove_unless_submitted(run_dir, reserve):
        snapshot.copy_code(run_dir)
        write_job_script(job, cfg, folder=run_dir)
        command = submit_and_report(cfg, run_dir, options=options, start=start)
    exit_if_job_failed(command, options)
    return run_dir


def check_submission(node: DictConfig, words: Sequence[str] | None, *, awaited: AwaitedRun | None = None) -> Config:
    """Return the config, with the keys that follow from the data. Raise `ConfigError` if it cannot be submitted.

    Args:
        words: overrides as typed, for a job that trains; None for other jobs, whose memory is not checked.
        awaited: the run that the job waits for. It may be `ckpt`, although it has no checkpoint yet.
    """
    cfg = arguments.check_files(parse(node, for_job=True), awaited=awaited.run_dirs if awaited else ())
    if words is not None:
        reject_too_big(cfg, words)
    return cfg


def reject_too_big(cfg: Config, words: Sequence[str]) -> None:
    """Raise `ConfigError` if training does not fit on the cluster's GPUs, provided that its file names them."""
    if cfg.cluster.gpu:
        from hpc.plan.memory_check import reject_too_big  # only here, as submit.py without a GPU needs no plan

        reject_too_big(cfg, words)


def prepare_submission(cfg: Config, code: Path, *, wait: bool) -> None:
    """Check that there are a scheduler and an environment for `code`. Pack the environment if the cluster stages it.

    Raises:
        ConfigError: one of them is missing. Nothing of the run has been written.
    """
    assert cfg.cluster.scheduler, "a config that is parsed for a job has one"
    scheduler.find_submit_command(cfg.cluster.scheduler)
    if wait and cfg.cluster.scheduler == "pbs" and cfg.cluster.chain > 1:
        rule = "cannot be used with a chain of jobs: it waits for one job"
        raise ConfigError("--wait", None, rule, "cluster.chain=1, or leave --wait out")
    if not cfg.cluster.container:
        from hpc.run import environment  # only here: --dry-run needs no environment

        if code == project.PROJECT:
            environment.reject_unsuitable_environment()
        else:  # the environment may belong to newer code by now
            environment.reject_incomplete_environment(code)
        if cfg.cluster.stage_env:
            environment.pack_environment(Path(sys.prefix))


@contextmanager
def remove_unless_submitted(folder: Path, reserve: Callable[[], None]) -> Iterator[None]:
    """Make a new run directory, or the folder of an array, and remove it again if its job is not submitted.

    Args:
        reserve: makes the folder this process's own. If it fails, the folder may be another process's.

    Raises:
        ConfigError: a file could not be copied or written.
    """
    try:
        before = os.listdir(folder) if folder.exists() else []
        reserve()
        try:
            yield
        except BaseException:
            directory.remove_written(folder, before)
            raise
    except OSError as error:
        file = Path(error.filename or folder)
        if file.is_relative_to(project.PROJECT) and not file.is_relative_to(folder):
            rule = f"must be readable, as a job gets a copy of it ({error.strerror})"
            fix = f"chmod u+r {shlex.quote(str(file))}, then submit again"
            raise ConfigError(str(file), None, rule, fix) from None
        rule = "must be a folder with room for the code and the script of a job"
        given = f"{folder} ({error.strerror or error})"
        raise ConfigError("run_dir", given, rule, "make room (quotas count files, too), then submit again") from None
