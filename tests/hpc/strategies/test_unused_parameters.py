"""Check that DDP trains modules whose steps leave out parameters, and looks for these only where there are any."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from test_resume import assert_same
from torch.nn.parallel import DistributedDataParallel

from hpc.strategies.ddp import rebuild_ddp_buckets

# A module with a part that no step uses.
UNUSED = """
import torch
from my_research.module import Classifier

before = Classifier.__init__

def __init__(self, *args, **kwargs):
    before(self, *args, **kwargs)
    self.pooler = torch.nn.Linear(3, 3)

Classifier.__init__ = __init__
"""
# A part that rank 0 alone uses: from the first step on, or all but in the third.
OF_ONE_RANK = """
import torch
from my_research.module import Classifier

before = Classifier.__init__

def __init__(self, *args, **kwargs):
    before(self, *args, **kwargs)
    self.beside = torch.nn.Linear(10, 10)

def forward(self, inputs):
    outputs = self.network(inputs)
    return self.beside(outputs) if {condition} else outputs

def on_train_end(self):
    print("BESIDE", self.beside.weight.double().sum().item(), flush=True)

Classifier.__init__, Classifier.forward, Classifier.on_train_end = __init__, forward, on_train_end
"""
LOOKS = """
from my_research.module import Classifier

def on_train_end(self):
    print("LOOKS", self.trainer.model.find_unused_parameters, flush=True)

Classifier.on_train_end = on_train_end
"""
SYNCS = """
step = Classifier.training_step

def training_step(self, batch, batch_idx):
    print("SYNCS", batch_idx, self.trainer.model.require_backward_grad_sync, flush=True)
    return step(self, batch, batch_idx)

Classifier.training_step = training_step
"""
WORDS = [
    "trainer.accelerator=cpu",
    "trainer.devices=2",
    "strategy=ddp",
    "trainer.max_steps=4",
    "callbacks.samples=null",
]
WORDS += ["+trainer.limit_val_batches=1", "+trainer.limit_test_batches=1", "callbacks.progress=null"]
WORDS += ["+trainer.num_sanity_val_steps=0"]


@pytest.mark.slow
def test_ddp_looks_for_parameters_that_the_first_step_leaves_unused(start: Callable[..., str], tmp_path: Path) -> None:
    output = start(tmp_path / "run", 2, WORDS, stop_at=2, patch=UNUSED + LOOKS)
    note = "DDP looks for unused parameters in each step, as the module's steps leave unused pooler.weight, pooler.bias"
    assert output.count(note) == 1
    assert start(tmp_path / "run", 2, [], patch=UNUSED + LOOKS).count("LOOKS True") == 2  # also after a resume


@pytest.mark.slow
def test_ddp_stops_looking_where_all_are_used(start: Callable[..., str], tmp_path: Path) -> None:
    output = start(tmp_path / "run", 2, WORDS, patch=LOOKS)
    assert output.count("LOOKS False") == 2 and "unused" not in output


@pytest.mark.slow
def test_what_one_rank_leaves_unused_is_looked_for(start: Callable[..., str], tmp_path: Path) -> None:
    patch = OF_ONE_RANK.format(condition="self.global_rank == 0")
    said = start(tmp_path / "run", 2, WORDS, patch=patch + LOOKS.replace("on_train_end", "on_train_epoch_end"))
    ends = {line.split()[1] for line in said.splitlines() if line.startswith("BESIDE")}
    assert len(ends) == 1 and said.count("LOOKS True") == 2
    assert "leave unused beside.weight, beside.bias" in said


@pytest.mark.slow
def test_what_one_rank_leaves_unused_in_a_later_step_is_told(start: Callable[..., str], tmp_path: Path) -> None:
    patch = OF_ONE_RANK.format(condition="self.global_rank == 0 or not self.training or self.global_step != 2")
    said = start(tmp_path / "run", 2, WORDS, patch=patch, code=ANY)
    assert "ConfigError: model=beside.weight, beside.bias: With strategy=ddp, each step must use all parameters" in said
    fix = said.partition("  Try: ")[2].split()[0]
    start(tmp_path / "other", 2, [*WORDS, fix], patch=patch)


@pytest.mark.slow
def test_ddp_that_looks_for_unused_parameters_sums_accumulated_batches_once(
    start: Callable[..., str], tmp_path: Path
) -> None:
    """Check that no batch but the last of a step is summed over ranks: a resumed run would round otherwise."""
    words = [*WORDS, "trainer.accumulate_grad_batches=2"]
    said = start(tmp_path / "reference", 2, words, patch=UNUSED + SYNCS)
    summed = {int(batch) for batch, is_summed in re.findall(r"SYNCS (\d) (\w+)", said) if is_summed == "True"}
    assert summed == {3, 5, 7}  # the first step shows which parameters are unused, and is summed otherwise
    start(tmp_path / "run", 2, words, stop_at=1, patch=UNUSED)
    start(tmp_path / "run", 2, [], patch=UNUSED)
    assert_same(tmp_path / "run", tmp_path / "reference")


def sums_after_wrapping(rank: int) -> list[float]:
    """Return the gradients of a batch that follows an accumulated one, in whose place DDP has been made anew."""
    module = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(module.weight)
    module.weight.grad = torch.full_like(module.weight, 10.0)
    ddp = DistributedDataParallel(module, gradient_as_bucket_view=True)
    strategy = SimpleNamespace(model=ddp, wrapped=list(module.parameters()))
    rebuild_ddp_buckets(SimpleNamespace(strategy=strategy), module)  # type: ignore[arg-type]
    ddp(torch.tensor([[1.0, 2.0]]) * (1 + 2 * rank)).sum().backward()
    return module.weight.grad[0].tolist()


def test_gradients_of_accumulated_batches_survive_that_ddp_is_made_anew(together: Callable[..., list[Any]]) -> None:
    assert together(sums_after_wrapping, 2) == [[12.0, 14.0]] * 2  # 10 and the mean of 1 and 3 times the inputs
