"""Check that streams are shared out among ranks and workers without a repeated sample, and resumed at the sample."""

import random
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hpc.config.errors import ConfigError
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


class ByRank(IterableDataset):
    """A stream that gives each rank its own samples, as Lightning asks for it."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.as_if = rank, num_ranks

    def __iter__(self) -> Iterator[float]:
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else self.as_if
        yield from (float(number) for number in range(rank, 40, size))


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


def rank_loader(loader: Any, rank: int = 0, num_ranks: int = 1, epoch: int = 0) -> StreamLoader:
    shared = StreamLoader(loader, rank=rank, num_ranks=num_ranks, seed=1, split="train")
    shared.set_epoch(epoch)
    return shared


def samples(batches: Any) -> list[float]:
    return list(chain.from_iterable(batch.tolist() for batch in batches))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", [Ignorant, Splitting])
def test_all_ranks_together_have_each_sample_once(kind: type, num_ranks: int, num_workers: int) -> None:
    if kind is Ignorant and num_workers and num_ranks == 1:
        pass  # plain torch would give each sample twice
    loader = DataLoader(kind(), batch_size=4, num_workers=num_workers)
    parts = [samples(rank_loader(loader, rank, num_ranks)) for rank in range(num_ranks)]
    assert Counter(map(int, chain(*parts))) == dict.fromkeys(range(40), 1)
    assert all(len(part) >= 40 // num_ranks - 7 for part in parts)


def test_the_order_follows_from_the_epoch_and_leaves_other_random_numbers_alone() -> None:
    loader = DataLoader(Ignorant(), batch_size=4)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = samples(rank_loader(loader))
    assert torch.equal(torch.rand(3), expected)
    assert samples(rank_loader(loader)) == first and samples(rank_loader(loader, epoch=1)) != first


def test_a_stream_that_splits_itself_by_rank_is_left_to_do_so() -> None:
    parts = []
    for rank in range(2):
        shared = rank_loader(DataLoader(ByRank(rank, 2), batch_size=4), rank, 2)
        assert "shared out among 2 ranks, as it does it itself" in shared.note
        parts.append(samples(shared))
    assert sorted(chain(*parts)) == list(range(40))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [Ignorant, Splitting, Stateful])
def test_a_pass_is_resumed_at_the_very_sample(kind: type, num_workers: int, capfd: pytest.CaptureFixture) -> None:
    def make() -> StreamLoader:
        return rank_loader(DataLoader(kind(), batch_size=3, num_workers=num_workers), 1, 2, epoch=2)

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
    """A stream whose order no seed determines."""

    def __iter__(self) -> Iterator[float]:
        numbers = list(range(1000))
        random.SystemRandom().shuffle(numbers)
        yield from map(float, numbers)


def test_a_stream_that_cannot_be_repeated_is_named(capfd: pytest.CaptureFixture) -> None:
    stopped = rank_loader(DataLoader(Unrepeatable(), batch_size=3))
    batches = iter(stopped)
    next(batches), next(batches)
    resumed = rank_loader(DataLoader(Unrepeatable(), batch_size=3))
    resumed.resume_at(stopped.place_after(2))
    next(iter(resumed))
    assert "warning: Unrepeatable gives other samples when it is read again" in capfd.readouterr().out


def test_an_iterable_of_batches_is_a_stream_of_them() -> None:
    batches = [torch.tensor([float(number)]) for number in range(7)]
    assert samples(rank_loader(batches, 0, 2)) == [0, 2, 4, 6] and samples(rank_loader(batches, 1, 2)) == [1, 3, 5]
    assert len(rank_loader(batches, 0, 2)) == 3


def test_a_stream_without_a_length_has_none() -> None:
    with pytest.raises(TypeError):
        len(rank_loader(DataLoader(Ignorant(), batch_size=4)))


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
