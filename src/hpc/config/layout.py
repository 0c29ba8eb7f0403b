"""The layout of the shared work, derived from the config: world size, micro-batch size, device, kind of strategy.

The files of configs/ say `${layout:world_size}` and `${on_gpu:}`.
"""

from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

# The classes that the Trainer gets, and what rules and plans know of them.
STRATEGY_KINDS = {"Single": "single", "DDP": "ddp", "FSDP": "fsdp", "DeepSpeed": "deepspeed"}


@dataclass(frozen=True)
class Layout:
    """Sizes of the shared work: derived from trainer, strategy and data, never typed."""

    world_size: int
    data_parallel_size: int
    micro_batch_size: int | None  # samples of a device at a time; None: only the loaders of the data know
    global_batch_size: int | None  # samples of an optimizer step
    device: str  # of a run on one device


def derive_layout(cfg: Any) -> Layout:
    """Return the layout of a config, parsed or as it was composed.

    world size = nodes * devices = data-parallel size * tensor-parallel size;
    global batch size = data-parallel size * accumulated batches * micro-batch size.
    """
    world_size = cfg.trainer.num_nodes * cfg.trainer.devices
    data_parallel_size = world_size // cfg.strategy.tensor_parallel_size
    num_micro_batches = data_parallel_size * cfg.trainer.accumulate_grad_batches
    global_size, micro_size = cfg.data.get("global_batch_size"), cfg.data.get("batch_size")
    if global_size is not None:
        micro_size = global_size // num_micro_batches
    elif micro_size is not None:
        global_size = micro_size * num_micro_batches
    return Layout(world_size, data_parallel_size, micro_size, global_size, "cuda:0" if is_on_gpu(cfg) else "cpu")


def strategy_kind(strategy: Any) -> str:
    """Return single, ddp, fsdp or deepspeed, by the class of the section `strategy`: its name is free text.

    Of a class of another name, return the name of the strategy.
    """
    class_name = str(strategy.lightning.get("_target_")).rpartition(".")[2]
    return STRATEGY_KINDS.get(class_name) or str(strategy.name)


def is_on_gpu(cfg: Any) -> bool:
    """Return whether the run trains on GPUs."""
    return cfg.trainer.accelerator != "cpu"


def is_known_number(value: Any) -> bool:
    """Return whether a value of the config is a whole number: neither null nor a bool, nor of a wrong type."""
    return isinstance(value, int) and not isinstance(value, bool)


OmegaConf.register_new_resolver("layout", lambda name, *, _root_: getattr(derive_layout(_root_), name), replace=True)
OmegaConf.register_new_resolver("on_gpu", lambda *, _root_: is_on_gpu(_root_), replace=True)
