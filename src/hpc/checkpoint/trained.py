"""The trained module of a run, for use from Python: a script, a notebook, a service."""

from pathlib import Path
from typing import Any

from lightning import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig

from hpc.checkpoint import load_hooks, on_disk
from hpc.config.build import build, build_data
from hpc.run import frozen_config
from hpc.system import home


def load(run_dir: str | Path) -> tuple[LightningModule, LightningDataModule]:
    """Return the module of a run of any strategy, on the CPU, ready to predict, and the data as the run had them.

    The weights are those of the best checkpoint; those of the last one if there is no best one, or if the run has
    averaged its weights at the end: those were tested.

    Raises:
        ConfigError: there is no such run, it has no whole checkpoint, or this code has another network.
    """
    run_dir = home.expand(run_dir).absolute()
    cfg = frozen_config.read_compatible(run_dir)
    best, last = (run_dir / "checkpoints" / name for name in (on_disk.BEST, on_disk.LAST))
    newest = on_disk.read_manifest(last)
    is_averaged = newest is not None and newest.details.get("averaged")
    data = build_data(cfg)
    module, rest = load_module(cfg, best if best.exists() and not is_averaged else last)
    if (state := rest.get(type(data).__qualname__)) is not None:
        data.load_state_dict(state)
    return module, data


def load_module(cfg: DictConfig, checkpoint: Path) -> tuple[LightningModule, dict[str, Any]]:
    """Return the module of a run's config with the weights of a checkpoint, on the CPU, ready to predict, and the rest.

    Raises:
        ConfigError: this code has another network.
    """
    module = build(cfg.model)
    if is_overridden("configure_model", module):  # as load_from_checkpoint does; without a mesh, nothing is sharded
        module.configure_model()
    rest = load_hooks.load_trained(module, checkpoint)
    return module.eval().requires_grad_(False), rest
