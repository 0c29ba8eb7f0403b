"""Ranks draw different random numbers within a step, the same ones in a hook, and the same again after a resume."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_bad_input import STRANGER, words

from hpc.state import randomness

# A line for each place in which a rank draws: what it is, the rank, the step, and random numbers of each library.
NOISY = """
import random, numpy as np

def tell(self, what):
    mask = torch.nn.functional.dropout(torch.ones(64)).tolist()
    numbers = [float(torch.rand(())), float(np.random.rand()), random.random(), sum(mask[::2])]
    print("DRAWN", what, self.trainer.global_rank, self.trainer.global_step, *numbers, flush=True)
    return sum(numbers)

def training_step(self, batch, batch_idx):
    return self.compute_loss(batch) * (1 + 0.1 * tell(self, "step"))

def validation_step(self, batch, batch_idx):
    tell(self, f"validation{batch_idx}")

def on_after_batch_transfer(self, batch, dataloader_idx):
    if self.trainer.training:
        tell(self, "transfer")
    return batch

def on_train_batch_end(self, *_):
    tell(self, "hook")

Line.training_step, Line.validation_step, Line.on_train_batch_end = training_step, validation_step, on_train_batch_end
Data.on_after_batch_transfer = on_after_batch_transfer
Data.train_dataloader = lambda self: DataLoader(Points(46), batch_size=4)
Data.val_dataloader = lambda self: DataLoader(Points(13), batch_size=4)
"""


def drawn(output: str) -> dict[tuple[str, str], list[str]]:
    """Return the numbers of each rank, by place and step."""
    numbers: dict[tuple[str, str], list[str]] = {}
    for line in sorted({line for line in output.splitlines() if line.startswith("DRAWN")}):
        _, what, _, step, *drawn = line.split()
        numbers.setdefault((what, step), []).extend(drawn)
    return numbers


@pytest.mark.slow
def test_ranks_draw_different_noise_and_draw_it_again_when_resumed(start: Callable[..., str], tmp_path: Path) -> None:
    more = words(2, "trainer.max_epochs=2")
    whole = drawn(start(tmp_path / "whole", 2, more, patch=STRANGER + NOISY))
    first = start(tmp_path / "run", 2, more, stop_at=8, patch=STRANGER + NOISY)
    assert drawn(first + start(tmp_path / "run", 2, [], patch=STRANGER + NOISY)) == whole
    assert len(whole) == 3 * 12 + 2 * 2 + 2  # six steps an epoch, two validations of two batches and a sanity check
    for (what, _), numbers in whole.items():
        assert len(numbers) == 8, what
        same = [a == b for a, b in zip(numbers[:4], numbers[4:], strict=True)]
        assert all(same) if what == "hook" else not any(same[:3]), (what, numbers)
    steps = [numbers[0] for (what, _), numbers in whole.items() if what == "step"]
    assert len(set(steps)) == len(steps)


def draws() -> list[float]:
    return [float(torch.rand(())), float(np.random.rand()), random.random()]


def test_what_is_drawn_apart_follows_from_its_key_and_leaves_no_trace() -> None:
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    plain: list[Any] = [draws(), draws()]
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    found: list[Any] = [draws()]
    apart = []
    for key in ((1, "a"), (1, "b"), (1, "a")):
        with randomness.drawn_apart(*key):
            apart.append(draws())
    with pytest.raises(KeyError), randomness.drawn_apart(2):
        raise KeyError
    assert [*found, draws()] == plain
    assert apart[0] == apart[2] and not set(apart[0]) & set(apart[1])
