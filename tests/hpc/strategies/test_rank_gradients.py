"""Check that gradients and losses are those of all ranks wherever a module or an optimizer reads them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from changed_weights import Small, train, whole_weights
from torch import nn

TOLERANCE = 1e-10


class Scaled(Small):
    """Has a parameter without dimensions, and notes its gradients after each backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.scale * self(batch[0])).square().mean()

    def on_after_backward(self) -> None:
        gradients = [parameter.grad for parameter in (self.scale, self.head.weight)]
        self.seen += [float(gradient.square().sum()) for gradient in gradients]
        self.scale.grad.clamp_(-0.01, 0.01)


class Adapting(Small):
    """Computes gradients in an evaluation, too."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.automatic_optimization:
            with torch.enable_grad():
                self.manual_backward(self(batch[0]).square().mean())


class Searched(Small):
    """Is trained by an optimizer that searches along a line, and leaves a part unused."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = nn.Linear(3, 3)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


@pytest.mark.slow
def test_what_reads_gradients_or_losses_reads_those_of_all_ranks(together: Callable[..., list[Any]]) -> None:
    assert together(differences, 2) == [[], []]


def differences(rank: int) -> list[str]:
    """Return what two ranks read, or end with, otherwise than one process."""
    wrong = []
    for make, strategies in ((Scaled, ("ddp", "fsdp")), (Searched, ("ddp",))):
        modules = {strategy: make() for strategy in ("single", *strategies)}
        for strategy, module in modules.items():
            train(rank, strategy, module)
        for strategy in strategies:
            seen, expected = (torch.tensor(getattr(modules[each], "seen", [])) for each in (strategy, "single"))
            if not torch.allclose(seen, expected, atol=TOLERANCE):
                wrong.append(f"{make.__name__} {strategy}: {seen} {expected}")
            ends, expected_ends = whole_weights(modules[strategy]), whole_weights(modules["single"])
            wrong += [
                f"{make.__name__} {strategy}: {name}"
                for name, value in ends.items()
                if (value - expected_ends[name]).abs().max() > TOLERANCE
            ]
        if make is Scaled:
            adapting = train(rank, "ddp", Adapting(), inference_mode=False)
            adapting.lightning_module.automatic_optimization = False
            adapting.validate(adapting.lightning_module, adapting.val_dataloaders)
    return wrong
