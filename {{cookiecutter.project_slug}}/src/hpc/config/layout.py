"""How the work of a run is shared out among ranks, derived from the config."""

from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf


@dataclass(frozen=True)
class Layout:
    """How the work is shared out: derived from trainer, strategy and data, never typed."""

    world_size: int
    data_parallel_size: int
    micro_batch_size: int
    device: str  # of a run on one device


def derive_layout(cfg: DictConfig) -> Layout:
    """world = nodes * devices = data-parallel * tensor-parallel; global batch = data-parallel * accumulate * micro."""
    world = cfg.trainer.num_nodes * cfg.trainer.devices
    data_parallel = world // cfg.strategy.tensor_parallel_size
    micro_batch = cfg.data.global_batch_size // (data_parallel * cfg.trainer.accumulate_grad_batches)
    return Layout(world, data_parallel, micro_batch, "cuda:0" if is_on_gpu(cfg) else "cpu")


def is_on_gpu(cfg: DictConfig) -> bool:
    """Does the run train on GPUs?"""
    return cfg.trainer.accelerator != "cpu"


OmegaConf.register_new_resolver("layout", lambda name, *, _root_: getattr(derive_layout(_root_), name), replace=True)
OmegaConf.register_new_resolver("on_gpu", lambda *, _root_: is_on_gpu(_root_), replace=True)
