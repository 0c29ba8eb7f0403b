"""Queue one run: check it, make its run directory with a copy of the code, write its job script, hand it over."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from omegaconf import DictConfig

from hpc.config import preflight, project
from hpc.config.errors import ConfigError
from hpc.run import directory, environment, frozen_config, snapshot
from hpc.submit import scheduler
from hpc.submit.hand_over import await_end, hand_over
from hpc.submit.options import Options
from hpc.submit.scripts import describe, text, write


def submit(cfg: DictConfig, words: Sequence[str], *, options: Options, program: str = "train.py") -> Path:
    """Queue a job whose ranks start `program`, and return its run directory. With --wait, end as the job does.

    Args:
        words: as typed; they are kept beside the config.
    """
    check(cfg, words if program == "train.py" else None)
    cfg.run_dir = str(directory.choose(cfg.run_dir, cfg.name, now=datetime.now(), environ={}))
    run_dir = Path(cfg.run_dir)
    work = describe(cfg, run_dir=run_dir, program=program)
    if options.dry_run:
        print(text(work, cfg), end="")
        return run_dir
    make_ready(cfg, project.PROJECT, wait=options.wait)
    snapshot.reject_unsuitable_code(cfg.dirty_tree)
    directory.reject_used(run_dir)
    with withdrawn_without_room(run_dir):
        directory.create(run_dir, cfg.group_readable)
        frozen_config.create_exclusively(run_dir, cfg, words=list(words))
        snapshot.copy_code(run_dir)
        write(work, cfg, run_dir)
    await_end(hand_over(cfg, run_dir, options=options), options)
    return run_dir


def check(cfg: DictConfig, words: Sequence[str] | None) -> None:
    """Raise `ConfigError` for a config that may not be submitted. Fills in what data say of themselves.

    Args:
        words: as typed, where the job trains; None where it does not.
    """
    preflight.check_job(cfg)
    preflight.check_files(cfg)
    if words is not None:
        reject_too_big(cfg, words)


def reject_too_big(cfg: DictConfig, words: Sequence[str]) -> None:
    """Raise `ConfigError` for what does not fit on the cluster's GPUs, where its file names them."""
    if cfg.cluster.gpu:
        from hpc.plan.memory_check import reject_too_big  # of the plan nothing is read where it cannot tell

        reject_too_big(cfg, words)


def make_ready(cfg: DictConfig, code: Path, *, wait: bool) -> None:
    """Find a scheduler here, and an environment for the code that is to run; pack it where the cluster wants that.

    Raises:
        ConfigError: one of them is missing. Of the run nothing is written yet.
    """
    scheduler.find(cfg.cluster.scheduler)
    if wait and cfg.cluster.scheduler == "pbs" and cfg.cluster.chain > 1:
        raise ConfigError("--wait", None, "follows one job, and this is a chain", "cluster.chain=1, or without --wait")
    if not cfg.cluster.container:
        environment.reject_incomplete_environment(Path(sys.prefix), code)
        if cfg.cluster.stage_env:
            environment.pack_environment(Path(sys.prefix))


@contextmanager
def withdrawn_without_room(run_dir: Path) -> Iterator[None]:
    """Leave no run behind where a part of its job cannot be written. Raises `ConfigError`."""
    try:
        yield
    except OSError as error:
        (run_dir / "config.yaml").unlink(missing_ok=True)
        rule = f"must have room for the code and the script of a job: {error.strerror or error}"
        raise ConfigError("run_dir", run_dir, rule, "make room (quotas count files, too), then submit again") from None
