"""The batch size: `data.batch_size` (of a device) or `data.global_batch_size`. One is given, the other derived."""

from typing import Any

from omegaconf import DictConfig

from hpc.config import signatures
from hpc.config.errors import ConfigError, require_at_least
from hpc.config.sections import derive_layout

GLOBAL, PER_DEVICE = "global_batch_size", "batch_size"
OF_LOADERS = "stream_splits"  # a key of `data` that its class does not take; configs/train.yaml explains


def check_batch_size(cfg: DictConfig) -> None:
    """Check that at most one size is given, and that a global batch can be shared equally.

    Raises:
        ConfigError
    """
    given = {key: cfg.data[key] for key in (GLOBAL, PER_DEVICE) if cfg.data.get(key) is not None}
    if given and cfg.data.get("_target_") is None:
        key, size = next(iter(given.items()))
        rule = "must be left out with data=none: the module's own loaders have their batch size"
        raise ConfigError(f"data.{key}", size, rule, f"the command without data.{key}=")
    if len(given) == 2:
        rule = f"must not be given beside data.{GLOBAL} ({given[GLOBAL]}), from which it follows"
        fix = f"data.{GLOBAL}=null, or data.{PER_DEVICE}=null"
        raise ConfigError(f"data.{PER_DEVICE}", given[PER_DEVICE], rule, fix)
    for key, size in given.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise ConfigError(f"data.{key}", size, "must be of type int", f"data.{key}=64")
        require_at_least(f"data.{key}", size, minimum=1)
    size = given.get(GLOBAL, 0)
    num_micro_batches = derive_layout(cfg).data_parallel_size * cfg.trainer.accumulate_grad_batches
    if size % num_micro_batches:
        below, above = size // num_micro_batches * num_micro_batches, -(-size // num_micro_batches) * num_micro_batches
        rule = f"must be divisible by data-parallel size * trainer.accumulate_grad_batches = {num_micro_batches}"
        fix = " or ".join(f"data.{GLOBAL}={n}" for n in (below, above) if n)
        raise ConfigError(f"data.{GLOBAL}", size, rule, fix)


def with_class_batch_size(node: dict[str, Any], cfg: DictConfig) -> dict[str, Any]:
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
