"""Outputs and gradients of each network of configs/model. A model that you add there is tested, too."""

import inspect
from typing import Any

import pytest
import torch
from choices import GROUPS, compose_choice, is_large
from hpc.config.build import build
from hydra.utils import get_class
from omegaconf import OmegaConf
from torch import Tensor, nn

pytestmark = pytest.mark.parametrize("model", GROUPS["model"])


def test_each_sample_has_an_output_and_each_parameter_a_gradient(model: str) -> None:
    with torch.device("meta"):  # shapes without content: of a network of any size
        network = build_network(arguments(model))
        outputs = network(network.example_input(3))
    assert len(outputs) == 3
    outputs.sum().backward()
    assert [name for name, parameter in network.named_parameters() if parameter.grad is None] == []


def test_a_sample_has_the_same_output_alone_and_in_a_batch(model: str) -> None:
    if is_large(arguments(model)):
        pytest.skip(f"{model} is too large to be computed here")
    torch.manual_seed(0)
    network = build_network(arguments(model)).eval()
    with torch.no_grad():
        for parameter in network.parameters():  # residual branches start at zero, which would hide errors in them
            parameter += 0.02 * torch.randn_like(parameter)
        inputs = random_like(network.example_input(3))
        outputs = network(inputs)
        torch.testing.assert_close(network(inputs[1:2]), outputs[1:2], atol=1e-4, rtol=1e-4)
    assert outputs.isfinite().all()
    assert not torch.allclose(outputs[0], outputs[1]), "the output does not depend on the input"


def arguments(model: str) -> dict[str, Any]:
    """Return the network's node of a model config, with 10 for numbers that are null until data fill them in.

    Skip the test if there is none, as in a LightningModule that makes its network itself.
    """
    cfg = compose_choice(f"model={model}").cfg.model
    if "network" not in cfg:
        pytest.skip(f"{cfg._target_} has no argument `network`")
    node: Any = OmegaConf.to_container(cfg.network, resolve=True)
    for name, parameter in inspect.signature(get_class(node["_target_"])).parameters.items():
        is_null = name in node and node[name] is None
        if parameter.default is parameter.empty and is_null:
            node[name] = 10
    return node


def build_network(node: dict[str, Any]) -> nn.Module:
    """Build a network; skip the test if it has no `example_input`."""
    network = build(node)
    if not hasattr(network, "example_input"):
        pytest.skip(f"{node['_target_']} has no example_input")
    return network


def random_like(inputs: Tensor) -> Tensor:
    """Return random inputs of the same shape and type; whole numbers are 0 or 1, which any vocabulary has."""
    return torch.randn_like(inputs) if inputs.is_floating_point() else torch.randint_like(inputs, 2)
