"""Random numbers of samples follow from seed, epoch and place, however a loader fetches them and on any layout."""

import random
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, StackDataset, Subset

from hpc.config.errors import ConfigError
from hpc.data import shared_loaders
from hpc.data.sample_randomness import fetches_together, find_generators

TRAIN, VAL = RunningStage.TRAINING, RunningStage.VALIDATING
Drawn = tuple[int, float]


class Noisy(Dataset):
    def __init__(self, num: int = 24, transform: Any = None) -> None:
        self.num, self.transform = num, transform

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Drawn:
        return int(index), float(torch.rand(())) + random.random() + float(np.random.rand())


class Fetching(Noisy):
    def __getitems__(self, indices: list[int]) -> list[Drawn]:
        return [self[index] for index in indices]


def drawn(make: Any, num_ranks: int) -> list[list[Drawn]]:
    """Return the samples of each rank with what they have drawn."""
    ranks = []
    for rank in range(num_ranks):
        torch.manual_seed(rank)
        loader, _ = shared_loaders.shard_dataloader(make(), TRAIN, rank=rank, num_ranks=num_ranks)
        ranks.append([sample for batch in loader for sample in (batch if isinstance(batch, list) else [batch])])
    return ranks


def loader(dataset: Any, **options: Any) -> DataLoader:
    return DataLoader(dataset, collate_fn=list, **options)


SAME = {
    "a sampler without batches": lambda size: DataLoader(Noisy(), batch_size=None, shuffle=True, collate_fn=tuple),
    "a part": lambda size: loader(Subset(Noisy(48), range(0, 48, 2)), batch_size=size, shuffle=True),
    "a part of a part": lambda size: loader(Subset(Subset(Noisy(), range(24)), range(24)), batch_size=size),
    "batches of tensors": lambda size: loader(Noisy(), batch_sampler=torch.arange(24).split(1)),
}


@pytest.mark.parametrize("what", SAME)
def test_samples_draw_the_same_on_one_rank_and_on_two(what: str) -> None:
    (alone,) = drawn(partial(SAME[what], 4), 1)
    together = [sample for pair in zip_longest(*drawn(partial(SAME[what], 2), 2)) for sample in pair]
    assert sorted(together) == sorted(alone) and len(set(alone)) == 24
    assert drawn(partial(SAME[what], 4), 1) == [alone]


def test_only_a_dataset_that_fetches_many_samples_at_once_is_seeded_once_for_them() -> None:
    assert fetches_together(Fetching()) and fetches_together(Subset(Fetching(), [1]))
    assert fetches_together(StackDataset(Noisy(), Fetching()))
    assert not any(map(fetches_together, (Noisy(), Subset(Noisy(), [1]), StackDataset(a=Noisy(), b=Noisy()))))


class Holder:
    def __init__(self, inside: Any) -> None:
        self.inside = inside

    def apply(self, x: Any) -> Any:
        return x + self.inside.normal()


GENERATOR = np.random.default_rng(1)
HIDDEN = {
    "in a list of transforms": Holder([Holder(GENERATOR)]),
    "in a dict": {"augment": Holder(GENERATOR)},
    "in a closure": (lambda generator: lambda x: x + generator.normal())(GENERATOR),
    "in what a partial function has been given": partial(Holder.apply, Holder(GENERATOR)),
    "in the object of a method": Holder(GENERATOR).apply,
}


@pytest.mark.parametrize("what", HIDDEN)
def test_a_generator_anywhere_in_a_dataset_is_found(what: str) -> None:
    assert list(find_generators([Subset(Noisy(transform=HIDDEN[what]), range(9))])) == [GENERATOR]
    assert not list(find_generators([Subset(Noisy(transform=Holder([Holder(3), len])), range(9))]))


GENERATORS: dict[str, Any] = {
    "numpy": lambda: np.random.default_rng(3),
    "numpy's old ones": lambda: np.random.RandomState(3),
    "Python": lambda: random.Random(3),
    "torch": lambda: torch.Generator().manual_seed(3),
}


class OwnGenerators(Noisy):
    """Samples that draw from generators of the dataset."""

    def __init__(self, num: int, make: Any) -> None:
        super().__init__(num)
        self.first, self.parts = make(), {"others": [make()]}

    def __getitem__(self, index: int) -> Drawn:
        return int(index), sum(_draw(each) for each in (self.first, *self.parts["others"])) * index


class NoisyCollate:
    """A collate function that draws from the process's generators and from one of its own."""

    def __init__(self, make: Any) -> None:
        self.generator = make()

    def __call__(self, samples: list[Drawn]) -> list[Drawn]:
        noise = float(torch.rand(())) + random.random() + float(np.random.rand()) + _draw(self.generator)
        return [(index, value + noise) for index, value in samples]


def _draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator))
    return float(generator.random())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", GENERATORS)
def test_a_batch_follows_from_its_place_and_not_from_those_before_it(kind: str, workers: int) -> None:
    """A resumed run fetches none of the batches that are done."""
    make = GENERATORS[kind]

    def fetched(epoch: int, start: int) -> list[list[Drawn]]:
        data = DataLoader(OwnGenerators(24, make), 4, shuffle=True, collate_fn=NoisyCollate(make), num_workers=workers)
        shared, _ = shared_loaders.shard_dataloader(data, TRAIN, rank=0, num_ranks=1)
        shared.batch_sampler.go_to(epoch, start)
        return list(shared)

    whole = fetched(2, 0)
    assert fetched(2, 4) == whole[4:] and fetched(1, 4) != whole[4:]
    assert len({value for batch in whole for _, value in batch if value}) == 24


def test_a_fetch_leaves_all_generators_as_they_were() -> None:
    collate = NoisyCollate(GENERATORS["numpy"])
    dataset = OwnGenerators(24, GENERATORS["numpy"])
    shared, _ = shared_loaders.shard_dataloader(DataLoader(dataset, 4, collate_fn=collate), TRAIN, rank=0, num_ranks=1)
    batches = iter(shared)
    before = [torch.get_rng_state(), random.getstate()]
    next(batches)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert all(_draw(each) == _draw(GENERATORS["numpy"]()) for each in (dataset.first, collate.generator))


def test_an_order_of_integers_is_kept_as_an_array_and_gives_integers() -> None:
    shared, _ = shared_loaders.shard_dataloader(loader(Noisy(), batch_size=5), TRAIN, rank=0, num_ranks=1)
    batches = list(shared.batch_sampler)
    assert list(chain(*batches)) == list(range(24)) and {type(index) for index in chain(*batches)} == {int}
    assert shared.batch_sampler.batch_size == 5 and not shared.batch_sampler.drop_last
    names = DataLoader({"a": 1, "b": 2}, sampler=["a", "b"])  # type: ignore[arg-type]
    assert list(shared_loaders.shard_dataloader(names, TRAIN, rank=0, num_ranks=1)[0].batch_sampler) == [["a"], ["b"]]


class OwnBatches(BatchSampler):
    """The batches of a rank, as a researcher shares them out."""

    def __init__(self, rank: int, num_replicas: int, *, pads: bool = False) -> None:
        self.rank, self.num_replicas = rank, num_replicas
        sampler = DistributedSampler(range(21), num_replicas, rank, shuffle=False)  # type: ignore[arg-type]
        self.indices = list(sampler) if pads else list(range(rank, 21, num_replicas))

    def __iter__(self) -> Any:
        return (self.indices[first : first + 4] for first in range(0, len(self.indices), 4))

    def __len__(self) -> int:
        return -(-len(self.indices) // 4)


def test_a_researchers_batches_of_each_rank_are_accepted_in_an_evaluation_unless_samples_come_twice() -> None:
    for rank in range(2):
        own = loader(Noisy(21), batch_sampler=OwnBatches(rank, 2))
        assert shared_loaders.shard_dataloader(own, VAL, rank=rank, num_ranks=2) == (own, "")
    padded = loader(Noisy(21), batch_sampler=OwnBatches(1, 2, pads=True))
    with pytest.raises(ConfigError, match="must count each of the 21 samples once"):
        shared_loaders.shard_dataloader(padded, VAL, rank=1, num_ranks=2)
