"""Check that ranks stay in sync in parameters that are unfrozen during training or lie in no sharded part."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from hpc.config.errors import ConfigError
from hpc.training.deepspeed_strategy import DeepSpeed
from hpc.training.strategies import FSDP
from hpc.training.unfrozen_parameters import TracksUnfrozenParameters

# In each rank the head is frozen until the second epoch. At the end each rank prints its weights.
FROZEN = """
import torch
from my_research.module import Classifier

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
# The same, but the head is released after a step has started; momentum keeps any update of a single rank.
WITHIN = (
    FROZEN.replace("lr=0.1", "lr=0.1, momentum=0.9")
    + """
before = Classifier.training_step

def training_step(self, *args):
    if self.global_step == 5:
        self.network.head.requires_grad_(True)
    return before(self, *args)

del Classifier.on_train_epoch_start
Classifier.training_step = training_step
"""
)
# A part of the module beside its network. At the end each rank prints its weights.
BESIDE = """
import torch
from my_research.module import Classifier

before = Classifier.__init__

def __init__(self, *args, **kwargs):
    before(self, *args, **kwargs)
    self.beside = torch.nn.Linear(10, 10)

def forward(self, inputs):
    return self.beside(self.network(inputs))

def on_train_end(self):
    weight = self.beside.weight.detach()
    weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    print("HEAD", weight.double().sum().item())

Classifier.__init__, Classifier.forward, Classifier.on_train_end = __init__, forward, on_train_end
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


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_train_together_what_is_released(strategy: str, start: Callable[..., str], tmp_path: Path) -> None:
    """Check also a resumed run, in which the parameters are trained from the first step on."""
    words = [*WORDS, f"strategy={strategy}"]
    told = heads(start(tmp_path / "reference", 2, words, patch=FROZEN))
    assert len(told) == 2
    assert len(set(told)) == 1
    start(tmp_path / "run", 2, words, stop_at=6, patch=FROZEN)
    assert heads(start(tmp_path / "run", 2, [], patch=FROZEN)) == told


@pytest.mark.soak
def test_ranks_train_together_what_is_released_within_a_step(start: Callable[..., str], tmp_path: Path) -> None:
    told = heads(start(tmp_path / "run", 2, [*WORDS, "strategy=ddp"], patch=WITHIN))
    assert len(told) == 2
    assert len(set(told)) == 1


def heads(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("HEAD")]


@pytest.mark.slow
def test_a_part_beside_the_network_is_sharded_and_trained_together(start: Callable[..., str], tmp_path: Path) -> None:
    sums = {
        strategy: [float(line.split()[1]) for line in heads(start(tmp_path / strategy, 2, words, patch=BESIDE))]
        for strategy in ("ddp", "fsdp")
        if (words := [*WORDS, f"strategy={strategy}", "trainer.precision=64-true"])
    }
    assert len(sums["fsdp"]) == 2
    assert sums["fsdp"] == pytest.approx(sums["ddp"], abs=1e-9)


def test_what_is_no_part_by_itself_cannot_be_sharded_by_itself() -> None:
    module = nn.Module()
    module.scale = nn.Parameter(torch.ones(2))  # a parameter of a loss, for example
    optimizers, place = [torch.optim.SGD(module.parameters())], {"num_replicas": 2}
    strategy: Any = SimpleNamespace(lightning_module=module, optimizers=optimizers, distributed_sampler_kwargs=place)
    with pytest.raises(ConfigError, match="scale in a part of the module with a forward of its own, or strategy=ddp"):
        FSDP.on_unfrozen(strategy, ["scale"])


def test_deepspeed_rejects_what_it_would_never_train() -> None:
    strategy = DeepSpeed()
    strategy.on_unfrozen(["head.weight"])  # as training begins
    strategy.frozen = {}
    with pytest.raises(ConfigError, match="never trains parameters that are frozen when training starts"):
        strategy.on_unfrozen(["body.weight"])


def test_what_was_trained_before_is_not_released_once_more() -> None:
    """Freeze two networks by turns: DDP is not rebuilt at each step, and DeepSpeed rejects nothing."""
    module = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in ("one", "other", "third")})
    module["third"].requires_grad_(False)
    steps = Steps(module)
    steps.setup(SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.FITTING)))
    for is_first in (True, False, True, False):
        module["one"].requires_grad_(is_first)
        module["other"].requires_grad_(not is_first)
        steps.training_step()
    module["third"].requires_grad_(True)
    steps.training_step()
    steps.training_step()
    assert steps.told == [["one.weight", "other.weight"], ["third.weight"]]


class Strategy:
    def setup(self, trainer: Any) -> None: ...

    def training_step(self) -> None: ...


class Steps(TracksUnfrozenParameters, Strategy):
    def __init__(self, module: nn.Module) -> None:
        self.lightning_module, self.told = module, list[list[str]]()

    def on_unfrozen(self, names: list[str]) -> None:
        self.told.append(names)
