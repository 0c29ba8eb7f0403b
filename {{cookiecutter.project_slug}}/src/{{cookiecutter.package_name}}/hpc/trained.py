"""What a run has learned, for use from Python: a script, a notebook, a service."""

from pathlib import Path
from typing import TYPE_CHECKING

from lightning import LightningModule

from . import home
from .checkpoints import checkpoint, weights
from .config import build
from .jobs import move

if TYPE_CHECKING:
    from ..data.loading import DataModule


def load(run_dir: str | Path) -> "tuple[LightningModule, DataModule]":
    """The module of a run of any strategy, on the CPU, ready to predict, and the data as the run had them.

    It has the weights of the best checkpoint; of the last one, where none was the best or where the run has averaged
    its weights at the end: those were tested.

    Raises:
        Refused: there is no such run, it has no whole checkpoint, or this code has another network.
    """
    run_dir = home.expand(run_dir).absolute()
    cfg = move.load(run_dir)
    best, last = (run_dir / "checkpoints" / name for name in ("best.ckpt", "last.ckpt"))
    module = build(cfg.model)
    newest = checkpoint.read(last)
    averaged = newest is not None and newest.note.get("averaged")
    weights.load(module, best if best.exists() and not averaged else last)
    return module.eval().requires_grad_(False), build(cfg.data)
