"""Queue a run that was submitted before once more, by its own script and code; or by a new script, if it moves."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from hpc.config import compose, preflight
from hpc.config.errors import ConfigError
from hpc.run import allowed_changes, changes, directory, frozen_config
from hpc.submit import queued
from hpc.submit.hand_over import await_end, hand_over
from hpc.submit.options import Options
from hpc.submit.queue_run import make_ready, reject_too_big
from hpc.submit.scripts import describe, reject_no_training, text, work_dir, write
from hpc.system import files


def resubmit(cfg: DictConfig, run_dir: Path, *, words: Sequence[str], options: Options) -> None:
    """Queue the job of a run directory again.

    Args:
        cfg: the run's own config, with what is typed now.
        words: what is typed now, which may move the run to other nodes.
    """
    preflight.job(cfg)
    reject_not_submitted(run_dir)
    moves, overrides = changes.changes(run_dir, cfg), compose.typed(words)
    if moves:
        reject_no_training(run_dir)
        os.chdir(work_dir(run_dir))  # its relative paths shall mean what they meant
        preflight.files(cfg)
        reject_too_big(cfg, frozen_config.said(run_dir, overrides))
    if options.dry_run:
        sys.stderr.write("".join(f"{line}\n" for line in moves))
        script = files.text(run_dir / "job.sh", errors="surrogateescape")
        print(text(describe(cfg, run_dir=run_dir), cfg) if moves else script, end="")
        return
    with queued.alone(run_dir):
        queued.reject_queued(run_dir)
        make_ready(cfg, run_dir / "code", wait=options.wait)
        directory.create(run_dir, cfg.group_readable)
        allowed_changes.withdraw(run_dir)  # of a job that was never run
        frozen_config.keep(run_dir, cfg, overrides)
        if moves:
            write(describe(cfg, run_dir=run_dir), cfg, run_dir)
        command = hand_over(cfg, run_dir, options=options)
    await_end(command, options)


def reject_not_submitted(run_dir: Path) -> None:
    """Raise `ConfigError` where submit.py has not made the run directory."""
    if not all((run_dir / name).is_file() for name in ("job.sh", "code/train.py")):
        rule = "was not made by submit.py: there is no job.sh with its code in it"
        raise ConfigError("resume", run_dir, rule, f"python train.py resume={run_dir}, in a job")
