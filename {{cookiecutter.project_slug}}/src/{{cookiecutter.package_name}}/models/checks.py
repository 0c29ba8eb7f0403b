"""Checks of model configs. They raise `ConfigError`, run on the login node, too, and import no torch.

`_check_` in a config names a function, which submit.py and train.py call with that node of the config and with the
whole config. If it returns a dict, as those of `hpc.packed.checks` do, its values fill keys that are null.
"""

import math
from pathlib import Path

from hpc.config import extras
from hpc.config.errors import ConfigError
from omegaconf import DictConfig


def check_optimizer(optimizer: DictConfig, cfg: DictConfig) -> None:
    """Reject a learning rate that is not positive: torch accepts 0 and infinity, and rejects a negative one late."""
    lr = optimizer.get("lr")
    # hpc compares the types of all values with the signature, and rejects a value that is no number.
    if isinstance(lr, int | float) and not (lr > 0 and math.isfinite(lr)):
        raise ConfigError("model.optimizer.lr", lr, rule="must be a number above 0", fix="model.optimizer.lr=0.003")


def check_gpt(network: DictConfig, cfg: DictConfig) -> None:
    """Reject sizes that do not fit together, and more tensor-parallel ranks than heads can be split over."""
    for key in ("num_layers", "num_heads", "width", "vocab_size", "block_size", "vocab_multiple"):
        _reject_below_one(key, network.get(key))
    if not 0 <= (dropout := network.get("dropout") or 0) <= 1:
        rule = "must be a probability, from 0 to 1"
        raise ConfigError("model.network.dropout", dropout, rule=rule, fix="model.network.dropout=0.1")
    width, num_heads = network.width, network.num_heads
    if width % num_heads:
        rule = f"must be a divisor of model.network.width ({width})"
        fix = f"model.network.num_heads={_largest_divisor(width, min(num_heads, max(width // 2, 1)))}"
        raise ConfigError("model.network.num_heads", num_heads, rule=rule, fix=fix)
    if width // num_heads % 2:
        rule = f"must give each head an even size, for rotary positions; {width} / {num_heads} is {width // num_heads}"
        fix = "model.network.num_heads=<width / 64, for example>"
        raise ConfigError("model.network.num_heads", num_heads, rule=rule, fix=fix)
    num_ranks = cfg.strategy.tensor_parallel_size
    if num_heads % num_ranks:
        rule = f"must be a divisor of the number of attention heads ({num_heads})"
        fix = f"strategy.tensor_parallel_size={_largest_divisor(num_heads, num_ranks)}"
        raise ConfigError("strategy.tensor_parallel_size", num_ranks, rule=rule, fix=fix)


def check_resnet(network: DictConfig, cfg: DictConfig) -> None:
    """Reject sizes that do not fit together."""
    for key in ("num_classes", "in_channels", "image_size"):
        _reject_below_one(key, network.get(key))
    for key, other, usual in (("depths", "widths", 2), ("widths", "depths", 32)):
        for size in network[key]:
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                rule = "must be a list of whole numbers above 0, one for each stage"
                fix = f"model.network.{key}=[{','.join([str(usual)] * len(network[other]))}]"
                raise ConfigError(f"model.network.{key}", network[key], rule=rule, fix=fix)
    if not network.depths or len(network.depths) != len(network.widths):
        rule = f"must have one number for each stage, like model.network.widths, which has {len(network.widths)}"
        fix = "model.network.depths=[2,2] model.network.widths=[8,16]"
        raise ConfigError("model.network.depths", network.depths, rule=rule, fix=fix)
    if (norm := network.get("norm", "group")) not in ("group", "batch"):
        raise ConfigError("model.network.norm", norm, rule="must be group or batch", fix="model.network.norm=group")
    for width in network.widths if norm == "group" else ():
        # The formula of group_norm in resnet.py, which imports torch.
        if width % (num_groups := min(32, max(1, width // 8))):
            rule = f"must be divisible by the number of groups of the group norm ({num_groups})"
            fix = "multiples of 8 below 256, and of 32 above; or model.network.norm=batch"
            raise ConfigError("model.network.widths", width, rule=rule, fix=fix)


def check_pretrained(model: DictConfig, cfg: DictConfig) -> None:
    """Reject a folder without a model of Hugging Face, and an environment without its libraries."""
    require_pretrained(model.folder)


def require_pretrained(folder: str) -> Path:
    """Return the folder of a pretrained model. Raise `ConfigError` if it is none, or transformers is not installed."""
    extras.require("huggingface", "model.folder", folder)
    path = Path(folder).expanduser()
    if not (path / "config.json").is_file():
        rule = "must be a local folder with a model of Hugging Face (config.json and weights), as nothing is downloaded"
        fix = "hf download <model> --local-dir <folder>, where there is a network"
        raise ConfigError("model.folder", folder, rule, fix)
    return path


def _reject_below_one(key: str, size: int | None) -> None:
    if size is not None and size < 1:  # null is filled in later, from the data
        fix = f"model.network.{key}=<number above 0>"
        raise ConfigError(f"model.network.{key}", size, rule="must be at least 1", fix=fix)


def _largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` that is at most `limit`."""
    return max(divisor for divisor in range(1, limit + 1) if number % divisor == 0)
