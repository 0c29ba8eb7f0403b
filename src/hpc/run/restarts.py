"""Checks of an existing run directory: is its run finished, or left by an earlier start of this job?"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from omegaconf import DictConfig

from hpc.config.errors import ConfigError, RunFinished
from hpc.run import claim, frozen_config
from hpc.system import files


def reject_finished(run_dir: Path, cfg: DictConfig) -> None:
    """Raise `ConfigError` where the run has finished, and this config does not train it any longer."""
    try:
        verdict = files.read_text(run_dir / "verdict", errors="replace")
    except OSError:
        return
    if not re.search(r"(?m)^outcome finished$", verdict):
        return  # it may have failed before there was a config
    old, new = frozen_config.read(run_dir).trainer, cfg.trainer
    if cfg.task == "train" and any(_limit(new.get(key)) > _limit(old.get(key)) for key in ("max_epochs", "max_steps")):
        return
    longer = f"trainer.max_epochs=<more than {old.get('max_epochs')}>"
    if _limit(old.get("max_steps")) < float("inf"):
        longer = f"trainer.max_steps=<more than {old.max_steps}>"
    fix = f"resume={run_dir} {longer}, or a new run from its weights: ckpt={run_dir}/checkpoints/last.ckpt"
    if cfg.task != "train":
        fix = f"run_dir=<a new directory> to {cfg.task} again; python report.py {run_dir} shows what is done"
    is_requeued = claim.is_claim_before_requeue(run_dir, claim.claimant_record(os.environ))
    raise (RunFinished if is_requeued else ConfigError)("resume", run_dir, "The run is finished", fix)


def reject_unnamed_restart(path: Path, environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` where a job that the scheduler has started again would begin a new run.

    A job may have made several runs, so which of them this start continues must be said. Scripts of submit.py say it.

    Args:
        path: the directory of the job's first run.
    """
    if claim.is_claim_before_requeue(path, claim.claimant_record(environ)):
        rule = "must be given where the scheduler starts a job again, which goes on with the run that it names"
        raise ConfigError("run_dir", None, rule, f"srun python train.py run_dir={path} ... in the job script")


def _limit(value: object) -> float:
    """Return a limit of epochs or steps as a number; null and -1 mean infinite to Lightning."""
    return value if isinstance(value, int) and value >= 0 else float("inf")
