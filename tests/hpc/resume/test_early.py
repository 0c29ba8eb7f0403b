"""Check that ranks whose steps slow down agree soon and at the same step, whatever the thread scheduling."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpc.resume.early_agreement import PATIENCE_TURNS, EarlyAgreement


class Store:
    """A stand-in for torch's store, in one process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def append(self, key: str, value: str) -> None:
        self.values[key] = self.values.get(key, b"") + value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
        return int(self.values[key])


class Ranks:
    """Main threads that make steps and threads that communicate, each only when told to.

    Args:
        lead: a rank starts no step as long as another is so many behind; None: they do not wait for each other.
        every: steps between planned agreements.
        stride: of the numbers of steps, as with two optimizers.
    """

    def __init__(self, num_ranks: int, lead: int | None, every: int, stride: int) -> None:
        self.store, self.lead, self.every, self.stride = Store(), lead, every, stride
        self.wants = [False] * num_ranks
        self.early = [
            EarlyAgreement(lambda rank=rank: self.wants[rank], rank=rank, num_ranks=num_ranks)
            for rank in range(num_ranks)
        ]
        self.at, self.next = [0] * num_ranks, 0
        self.waits = [False] * num_ranks  # whether a rank waits in an agreement
        self.agreed: list[int] = []

    def step(self, rank: int) -> None:
        if self.waits[rank]:
            return
        step = self.at[rank]
        here = step >= self.next or self.early[rank].reach_step(step)
        if here:
            self.waits[rank] = True
            if all(self.waits):
                self._agree()
        elif here is False and (self.lead is None or step - min(self.at) < self.lead * self.stride):
            self.at[rank] += self.stride

    def _agree(self) -> None:
        assert len(set(self.at)) == 1, f"ranks agree at different steps: {self.at}"
        self.agreed.append(self.at[0])
        self.next = self.at[0] + self.every * self.stride
        for rank, early in enumerate(self.early):
            early.conclude(self.at[rank])
            self.waits[rank] = False
            self.at[rank] += self.stride


@example(num_ranks=5, lead=7, stride=1, every=40, steps_per_turn=0.05, callers={0}, seed=8375)  # two have passed
@example(num_ranks=5, lead=7, stride=1, every=40, steps_per_turn=0.05, callers={0}, seed=4671)
@settings(max_examples=150, deadline=None)
@given(
    num_ranks=st.integers(2, 5),
    lead=st.sampled_from([1, 2, 7, None]),
    stride=st.integers(1, 2),
    every=st.sampled_from([3, 40, 10**6]),
    steps_per_turn=st.sampled_from([0.05, 1, 10]),
    callers=st.sets(st.integers(0, 4), min_size=1),
    seed=st.integers(0, 10**6),
)
def test_never_at_different_steps_and_always_soon(
    num_ranks: int, lead: int | None, stride: int, every: int, steps_per_turn: float, callers: set[int], seed: int
) -> None:
    chance, ranks = random.Random(seed), Ranks(num_ranks, lead, every, stride)

    def goes_on(turns: int) -> None:
        for _ in range(turns * num_ranks):
            ranks.early[chance.randrange(num_ranks)].exchange(ranks.store)
            whole, part = divmod(steps_per_turn, 1)
            for _ in range(int(whole) + (chance.random() < part)):
                ranks.step(chance.randrange(num_ranks))

    for _ in range(3):
        goes_on(chance.randrange(100))
        ranks.wants = [rank in callers for rank in range(num_ranks)]
        if not any(ranks.wants):
            ranks.wants[0] = True
        # All ranks may have to take some twenty steps, and at 0.05 steps a turn one takes twenty turns.
        before, limit = len(ranks.agreed), 200 if steps_per_turn >= 1 else 1000
        while len(ranks.agreed) == before and limit:
            goes_on(1)
            limit -= 1
        assert limit, "they have not agreed"
        ranks.wants = [False] * num_ranks
    if every == 10**6:
        assert len(ranks.agreed) <= 1 + 2 * 3, "nobody asks for what nobody wants"


def test_it_takes_a_few_turns_and_the_next_step() -> None:
    ranks = Ranks(3, 1, 10**6, 1)
    for _ in range(100):
        for rank in range(3):
            ranks.step(rank)
    ranks.wants[2] = True
    at, turns = max(ranks.at), 0
    while len(ranks.agreed) < 2:
        for rank in range(3):
            ranks.early[rank].exchange(ranks.store)
        turns += 1
        if turns % 2 == 0:
            for _ in range(3):
                for rank in range(3):
                    ranks.step(rank)
        assert turns < PATIENCE_TURNS + 8
    assert ranks.agreed[1] <= at + turns * 2 + 4


def test_one_rank_asks_nobody() -> None:
    wants = iter([False, True])
    early = EarlyAgreement(lambda: next(wants), rank=0, num_ranks=1)
    assert [early.wait_if_promised(1), early.wait_if_promised(2)] == [False, True]


SLOW = """
import os, signal, time
from hpc.resume import agreement as agree
from my_research.module import Classifier

agree.INTERVAL_SECONDS = 1000  # so that the next agreement is at step 585, as after steps that were fast
before = Classifier.training_step

def training_step(self, batch, batch_idx):
    if self.trainer.global_step >= 80:
        time.sleep(0.5)
    if self.trainer.global_step == 82 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGUSR2)
    return before(self, batch, batch_idx)

Classifier.training_step = training_step
"""


@pytest.mark.soak
def test_a_stop_is_obeyed_soon_after_steps_became_slow(start: Callable, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.precision=32-true"]
    words += ["callbacks.progress=null", "trainer.max_epochs=100", "trainer.max_steps=140"]
    words += ["+trainer.limit_val_batches=0", "+trainer.limit_test_batches=1", "checkpoint.monitor=null"]
    start(run_dir, 2, words, patch=SLOW, code=85)
    verdict = (run_dir / "verdict").read_text()
    step = int(verdict.split("step ")[1].split()[0])
    assert "why SIGUSR2" in verdict and 82 < step < 105
    assert (run_dir / "checkpoints" / "last.ckpt").resolve().name == f"step-{step:09}-001"
