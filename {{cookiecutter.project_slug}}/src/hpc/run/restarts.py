"""Whether a run directory belongs to this start of a job, and whether its run is finished."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from hpc.config.errors import ConfigError, RunFinished
from hpc.launch import placement
from hpc.run import claim, directory, saved_config
from hpc.system import files


def reject_finished(run_dir: Path, cfg: DictConfig) -> None:
    """Raise `ConfigError` where the run has come to its end, and this config does not set a later one."""
    try:
        verdict = files.read_text(run_dir / "verdict", errors="replace")
    except OSError:
        return
    if not re.search(r"(?m)^outcome finished$", verdict):
        return  # it may have failed before there was a config
    old, new = saved_config.load(run_dir).trainer, cfg.trainer
    if any(_limit(new.get(key)) > _limit(old.get(key)) for key in ("max_epochs", "max_steps")):
        return
    more = f"trainer.max_epochs=<more than {old.get('max_epochs')}>"
    if _limit(old.get("max_steps")) < float("inf"):
        more = f"trainer.max_steps=<more than {old.max_steps}>"
    fix = f"resume={run_dir} {more}, or a new run from its weights: ckpt={run_dir}/checkpoints/last.ckpt"
    again = _whole(os.environ.get("SLURM_RESTART_COUNT")) or _is_of_this_batch_job(run_dir, os.environ)
    raise (RunFinished if again else ConfigError)("resume", run_dir, "the run is finished", fix)


def goes_on(run_dir: Path, words: Sequence[str], who: Mapping[str, Any], environ: Mapping[str, str]) -> bool:
    """Is there a run of this job that the scheduler has started again, and not another one that the job started?

    Args:
        who: this process, as its claim would name it.
    """
    # PBS does not tell a job that it was started again: there the same words are the same run.
    again = claim.of_earlier_start(run_dir, who) or _is_of_this_batch_job(run_dir, environ)
    try:
        return again and json.loads((run_dir / "overrides.json").read_text(encoding="utf-8")) == list(words)
    except FileNotFoundError:  # it came to nothing before
        return again
    except (OSError, ValueError):
        return False


def _is_of_this_batch_job(run_dir: Path, environ: Mapping[str, str]) -> bool:
    """Of PBS."""
    job, batch = placement.job_id(environ), environ.get("PBS_ENVIRONMENT") == "PBS_BATCH"
    return batch and any(event.get("job") == job for event in directory.events(run_dir))


def _whole(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


def _limit(value: object) -> float:
    """Of epochs or steps; none is null or -1 to Lightning."""
    return value if isinstance(value, int) and value >= 0 else float("inf")
