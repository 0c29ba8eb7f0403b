"""The defaults of all keys, as Hydra finds them: `base`, the first entry of configs/train.yaml.

In the copy of a job's code they are a file of configs/, as they were then.
"""

from dataclasses import MISSING
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from hpc.config import layout as layout  # the defaults name its resolvers
from hpc.config.errors import join_key
from hpc.config.sections import SECTIONS, Config, key_fields

# Keys that only files have: the groups that a person writes, and where Lightning is to choose.
NOT_HERE = ("model", "data", "strategy.name", "strategy.lightning")
NOT_HERE += ("trainer.gradient_clip_algorithm", "trainer.check_val_every_n_epoch")
# The files of these groups may begin with `defaults: [base]`. That adds nothing to `base`, except in older copies.
GROUPS = ("cluster", "strategy", "trainer")


def all_defaults() -> dict[str, Any]:
    """Return the defaults of all keys, as `base` has them."""
    values = _defaults("", Config) | {"name": None}
    return values | {name: _defaults(name, schema) for name, schema in SECTIONS.items()}


def register(configs: Path | None = None) -> None:
    """Give them to Hydra, except those that are files of this folder: Hydra would mix both."""
    store: Any = ConfigStore.instance()
    for group, values in {None: all_defaults(), **{group: {} for group in GROUPS}}.items():
        if configs and (configs / (group or "") / "base.yaml").is_file():
            (store.repo[group] if group else store.repo).pop("base.yaml", None)
        else:
            store.store(name="base", node=OmegaConf.create(values), group=group, provider="hpc")


def write(configs: Path) -> None:
    """Write them into the copy of a project's configs/, so that they stay as they are now."""
    if not (file := configs / "base.yaml").exists():
        file.write_text(OmegaConf.to_yaml(OmegaConf.create(all_defaults())), encoding="utf-8")


def _defaults(section: str, schema: type) -> dict[str, Any]:
    kept = [f for f in key_fields(schema) if join_key(section, f.name) not in NOT_HERE]
    return {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in kept}


register()
