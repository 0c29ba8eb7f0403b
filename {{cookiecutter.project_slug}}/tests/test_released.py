"""What is frozen as training begins and released later, or lies in no sharded part: ranks train it together."""

from collections.abc import Callable
from pathlib import Path

import pytest

from {{ cookiecutter.package_name }}.hpc.config import Refused
from {{ cookiecutter.package_name }}.hpc.training.strategies import DeepSpeed

# In each rank: the head is frozen till the second epoch. What each has made of it is told at the end.
FROZEN = """
import torch
from {{ cookiecutter.package_name }}.module import Classifier

def setup(self, stage):
    self.network.head.requires_grad_(False)

def on_train_epoch_start(self):
    if self.current_epoch == 1:
        self.network.head.requires_grad_(True)

def configure_optimizers(self):
    return torch.optim.SGD(self.parameters(), lr=0.1)

def on_train_end(self):
    weight = self.network.head.weight.detach()
    weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    print("HEAD", weight.double().norm().item(), flush=True)

Classifier.setup, Classifier.on_train_epoch_start = setup, on_train_epoch_start
Classifier.configure_optimizers, Classifier.on_train_end = configure_optimizers, on_train_end
"""
# A part of the module beside its network, which configure_model does not shard.
BESIDE = """
import torch
from {{ cookiecutter.package_name }}.module import Classifier

before = Classifier.__init__

def __init__(self, *args, **kwargs):
    before(self, *args, **kwargs)
    self.beside = torch.nn.Linear(10, 10)

def forward(self, inputs):
    return self.beside(self.network(inputs))

Classifier.__init__, Classifier.forward = __init__, forward
"""
WORDS = [
    "trainer.accelerator=cpu",
    "trainer.devices=2",
    "trainer.max_epochs=3",
    "+trainer.limit_train_batches=4",
    "+trainer.limit_val_batches=1",
    "+trainer.limit_test_batches=1",
    "+trainer.num_sanity_val_steps=0",
    "callbacks.progress=null",
    "callbacks.samples=null",
    "callbacks.monitor=null",
    "callbacks.throughput=null",
]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_train_together_what_is_released(strategy: str, start: Callable[..., str], tmp_path: Path) -> None:
    """Also in a run that was stopped after that: there it is trained from the first step on."""
    words = [*WORDS, f"strategy={strategy}"]
    told = heads(start(tmp_path / "reference", 2, words, patch=FROZEN))
    assert len(told) == 2
    assert len(set(told)) == 1
    start(tmp_path / "run", 2, words, stop_at=6, patch=FROZEN)
    assert heads(start(tmp_path / "run", 2, [], patch=FROZEN)) == told


def heads(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("HEAD")]


def test_what_is_in_no_sharded_part_is_refused(start: Callable[..., str], tmp_path: Path) -> None:
    said = start(tmp_path / "run", 2, [*WORDS, "strategy=fsdp"], patch=BESIDE, code=2)
    assert "refused: model=beside.weight, beside.bias" in said
    assert "fully_shard(self.beside" in said


def test_deepspeed_refuses_what_it_would_never_train() -> None:
    strategy = DeepSpeed()
    strategy.released(["head.weight"])  # as training begins
    strategy.followed = (None,)  # type: ignore[assignment]
    with pytest.raises(Refused, match="never trains what is frozen"):
        strategy.released(["body.weight"])
