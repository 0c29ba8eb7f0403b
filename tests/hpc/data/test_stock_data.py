"""Check that stock DataLoaders and DataModules shard samples over ranks, with metrics independent of the world size."""

import copy
import json
import random
from collections import Counter
from collections.abc import Callable
from itertools import chain, cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy
import pytest
import torch
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.trainer.states import RunningStage
from tiers import soak_all_but
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from hpc.config.errors import ConfigError
from hpc.data import loader_agreement, shared_loaders
from hpc.data.data_module import DataModule
from hpc.predict import rest_of_loader

TRAIN, VAL = RunningStage.TRAINING, RunningStage.VALIDATING
NUMBERS = list(range(50))

# Replaces the shipped DataModule in each rank, and records each sample that is read.
STOCK = """
import os, lightning as L, torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset
from my_research.data import digits, stdlib

class Noted(Dataset):
    def __init__(self, split, num):
        self.split, self.num = split, num

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        with open(f"FOLDER/{self.split}-{os.environ['PMI_RANK']}", "a") as stream:
            stream.write(f"{index}\\n")
        if STREAM is None:
            tokens = torch.arange(index, index + 9)
            return tokens[:-1], tokens[1:]
        return torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(index)), index % 10

class Stream(IterableDataset):
    def __iter__(self):
        yield from (Noted("train", 50)[index] for index in range(50))

class Stock(L.LightningDataModule):
    def __init__(self, **options):
        super().__init__()

    def train_dataloader(self):
        if STREAM:
            return DataLoader(Stream(), batch_size=8)
        return DataLoader(Noted("train", 50), batch_size=8, shuffle=True)

    def val_dataloader(self):
        loaders = [DataLoader(Noted("val", 21), batch_size=4), DataLoader(Noted("more", 16), batch_size=4)]
        return CombinedLoader(loaders, "sequential")

    def test_dataloader(self):
        return DataLoader(Noted("test", 37), batch_size=8)

digits.Digits = stdlib.StandardLibrary = Stock
from my_research.module import Classifier
Classifier.validation_step = lambda self, batch, batch_idx, dataloader_idx=0: self._evaluate("val", batch)
"""
# Records the samples of each training step, as more than these are prefetched before a run is stopped.
TRAINED = """
numbers = {float(Noted("none", 60)[index][0].sum()): index for index in range(60)}
before = Classifier.training_step

def training_step(self, batch, batch_idx):
    with open(f"FOLDER/trained-{os.environ['PMI_RANK']}", "a") as stream:
        stream.writelines(f"{numbers[float(image.float().sum())]}\\n" for image in batch[0])
    return before(self, batch, batch_idx)

Classifier.training_step = training_step
"""
WORDS = [
    "trainer.accelerator=cpu",
    "trainer.precision=64-true",
    "+trainer.num_sanity_val_steps=0",
    "+trainer.enable_progress_bar=false",
    "callbacks.progress=null",
    "callbacks.samples=null",
    "checkpoint.monitor=null",
]


def noted(folder: Path, split: str) -> list[list[int]]:
    """Return the samples that each rank read."""
    return [list(map(int, file.read_text().split())) for file in sorted(folder.glob(f"{split}-*"))]


def loaded(loader: Any, stage: RunningStage, num_ranks: int, epoch: int = 0) -> list[list[list[Any]]]:
    """Return the batches of each rank, as lists, without the sample that a rank computes along with."""
    per_rank = []
    for rank in range(num_ranks):
        torch.manual_seed(rank)  # ranks only share the seed of the run
        loader_of_rank, _ = shared_loaders.shard_dataloader(loader, stage, rank=rank, num_ranks=num_ranks)
        loader_of_rank.sampler.set_epoch(epoch)
        batches = list(loader_of_rank)
        assert len(batches) == len(loader_of_rank)
        per_rank.append([batch.tolist() for batch in batches])
        if not getattr(loader_of_rank.sampler, "share", lambda number: 1)(len(batches) - 1):
            per_rank[-1][-1] = []
    return per_rank


def everything(per_rank: list[list[list[Any]]]) -> list[Any]:
    assert len({len(batches) for batches in per_rank}) == 1, "a rank with fewer batches would be waited for"
    return list(chain.from_iterable(chain.from_iterable(per_rank)))


def stock(folder: Path, stream: bool | None = False) -> str:
    """Return code for data of tokens if `stream` is None, else of images: an iterable dataset if True."""
    return STOCK.replace("FOLDER", str(folder)).replace("STREAM", str(stream))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", soak_all_but(["ddp", "fsdp", "deepspeed_zero2"], "ddp"))
def test_ranks_of_a_run_get_different_samples(strategy: str, start: Callable[..., str], tmp_path: Path) -> None:
    words = [*WORDS, f"strategy={strategy}", "trainer.devices=2", "trainer.max_epochs=2"]
    words += ["trainer.precision=32-true"] if "deepspeed" in strategy else []
    output = start(tmp_path / "run", 2, words, patch=stock(tmp_path))
    train = noted(tmp_path, "train")
    assert Counter(chain(*train)) == dict.fromkeys(range(50), 2)  # two epochs
    epochs = [[samples[:25], samples[25:]] for samples in train]
    assert all(Counter(a + b) == Counter(range(50)) for a, b in zip(*epochs, strict=True))
    assert epochs[0][0] != epochs[0][1]
    for split, num in (("val", 21), ("more", 16)):
        assert Counter(chain(*noted(tmp_path, split))) == dict.fromkeys(range(num), 2)
    assert sorted(chain(*noted(tmp_path, "test"))) == list(range(37))
    assert output.count("50 samples are shared out among 2 ranks, 8 in a batch of each") == 1


@pytest.mark.slow
def test_a_run_resumes_at_its_place_and_with_more_samples_if_permitted(
    start: Callable[..., str], tmp_path: Path
) -> None:
    words = [*WORDS, "strategy=ddp", "trainer.devices=2", "trainer.max_epochs=2"]
    patch = stock(tmp_path) + TRAINED.replace("FOLDER", str(tmp_path))
    start(tmp_path / "run", 2, words, stop_at=2, patch=patch)
    start(tmp_path / "run", 2, [], stop_at=6, patch=patch)
    more = patch.replace('Noted("train", 50)', 'Noted("train", 60)')
    assert "train: samples 50 -> 60" in start(tmp_path / "run", 2, [], patch=more, code=2)
    start(tmp_path / "run", 2, ["resume_allow=[data]"], patch=more)
    trained = noted(tmp_path, "trained")
    assert sorted(chain(*(samples[:25] for samples in trained))) == list(range(50))
    assert [len(samples) for samples in trained] == [25 + 30, 25 + 30]
    assert len(set(chain(*(samples[41:] for samples in trained)))) == 28  # in the new order, after the resumed position


@pytest.mark.soak
@pytest.mark.slow
def test_a_run_that_moves_to_one_rank_gets_a_fix(start: Callable[..., str], tmp_path: Path) -> None:
    patch = stock(tmp_path).replace('Noted("train", 50)', 'Noted("train", 48)')
    start(tmp_path / "run", 2, [*WORDS, "strategy=ddp", "trainer.devices=2", "trainer.max_epochs=1"], patch=patch)
    words = ["strategy=single", "trainer.devices=1", "trainer.max_epochs=2"]
    output = start(tmp_path / "run", 1, words, patch=patch, code=2)
    assert "trainer.devices=1: A step must have as many samples as before: 16, not 8." in output
    fix = "trainer.accumulate_grad_batches=2"
    assert f"Try: {fix}\n" in output
    start(tmp_path / "run", 1, [*words, fix], patch=patch)


@pytest.mark.soak
@pytest.mark.slow
def test_ranks_of_a_tensor_parallel_run_get_the_same_samples(start: Callable[..., str], tmp_path: Path) -> None:
    words = ["model=gpt_tiny", "strategy=tensor_parallel", "trainer.devices=2", "trainer.max_epochs=2"]
    start(tmp_path / "run", 2, [*WORDS, *words], patch=stock(tmp_path, None))
    for split, num in (("train", 50), ("val", 21), ("test", 37)):
        first, second = noted(tmp_path, split)
        assert first == second and sorted(first[:num]) == list(range(num))


@pytest.mark.slow
def test_a_stream_is_shared_out_and_resumed_at_its_sample(start: Callable[..., str], tmp_path: Path) -> None:
    words = [*WORDS, "strategy=ddp", "trainer.devices=2", "trainer.max_epochs=2", "trainer.max_steps=7"]
    patch = stock(tmp_path, True) + TRAINED.replace("FOLDER", str(tmp_path))
    rejected = start(tmp_path / "rejected", 2, words, patch=patch, code=2)
    assert "data.stream_splits must say who splits the samples of Stream (train) among 2 ranks" in rejected
    assert "data.stream_splits=ranks if" in rejected and "Traceback" not in rejected and not noted(tmp_path, "trained")
    words += ["data.stream_splits=nothing"]
    output = start(tmp_path / "run", 2, words, stop_at=2, patch=patch)
    assert "the stream Stream: its samples are shared out in turns among 2 parts; it has no state_dict()" in output
    start(tmp_path / "run", 2, [], patch=patch)
    first, second = noted(tmp_path, "trained")
    assert sorted(first[:25] + second[:25]) == list(range(50)) and first[25:49] == first[:24]


# A sampler that draws from an unseeded generator.
UNSEEDED = """
import numpy
from torch.utils.data import Sampler

class Unseeded(Sampler):
    def __init__(self, num):
        self.num = num

    def __len__(self):
        return self.num

    def __iter__(self):
        return iter(numpy.random.default_rng().permutation(self.num).tolist())

Stock.SPLIT_dataloader = lambda self: DataLoader(Noted("SPLIT", 20), batch_size=4, sampler=Unseeded(20))
"""


# Each rank orders the next epoch by the losses of the samples that it has seen.
OWN_WEIGHTS = """
class Hardest(Sampler):
    def __init__(self):
        self.losses = torch.zeros(20)

    def __len__(self):
        return 20

    def __iter__(self):
        return iter(torch.argsort(-self.losses, stable=True).tolist())

hardest, noting = Hardest(), Classifier.training_step

def training_step(self, batch, batch_idx):
    hardest.losses[[numbers[float(image.float().sum())] for image in batch[0]]] += 1 + self.global_rank
    return noting(self, batch, batch_idx)

Classifier.training_step = training_step
Stock.train_dataloader = lambda self: DataLoader(Noted("train", 20), batch_size=4, sampler=hardest)
"""


@pytest.mark.slow
def test_ranks_whose_orders_differ_in_a_later_epoch_stop_there(start: Callable[..., str], tmp_path: Path) -> None:
    patch = stock(tmp_path) + UNSEEDED + TRAINED.replace("FOLDER", str(tmp_path)) + OWN_WEIGHTS
    words = [*WORDS, "trainer.max_epochs=2", "strategy=ddp", "trainer.devices=2"]
    output = start(tmp_path / "run", 2, words, patch=patch, code=2)
    assert "Hardest must give all ranks the same order of samples" in output
    assert sorted(chain(*noted(tmp_path, "trained"))) == list(range(20)), "the first epoch was right"


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "val"])
def test_ranks_that_draw_different_orders_do_not_train(split: str, start: Callable[..., str], tmp_path: Path) -> None:
    patch = stock(tmp_path) + UNSEEDED.replace("SPLIT", split) + TRAINED.replace("FOLDER", str(tmp_path))
    words = [word for word in WORDS if "sanity" not in word]  # keeps the sanity check
    output = start(tmp_path / "run", 2, [*words, "strategy=ddp", "trainer.devices=2"], patch=patch, code=2)
    assert "Unseeded must give all ranks the same order of samples" in output and "Traceback" not in output
    assert not noted(tmp_path, "trained")


@pytest.mark.slow
def test_a_rank_without_a_sample_computes_along(start: Callable[..., str], tmp_path: Path) -> None:
    patch = stock(tmp_path).replace('Noted("test", 37)', 'Noted("test", 1)')
    words = [*WORDS, "strategy=fsdp", "trainer.max_steps=1", "+trainer.limit_val_batches=0"]
    # One optimizer step with the same 16 samples: their order is the same on any number of ranks.
    layouts = {1: ["trainer.devices=1", "trainer.accumulate_grad_batches=2"], 2: ["trainer.devices=2"]}
    metrics = []
    for ranks, layout in layouts.items():
        start(tmp_path / str(ranks), ranks, [*words, *layout], patch=patch)
        metrics.append(json.loads((tmp_path / str(ranks) / "attempts.jsonl").read_text().splitlines()[-1])["metrics"])
    assert metrics[1] == pytest.approx(metrics[0], abs=1e-9)


@pytest.mark.slow
def test_a_loader_of_an_evaluation_must_be_for_this_rank_before_training(
    start: Callable[..., str], tmp_path: Path
) -> None:
    foreign = 'DataLoader(Noted("test", 37), sampler=torch.utils.data.DistributedSampler(range(37), 3, 2))'
    patch = stock(tmp_path).replace('DataLoader(Noted("test", 37), batch_size=8)', foreign)
    output = start(tmp_path / "run", 2, [*WORDS, "strategy=ddp", "trainer.devices=2"], patch=patch, code=2)
    assert "DataLoader over Noted (test)" in output and "DistributedSampler is for rank 2 of 3" in output
    assert not noted(tmp_path, "train")


# A metric logged as in Lightning's documentation: a mean over each batch, of batches that differ in size.
LOGS = """
from my_research.module import Classifier

before = Classifier.test_step

def test_step(self, batch, batch_idx):
    before(self, batch, batch_idx)
    self.log("test/mean", self(batch[0]).square().mean(), on_epoch=True, sync_dist=True)

Classifier.test_step = test_step
"""


def metrics_of(start: Callable[..., str], run_dir: Path, ranks: int, *words: str) -> dict[str, float]:
    common = ["+trainer.limit_val_batches=0", "trainer.max_steps=1", f"trainer.devices={ranks}"]
    start(run_dir, ranks, [*WORDS, *common, *words], patch=LOGS)
    return json.loads((run_dir / "attempts.jsonl").read_text().splitlines()[-1])["metrics"]


@pytest.mark.soak
def test_metrics_are_the_same_in_every_layout(start: Callable[..., str], tmp_path: Path) -> None:
    one = metrics_of(start, tmp_path / "one", 1)
    assert len(one) == 3
    for ranks, strategy in ((2, "ddp"), (4, "ddp"), (2, "fsdp")):
        metrics = metrics_of(start, tmp_path / f"{strategy}-{ranks}", ranks, f"strategy={strategy}")
        assert metrics == pytest.approx(one, rel=0, abs=1e-9)
    words = ["strategy=deepspeed_zero3", "trainer.precision=32-true", "model.network.widths=[8,8,16]"]
    alone, shared = (metrics_of(start, tmp_path / f"zero-{ranks}", ranks, *words) for ranks in (1, 2))
    assert shared == pytest.approx(alone, rel=0, abs=1e-5)


def plain(**options: Any) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(50)), collate_fn=collate, **options)


class Counting(L.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.files, self.sizes = 0, iter([8, 9]), [3, 4]

    def test_dataloader(self) -> DataLoader:
        self.calls += 1
        return plain(batch_size=next(self.files) + self.sizes.pop())


def test_a_test_that_is_checked_before_training_is_made_once_and_leaves_no_trace() -> None:
    data = Counting()
    fit_loop = SimpleNamespace(_combined_loader=None)
    trainer: Any = SimpleNamespace(fit_loop=fit_loop, datamodule=data, callbacks=[], optimizers=[])
    trainer.lr_scheduler_configs, trainer.lightning_module = [], L.LightningModule()
    trainer.strategy = SimpleNamespace(root_device="cpu")
    strategy = shared_loaders.ShardsDataLoaders()
    strategy._check_test_loaders(trainer)
    assert (data.calls, next(data.files), data.sizes) == (0, 8, [3, 4]) and strategy._has_checked_test_loaders


def collate(samples: list[Any]) -> torch.Tensor:
    return torch.stack([sample for (sample,) in samples])


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("workers", [0, 2])
def test_each_sample_once_in_an_order_that_follows_from_seed_and_epoch(num_ranks: int, workers: int) -> None:
    loader = plain(batch_size=8, shuffle=True, num_workers=workers)
    first, again, next_epoch = (loaded(loader, TRAIN, num_ranks, epoch) for epoch in (0, 0, 1))
    assert sorted(everything(first)) == sorted(everything(next_epoch)) == NUMBERS
    assert first == again != next_epoch
    assert max(len(batch) for batches in first for batch in batches) == 8
    assert everything(loaded(plain(batch_size=8), VAL, num_ranks)) != NUMBERS  # each rank reads a part
    assert sorted(everything(loaded(plain(batch_size=8), VAL, num_ranks))) == NUMBERS


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_batch_sampler_without_a_rank_is_shared_out_with_its_order_and_its_batches(drop_last: bool) -> None:
    generator = torch.Generator()
    given = BatchSampler(RandomSampler(NUMBERS, generator=generator), 8, drop_last)
    drawn = []
    for loader in (plain(batch_sampler=given), plain(batch_size=8, sampler=given.sampler, drop_last=drop_last)):
        generator.manual_seed(1)
        drawn.append(loaded(loader, TRAIN, 2))
    assert drawn[0] == drawn[1] and everything(drawn[0])[:8] != NUMBERS[:8]


def test_an_incomplete_batch_is_left_out_where_the_loader_says_so() -> None:
    assert len(set(everything(loaded(plain(batch_size=8, shuffle=True, drop_last=True), TRAIN, 2)))) == 48
    assert sorted(everything(loaded(plain(batch_size=9, drop_last=True), VAL, 2))) == list(range(45))  # as one process


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_researchers_sampler_is_shared_out(num_ranks: int) -> None:
    weights = WeightedRandomSampler([1.0] * 25 + [0.0] * 25, num_samples=40)
    drawn = [everything(loaded(plain(batch_size=4, sampler=weights), TRAIN, num_ranks)) for _ in range(2)]
    assert len(drawn[0]) == 40 and max(drawn[0]) < 25
    assert sorted(drawn[0]) == sorted(drawn[1])
    one = everything(loaded(plain(batch_size=4, sampler=weights), TRAIN, 1))
    assert sorted(drawn[0]) == sorted(one)
    subset = SubsetRandomSampler(range(10, 30))
    assert sorted(everything(loaded(plain(batch_size=4, sampler=subset), TRAIN, num_ranks))) == list(range(10, 30))


def test_a_module_reaches_its_sampler_through_the_loader() -> None:
    weights = WeightedRandomSampler([1.0] * 50, num_samples=40)
    loader, _ = shared_loaders.shard_dataloader(plain(batch_size=4, sampler=weights), TRAIN, rank=0, num_ranks=1)
    chosen: Any = loader.sampler
    assert chosen.num_samples == 40 and not hasattr(chosen, "unknown")
    chosen.weights = torch.tensor([0.0] * 49 + [1.0])
    assert {number for batch in loader for number in batch.tolist()} == {49}
    chosen.seed = 7  # its own
    assert not hasattr(weights, "seed") and copy.deepcopy(chosen).num_samples == 40


def distributed(rank: int, num_ranks: int, **options: Any) -> DataLoader:
    sampler = DistributedSampler(range(50), num_replicas=num_ranks, rank=rank, **options)  # type: ignore[arg-type]
    return plain(batch_size=8, sampler=sampler)


def test_a_researchers_distributed_sampler_must_be_for_this_rank() -> None:
    loader = distributed(1, 3)
    kept, note = shared_loaders.shard_dataloader(loader, TRAIN, rank=1, num_ranks=3)
    assert [batch.tolist() for batch in kept] == [batch.tolist() for batch in loader] and not note
    with pytest.raises(ConfigError, match=r"must be for rank 0 of 2 .*is for rank 1 of 3"):
        shared_loaders.shard_dataloader(
            loader, TRAIN, rank=0, num_ranks=2
        )  # ranks of a tensor-parallel group would get different ones
    batches = DataLoader(range(50), batch_sampler=BatchSampler(loader.sampler, 8, False))  # type: ignore[arg-type]
    kept, _ = shared_loaders.shard_dataloader(batches, TRAIN, rank=1, num_ranks=3)
    assert [batch.tolist() for batch in kept] == [batch.tolist() for batch in batches]


def test_a_distributed_sampler_does_not_repeat_samples_of_an_evaluation() -> None:
    parts = [
        shared_loaders.shard_dataloader(distributed(r, 3, shuffle=False), VAL, rank=r, num_ranks=3)[0] for r in range(3)
    ]
    assert sorted(chain(*(batch.tolist() for part in parts for batch in part))) == NUMBERS

    class Other(DistributedSampler):
        pass

    other = plain(batch_size=8, sampler=Other(range(50), num_replicas=3, rank=0))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"must count each of the 50 samples once; Other gives 3 \* 17"):
        shared_loaders.shard_dataloader(other, VAL, rank=0, num_ranks=3)


class Buckets(Sampler[list[int]]):
    def __iter__(self) -> Any:
        return iter([[1, 2], [3, 4]])

    def __len__(self) -> int:
        return 2


class Few(Buckets):
    def __len__(self) -> int:
        return 1


class Shuffling(Sampler[list[int]]):
    """Nine pairs of neighbours, in random order."""

    def __iter__(self) -> Any:
        return iter([[2 * number, 2 * number + 1] for number in torch.randperm(9).tolist()])

    def __len__(self) -> int:
        return 9


class Endless(Sampler[int]):
    """0 to 8, again and again."""

    def __iter__(self) -> Any:
        return cycle(range(9))


@pytest.mark.parametrize(
    ("loader", "stage", "words"),
    [
        (iter([1]), TRAIN, "must be iterable, once for each epoch"),
        (DataLoader(range(1)), TRAIN, "Each of the 2 ranks must get a batch; the number of samples is 1"),  # type: ignore[arg-type]
        (DataLoader(range(9), batch_size=8, drop_last=True), TRAIN, "must get a batch; the number of samples is 9"),  # type: ignore[arg-type]
        (DataLoader(range(9), batch_sampler=Few()), TRAIN, "must get a batch; the number of samples is 9"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_a_loader_that_cannot_be_shared_out_is_rejected(loader: Any, stage: RunningStage, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        shared_loaders.shard_dataloader(loader, stage, rank=0, num_ranks=2)


@pytest.mark.parametrize("loader", [DataLoader(range(9), batch_sampler=Buckets()), plain(batch_size=3), [[1], [2]]])  # type: ignore[arg-type]
def test_one_process_evaluates_the_batches_of_the_researchers_loader(loader: Any) -> None:
    shared, note = shared_loaders.shard_dataloader(loader, VAL, rank=0, num_ranks=1, is_single_process=True)
    assert list(map(torch.as_tensor, shared)) and not note and len(shared) == len(loader)
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(shared, loader, strict=True))


def test_the_order_of_one_process_is_that_of_several() -> None:
    alone, _ = shared_loaders.shard_dataloader(
        plain(batch_size=8, shuffle=True), TRAIN, rank=0, num_ranks=1, is_single_process=True
    )
    alone.sampler.set_epoch(3)
    pairs = zip(*loaded(plain(batch_size=4, shuffle=True), TRAIN, 2, epoch=3), strict=True)
    assert [batch.tolist() for batch in alone] == [first + second for first, second in pairs]


class Augmenting(Dataset):
    """Samples with random numbers of three libraries."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.tensor([float(torch.rand(())), numpy.random.rand(), random.random()])


class AugmentingMany(Augmenting):
    """The same, fetched many at once by torch's protocol."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("workers", [0, 2])
def test_random_numbers_of_a_sample_follow_from_seed_epoch_and_place(workers: int) -> None:
    def samples(num_ranks: int, epoch: int, dataset: Any = None) -> dict[int, list[float]]:
        found = {}
        for rank in range(num_ranks):
            loader, _ = shared_loaders.shard_dataloader(
                DataLoader(dataset or Augmenting(), batch_size=4, shuffle=True, num_workers=workers),
                TRAIN, rank=rank, num_ranks=num_ranks,
            )  # fmt: skip
            loader.sampler.set_epoch(epoch)
            found |= {int(sample[0]): sample.tolist() for batch in loader for sample in batch}
        return found

    one = samples(1, epoch=1)
    assert len(one) == 30 and one == samples(1, epoch=1) == samples(3, epoch=1) != samples(1, epoch=2)
    assert samples(2, 1, AugmentingMany()) == samples(2, 1, AugmentingMany())


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_sample_that_comes_twice_draws_other_random_numbers(num_ranks: int) -> None:
    weights = WeightedRandomSampler([1.0, 0.0], num_samples=12)
    batches = loaded(DataLoader(Augmenting(), batch_size=3, sampler=weights), TRAIN, num_ranks)
    draws = [tuple(sample) for sample in everything(batches)]
    assert len(set(draws)) == 12 and sorted(draws) == sorted(
        tuple(sample) for sample in everything(loaded(DataLoader(Augmenting(), 3, sampler=weights), TRAIN, 1))
    )


def test_the_dataset_of_a_rebuilt_loader_stays() -> None:
    given = DataLoader(Augmenting(), batch_size=4, num_workers=2, persistent_workers=True)
    loader, _ = shared_loaders.shard_dataloader(given, TRAIN, rank=0, num_ranks=2)
    assert loader.dataset is given.dataset and loader.persistent_workers and loader.collate_fn is given.collate_fn
    assert isinstance(given.batch_sampler, BatchSampler), "the researcher's own loader is not changed"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_batches_of_a_batch_sampler_are_taken_in_turns(num_ranks: int) -> None:
    loader = DataLoader(range(40), batch_sampler=Shuffling())  # type: ignore[arg-type]
    batches = loaded(loader, TRAIN, num_ranks)
    pairs = sorted(tuple(batch) for rank_batches in batches for batch in rank_batches)
    assert len(pairs) == 9 // num_ranks * num_ranks and all(second == first + 1 for first, second in pairs)
    assert len(set(pairs)) == len(pairs) and batches == loaded(loader, TRAIN, num_ranks)
    assert batches != loaded(loader, TRAIN, num_ranks, epoch=1)


def test_a_sampler_without_an_end_is_a_stream_of_batches() -> None:
    endless: Any = DataLoader(range(9), sampler=Endless(), batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"data.stream_splits must say who splits the samples of DataLoader"):
        shared_loaders.shard_dataloader(endless, TRAIN, rank=1, num_ranks=2)
    loader, note = shared_loaders.shard_dataloader(endless, TRAIN, rank=1, num_ranks=2, stream_splits="nothing")
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(3)] == [[2, 3], [6, 7], [1, 2]]
    assert "the stream DataLoader: its samples are shared out in turns among 2 parts" in note


def test_a_loader_of_unknown_length_on_one_rank_is_named_with_its_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_agreement, "extremes", lambda number, group: (-1, number))  # without another rank
    words = r"\(test\).* it has an unknown number on one and 3 on another"
    with pytest.raises(ConfigError, match=words):
        loader_agreement.reject_differing_orders(DataLoader([1, 2, 3]), "a group", split="test")  # type: ignore[arg-type]


def test_samples_that_are_batches_are_taken_in_turns() -> None:
    loader = DataLoader([torch.tensor([number]) for number in range(5)], batch_size=None)  # type: ignore[arg-type]
    assert everything(loaded(loader, TRAIN, 2)) == [0, 2, 1, 3]


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("loader", [DataLoader([]), plain(batch_size=64, drop_last=True)])  # type: ignore[arg-type]
def test_a_loader_without_a_batch_to_train_on_is_rejected(loader: DataLoader, alone: bool) -> None:
    with pytest.raises(ConfigError, match=r"must (have|get) a batch"):
        shared_loaders.shard_dataloader(loader, TRAIN, rank=0, num_ranks=1 if alone else 2, is_single_process=alone)
    if alone:
        evaluated, _ = shared_loaders.shard_dataloader(loader, VAL, rank=0, num_ranks=1, is_single_process=True)
        assert list(evaluated) == []


def test_ranks_of_a_tensor_parallel_group_get_the_same_samples() -> None:
    group = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 1, "rank": 0})
    place = shared_loaders.data_rank_and_size(group)
    assert place == {"rank": 0, "num_ranks": 1}
    per_seed = []
    for seed in (1, 2):  # two ranks with different states of their generators
        torch.manual_seed(seed)
        loader, _ = shared_loaders.shard_dataloader(plain(batch_size=8, shuffle=True), TRAIN, **place)
        per_seed.append([batch.tolist() for batch in loader])  # type: ignore[attr-defined]
    assert per_seed[0] == per_seed[1] and sorted(chain(*per_seed[0])) == NUMBERS


def test_loaders_of_this_project_are_never_changed() -> None:
    data = Regression(global_batch_size=8)
    for loader, stage in ((data.train_dataloader(), TRAIN), (data.val_dataloader(), VAL)):
        assert shared_loaders.shard_dataloader(loader, stage, rank=0, num_ranks=2) == (loader, "")
        assert isinstance(loader.sampler, DistributedSampler)  # trainer.use_distributed_sampler=true leaves it alone


class Regression(DataModule):
    """Data with numbers as targets, none of which stands for padding."""

    def dataset(self, split: str) -> TensorDataset:
        targets = torch.linspace(-300, 500, 37, dtype=torch.float64)
        return TensorDataset(torch.zeros(37, 2, dtype=torch.float64), targets)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_metric_of_numbers_is_the_same_for_any_number_of_ranks(num_ranks: int) -> None:
    total, count, batches = 0.0, 0, []
    for rank in range(num_ranks):
        data = Regression(global_batch_size=8)
        data._data_rank = lambda rank=rank: {"rank": rank, "num_ranks": num_ranks}  # type: ignore[method-assign]
        loader = data.val_dataloader()
        batches.append(len(loader))
        for batch in loader:
            inputs, targets = data.on_after_batch_transfer(batch, 0)
            total += float((targets - inputs.sum(1)).square().sum())
            count += len(targets)
    expected = Regression(global_batch_size=8).dataset("val").tensors[1].square().mean()
    assert total / count == pytest.approx(float(expected), rel=1e-12)
    assert len(set(batches)) == 1


def test_fewer_samples_than_ranks_are_rejected_before_training() -> None:
    data = Regression(global_batch_size=37)
    data._data_rank = lambda: {"rank": 0, "num_ranks": 37}  # type: ignore[method-assign]
    data.train_dataloader()
    data._data_rank = lambda: {"rank": 0, "num_ranks": 38}  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="must have a sample of each split for each of the 38 ranks; val has 37"):
        data.train_dataloader()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_prediction_knows_the_samples_of_each_batch(num_ranks: int) -> None:
    seen = []
    for rank in range(num_ranks):
        loader: Any = DataLoader(NUMBERS, batch_size=8)  # type: ignore[arg-type]
        loader.__dict__["batch_sampler"] = _IndexBatchSamplerWrapper(loader.batch_sampler)  # as Lightning does
        shared: Any = shared_loaders.shard_dataloader(
            loader, RunningStage.PREDICTING, rank=rank, num_ranks=num_ranks, is_single_process=num_ranks == 1
        )[0]
        for number, batch in enumerate(shared):
            assert rest_of_loader.sample_indices(shared, number) == batch.tolist()
            seen += batch.tolist()
    assert sorted(seen) == NUMBERS
    assert rest_of_loader.sample_indices([torch.zeros(3)], 0) is None  # not a DataLoader
