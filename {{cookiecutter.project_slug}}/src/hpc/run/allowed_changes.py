"""What a person means to change of a run that goes on: `resume_allow=[model.optimizer.lr,data]`, typed for one resume.

A key of the config counts as soon as its new value stands in config.yaml. Whether data have changed is seen when
training starts, in a job maybe: till then the permission lies in the run directory. It is used once.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from hpc.config.conversion import flatten
from hpc.config.errors import ConfigError, closest_word
from hpc.run import directory

KEY, DATA = "resume_allow", "data"
# The place in an epoch is counted with these, or they say nothing to a run that goes on.
NEVER = ("seed", "data.seed", "data.global_batch_size", "name", "run_dir", "ckpt", "test_only")


def keys(old: DictConfig, new: DictConfig) -> list[str]:
    """Return the keys of the config that may differ, beside those that always may. Raises `ConfigError`."""
    known = flatten(old) | flatten(new)
    for key in new.resume_allow:
        if key in NEVER:
            rule = f"{key} must stay as it is while a run goes on"
            raise ConfigError(KEY, f"[{key}]", rule, f"a new run from its weights: {key}=... ckpt=<its last.ckpt>")
        if key not in known and not any(leaf.startswith(f"{key}.") for leaf in known):
            rule = f"must name keys of the config, or data; {key} is none of them"
            raise ConfigError(KEY, f"[{key}]", rule, f"{KEY}=[{closest_word(key, known, '<key>')}]")
    return [key for key in new.resume_allow if key != DATA]


def grant(run_dir: Path, allowed: Sequence[str]) -> None:
    """Leave a permission for the next start."""
    (run_dir / f"{KEY}.json").write_text(json.dumps(list(allowed)), encoding="utf-8")


def granted(run_dir: Path) -> list[str]:
    """Return what was permitted and is not used yet."""
    try:
        return list(json.loads((run_dir / f"{KEY}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return []


def withdraw(run_dir: Path) -> None:
    """The permission is used, or no longer meant."""
    (run_dir / f"{KEY}.json").unlink(missing_ok=True)


def note(run_dir: Path, changes: Sequence[str], **facts: Any) -> None:
    """Note in attempts.jsonl what was changed with permission. A run that has not started yet is not changed."""
    file = run_dir / "attempts.jsonl"
    if changes and file.exists():
        directory.note(file, {"event": "allowed", "time": time.time(), "changes": list(changes), **facts})


def noted(run_dir: Path, fact: str) -> list[Any]:
    """Return this fact of all that was permitted so far."""
    return [event[fact] for event in directory.events(run_dir) if event.get("event") == "allowed" and fact in event]
