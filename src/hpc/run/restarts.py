"""Checks of an existing run directory: is its run this job's own before a requeue, or finished?"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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


def is_restart(run_dir: Path, words: Sequence[str], *, claimant: Mapping[str, Any]) -> bool:
    """Return whether the run here is this job's own, which the scheduler has started again, and not its next run.

    Args:
        claimant: this process, as its claim would name it.
    """
    is_same_job = claim.is_claim_before_requeue(run_dir, claimant)
    try:
        words_before = json.loads((run_dir / "overrides.json").read_text(encoding="utf-8"))
        return is_same_job and words_before == list(words)
    except FileNotFoundError:  # the earlier start failed before it wrote them
        return is_same_job
    except (OSError, ValueError):
        return False


def _limit(value: object) -> float:
    """Return a limit of epochs or steps as a number; null and -1 mean infinite to Lightning."""
    return value if isinstance(value, int) and value >= 0 else float("inf")
