"""The trained module of a run, for use from Python: a script, a notebook, a service."""

from pathlib import Path

from lightning import LightningDataModule, LightningModule

from hpc.checkpoint import on_disk, weights
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
    module = build(cfg.model)
    newest = on_disk.read_manifest(last)
    is_averaged = newest is not None and newest.details.get("averaged")
    weights.load(module, best if best.exists() and not is_averaged else last)
    return module.eval().requires_grad_(False), build_data(cfg)
