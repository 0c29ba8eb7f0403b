"""What is written beside the scalars: the resolved config, hyperparameters with their result, histograms."""

import os
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.tensorboard.summary import hparams
from torch.utils.tensorboard.writer import FileWriter

from . import rundir, snapshot
from .config import flat, frozen
from .launch import Place


@rank_zero_only
def begin(trainer: L.Trainer, cfg: DictConfig, launcher: str, hosts: list[str]) -> int:
    """Note the attempt and keep what made the run: config, code, versions. The attempt's number."""
    run_dir = Path(cfg.run_dir)
    text = frozen(cfg)
    for logger in _tensorboards(trainer):
        logger.experiment.add_text("config", f"```yaml\n{text}```")
    if not (run_dir / "config.yaml").exists():
        (run_dir / "config.yaml").write_text(text, encoding="utf-8")
        snapshot.made_by(run_dir)
    gpus = 0 if trainer.accelerator.__class__.__name__ == "CPUAccelerator" else cfg.trainer.devices
    return rundir.start(
        run_dir,
        os.environ,
        launcher=launcher,
        hosts=hosts,
        world_size=trainer.world_size,
        gpus_per_node=gpus,
    )


def finish(trainer: L.Trainer, cfg: DictConfig, attempt: int | None, metrics: dict[str, Any]) -> None:
    """All ranks have come to the end: rank 0 leaves the verdict."""
    trainer.strategy.barrier()
    if attempt is not None:  # as on rank 0
        values = {name: float(value) for name, value in metrics.items()}
        rundir.end(Path(cfg.run_dir), attempt, trainer.global_step, "finished", values)


def environment(place: Place) -> ClusterEnvironment:
    """How Lightning learns its rank: from `launch`, whoever started it, and never by guessing at SLURM_ variables."""
    return LightningEnvironment() if place.launcher == "none" else TorchElasticEnvironment()


@rank_zero_only
def result(trainer: L.Trainer, cfg: DictConfig, metrics: dict[str, Any]) -> None:
    """The hyperparameters beside the final metrics, for TensorBoard's HPARAMS page, which reads the scalars by name."""
    values = flat(OmegaConf.create(frozen(cfg)))
    shown = {k: v for k, v in values.items() if k.startswith(("model.", "data.", "trainer.", "strategy.", "seed"))}
    plain = {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in shown.items()}
    final = [k for k in metrics if k.startswith(("val/", "test/"))]
    for logger in _tensorboards(trainer):
        # Not logger.log_hyperparams: it would write each metric a second time, as another point of its curve.
        writer = FileWriter(logger.log_dir)
        for summary in hparams(plain, dict.fromkeys(final, 0)):
            writer.add_summary(summary)
        writer.close()


class Histograms(L.Callback):
    """Weights and gradients of every parameter, each `every_n_steps` optimizer steps; None for never."""

    def __init__(self, every_n_steps: int | None = None) -> None:
        self.every_n_steps = every_n_steps

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if not self.every_n_steps or trainer.global_step % self.every_n_steps:
            return
        # Gathering a sharded tensor is a collective: every rank takes part, rank 0 writes.
        for name, parameter in pl_module.named_parameters():
            for kind, tensor in _gathered(parameter).items():
                if tensor is not None:
                    _write(trainer, f"{kind}/{name}", tensor)


def _gathered(parameter: Parameter) -> dict[str, Tensor | None]:
    """Whole weights and gradients of one parameter, however the strategy keeps them."""
    if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):  # ZeRO-3, ZeRO-1 and -2
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

        return {"weights": safe_get_full_fp32_param(parameter), "gradients": safe_get_full_grad(parameter)}
    both = {"weights": parameter.detach(), "gradients": parameter.grad}
    return {kind: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for kind, tensor in both.items()}


@rank_zero_only
def _write(trainer: L.Trainer, tag: str, tensor: Tensor) -> None:
    for logger in _tensorboards(trainer):
        logger.experiment.add_histogram(tag, tensor.float(), trainer.global_step)


def _tensorboards(trainer: L.Trainer) -> list[Any]:
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
