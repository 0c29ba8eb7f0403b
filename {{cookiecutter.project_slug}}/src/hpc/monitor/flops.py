"""The floating-point operations of a network, counted without a device and without memory."""

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def training_flops(network: Any) -> int:
    """Return the floating-point operations of forward and backward for one example.

    Counted are matrix products, convolutions and attention, with two operations per multiply-add, and attention as if
    it were not causal, as PaLM counts (Chowdhery et al., 2022, appendix B). Recomputation by activation checkpointing
    must not count, so call this before checkpointing is switched on.

    Args:
        network: has `example_input(batch_size)`. Its forward is called on a copy without content, because a network may
            initialize itself from the first batch that it sees.
    """
    content = [*network.parameters(), *network.buffers()]
    on_meta = {
        id(tensor): torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad) for tensor in content
    }
    for parameter in network.parameters():
        on_meta[id(parameter)] = nn.Parameter(on_meta[id(parameter)], parameter.requires_grad)
    copy = deepcopy(network, on_meta).eval()  # dropout draws no numbers, and batch norm accepts a single example
    counter = FlopCounterMode(display=False)
    with counter:
        copy(network.example_input(1).to("meta")).sum().backward()
    return counter.get_total_flops()
