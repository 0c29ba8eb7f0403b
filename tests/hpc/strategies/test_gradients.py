"""Check the effect of a strategy on a network within one process; test_strategies.py checks the rest."""

import copy
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from hpc.config.errors import ConfigError
from hpc.state.holder_fields import SKIPS_NOT_FINITE
from hpc.strategies.gradients import clip_gradients, require_clip_gradients
from hpc.strategies.parallelize import ModuleChanges, parallelize
from my_research.models.gpt import GPT
from my_research.module import Classifier


@pytest.fixture
def network() -> GPT:
    torch.manual_seed(0)
    return GPT(num_layers=2, num_heads=2, width=16, vocab_size=11, block_size=8)


def change(network: nn.Module, **changes: Any) -> None:
    """Apply changes to a network as the part of a module that a strategy sets up."""
    module = L.LightningModule()
    module.network, module._trainer = network, SimpleNamespace(is_global_zero=True)
    for _ in range(2):  # Lightning asks once per fit, validate and test
        parallelize(module, None, ModuleChanges(**changes))


def gradients(network: nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    network(tokens).square().mean().backward()
    return [parameter.grad for parameter in network.parameters()]


@pytest.mark.parametrize("option", ["activation_checkpointing", "channels_last"])
def test_an_option_changes_neither_gradients_nor_names(option: str, network: GPT) -> None:
    changed, tokens = copy.deepcopy(network), torch.randint(0, 11, (2, 8))
    change(changed, **{option: True})
    torch.testing.assert_close(gradients(changed, tokens), gradients(network, tokens))
    assert list(changed.state_dict()) == list(network.state_dict())


def test_checkpointing_keeps_less_for_backward(network: GPT) -> None:
    def kept(network: GPT) -> int:
        count = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            network(torch.randint(0, 11, (2, 8)))
        return count

    changed = copy.deepcopy(network)
    change(changed, activation_checkpointing=True)
    assert kept(changed) < kept(network) / 2


def test_gradients_are_clipped_to_the_norm_that_is_reported(network: GPT) -> None:
    import lightning as L

    module = L.LightningModule()
    module.network = network
    module._trainer = L.Trainer(logger=False, enable_checkpointing=False, barebones=False, accelerator="cpu")
    gradients(network, torch.randint(0, 11, (2, 8)))
    expected = torch.stack([p.grad.norm() for p in network.parameters()]).norm()
    optimizer = torch.optim.SGD(network.parameters())
    torch.testing.assert_close(clip_gradients(module, optimizer, None), expected)
    torch.testing.assert_close(clip_gradients(module, optimizer, 1e-3), expected)
    after = torch.stack([p.grad.norm() for p in network.parameters()]).norm()
    torch.testing.assert_close(after, torch.tensor(1e-3), rtol=1e-2, atol=0)


def test_gradients_are_clipped_by_value_as_lightning_does_it(network: GPT) -> None:
    import lightning as L

    module = L.LightningModule()
    module.network = network
    options = {"gradient_clip_algorithm": "value", "gradient_clip_val": 1e-3}
    module._trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", **options)
    optimizer, batch = torch.optim.SGD(network.parameters()), torch.randint(0, 11, (2, 8))
    gradients(network, batch)
    clip_gradients(module, optimizer, 1e-3)
    ours = [p.grad.clone() for p in network.parameters()]
    network.zero_grad()
    gradients(network, batch)
    assert any(not torch.equal(p.grad, own) for p, own in zip(network.parameters(), ours, strict=True))
    module.clip_gradients(optimizer, 1e-3, "value")
    assert all(torch.equal(p.grad, own) for p, own in zip(network.parameters(), ours, strict=True))


def test_a_step_is_skipped_without_waiting_for_the_device() -> None:
    """Use tensors without values: a decision on the host would have to read one, and fail."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        module: Any = nn.Module()
        module.network = GPT(num_layers=1, num_heads=2, width=16, vocab_size=11, block_size=8)
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        module.trainer = SimpleNamespace(model=None, optimizers=[optimizer], gradient_clip_algorithm=None)
        setattr(module, SKIPS_NOT_FINITE, True)
        gradients(module.network, torch.randint(0, 11, (2, 8)))
        clip_gradients(module, optimizer, 1.0)
        assert optimizer.found_inf.shape == ()  # type: ignore[attr-defined]
        optimizer.step()


class ByHand(Classifier):
    automatic_optimization = False


def test_a_module_that_would_skip_no_step_is_rejected(network: GPT) -> None:
    require_clip_gradients(Classifier(network, torch.optim.AdamW))
    for module in (L.LightningModule(), ByHand(network, torch.optim.AdamW)):
        with pytest.raises(ConfigError, match="must leave steps out itself"):
            require_clip_gradients(module)
