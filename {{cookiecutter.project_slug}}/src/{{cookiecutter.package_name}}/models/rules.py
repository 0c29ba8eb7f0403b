"""What the numbers of a model must satisfy, told from the config alone: no torch here."""

import math

from omegaconf import DictConfig

from hpc.config.errors import ConfigError


def optimizer(node: DictConfig, cfg: DictConfig) -> None:
    """The `_check_` of the optimizer: torch takes a learning rate of 0 or infinity, and tells of one below 0 late."""
    rate = node.get("lr")
    if isinstance(rate, int | float) and not (rate > 0 and math.isfinite(rate)):  # a word is told of with the types
        raise ConfigError("model.optimizer.lr", rate, "must be a number above 0", "model.optimizer.lr=0.003")


def gpt(node: DictConfig, cfg: DictConfig) -> None:
    """The `_check_` of GPT configs."""
    for key in ("num_layers", "num_heads", "width", "vocab_size", "block_size", "vocab_multiple"):
        _at_least_one(key, node.get(key))
    if not 0 <= (dropout := node.get("dropout") or 0) <= 1:
        rule = "must be a share of the numbers, from 0 to 1"
        raise ConfigError("model.network.dropout", dropout, rule, "model.network.dropout=0.1")
    if node.width % node.num_heads:
        most = min(node.num_heads, node.width)
        fix = f"model.network.num_heads={max(h for h in range(1, most + 1) if node.width % h == 0)}"
        raise ConfigError("model.network.num_heads", node.num_heads, f"divides the width, {node.width}", fix)
    if node.width // node.num_heads % 2:
        rule = f"leaves heads of an even size, for rotary positions; the width is {node.width}"
        raise ConfigError("model.network.num_heads", node.num_heads, rule, "model.network.num_heads=<width / 64, say>")
    ranks = cfg.strategy.tensor_parallel_size
    if node.num_heads % ranks:
        fix = f"strategy.tensor_parallel_size={max(r for r in range(1, ranks + 1) if node.num_heads % r == 0)}"
        raise ConfigError("strategy.tensor_parallel_size", ranks, f"divides the {node.num_heads} attention heads", fix)


def resnet(node: DictConfig, cfg: DictConfig) -> None:
    """The `_check_` of ResNet configs."""
    for key in ("num_classes", "in_channels", "image_size"):
        _at_least_one(key, node.get(key))
    for key in ("depths", "widths"):
        for size in node[key]:
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                rule = "must be a list of whole numbers above 0, one for each stage"
                raise ConfigError(f"model.network.{key}", node[key], rule, f"model.network.{key}=[2,2]")
    if not node.depths or len(node.depths) != len(node.widths):
        rule = f"must have a number for each stage, as model.network.widths has {len(node.widths)}"
        fix = "model.network.depths=[2,2] model.network.widths=[8,16]"
        raise ConfigError("model.network.depths", node.depths, rule, fix)
    if (norm := node.get("norm", "group")) not in ("group", "batch"):
        raise ConfigError("model.network.norm", norm, "must be group or batch", "model.network.norm=group")
    for width in node.widths if norm == "group" else ():
        if width % (groups := min(32, max(1, width // 8))):
            rule = f"must be divisible by the number of groups of channels that are normalized ({groups} for {width})"
            fix = "a multiple of 8 below 256, of 32 above; or model.network.norm=batch"
            raise ConfigError("model.network.widths", width, rule, fix)


def _at_least_one(key: str, size: int | None) -> None:
    if size is not None and size < 1:  # None: data will say it
        raise ConfigError(
            f"model.network.{key}", size, "is at least 1", f"model.network.{key}=<a whole number above 0>"
        )
