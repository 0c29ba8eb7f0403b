"""The boundaries between the parts of a training step: hooks that tell a meter which part begins."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from hpc.data.batch_contents import iterate_tensors
from hpc.plan.meter import Meter, local_bytes
from hpc.training.blocks import Blocks


class PartsOutOfOrder(Exception):
    """The parts do not run once each, in their order."""


class PartBoundaries:
    """Enter the meter's parts as the module runs: what is before the blocks, each block, what is after, and the loss.

    The loss begins when the network returns: the part of the module that holds the blocks or, without blocks, all of
    its parameters; or else the module's own forward. If it never returns, the loss belongs to the part before.

    Attributes:
        names: of the parts, in the order of forward.
        output_bytes: that each part hands on.
    """

    def __init__(self, module: nn.Module, blocks: Blocks | None, meter: Meter) -> None:
        self.meter = meter
        self.names = ["before", *block_parts(blocks), *(["after"] if blocks else []), "loss"]
        self.output_bytes: dict[str, int] = {}
        if blocks:
            blocks.modules[0].register_forward_pre_hook(
                lambda _, args, kwargs: self._end_part("before", (args, kwargs)), with_kwargs=True
            )
        for name, block in block_parts(blocks).items():
            block.register_forward_hook(lambda _, __, output, name=name: self._end_part(name, output))
        network = _network(module, blocks)
        network.register_forward_hook(lambda _, __, output: self._end_part(self.names[-2], output))
        meter.enter("before", "forward")

    def begin_backward(self) -> None:
        """Begin backward with the last part that forward has reached.

        Raises:
            PartsOutOfOrder: there are blocks that forward has not reached.
        """
        if self.meter.part not in self.names[-2:] or self.meter.direction != "forward":
            raise PartsOutOfOrder
        self.meter.enter(self.meter.part, "backward")

    def _end_part(self, name: str, output: Any) -> None:
        if self.meter.part != name or self.meter.direction != "forward":
            raise PartsOutOfOrder
        tensor = next(iterate_tensors(output), None)
        if tensor is None:
            raise PartsOutOfOrder
        self.output_bytes[name] = local_bytes(tensor)
        if tensor.requires_grad:
            tensor.register_hook(lambda _: self.meter.enter(name, "backward"))
        self.meter.enter(self.names[self.names.index(name) + 1], "forward")


def block_parts(blocks: Blocks | None) -> Mapping[str, nn.Module]:
    """Return the blocks by the names of their parts."""
    return {f"block {number}": block for number, block in enumerate(blocks.modules if blocks else ())}


def _network(module: nn.Module, blocks: Blocks | None) -> nn.Module:
    """Return the part of the module whose output the loss is computed from, or the module itself."""
    children = [child for child in module.children() if next(child.parameters(), None) is not None]
    if blocks:
        inner = blocks.modules[0]
        children = [child for child in children if any(part is inner for part in child.modules())]
    is_callable = len(children) == 1 and not isinstance(children[0], nn.ModuleList | nn.ModuleDict)
    is_blocks = blocks is not None and children[0] is module.get_submodule(blocks.paths[0])
    return children[0] if is_callable and not is_blocks else module
