"""Each dataset of configs/data that needs none of your files. One that you add there is tested, too."""

from typing import Any

import pytest
import torch
from choices import GROUPS, compose_or_skip, load_batches
from torch import Tensor
from torch.utils._pytree import tree_leaves

SPLITS = ("train", "val", "test")
MAX_BATCHES = 100  # of each split
MAX_OVERLAP = 0.01  # share of samples that may be in two splits: some data contain a sample twice

pytestmark = pytest.mark.parametrize("data", GROUPS["data"])


def tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def test_all_splits_have_samples_of_one_kind(data: str) -> None:
    cfg = compose_or_skip(f"data={data}")
    kinds = set()
    for split in SPLITS:
        loaded = [tensors(batch) for batch in load_batches(cfg, split, MAX_BATCHES)]
        assert loaded, f"{split} is empty"
        assert all(tensor.isfinite().all() for batch in loaded for tensor in batch)
        kinds |= {tuple((tensor.dtype, tensor.shape[1:]) for tensor in batch) for batch in loaded}
    assert len(kinds) == 1, kinds


def test_no_sample_is_in_two_splits(data: str) -> None:
    cfg = compose_or_skip(f"data={data}")
    inputs = {split: [tensors(batch)[0] for batch in load_batches(cfg, split, MAX_BATCHES)] for split in SPLITS}
    samples = {split: {row.numpy().tobytes() for batch in inputs[split] for row in batch} for split in SPLITS}
    for one, other in (("train", "val"), ("train", "test"), ("val", "test")):
        shared = samples[one] & samples[other]
        assert len(shared) <= MAX_OVERLAP * len(samples[other]), f"{len(shared)} samples are in {one} and in {other}"


def test_the_seed_decides_the_order(data: str) -> None:
    cfg = compose_or_skip(f"data={data}").copy()
    first, again = ([tensors(batch)[0] for batch in load_batches(cfg, "train", 3)] for _ in range(2))
    cfg.seed += 1
    other = [tensors(batch)[0] for batch in load_batches(cfg, "train", 3)]
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other)), "another seed changes nothing: `seed: ${seed}` in the config?"
