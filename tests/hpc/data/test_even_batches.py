"""Check ranks with different numbers of batches: none waits for ever, and no sample counts twice or never."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import lightning as L
import pytest
import torch
from test_bad_input import STRANGER
from test_bad_input import words as stranger_words
from torchmetrics import MeanMetric

from hpc.data.without_trace import without_trace

# Replaces the shipped data: a training stream of 50 samples that ranks share out unequally, and evaluations with fewer
# batches on some ranks. Each rank notes the samples of its evaluation that it counts.
UNEVEN = """
import os, lightning as L, numpy as np, torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from my_research.data import digits

class Noted(Dataset):
    def __init__(self, num):
        self.num = num

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        return torch.full((1, 8, 8), float(index)), index % 10

class Stream(IterableDataset):
    def __iter__(self):
        yield from (Noted(50)[index] for index in range(50))

class Pairs(Sampler):
    def __iter__(self):
        yield from ([index, index + 1] for index in range(0, 10, 2))

    def __len__(self):
        return 5

class Uneven(L.LightningDataModule):
    def __init__(self, **options):
        super().__init__()

    def train_dataloader(self):
        return DataLoader(Stream(), batch_size=3)

    def val_dataloader(self):
        return DataLoader(Noted(10), batch_sampler=Pairs())  # 3 batches on one rank, 2 on the other

    def test_dataloader(self):
        return DataLoader(Stream(), batch_size=6)  # 25 samples on each rank: five batches

digits.Digits = Uneven
from collections import Counter
from my_research.module import Classifier

class Meter:
    __module__ = "my_research.meters"

    def __init__(self):
        self.total = 0

class Hooked(L.Callback):
    __module__ = "my_research.callbacks"
    num = 0

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        self.num += len(batch[0])

def setup(self, stage):
    if not hasattr(self, "seen"):
        self.seen, self.correct, self.by_name, self.meter, self.array = [], 0, Counter(), Meter(), np.zeros(1)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)
        self.nested = {"more": [torch.zeros(2)]}
        self.hooked = 0

def evaluate(self, stage, batch):
    num = len(batch[0])
    self.seen.append(batch[0])
    self.correct += num
    self.by_name["all"] += num
    self.meter.total += num
    self.array += num
    self.count += num
    self.nested["more"][0] += num
    for digit in batch[1].unique():  # other names on each rank
        of_digit = batch[0][batch[1] == digit]
        self.log(f"{stage}/class{int(digit)}", of_digit.mean(), sync_dist=True, batch_size=len(of_digit))
    loss = self.loss(self(batch[0]), batch[1])
    self._log_mean(f"{stage}/loss", self.means[f"{stage}_loss"], batch[0].mean(), torch.tensor(len(batch[0])))

def on_validation_end(self):
    print("SEEN", [int(x) for images in self.seen for x in images[:, 0, 0, 0]], flush=True)
    self.seen.clear()
    counted = self.correct, self.by_name["all"], self.meter.total, self.array[0], self.count, self.nested["more"][0][1]
    hooked = next(callback for callback in self.trainer.callbacks if type(callback).__name__ == "Hooked")
    print("COUNTED", [int(number) for number in (*counted, self.hooked, hooked.num)], flush=True)

def on_validation_batch_end(self, outputs, batch, batch_idx):
    self.hooked += len(batch[0])

Classifier._evaluate, Classifier.on_validation_end, Classifier.setup = evaluate, on_validation_end, setup
Classifier.on_validation_batch_end = on_validation_batch_end
Classifier.configure_callbacks = lambda self: [Hooked()]
"""
WORDS = ["trainer.accelerator=cpu", "trainer.devices=2", "trainer.precision=64-true", "trainer.max_epochs=1"]
WORDS += [
    "+trainer.num_sanity_val_steps=0",
    "data.stream_splits=nothing",
    "callbacks.progress=null",
    "callbacks.samples=null",
]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_with_fewer_batches_compute_along_and_count_nothing(
    strategy: str, start: Callable[..., str], tmp_path: Path
) -> None:
    output = start(tmp_path / "run", 2, [*WORDS, f"strategy={strategy}"], patch=UNEVEN)
    seen = [list(map(int, re.findall(r"\d+", line))) for line in output.splitlines() if line.startswith("SEEN")]
    assert sorted(map(len, seen)) == [4, 6] and Counter(seen[0] + seen[1]) == dict.fromkeys(range(10), 1)
    assert re.search(r"test/loss 24\.5000", output), output[-500:]  # the mean of 0 to 49
    counted = [list(map(int, re.findall(r"\d+", line))) for line in output.splitlines() if line.startswith("COUNTED")]
    assert sorted(counted) == [[4] * 8, [6] * 8]
    for digit in range(10):  # of the samples 3, 13, ... 43: names that one rank has logged, and the other has not
        assert re.search(rf"test/class{digit} {20 + digit}\.0000", output), output[-2000:]
    assert "5 batches of Pairs are shared out among 2 ranks in turns" in output


# Logs as Lightning's documentation does; no step changes the weights.
MEANS = """
from torchmetrics import MeanSquaredError

before = Line.__init__

def __init__(self, **options):
    before(self)
    self.errors = MeanSquaredError().set_dtype(torch.float64)  # torchmetrics does not follow the module's

def test_step(self, batch, batch_idx):
    outputs = self.layer(batch[0])
    self.errors(outputs, batch[1])
    self.log("error", self.errors)
    self.log("mean", outputs.square().mean(), sync_dist=True, batch_size=len(outputs))

Line.__init__, Line.test_step = __init__, test_step
Line.configure_optimizers = lambda self: torch.optim.SGD(self.parameters(), 0.0)
Data.test_dataloader = lambda self: DataLoader(Points(50), batch_size=SIZE)
"""
LAYOUTS = [
    (1, 7),
    (2, 8),
    (3, 8),
    (3, 50),
]  # ranks, batch size; one of three ranks has fewer batches of 8


@pytest.mark.slow
def test_means_of_samples_are_the_same_for_any_batch_size_and_number_of_ranks(
    start: Callable[..., str], tmp_path: Path
) -> None:
    metrics = []
    for num_ranks, size in [(1, 50), *LAYOUTS]:
        run_dir, patch = tmp_path / f"{num_ranks}-{size}", STRANGER + MEANS.replace("SIZE", str(size))
        words = [*stranger_words(min(num_ranks, 2)), f"trainer.devices={num_ranks}", "data.global_batch_size=48"]
        start(run_dir, num_ranks, [*words, "trainer.precision=64-true", "trainer.max_steps=1"], patch=patch)
        metrics.append(json.loads((run_dir / "attempts.jsonl").read_text().splitlines()[-1])["metrics"])
    assert set(metrics[0]) == {"error", "mean"}
    assert metrics[1:] == [pytest.approx(metrics[0], rel=0, abs=1e-9)] * len(LAYOUTS)


def test_a_step_without_a_trace() -> None:
    module = L.LightningModule()
    module.mean, module.outputs, module.norm = MeanMetric(), [], torch.nn.BatchNorm1d(2)
    module.number, module.of_class, module.matrix = 1, defaultdict(int), torch.eye(2)
    large = torch.zeros(1 << 19)  # 2 MiB
    module.gathered = [large]
    with without_trace(module):
        module.mean.update(torch.tensor(3.0))
        module.mean(torch.tensor(3.0))
        module.outputs.append(1)
        module.norm(torch.rand(3, 2))
        module.number += 1
        module.of_class["a"] += 1
        module.matrix[0] += 1
        module.new = 1
        module.gathered.append(torch.zeros(1))
    assert module.outputs == [] and not module.mean.update_called and not module.of_class and module.number == 1
    assert torch.equal(module.matrix, torch.eye(2)) and not hasattr(module, "new")
    assert torch.equal(module.norm.running_mean, torch.zeros(2)) and int(module.norm.num_batches_tracked) == 0
    assert len(module.gathered) == 1 and module.gathered[0] is large
    module.mean.update(torch.tensor(2.0))
    assert module.mean.compute() == 2.0
