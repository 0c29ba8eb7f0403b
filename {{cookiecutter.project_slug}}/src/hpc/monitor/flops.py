"""What a network computes for an example, found without a device and without memory."""

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def training_flops(network: Any) -> int:
    """Floating-point operations of forward and backward for one example of a network.

    Matrix products, convolutions and attention, two operations per multiply-add; attention as if it were not causal,
    as PaLM counts (Chowdhery et al., 2022, appendix B). What activation checkpointing computes again does not count:
    ask before it is switched on.

    Args:
        network: with `example_input(batch_size)`. Its forward is called on a copy without content: it may set itself up
            by the first batch that it sees.
    """
    content = [*network.parameters(), *network.buffers()]
    hollow = {id(one): torch.empty_like(one, device="meta", requires_grad=one.requires_grad) for one in content}
    for parameter in network.parameters():
        hollow[id(parameter)] = nn.Parameter(hollow[id(parameter)], parameter.requires_grad)
    copy = deepcopy(network, hollow).eval()  # dropout draws no numbers, batch norm takes one example
    counter = FlopCounterMode(display=False)
    with counter:
        copy(network.example_input(1).to("meta")).sum().backward()
    return counter.get_total_flops()
