"""What the numbers of a model must satisfy, told from the config alone: no torch here."""

import math

from omegaconf import DictConfig

from ..hpc.config import Refused


def optimizer(node: DictConfig, cfg: DictConfig) -> None:
    """The `_check_` of the optimizer: torch takes a learning rate of 0 or infinity, and tells of one below 0 late."""
    rate = node.get("lr")
    if isinstance(rate, int | float) and not (rate > 0 and math.isfinite(rate)):  # a word is told of with the types
        raise Refused("model.optimizer.lr", rate, "is a number above 0", "model.optimizer.lr=0.003")


def gpt(node: DictConfig, cfg: DictConfig) -> None:
    """The `_check_` of GPT configs."""
    for key in ("num_layers", "num_heads", "width", "vocab_size", "block_size"):
        if (size := node[key]) is not None and size < 1:  # None: data will say it
            raise Refused(
                f"model.network.{key}", size, "is at least 1", f"model.network.{key}=<a whole number above 0>"
            )
    if node.width % node.num_heads:
        fix = f"model.network.num_heads={max(h for h in range(1, node.num_heads + 1) if node.width % h == 0)}"
        raise Refused("model.network.num_heads", node.num_heads, f"divides the width, {node.width}", fix)
    if node.width // node.num_heads % 2:
        rule = f"leaves heads of an even size, for rotary positions; the width is {node.width}"
        raise Refused("model.network.num_heads", node.num_heads, rule, "model.network.num_heads=<width / 64, say>")
    ranks = cfg.strategy.tensor_parallel_size
    if node.num_heads % ranks:
        fix = f"strategy.tensor_parallel_size={max(r for r in range(1, ranks + 1) if node.num_heads % r == 0)}"
        raise Refused("strategy.tensor_parallel_size", ranks, f"divides the {node.num_heads} attention heads", fix)
