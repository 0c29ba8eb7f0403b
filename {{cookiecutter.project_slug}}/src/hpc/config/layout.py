"""Sharing of a run's work among ranks, derived from the config."""

from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf


@dataclass(frozen=True)
class Layout:
    """Sizes of the shared work: derived from trainer, strategy and data, never typed."""

    world_size: int
    data_parallel_size: int
    micro_batch_size: int
    device: str  # of a run on one device


def derive_layout(cfg: DictConfig) -> Layout:
    """Return the layout of a config.

    world size = nodes * devices = data-parallel size * tensor-parallel size;
    global batch size = data-parallel size * accumulated batches * micro-batch size.
    """
    world_size = cfg.trainer.num_nodes * cfg.trainer.devices
    data_parallel_size = world_size // cfg.strategy.tensor_parallel_size
    micro_batch_size = cfg.data.global_batch_size // (data_parallel_size * cfg.trainer.accumulate_grad_batches)
    return Layout(world_size, data_parallel_size, micro_batch_size, "cuda:0" if is_on_gpu(cfg) else "cpu")


def is_on_gpu(cfg: DictConfig) -> bool:
    """Return whether the run trains on GPUs."""
    return cfg.trainer.accelerator != "cpu"


# The files of configs/ say ${layout:world_size} and ${on_gpu:}.
OmegaConf.register_new_resolver("layout", lambda name, *, _root_: getattr(derive_layout(_root_), name), replace=True)
OmegaConf.register_new_resolver("on_gpu", lambda *, _root_: is_on_gpu(_root_), replace=True)
