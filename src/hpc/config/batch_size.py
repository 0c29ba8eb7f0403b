"""The batch size: `data.batch_size` (of a device) or `data.global_batch_size`. One is given, the other derived."""

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig

from hpc.config import signatures
from hpc.config.errors import ConfigError
from hpc.config.layout import derive_layout, is_known_number
from hpc.config.sections import StrategyConfig, TrainerConfig
from hpc.config.value_rules import at_least

GLOBAL, PER_DEVICE = "global_batch_size", "batch_size"
OF_LOADERS = "stream_splits"  # a key of `data` that its class does not take


def a_batch_can_be_shared(data: DictConfig, trainer: TrainerConfig, strategy: StrategyConfig) -> Iterator[ConfigError]:
    """Yield the errors of two sizes, of one that is none, and of a global batch that cannot be shared equally."""
    given = {key: data[key] for key in (GLOBAL, PER_DEVICE) if data.get(key) is not None}
    if given and data.get("_target_") is None:
        key, size = next(iter(given.items()))
        rule = "must be left out with data=none: the module's own loaders have their batch size"
        yield ConfigError(f"data.{key}", size, rule, f"the command without data.{key}=")
        return
    if len(given) == 2:
        rule = f"must not be given beside data.{GLOBAL} ({given[GLOBAL]}), from which it follows"
        fix = f"data.{GLOBAL}=null, or data.{PER_DEVICE}=null"
        yield ConfigError(f"data.{PER_DEVICE}", given[PER_DEVICE], rule, fix)
        return
    for key, size in given.items():
        if not is_known_number(size):
            yield ConfigError(f"data.{key}", size, "must be of type int", f"data.{key}=64")
        elif error := at_least(f"data.{key}", size, 1):
            yield error
        elif key == GLOBAL:
            yield from _uneven(size, trainer, strategy)


def _uneven(size: int, trainer: TrainerConfig, strategy: StrategyConfig) -> Iterator[ConfigError]:
    data_parallel_size = trainer.num_nodes * (trainer.devices or 1) // strategy.tensor_parallel_size
    num_micro_batches = data_parallel_size * trainer.accumulate_grad_batches
    if num_micro_batches and size % num_micro_batches:
        below, above = size // num_micro_batches * num_micro_batches, -(-size // num_micro_batches) * num_micro_batches
        rule = f"must be divisible by data-parallel size * trainer.accumulate_grad_batches = {num_micro_batches}"
        fix = " or ".join(f"data.{GLOBAL}={n}" for n in (below, above) if n)
        yield ConfigError(f"data.{GLOBAL}", size, rule, fix)


def with_class_batch_size(node: dict[str, Any], cfg: Any) -> dict[str, Any]:
    """Return the arguments of the data's class: the node `data` with the size under the name that this takes.

    Args:
        node: `cfg.data` as a plain container.
    """
    node = {key: value for key, value in node.items() if key != OF_LOADERS}
    taken = signatures.read_signature(node["_target_"]).parameters
    given = [key for key in (GLOBAL, PER_DEVICE) if node.get(key) is not None]
    node = {key: value for key, value in node.items() if key not in (GLOBAL, PER_DEVICE) or key in [*given, *taken]}
    if len(given) != 1 or given[0] in taken:
        return node
    layout = derive_layout(cfg)
    sizes = {GLOBAL: layout.global_batch_size, PER_DEVICE: layout.micro_batch_size}
    other = next((key for key in sizes if key in taken), None)
    if other is None:
        return node  # the class takes neither, which the check of its arguments rejects
    return {key: value for key, value in node.items() if key not in sizes} | {other: sizes[other]}
