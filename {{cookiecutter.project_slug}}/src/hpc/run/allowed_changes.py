"""Keys that a person allows to change when a run is resumed: `resume_allow=[model.optimizer.lr,data]`.

A key of the config takes effect as soon as its new value is in config.yaml. Whether data have changed is seen only when
training starts, possibly in a job: until then the permission is kept in the run directory. It is used once.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from hpc.config.conversion import flatten
from hpc.config.errors import ConfigError, closest_word
from hpc.run import attempt_log

KEY, DATA = "resume_allow", "data"
# The position in an epoch depends on the first three; the others mean nothing to a run that is resumed.
NEVER_ALLOWED = ("seed", "data.seed", "data.global_batch_size", "name", "run_dir", "ckpt", "task")


def allowed_keys(old: DictConfig, new: DictConfig) -> list[str]:
    """Return the keys of the config that `resume_allow` lets differ. Raises `ConfigError`."""
    existing = flatten(old) | flatten(new)
    for key in new.resume_allow:
        if key in NEVER_ALLOWED:
            rule = f"cannot name {key}, which must stay the same while a run is resumed"
            fix = f"a new run from the weights of this one: {key}=... ckpt=<its last.ckpt>"
            raise ConfigError(KEY, f"[{key}]", rule, fix)
        if key not in existing and not any(leaf.startswith(f"{key}.") for leaf in existing):
            rule = f"must name keys of the config, or data; {key} is neither"
            raise ConfigError(KEY, f"[{key}]", rule, f"{KEY}=[{closest_word(key, existing, '<key>')}]")
    return [key for key in new.resume_allow if key != DATA]


def grant(run_dir: Path, keys: Sequence[str]) -> None:
    """Leave a permission for the next start."""
    (run_dir / f"{KEY}.json").write_text(json.dumps(list(keys)), encoding="utf-8")


def read_grant(run_dir: Path) -> list[str]:
    """Return the keys that are permitted and not used yet."""
    try:
        return list(json.loads((run_dir / f"{KEY}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return []


def withdraw(run_dir: Path) -> None:
    """Remove the permission: it is used, or no longer wanted."""
    (run_dir / f"{KEY}.json").unlink(missing_ok=True)


def record_changes(run_dir: Path, changes: Sequence[str], **facts: Any) -> None:
    """Record in attempts.jsonl what was changed with permission, unless the run has not started yet."""
    file = run_dir / "attempts.jsonl"
    if changes and file.exists():
        event = {"event": "allowed", "time": time.time(), "changes": list(changes), **facts}
        attempt_log.append_json_line(file, event)


def read_recorded_values(run_dir: Path, name: str) -> list[Any]:
    """Return the values of one fact in all changes that were recorded, oldest first."""
    events = attempt_log.read_events(run_dir)
    return [event[name] for event in events if event.get("event") == "allowed" and name in event]
