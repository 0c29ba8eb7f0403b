"""Check that gradients accumulated with manual optimization are part of the saved state."""

import lightning as L
import torch

from hpc.resume import accumulated_gradients


class ByHand(L.LightningModule):
    def __init__(self, automatic: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        self.used, self.unused = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)


def test_they_come_back() -> None:
    before, after = ByHand(), ByHand()
    before.used(torch.ones(3, 2)).sum().backward()
    saved = accumulated_gradients.state(before)
    before.zero_grad()  # must not change the saved copy
    accumulated_gradients.restore(after, saved)
    assert {name: p.grad.tolist() for name, p in after.named_parameters() if p.grad is not None} == {
        "used.weight": [[3.0, 3.0]], "used.bias": [3.0],
    }  # fmt: skip


def test_between_two_steps_of_automatic_optimization_there_are_none() -> None:
    module = ByHand(automatic=True)
    module.used(torch.ones(3, 2)).sum().backward()
    assert accumulated_gradients.state(module) == {}
