"""Differences between the config of a run and the one that it is resumed with, and which of them are allowed.

A person allows more of them with `resume_allow=[model.optimizer.lr,data]`. A key of the config takes effect as soon as
its new value is in config.yaml. Whether data have changed is seen only when training starts, possibly in a job: until
then the permission is kept in the run directory. It is used once.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from hpc.config.conversion import flatten
from hpc.config.errors import ConfigError, closest_word
from hpc.config.freezing import to_frozen_yaml
from hpc.run import attempt_log

# Keys that may change while a run is resumed: where and how it runs. And what follows from these through `${...}`.
MAY_CHANGE = (
    "run_dir", "trainer", "strategy", "cluster", "callbacks", "checkpoint", "faults", "logger", "dirty_tree", "force",
    "profile", "resume_allow", "data.num_workers", "data.num_ahead", "data.stage",
    "data.batch_size",  # of a device: a step must still have as many samples, which data/position_checks.py checks
)  # fmt: skip
ALLOW_KEY, DATA = "resume_allow", "data"
# The position in an epoch depends on the first three; the others mean nothing to a run that is resumed.
NEVER_ALLOWED = ("seed", "data.seed", "data.global_batch_size", "name", "run_dir", "ckpt", "task")

NOTHING = "(nothing)"  # in place of a value that is not set


def accept_new_config(old: DictConfig, new: DictConfig, *, run_dir: Path) -> DictConfig:
    """Return the new config of a run, with keys that `_check_` functions filled in copied from the frozen config.

    Raises:
        ConfigError: a value differs that is neither in `MAY_CHANGE` nor follows from one there.
    """
    for key, value in flatten(new).items():
        if value is None and OmegaConf.select(new, f"{key.rpartition('.')[0]}._check_"):  # read from the data
            OmegaConf.update(new, key, OmegaConf.select(old, key))
    reject_changed_training(old, new, run_dir=run_dir)
    new.run_dir = str(run_dir)
    return new


def list_changes(old: DictConfig, new: DictConfig) -> list[str]:
    """Return a line `key: old -> new` for each value that differs."""
    before, after = _leaves(old), _leaves(new)
    differing = [key for key in _differing_keys(before, after) if key != ALLOW_KEY]
    return [f"{key}: {_as_typed(before, key)} -> {_as_typed(after, key)}" for key in differing]


def reject_changed_training(old: DictConfig, new: DictConfig, *, run_dir: Path) -> None:
    """Raise `ConfigError` where the new config would train something else than the run in this directory does."""
    _reject_changed_key(old, new, run_dir=run_dir)
    _reject_fast_dev_run(old, new, run_dir=run_dir)


def may_change(key: str) -> bool:
    """Return whether a key may change while a run is resumed, without permission."""
    return any(key == section or key.startswith(f"{section}.") for section in MAY_CHANGE)


def grant_permission(run_dir: Path, keys: Sequence[str]) -> None:
    """Leave a permission for the next start, if there are keys."""
    if keys:
        (run_dir / f"{ALLOW_KEY}.json").write_text(json.dumps(list(keys)), encoding="utf-8")


def read_permission(run_dir: Path) -> list[str]:
    """Return the keys that are permitted and not used yet."""
    try:
        return list(json.loads((run_dir / f"{ALLOW_KEY}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return []


def withdraw_permission(run_dir: Path) -> None:
    """Remove the permission: it is used, or no longer wanted."""
    (run_dir / f"{ALLOW_KEY}.json").unlink(missing_ok=True)


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


def _reject_changed_key(old: DictConfig, new: DictConfig, *, run_dir: Path) -> None:
    before, after = _leaves(old), _leaves(_reset_changeable_keys(old, new))
    differing = [key for key in _differing_keys(before, after) if not may_change(key)]
    if not differing:
        return
    unresolved = flatten(new)
    key = min(differing, key=lambda key: "${" in str(unresolved.get(key)))  # a cause before what follows from it
    value = _as_typed(after, key)
    if key in before:
        rule, keep = (
            f"must stay {_as_typed(before, key)}, as it was when this run started",
            f"{key}={_as_typed(before, key)}",
        )
    else:
        rule, keep = "must stay unset, as it was when this run started", f"leave out {key}"
    change = f"{key}={value}" if key in after else f"~{key}"
    allow = f"{change} {ALLOW_KEY}=[{key}] to change it on purpose, or "
    if key in NEVER_ALLOWED:
        allow = ""
    last = run_dir / "checkpoints/last.ckpt"
    new_run = f"a new run from its weights: {f'{change} ' * (key != 'ckpt')}ckpt={last}"
    if not last.exists():
        new_run = "a new run, without resume= and in another directory"
    fix = f"{keep}, or {allow}{new_run}"
    raise ConfigError(key, value, rule, fix)


def _reject_fast_dev_run(old: DictConfig, new: DictConfig, *, run_dir: Path) -> None:
    """Reject a trial of a few batches: Lightning would take its end for the end of the run."""
    key = "fast_dev_run"
    old_value, new_value = old.trainer.get(key), new.trainer.get(key)
    if new_value and new_value != old_value:
        rule = "must be false for a run that is resumed: the run would count as finished after a few batches"
        fix = f"a new run, without resume={run_dir}; or resume={run_dir} without trainer.{key}"
        raise ConfigError(f"trainer.{key}", new_value, rule, fix)


def _reset_changeable_keys(old: DictConfig, new: DictConfig) -> DictConfig:
    """Return the new config with all that may change set back, so that what follows from it is as it was, too."""
    cfg = new.copy()
    with open_dict(cfg):
        for key in (*MAY_CHANGE, *_allowed_keys(old, new)):
            section, _, name = key.rpartition(".")
            node, old_node = (OmegaConf.select(config, section) if section else config for config in (cfg, old))
            if node is not None:
                node.pop(name, None)
            if node is not None and old_node is not None and name in old_node:
                node[name] = old_node[name]
    return cfg


def _allowed_keys(old: DictConfig, new: DictConfig) -> list[str]:
    """Return the keys of the config that `resume_allow` lets differ. Raises `ConfigError`."""
    existing = flatten(old) | flatten(new)
    for key in new.resume_allow:
        if key in NEVER_ALLOWED:
            rule = f"cannot name {key}, which must stay the same while a run is resumed"
            fix = f"a new run from the weights of this one: {key}=... ckpt=<its last.ckpt>"
            raise ConfigError(ALLOW_KEY, f"[{key}]", rule, fix)
        if key not in existing and not any(leaf.startswith(f"{key}.") for leaf in existing):
            rule = f"must name keys of the config, or data; {key} is neither"
            raise ConfigError(ALLOW_KEY, f"[{key}]", rule, f"{ALLOW_KEY}=[{closest_word(key, existing, '<key>')}]")
    return [key for key in new.resume_allow if key != DATA]


def _leaves(cfg: DictConfig) -> dict[str, Any]:
    """Return all values as config.yaml holds them. Raises `ConfigError` where a reference cannot be resolved."""
    try:
        return flatten(OmegaConf.create(to_frozen_yaml(cfg)))
    except OmegaConfBaseException as error:
        rule = f"cannot be resolved: {str(error).splitlines()[0]}"
        raise ConfigError(
            error.full_key or "resume", None, rule, "--cfg job, which prints the config with its references"
        ) from None


def _differing_keys(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [key for key in before | after if (key in before, before.get(key)) != (key in after, after.get(key))]


def _as_typed(leaves: dict[str, Any], key: str) -> str:
    """Return a value as it would be typed on a command line."""
    value = leaves.get(key, NOTHING)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
