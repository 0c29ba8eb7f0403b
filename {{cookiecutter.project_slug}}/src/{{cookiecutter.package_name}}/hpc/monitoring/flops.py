"""What a network computes for an example, found without a device and without memory."""

from typing import Any

import torch
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode


def training_flops(network: Any) -> int:
    """Floating-point operations of forward and backward for one example of a network.

    Matrix products, convolutions and attention, two operations per multiply-add; attention as if it were not causal,
    as PaLM counts (Chowdhery et al., 2022, appendix B). What activation checkpointing computes again does not count:
    ask before it is switched on.

    Args:
        network: with `example_input(batch_size)`; neither it nor the random numbers are changed.
    """
    content = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    hollow = {
        name: torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
        for name, tensor in content.items()
    }
    inputs, training = network.example_input(1).to("meta"), network.training
    counter = FlopCounterMode(display=False)
    network.eval()  # dropout draws no numbers, batch norm takes one example
    try:
        with counter:
            functional_call(network, hollow, (inputs,)).sum().backward()
    finally:
        network.train(training)
    return counter.get_total_flops()
