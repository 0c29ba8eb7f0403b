"""What differs between the config of a run and the one it is resumed with, and what of that may differ."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from hpc.config.conversion import flatten
from hpc.config.errors import ConfigError
from hpc.config.freezing import to_frozen_yaml
from hpc.run import allowed_changes, saved_config

# What may change while a run goes on: where and how it runs. And what these decide through `${...}`, wherever it is.
MAY_CHANGE = (
    "run_dir", "trainer", "strategy", "cluster", "callbacks", "checkpoint", "faults", "logger", "group_readable",
    "dirty_tree", "force", "profile", "resume_allow", "data.num_workers", "data.num_ahead", "data.stage",
)  # fmt: skip


def moved(run_dir: Path, old: DictConfig, new: DictConfig) -> DictConfig:
    """The newly composed config of a run, its science compared with the frozen one.

    Raises:
        ConfigError: something differs that is not in `MAY_CHANGE` and does not follow from that.
    """
    for key, value in flatten(new).items():  # what the data said of themselves
        if value is None and OmegaConf.select(new, f"{key.rpartition('.')[0]}._check_"):
            OmegaConf.update(new, key, OmegaConf.select(old, key))
    _reject_other_science(run_dir, old, new)
    _reject_trial(run_dir, old, new)
    new.run_dir = str(run_dir)
    return new


def changes(run_dir: Path, cfg: DictConfig) -> list[str]:
    """`key: old -> new`, a line for each value that differs from the run's config.yaml."""
    before, after = _leaves(saved_config.load(run_dir)), _leaves(cfg)
    differ = [key for key in _differ(before, after) if key != allowed_changes.KEY]
    return [f"{key}: {_typed(before, key)} -> {_typed(after, key)}" for key in differ]


def reject_other(run_dir: Path, cfg: DictConfig) -> None:
    """Raise `ConfigError` where there is a run of other science."""
    if (run_dir / "config.yaml").exists():
        old = saved_config.load(run_dir)
        _reject_other_science(run_dir, old, cfg)
        _reject_trial(run_dir, old, cfg)


def _reject_other_science(run_dir: Path, old: DictConfig, new: DictConfig) -> None:
    before, after = _leaves(old), _leaves(_as_it_ran(old, new))
    differ = [key for key in _differ(before, after) if not _may_change(key)]
    if not differ:
        return
    raw = flatten(new)
    key = min(differ, key=lambda key: "${" in str(raw.get(key)))  # what is written before what follows from it
    its, asked = _typed(before, key), _typed(after, key)
    rule = f"the run has {its}; it must go on with the same science, but for what you name in {allowed_changes.KEY}"
    mean = "" if key in allowed_changes.NEVER else f"{key}={asked} {allowed_changes.KEY}=[{key}] if you mean it, or "
    fix = f"{key}={its}, or {mean}a new run from its weights: {key}={asked} ckpt={run_dir}/checkpoints/last.ckpt"
    raise ConfigError(key, asked, rule, fix)


def _reject_trial(run_dir: Path, old: DictConfig, new: DictConfig) -> None:
    """Raise `ConfigError` where a few batches are asked for to try a run: Lightning would take them for its end."""
    key = "fast_dev_run"
    before, asked = old.trainer.get(key), new.trainer.get(key)
    if asked and asked != before:
        rule = "must stay off while a run goes on: it tries a few batches, and the run would be finished then"
        fix = f"a new run, so without resume={run_dir}; or resume={run_dir} without trainer.{key}"
        raise ConfigError(f"trainer.{key}", asked, rule, fix)


def _as_it_ran(old: DictConfig, new: DictConfig) -> DictConfig:
    """The new config, but for what may change: so what follows from that is as it was, too."""
    cfg = new.copy()
    with open_dict(cfg):
        for key in (*MAY_CHANGE, *allowed_changes.keys(old, new)):
            above, _, last = key.rpartition(".")
            here, there = (OmegaConf.select(some, above) if above else some for some in (cfg, old))
            if here is not None:
                here.pop(last, None)
            if here is not None and there is not None and last in there:
                here[last] = there[last]
    return cfg


def _leaves(cfg: DictConfig) -> dict[str, Any]:
    """All values as config.yaml holds them. Raises `ConfigError` where a reference leads nowhere."""
    try:
        return flatten(OmegaConf.create(to_frozen_yaml(cfg)))
    except OmegaConfBaseException as error:
        raise ConfigError(error.full_key or "resume", None, str(error).splitlines()[0], "see --cfg job") from None


def _may_change(key: str) -> bool:
    return any(key == part or key.startswith(f"{part}.") for part in MAY_CHANGE)


def _differ(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [key for key in before | after if (key in before, before.get(key)) != (key in after, after.get(key))]


def _typed(leaves: dict[str, Any], key: str) -> str:
    """A value as one would type it."""
    value = leaves.get(key, "(nothing)")
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
