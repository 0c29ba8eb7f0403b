"""The predictions of `task=predict`: a file of each rank in the run directory."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities.model_helpers import is_overridden

from hpc.config.errors import ConfigError
from hpc.data.sampler import EvalBatchSampler


class PredictionFile(L.Callback):
    """Writes what `predict_step` returns to predictions-RANK.pt, a list with an entry for each batch.

    An entry has `loader` (0, if there is one), `indices` of the samples in its dataset (None: unknown) and `outputs`.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._batches: list[dict[str, Any]] = []

    def on_predict_batch_end(
        self,
        trainer: Any,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        loader = trainer.predict_loop._combined_loader.flattened[dataloader_idx]
        entry = {"loader": dataloader_idx, "indices": sample_indices(loader, batch_idx)}
        self._batches.append(entry | {"outputs": move_data_to_device(outputs, torch.device("cpu"))})

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        path = self.run_dir / f"predictions-{trainer.global_rank}.pt"
        part = path.with_suffix(".part")
        torch.save(self._batches, part)
        part.replace(path)
        self._batches = []
        if trainer.is_global_zero:
            files = path if trainer.world_size == 1 else f"{self.run_dir}/predictions-*.pt"
            print(f"predictions in {files}", flush=True)


def sample_indices(loader: Any, batch_idx: int) -> list[int] | None:
    """Return the indices of a batch's samples in the dataset; None if the loader does not tell."""
    if isinstance(sampler := getattr(loader, "sampler", None), EvalBatchSampler):
        return list(sampler.parts[batch_idx])
    seen = getattr(getattr(loader, "batch_sampler", None), "seen_batch_indices", None)  # Lightning's wrapper has it
    return [int(index) for index in seen[batch_idx]] if seen else None


def require_predict_hooks(module: L.LightningModule, data: L.LightningDataModule) -> None:
    """Raise `ConfigError` unless the module and the data have what `task=predict` calls."""
    has_loader = is_overridden("predict_dataloader", data) or is_overridden("predict_dataloader", module)
    missing = [] if is_overridden("predict_step", module) else [f"{type(module).__name__}.predict_step"]
    missing += [] if has_loader else [f"{type(data).__name__}.predict_dataloader"]
    if missing:
        rule = f"must not be predict without {' and '.join(missing)}, which Lightning's Trainer.predict calls"
        methods = {"predict_step": "(self, batch, batch_idx)", "predict_dataloader": "(self)"}
        fix = " and ".join(f"def {name}{methods[name]}" for name in (word.rpartition(".")[2] for word in missing))
        raise ConfigError("task", "predict", rule, f"add {fix}")
