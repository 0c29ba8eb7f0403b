"""The defaults of all keys, as Hydra finds them: `base` of configs/train.yaml, and of the groups' files.

In the copy of a job's code they are files of configs/, as they were then.
"""

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from hpc.config import layout as layout  # the defaults name its resolvers
from hpc.config.sections import CheckpointConfig, ClusterConfig, Config, FaultsConfig, StrategyConfig, TrainerConfig

# Keys of the groups' sections that come first, as any file may set them: a model, or configs/account.yaml.
FIRST = {
    "cluster": ["account"],
    "strategy": ["channels_last", "compile"],
    "trainer": ["gradient_clip_val"],
}
# Keys that only files have: of a group, or where somebody wants another value than Lightning's.
NOT_HERE = {
    "": ["trainer", "strategy", "cluster", "checkpoint", "faults", "model", "data", "node"],
    "strategy": ["name", "lightning"],
    "trainer": ["gradient_clip_algorithm", "check_val_every_n_epoch", "arguments"],
}
GROUPS: dict[str, type] = {"cluster": ClusterConfig, "strategy": StrategyConfig, "trainer": TrainerConfig}


def all_defaults() -> dict[str, dict[str, Any]]:
    """Return the defaults by the name of their file, without ending: base, cluster/base, ..."""
    top = _defaults(Config, NOT_HERE[""]) | {"name": None, "callbacks": {}}
    top |= {"checkpoint": _defaults(CheckpointConfig), "faults": _defaults(FaultsConfig)}
    files = {"base": top}
    for group, schema in GROUPS.items():
        values = _defaults(schema, NOT_HERE.get(group, ()))
        top[group] = {key: values.pop(key) for key in FIRST[group]}
        files[f"{group}/base"] = values
    return files


def register(configs: Path | None = None) -> None:
    """Give them to Hydra, except those that are files of this folder: Hydra would mix both."""
    store: Any = ConfigStore.instance()
    for path, values in all_defaults().items():
        group, _, name = path.rpartition("/")
        folder = store.repo.setdefault(group, {}) if group else store.repo
        if configs and (configs / f"{path}.yaml").is_file():
            folder.pop(f"{name}.yaml", None)
        elif f"{name}.yaml" not in folder:
            store.store(name=name, node=OmegaConf.create(values), group=group or None, provider="hpc")


def write(configs: Path) -> None:
    """Write them into the copy of a project's configs/, so that they stay as they are now."""
    for name, values in all_defaults().items():
        file = configs / f"{name}.yaml"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(OmegaConf.to_yaml(OmegaConf.create(values)), encoding="utf-8")


def _defaults(schema: type, without: Any = ()) -> dict[str, Any]:
    """Return the defaults of a section."""
    kept = [field for field in fields(schema) if field.name not in without]
    return {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in kept}


register()
