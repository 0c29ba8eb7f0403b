"""Check that sample order and random numbers do not depend on the number of ranks."""

from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler

from hpc.data.batch_parts import TrainingRanges, batch_ranges
from hpc.data.sample_order import ARRAYS, SampleOrder
from hpc.state.randomness import uniform_per_sample

LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 4), (2, 2), (8, 1)]  # ranks, accumulate


def training_order(num_samples, global_batch_size, *, rank=0, ranks=1, accumulate=1, seed=1, **options):
    batch_size, num_whole = global_batch_size // (ranks * accumulate), num_samples - num_samples % global_batch_size
    parts = TrainingRanges(num_whole, batch_size, rank=rank, num_ranks=ranks)
    return SampleOrder(RandomSampler(range(num_samples)), parts, seed=seed, gives=ARRAYS, **options)


def evaluation_order(num_samples, batch_size, *, rank, ranks):
    parts = batch_ranges(num_samples, batch_size, rank=rank, num_ranks=ranks)
    return SampleOrder(SequentialSampler(range(num_samples)), parts, seed=1, gives=ARRAYS)


def batches(sampler, epoch=0):
    """Return the indices of each batch."""
    batches = list(sampler)
    assert {batch.epoch for batch in batches} <= {epoch}
    return [batch.index.tolist() for batch in batches]


def flat(batches):
    return list(chain.from_iterable(batches))


def global_batches_of_one(epoch):
    return global_batches(100, 16, 1, 1, epoch)


def global_batches(num_samples, global_batch_size, ranks, accumulate, epoch=0, seed=1, start=0):
    """Return the samples of each optimizer step over all ranks and micro-batches, in order of ranks."""
    samplers = [
        training_order(num_samples, global_batch_size, rank=r, ranks=ranks, accumulate=accumulate, seed=seed)
        for r in range(ranks)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
        if start:
            sampler.go_to(epoch, start * accumulate)
    per_rank = [batches(sampler, epoch) for sampler in samplers]
    left_out = start * accumulate
    assert [len(batches) + left_out for batches in per_rank] == [len(sampler) for sampler in samplers]
    micro_steps = [flat(step) for step in zip(*per_rank, strict=True)]
    return [flat(micro_steps[i : i + accumulate]) for i in range(0, len(micro_steps), accumulate)]


@pytest.mark.parametrize(("ranks", "accumulate"), LAYOUTS)
def test_every_layout_sees_the_same_global_batches(ranks, accumulate):
    assert global_batches(100, 16, ranks, accumulate) == global_batches(100, 16, 1, 1)


@pytest.mark.parametrize(("ranks", "accumulate"), LAYOUTS)
def test_an_epoch_holds_each_sample_once_and_leaves_out_the_incomplete_batch(ranks, accumulate):
    batches = global_batches(100, 16, ranks, accumulate)
    assert [len(batch) for batch in batches] == [16] * 6
    assert len(set(flat(batches))) == 96
    assert set(flat(global_batches(96, 16, ranks, accumulate))) == set(range(96))


def test_epochs_and_seeds_have_their_own_order_and_repeat_it():
    first = global_batches(96, 16, 2, 1)
    assert first == global_batches(96, 16, 2, 1)
    assert first != global_batches(96, 16, 2, 1, epoch=1)
    assert first != global_batches(96, 16, 2, 1, seed=2)
    assert first != [list(range(i, i + 16)) for i in range(0, 96, 16)]


@pytest.mark.parametrize(("ranks", "accumulate"), LAYOUTS)
@pytest.mark.parametrize("start", [0, 1, 4, 6])
def test_a_run_resumes_in_the_middle_of_an_epoch_in_every_layout(start, ranks, accumulate):
    """Convert a position that another layout saved to micro-batches of this layout."""
    rest = global_batches(100, 16, ranks, accumulate, epoch=2, start=start)
    assert rest == global_batches(100, 16, 1, 1, epoch=2)[start:]


def test_the_epoch_after_the_resumed_one_is_whole():
    sampler = training_order(100, 16)
    sampler.go_to(2, 4)
    sampler.set_epoch(2)  # as Lightning calls it at the start
    assert (len(batches(sampler, 2)), len(sampler)) == (2, 6)
    assert batches(sampler, 2) == global_batches_of_one(2)  # again in the same epoch, as in a CombinedLoader
    sampler.set_epoch(3)
    assert batches(sampler, 3) == global_batches_of_one(3)


def test_with_overfit_batches_each_epoch_repeats_the_first():
    sampler = training_order(100, 16, repeats_first_epoch=True)
    assert isinstance(sampler, SequentialSampler)  # otherwise Lightning would replace it
    sampler.set_epoch(3)
    assert batches(sampler, 3) == global_batches_of_one(0)


class Numbers(Dataset):
    def __getitem__(self, batch):
        return batch


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_workers_that_fetch_ahead_change_nothing(num_workers):
    """Start after the third batch, while the workers still fetch the first epoch."""
    sampler = training_order(100, 16)
    workers = dict(num_workers=num_workers, persistent_workers=num_workers > 0)
    loader = DataLoader(Numbers(), sampler=sampler, batch_size=None, **workers)
    next(iter(loader))
    sampler.go_to(1, 3)
    rest = [(batch.epoch, batch.index.tolist()) for batch in loader]
    assert rest == [(1, indices) for indices in global_batches_of_one(1)[3:]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("num_samples", [8, 9, 23, 24, 25, 33, 64, 65, 71, 72])
def test_evaluation_covers_each_sample_once_in_equally_many_batches_without_filling_any(ranks, num_samples):
    per_rank = [batches(evaluation_order(num_samples, 4, rank=rank, ranks=ranks)) for rank in range(ranks)]
    sampler = evaluation_order(num_samples, 4, rank=0, ranks=ranks)
    assert {len(batches) for batches in per_rank} == {len(sampler)}
    steps = [flat(step) for step in zip(*per_rank, strict=True)]
    assert flat(steps) == list(range(num_samples))  # in order, whatever the layout
    sizes = [{len(batch) for batch in step} for step in zip(*per_rank, strict=True)]
    assert all(size == {4} for size in sizes[:-1])
    assert min(sizes[-1]) >= 1 and max(sizes[-1]) <= 5 and max(sizes[-1]) - min(sizes[-1]) <= 1
    assert list(evaluation_order(0, 4, rank=0, ranks=ranks)) == []


def test_draws_belong_to_the_sample_and_not_to_its_batch():
    index = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    draws = uniform_per_sample(1, 3, indices=index, num=4)
    in_parts = torch.cat([uniform_per_sample(1, 3, indices=part, num=4) for part in index.split(7)])
    torch.testing.assert_close(in_parts, draws, rtol=0, atol=0)
    torch.testing.assert_close(
        uniform_per_sample(1, 3, indices=index.sort().values, num=4)[index], draws, rtol=0, atol=0
    )


def test_draws_differ_between_epochs_and_seeds():
    index = torch.arange(100)
    draws = uniform_per_sample(1, 0, indices=index, num=4)
    for other in (uniform_per_sample(1, 1, indices=index, num=4), uniform_per_sample(2, 0, indices=index, num=4)):
        assert (other == draws).float().mean() < 0.01


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (1, 0), (1, 1), (12345, 99)])
def test_draws_are_uniform_and_uncorrelated(seed, epoch):
    num = 50_000
    draws = uniform_per_sample(seed, epoch, indices=torch.arange(num), num=4).double()
    assert draws.min() >= 0
    assert draws.max() < 1
    bound = 5 / num**0.5  # five standard errors of a correlation
    assert (draws.mean(0) - 0.5).abs().max() < bound * (1 / 12) ** 0.5
    assert (draws.var(0) - 1 / 12).abs().max() < bound * (1 / 180) ** 0.5
    neighbours = torch.cat([draws[:-1], draws[1:]], dim=1)  # columns of a sample, and those of the next one
    later = uniform_per_sample(seed, epoch + 1, indices=torch.arange(1, num), num=4).double()
    correlation = torch.corrcoef(torch.cat([neighbours, later], dim=1).T)
    assert (correlation - torch.eye(len(correlation))).abs().max() < bound
    counts = torch.histc(draws.float(), bins=64, min=0, max=1)
    assert ((counts - 4 * num / 64) ** 2 / (4 * num / 64)).sum() < 63 + 5 * (2 * 63) ** 0.5
