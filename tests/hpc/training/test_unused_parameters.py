"""Check that DDP trains modules whose steps leave out parameters, and looks for these only where there are any."""

from collections.abc import Callable
from pathlib import Path

import pytest

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
LOOKS = """
from my_research.module import Classifier

def on_train_end(self):
    print("LOOKS", self.trainer.model.find_unused_parameters, flush=True)

Classifier.on_train_end = on_train_end
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
