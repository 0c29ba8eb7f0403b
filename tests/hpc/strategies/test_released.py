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
from hpc.strategies.deepspeed import DeepSpeed
from hpc.strategies.fsdp import FSDP
from hpc.strategies.unfrozen_parameters import TracksUnfrozenParameters

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
# A layer for each hook, which freezes it and frees it again by turns. At the end each rank prints its weights.
BY_TURNS = """
import torch
from my_research.module import Classifier

HOOKS = ["on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_backward",
         "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end",
         "on_train_epoch_end", "on_validation_start", "on_validation_end"]
before = Classifier.__init__

def __init__(self, *args, **kwargs):
    before(self, *args, **kwargs)
    self.network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    self.beside = torch.nn.ModuleDict({hook: torch.nn.Linear(10, 10) for hook in HOOKS})

def forward(self, inputs):
    outputs = self.network(inputs)
    for layer in self.beside.values():
        outputs = outputs + layer(outputs)
    return outputs

def toggles(hook):
    def toggle(self, *args):
        weight = self.beside[hook].weight
        weight.requires_grad_(not weight.requires_grad)
    return toggle

def configure_optimizers(self):
    return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

def on_train_end(self):
    for hook, layer in self.beside.items():
        weight = layer.weight.detach()
        weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        print("HEAD", hook, (weight * torch.arange(100).reshape(10, 10)).sum().item(), flush=True)

Classifier.__init__, Classifier.forward, Classifier.on_train_end = __init__, forward, on_train_end
Classifier.configure_optimizers = configure_optimizers
for hook in HOOKS:
    setattr(Classifier, hook, toggles(hook))
"""
FROZEN_WITHIN = """
from my_research.module import Classifier
before = Classifier.training_step

def training_step(self, *args):
    if self.global_step == 3:
        self.network.head.requires_grad_(False)
    return before(self, *args)

Classifier.training_step = training_step
"""
# A layer that rank 0 alone uses, with the first of two batches of a step, and that is frozen before the second.
OF_ONE_RANK = """
import torch
from my_research.module import Classifier

before_init, before_step = Classifier.__init__, Classifier.training_step

def __init__(self, *args, **kwargs):
    before_init(self, *args, **kwargs)
    self.beside = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(self.beside.weight)

def on_train_batch_start(self, batch, batch_idx):
    self.beside.requires_grad_(batch_idx % 2 == 0)

def training_step(self, batch, batch_idx):
    loss = before_step(self, batch, batch_idx)
    if batch_idx == 0 and self.global_rank == 0:
        loss = loss + self.beside(torch.ones(1, 1, dtype=loss.dtype)).sum()
    return loss

def configure_optimizers(self):
    return torch.optim.SGD(self.parameters(), lr=1.0)

def on_train_end(self):
    print("HEAD", self.beside.weight.item(), self.network.head.weight.detach().double().norm().item(), flush=True)

Classifier.__init__, Classifier.training_step = __init__, training_step
Classifier.on_train_batch_start = on_train_batch_start
Classifier.configure_optimizers, Classifier.on_train_end = configure_optimizers, on_train_end
"""
WORDS = [
    "trainer.accelerator=cpu",
    "trainer.devices=2",
    "trainer.max_epochs=3",
    "+trainer.limit_train_batches=4",
    "+trainer.limit_val_batches=1",
    "+trainer.limit_test_batches=1",
    "trainer.num_sanity_val_steps=0",
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


@pytest.mark.soak
@pytest.mark.parametrize(
    "own",
    [[], ["trainer.accumulate_grad_batches=2"], ["+strategy.lightning.find_unused_parameters=true"]],
    ids=["", "accumulated", "find_unused_parameters"],
)
def test_what_any_hook_freezes_and_frees_is_trained_alike(
    own: list[str], start: Callable[..., str], tmp_path: Path
) -> None:
    of_ddp = [word for word in own if "strategy" in word]
    words = [*WORDS, *(word for word in own if word not in of_ddp), "trainer.precision=64-true"]
    words += ["trainer.num_sanity_val_steps=2"]
    told = {
        strategy: dict(line.split()[1:] for line in heads(start(tmp_path / strategy, ranks, typed, patch=BY_TURNS)))
        for strategy, ranks in (("single", 1), ("ddp", 2), ("fsdp", 2))
        if (typed := [*words, f"strategy={strategy}", f"trainer.devices={ranks}"])
        if (typed := [*typed, *(of_ddp if strategy == "ddp" else [])])
    }
    assert len(told["single"]) == 12
    for strategy in ("ddp", "fsdp"):
        weights = {hook: float(told[strategy][hook]) for hook in told["single"]}
        assert weights == pytest.approx({hook: float(own) for hook, own in told["single"].items()}, rel=1e-11), strategy
    start(tmp_path / "run", 2, [*words, "strategy=ddp", *of_ddp], stop_at=3, patch=BY_TURNS)
    assert dict(line.split()[1:] for line in heads(start(tmp_path / "run", 2, [], patch=BY_TURNS))) == told["ddp"]


@pytest.mark.soak
def test_what_is_frozen_within_a_step_of_ddp_is_told(start: Callable[..., str], tmp_path: Path) -> None:
    said = start(tmp_path / "run", 2, [*WORDS, "strategy=ddp"], patch=FROZEN_WITHIN, code=2)
    assert "ConfigError: model=network.head.weight, network.head.bias: With strategy=ddp, parameters must not" in said
    assert "frame #" not in said  # of a rank that asks rank 0's store when it is gone
    words = [*WORDS, "strategy=ddp", "+strategy.lightning.find_unused_parameters=true"]  # what it says to type
    start(tmp_path / "other", 2, words, patch=FROZEN_WITHIN)
    start(tmp_path / "fsdp", 2, [*WORDS, "strategy=fsdp"], patch=FROZEN_WITHIN)


@pytest.mark.soak
def test_what_one_rank_uses_and_all_freeze_in_the_first_step_is_averaged(
    start: Callable[..., str], tmp_path: Path
) -> None:
    words = [
        *WORDS,
        "strategy=ddp",
        "trainer.accumulate_grad_batches=2",
        "trainer.max_epochs=1",
        "+trainer.max_steps=1",
    ]
    told = heads(start(tmp_path / "run", 2, words, patch=OF_ONE_RANK))
    assert len(told) == 2 and len(set(told)) == 1
    # The gradient is 1 on rank 0 and 0 on rank 1, of a loss that Lightning halves for the two batches of a step.
    assert float(told[0].split()[1]) == pytest.approx(-0.25)


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
    steps = set_up(module)
    for is_first in (True, False, True, False):
        module["one"].requires_grad_(is_first)
        module["other"].requires_grad_(not is_first)
        steps.training_step()
    module["third"].requires_grad_(True)
    steps.training_step()
    steps.training_step()
    assert steps.told == [["one.weight", "other.weight"], ["third.weight"]]


def set_up(module: nn.Module, frozen_before: list[str] | None = None) -> "Steps":
    steps = Steps(module)
    steps.frozen_before = frozen_before
    steps.setup(SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.FITTING)))
    return steps


def test_what_takes_the_place_of_a_frozen_parameter_is_not_released() -> None:
    """Check it of a run that resumes, too: DDP has never seen that parameter, and would wait for its gradient."""
    module = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in ("one", "other")}).requires_grad_(False)
    steps = set_up(module)
    module["one"].weight = nn.Parameter(torch.ones(1, 1))
    steps.training_step()
    assert steps.frozen_to_save() == ["other.weight"]
    again = set_up(module.requires_grad_(False), frozen_before=steps.frozen_to_save())
    module.requires_grad_(True)
    again.training_step()
    assert (steps.told, again.told) == ([[]], [[], ["other.weight"]])


class Strategy:
    def setup(self, trainer: Any) -> None: ...

    def training_step(self) -> None: ...


class Steps(TracksUnfrozenParameters, Strategy):
    def __init__(self, module: nn.Module) -> None:
        self.lightning_module, self.told = module, list[list[str]]()

    def on_unfrozen(self, names: list[str]) -> None:
        self.told.append(names)
