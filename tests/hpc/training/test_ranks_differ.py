"""Check that ranks which would train apart from each other, or wait for each other for ever, are told so."""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import ANY

import pytest

WORDS = [
    "trainer.accelerator=cpu",
    "trainer.devices=2",
    "trainer.max_epochs=1",
    "trainer.precision=64-true",
    "+trainer.limit_train_batches=6",
    "+trainer.limit_val_batches=1",
    "+trainer.limit_test_batches=1",
    "trainer.num_sanity_val_steps=0",
    "callbacks.progress=null",
    "callbacks.samples=null",
    "callbacks.monitor=null",
    "callbacks.throughput=null",
    "trainer.gradient_clip_val=null",
]
# Each rank calls backward by itself, as in plain torch.
OWN_BACKWARD = """
import torch
from my_research.module import Classifier

before = Classifier.__init__

def __init__(self, *args, **kwargs):
    before(self, *args, **kwargs)
    self.automatic_optimization = False

def training_step(self, batch, batch_idx):
    optimizer = self.optimizers()
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(self(batch[0]), batch[1]).backward()
    optimizer.step()

Classifier.__init__, Classifier.training_step = __init__, training_step
Classifier.configure_optimizers = lambda self: torch.optim.SGD(self.parameters(), lr=0.1)
"""
# Each parameter is updated as soon as it has its gradient, to save the memory of gradients.
UPDATE_IN_BACKWARD = """
import torch
from my_research.module import Classifier

def on_fit_start(self):
    for parameter in self.parameters():
        parameter.register_post_accumulate_grad_hook(update)

def update(parameter):
    with torch.no_grad():
        parameter -= 0.1 * parameter.grad

Classifier.on_fit_start = on_fit_start
"""
# A codebook is an average of what a rank has seen.
CODEBOOK = """
import torch
from my_research.module import Classifier

before_init, before_step = Classifier.__init__, Classifier.training_step

def __init__(self, *args, **kwargs):
    before_init(self, *args, **kwargs)
    self.codebook = torch.nn.Parameter(torch.zeros(()), requires_grad=False)

def training_step(self, batch, batch_idx):
    if self.global_step == START:
        self.codebook.data.lerp_(batch[0].mean(), 0.1)
    return before_step(self, batch, batch_idx)

Classifier.__init__, Classifier.training_step = __init__, training_step
"""
# Two heads of the same size, of which each rank uses another one in its third step.
HEADS = """
import torch
from my_research.module import Classifier

before_init, before_step = Classifier.__init__, Classifier.training_step

def __init__(self, *args, **kwargs):
    before_init(self, *args, **kwargs)
    self.heads = torch.nn.ModuleList(torch.nn.Linear(10, 10) for _ in range(2))

def forward(self, inputs):
    outputs = self.network(inputs)
    if self.trainer.training and self.global_step == 2:
        return self.heads[self.global_rank](outputs)
    return sum(head(outputs) for head in self.heads)

Classifier.__init__, Classifier.forward = __init__, forward
"""
# What the last rank alone does before its second step.
ALONE = """
from my_research.module import Classifier

def on_train_batch_start(self, batch, batch_idx):
    if self.global_step == 1 and self.global_rank == 1:
        {statement}

Classifier.on_train_batch_start = on_train_batch_start
"""
CASES = {
    "its own backward": ("ddp", OWN_BACKWARD, "model=network", "self.manual_backward(loss)"),
    "updates in backward": ("ddp", UPDATE_IN_BACKWARD, "model=network", "no optimizer step in a hook"),
    "a codebook": ("ddp", CODEBOOK.replace("START", "0"), "model=codebook", "self.all_gather(value)"),
    "a codebook, later": ("ddp", CODEBOOK.replace("START", "5"), "model=codebook", "self.all_gather(value)"),
    "a codebook, fsdp": ("fsdp", CODEBOOK.replace("START", "0"), "model=codebook", "self.all_gather(value)"),
    "other heads, fsdp": ("fsdp", HEADS, "must use the same parts", "added to the loss, or strategy=ddp"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_ranks_that_would_train_apart_are_told(case: str, start: Callable[..., str], tmp_path: Path) -> None:
    strategy, patch, given, fix = CASES[case]
    said = start(tmp_path / "run", 2, [*WORDS, f"strategy={strategy}"], patch=patch, code=2)
    assert said.count("ConfigError") == 1 and given in said and fix in said, said
    assert not list((tmp_path / "run" / "checkpoints").glob("step-000000006*"))


ALONE_CASES = {
    "freezes": ("ddp", "self.network.head.requires_grad_(False)", "freeze and release", "self.trainer.global_step"),
    "stops": ("ddp", "self.trainer.should_stop = True", "trainer.should_stop=True", "reduce_boolean_decision"),
    "leaves": ("ddp", "return -1", "All ranks must end training", "-1 from on_train_batch_start"),
    "leaves, fsdp": ("fsdp", "return -1", "All ranks must end training", "-1 from on_train_batch_start"),
    "reads": ("fsdp", "self.network.head.weight.norm().item()", "read a number", "on all ranks"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ALONE_CASES)
def test_a_rank_that_does_something_alone_is_told(case: str, start: Callable[..., str], tmp_path: Path) -> None:
    strategy, statement, given, fix = ALONE_CASES[case]
    patch = ALONE.format(statement=statement)
    said = start(tmp_path / "run", 2, [*WORDS, f"strategy={strategy}", "+faults.hang_minutes=2"], patch=patch, code=ANY)
    assert given in said and fix in said, said


# Gradients are clamped before they are averaged, and parts of them are masked.
CLAMPED = """
from my_research.module import Classifier

def on_fit_start(self):
    self.network.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

Classifier.on_fit_start = on_fit_start
"""


@pytest.mark.slow
def test_it_is_said_where_a_hook_gets_the_gradients_of_one_rank(start: Callable[..., str], tmp_path: Path) -> None:
    said = start(tmp_path / "ddp", 2, [*WORDS, "strategy=ddp", "trainer.max_steps=3"], patch=CLAMPED)
    assert said.count("train: hooks of the gradients of network.head.weight get those of a rank's own samples") == 1
    said = start(tmp_path / "fsdp", 2, [*WORDS, "strategy=fsdp"], patch=CLAMPED, code=2)
    assert "where a hook gets the gradient of its rank's own samples" in said


# One sample for two ranks, of which the first alone has a batch, and calls its hooks.
GATHERS = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from hpc.data.data_module import DataModule
from my_research.module import Classifier

def val_dataloader(self):
    return DataLoader(TensorDataset(*torch.zeros(3, 1, 1)), batch_size=1)

def gather(self, *args):
    self.all_gather(torch.ones(1))

DataModule.val_dataloader = val_dataloader
Classifier.validation_step = lambda self, batch, batch_idx: None
Classifier.on_validation_epoch_end = lambda self: None
Classifier.{hook} = gather
"""


@pytest.mark.slow
def test_gathering_where_a_rank_has_no_batch_is_told(start: Callable[..., str], tmp_path: Path) -> None:
    words = [word for word in WORDS if "limit_val" not in word]
    words += ["strategy=ddp", "checkpoint.monitor=null"]
    for hook in ("validation_step", "on_validation_epoch_end"):
        start(tmp_path / hook, 2, words, patch=GATHERS.format(hook=hook))
    said = start(tmp_path / "run", 2, words, patch=GATHERS.format(hook="on_validation_batch_end"), code=ANY)
    assert "self.all_gather: All ranks must gather together" in said and "in the step itself" in said


# A rank's weights are moved and moved back, which rounds the last digits; the heads are those of HEADS.
ROUNDED = """
from my_research.module import Classifier

def on_train_batch_end(self, *args):
    self.network.head.weight.data.mul_(1 + 1e-14 * self.global_rank)

Classifier.on_train_batch_end = on_train_batch_end
"""
AS_TORCH_SAYS = """
def on_fit_start(self):
    self.set_reduce_scatter_unused_params(True)

Classifier.on_fit_start = on_fit_start
"""


@pytest.mark.slow
def test_what_is_right_is_not_told(start: Callable[..., str], tmp_path: Path) -> None:
    words = [*WORDS, "strategy=ddp", "trainer.max_steps=3"]
    start(tmp_path / "rounded", 2, words, patch=ROUNDED)
    words[-2] = "strategy=fsdp"
    start(tmp_path / "heads", 2, words, patch=HEADS + AS_TORCH_SAYS)
