"""Check that streams are shared out among ranks and workers without a repeated sample, and resumed at the sample."""

import logging
import os
import random
import sys
import types
from collections import Counter
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hpc.config.errors import ConfigError
from hpc.data import loader_agreement
from hpc.data.stream_loader import StreamLoader, stream_of


class Ignorant(IterableDataset):
    """A stream that knows nothing of ranks or workers, and shuffles with the global generators."""

    def __iter__(self) -> Iterator[int]:
        numbers = list(range(40))
        random.shuffle(numbers)
        for number in numbers:
            yield number + float(torch.rand(())) / 2


class Splitting(IterableDataset):
    """A stream that splits its shards among workers, as torch's documentation shows it."""

    def __iter__(self) -> Iterator[float]:
        info = get_worker_info()
        shards = list(range(8))
        for shard in shards[info.id :: info.num_workers] if info else shards:
            yield from (float(shard * 5 + number) for number in range(5))


class Stateful(Ignorant):
    """A stream with a state of its own, which counts how often it reads."""

    reads = 0

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[float]:
        start, self.position = self.position, 0
        for number in range(start, 40):
            Stateful.reads += 1
            self.position = number + 1
            yield float(number)
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def rank_loader(
    loader: Any, rank: int = 0, num_ranks: int = 1, epoch: int = 0, splits: str | None = "nothing", split: str = "train"
) -> StreamLoader:
    shared = StreamLoader(loader, rank=rank, num_ranks=num_ranks, seed=1, split=split, splits=splits)
    shared.set_epoch(epoch)
    return shared


def samples(batches: Any) -> list[float]:
    return list(chain.from_iterable(batch.tolist() for batch in batches))


class GivenNumbers(IterableDataset):
    """A stream that splits its samples by the numbers that it is given, and among workers as the documentation says."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.place = rank, num_ranks

    def __iter__(self) -> Iterator[float]:
        info, (rank, size) = get_worker_info(), self.place
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        yield from (float(number) for number in range(rank * workers + worker, 40, size * workers))


class ByEnvironment(GivenNumbers):
    """A stream that splits its samples by the launcher's variables."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        pass

    @property
    def place(self) -> tuple[int, int]:  # type: ignore[override]
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class ByHelper(ByEnvironment):
    """A stream that splits its samples by a function of another module."""

    @property
    def place(self) -> tuple[int, int]:  # type: ignore[override]
        helpers: Any = sys.modules["helpers_of_somebody"]
        return helpers.my_place()


class Logging(Ignorant):
    """A stream that reads its rank and its worker, and splits nothing by them."""

    def __iter__(self) -> Iterator[float]:
        logging.getLogger("stream").debug("rank %s, worker %s", os.environ.get("RANK"), get_worker_info())
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        logging.getLogger("stream").debug("%s of %s", rank, size)
        yield from super().__iter__()


@pytest.fixture
def helper() -> Iterator[None]:
    module = types.ModuleType("helpers_of_somebody")
    module.my_place = lambda: (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    yield
    del sys.modules[module.__name__]


KINDS = [(Ignorant, "nothing"), (Logging, "nothing"), (Splitting, "nothing"), (Splitting, "workers")]
KINDS += [(GivenNumbers, "ranks"), (ByEnvironment, "ranks"), (ByHelper, "ranks")]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(("kind", "splits"), KINDS)
def test_all_ranks_together_have_each_sample_once(
    kind: type, splits: str, num_ranks: int, num_workers: int, helper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
    parts = []
    for rank in range(num_ranks):
        monkeypatch.setenv("RANK", str(rank))
        stream = kind(rank, num_ranks) if issubclass(kind, GivenNumbers) else kind()
        shared = rank_loader(DataLoader(stream, batch_size=4, num_workers=num_workers), rank, num_ranks, splits=splits)
        parts.append(samples(shared))
        shared.reject_unasked()
    assert Counter(map(int, chain(*parts))) == dict.fromkeys(range(40), 1)
    assert all(len(part) >= 40 // num_ranks - 7 for part in parts)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_worker_init_fn_splits_the_stream_as_the_documentation_shows(num_workers: int) -> None:
    class Range(IterableDataset):
        start, end = 0, 40

        def __iter__(self) -> Iterator[float]:
            yield from map(float, range(self.start, self.end))

    def split(worker_id: int) -> None:
        info: Any = get_worker_info()
        size = -(-40 // info.num_workers)
        info.dataset.start, info.dataset.end = worker_id * size, min(40, (worker_id + 1) * size)
        assert worker_id == info.id

    def parts(num_ranks: int, splits: str | None) -> list[list[float]]:
        loader = DataLoader(Range(), batch_size=4, num_workers=num_workers, worker_init_fn=split)
        return [samples(rank_loader(loader, rank, num_ranks, splits=splits)) for rank in range(num_ranks)]

    assert sorted(chain(*parts(1, None))) == list(range(40))
    assert sorted(chain(*parts(2, "nothing"))) == list(range(40))
    if num_workers:
        assert sorted(chain(*parts(2, "workers"))) == list(range(40))


def test_several_ranks_need_a_word_for_who_splits() -> None:
    loader = DataLoader(Ignorant(), batch_size=4)
    with pytest.raises(
        ConfigError, match=r"must say who splits the samples of Ignorant \(train\) among 2 ranks"
    ) as told:
        rank_loader(loader, 0, 2, splits=None)
    assert all(f"{word} if" in str(told.value) for word in ("ranks", "workers", "nothing"))
    own = DataLoader(Splitting(), batch_size=4)
    own.dataset.stream_splits = "workers"  # type: ignore[attr-defined]
    assert rank_loader(own, 0, 2, splits=None).splits == "workers"
    assert samples(rank_loader(loader, splits=None)) == samples(rank_loader(loader, splits="nothing"))


def test_one_rank_reads_a_stream_as_torch_does(capfd: pytest.CaptureFixture) -> None:
    """Of a stream that does not split itself among workers, each gives all samples: torch does so, here it is told."""
    shared = rank_loader(DataLoader(Ignorant(), batch_size=4, num_workers=2), splits=None)
    assert Counter(map(int, samples(shared))) == dict.fromkeys(range(40), 2)
    for _ in range(2):
        shared.reject_unasked()
    warning = "warning: Ignorant (train) has not called torch.utils.data.get_worker_info"
    assert capfd.readouterr().out.count(warning) == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_that_asks_for_no_worker_does_not_split_by_them(num_workers: int) -> None:
    shared = rank_loader(DataLoader(Ignorant(), batch_size=4, num_workers=num_workers), 0, 2, splits="workers")
    next(iter(shared))
    with pytest.raises(ConfigError, match=r"cannot be workers, as Ignorant .* has not called"):
        shared.reject_unasked()


@pytest.mark.parametrize(
    ("splits", "splits_itself", "words"),
    [
        ("ranks", True, ""),
        ("nothing", False, ""),
        ("nothing", True, "must not be nothing: GivenNumbers (train) gives ranks different samples"),
        ("ranks", False, "warning: all ranks got the same first sample of GivenNumbers (train)"),
    ],
)
def test_a_wrong_word_is_told_at_the_first_batch(
    splits: str, splits_itself: bool, words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    streams = [GivenNumbers(rank, 2) if splits_itself else GivenNumbers(0, 1) for rank in range(2)]
    loaders = [rank_loader(DataLoader(stream), rank, 2, splits=splits) for rank, stream in enumerate(streams)]
    firsts = [loader.first_checksum() for loader in loaders if next(iter(loader)) is not None]
    monkeypatch.setattr(loader_agreement, "extremes", lambda number, group: (min(firsts), max(firsts)))
    errors = []
    for loader in loaders * 2:
        try:
            loader_agreement.reject_differing_orders([loader], "a group", split="train")
        except ConfigError as error:
            errors.append(str(error))
    said = capfd.readouterr().out
    assert len(errors) == (4 if words.startswith("must") else 0) and all(words in error for error in errors)
    assert said.count("warning:") == said.count(words) == 1 if words.startswith("warning") else not said


def test_the_order_follows_from_the_epoch_and_leaves_other_random_numbers_alone() -> None:
    loader = DataLoader(Ignorant(), batch_size=4)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = samples(rank_loader(loader))
    assert torch.equal(torch.rand(3), expected)
    assert samples(rank_loader(loader)) == first and samples(rank_loader(loader, epoch=1)) != first


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("kind", "splits"), [(Ignorant, "nothing"), (Splitting, "workers"), (Stateful, "nothing")])
def test_a_pass_is_resumed_at_the_very_sample(
    kind: type, splits: str, num_workers: int, capfd: pytest.CaptureFixture
) -> None:
    def make() -> StreamLoader:
        return rank_loader(DataLoader(kind(), batch_size=3, num_workers=num_workers), 1, 2, epoch=2, splits=splits)

    whole = [batch.tolist() for batch in make()]
    stopped = make()
    batches = iter(stopped)
    for _ in range(5):
        next(batches)
    place = stopped.place_after(3)  # two batches were fetched ahead
    Stateful.reads = 0
    resumed = make()
    resumed.resume_at(place)
    assert [batch.tolist() for batch in resumed] == whole[3:]
    assert Stateful.reads < 40  # a stream with a state is not read again
    assert resumed.num_yielded == len(whole)
    assert [batch.tolist() for batch in resumed] == whole, "the next pass is whole again"
    assert "gives other samples" not in capfd.readouterr().out


class Unrepeatable(IterableDataset):
    """A stream that no seed determines: it never gives a sample twice."""

    numbers = count()

    def __iter__(self) -> Iterator[float]:
        yield from map(float, self.numbers)


def test_a_stream_that_cannot_be_repeated_is_named(capfd: pytest.CaptureFixture) -> None:
    stopped = rank_loader(DataLoader(Unrepeatable(), batch_size=3))
    batches = iter(stopped)
    next(batches), next(batches)
    resumed = rank_loader(DataLoader(Unrepeatable(), batch_size=3))
    resumed.resume_at(stopped.place_after(2))
    next(iter(resumed))
    assert "goes on with other samples if they follow from more than a seed" in stopped.note, "before it is saved"
    assert "warning: Unrepeatable gives other samples when it is read again" in capfd.readouterr().out


def test_an_iterable_of_batches_is_a_stream_of_them() -> None:
    batches = [torch.tensor([float(number)]) for number in range(7)]
    assert samples(rank_loader(batches, 0, 2)) == [0, 2, 4, 6] and samples(rank_loader(batches, 1, 2)) == [1, 3, 5]
    assert len(rank_loader(batches, 0, 2)) == 4 and len(rank_loader(batches, 1, 2)) == 3


class Sized(Ignorant):
    def __len__(self) -> int:
        return 40


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_length_is_that_of_the_batches(num_ranks: int, num_workers: int, drop_last: bool) -> None:
    for rank in range(num_ranks):
        loader = DataLoader(Sized(), batch_size=6, num_workers=num_workers, drop_last=drop_last)
        shared = rank_loader(loader, rank, num_ranks, split="val")
        assert len(shared) == len(list(shared))


def test_a_stream_without_a_length_has_none() -> None:
    with pytest.raises(TypeError):
        len(rank_loader(DataLoader(Ignorant(), batch_size=4)))
    loader = DataLoader(Sized(), batch_size=4)
    with pytest.raises(TypeError):  # a rank may have any number of the 40 samples, and none may be left out
        len(rank_loader(loader, 0, 2, splits="workers", split="val"))
    assert (
        len(rank_loader(loader, 0, 2, splits="workers")) == 5 and len(rank_loader(loader, 0, 2, splits="ranks")) == 10
    )


class Doubling(DataLoader):
    """A loader with an `__iter__` of its own."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch * 2


class StatefulLoader(Doubling):
    """A loader with an `__iter__` and a protocol of its own for a resume, as those of litdata and MosaicML."""

    num = 0

    def __iter__(self) -> Any:
        for number, batch in enumerate(super().__iter__()):
            if number >= self.num:
                self.num = number + 1
                yield batch
        self.num = 0

    def state_dict(self) -> dict[str, int]:
        return {"num": self.num}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num = state["num"]


@pytest.mark.parametrize("kind", [Doubling, StatefulLoader])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_keeps_an_iter_of_its_own(num_workers: int, kind: type[DataLoader]) -> None:
    def make() -> StreamLoader:
        return rank_loader(kind(Splitting(), batch_size=4, num_workers=num_workers), splits=None)

    whole = [batch.tolist() for batch in make()]
    assert sorted(chain(*whole)) == [2.0 * number for number in range(40)]
    stopped = make()
    batches = iter(stopped)
    next(batches), next(batches)
    resumed = make()
    resumed.resume_at(stopped.place_after(2))
    assert [batch.tolist() for batch in resumed] == whole[2:]
    assert ("resumed by its own state_dict()" in resumed.note) == (kind is StatefulLoader)


class WantsArguments(Splitting):
    """A stream with a state as litdata's StreamingDataset has it."""

    def state_dict(self, num_samples_yielded: int, num_workers: int, batch_size: int) -> dict[str, int]:
        return {"num": num_samples_yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError("nobody knows these arguments here")


def test_a_state_that_wants_arguments_is_no_state() -> None:
    stopped = rank_loader(DataLoader(WantsArguments(), batch_size=4))
    batches = iter(stopped)
    first = next(batches).tolist()
    resumed = rank_loader(DataLoader(WantsArguments(), batch_size=4))
    resumed.resume_at(stopped.place_after(1))
    assert first + samples(resumed) == list(range(40)) and "it has no state_dict()" in resumed.note


def test_other_ranks_or_workers_cannot_resume_within_an_epoch() -> None:
    stopped = rank_loader(DataLoader(Ignorant(), batch_size=4), 0, 2)
    next(iter(stopped))
    with pytest.raises(ConfigError, match="must stay 2 data-parallel ranks with 0 workers each"):
        rank_loader(DataLoader(Ignorant(), batch_size=4), 0, 3).resume_at(stopped.place_after(1))


def test_stream_of_finds_the_stream_of_a_loader() -> None:
    shared = rank_loader(DataLoader(Ignorant(), batch_size=4))
    assert stream_of(shared) is shared and stream_of(DataLoader([1, 2])) is None


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_of_hugging_face(num_workers: int, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    file = tmp_path / "numbers.jsonl"
    file.write_text("".join(f'{{"number": {number}}}\n' for number in range(40)))

    def make(rank: int) -> StreamLoader:
        stream = datasets.load_dataset("json", data_files=str(file), split="train", streaming=True).shuffle(seed=3)
        return rank_loader(DataLoader(stream.with_format("torch"), batch_size=3, num_workers=num_workers), rank, 2)

    def numbers(batches: Any) -> list[int]:
        return list(chain.from_iterable(batch["number"].tolist() for batch in batches))

    parts = [numbers(make(rank)) for rank in range(2)]
    assert sorted(chain(*parts)) == list(range(40)) and len(parts[0]) == len(parts[1]) == 20
    stopped = make(1)
    batches = iter(stopped)
    done = numbers([next(batches), next(batches)])
    resumed = make(1)
    resumed.resume_at(stopped.place_after(2))
    rest = numbers(resumed)
    assert "resumed by its own state_dict()" in resumed.note
    assert sorted(done + rest) == sorted(parts[1])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_of_webdataset(num_workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wds = pytest.importorskip("webdataset")
    for shard in range(4):
        with wds.TarWriter(str(tmp_path / f"{shard}.tar")) as tar:
            for number in range(10):
                tar.write({"__key__": f"{shard}-{number}", "cls": shard * 10 + number})
    monkeypatch.setenv("WORLD_SIZE", "2")  # as the launcher sets it
    parts = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        stream = wds.WebDataset([str(tmp_path / f"{shard}.tar") for shard in range(4)], shardshuffle=False)
        loader = DataLoader(stream.decode().to_tuple("cls"), batch_size=5, num_workers=num_workers)
        parts.append(list(chain.from_iterable(batch[0].tolist() for batch in rank_loader(loader, rank, 2))))
    assert sorted(chain(*parts)) == list(range(40)) and len(parts[0]) == 20
