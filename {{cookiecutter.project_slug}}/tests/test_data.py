"""Each dataset of configs/data that is complete without your files. One that you add there is tested, too."""

from typing import Any

import pytest
import torch
from choices import GROUPS, batches, complete
from torch import Tensor
from torch.utils._pytree import tree_leaves

SPLITS = ("train", "val", "test")
NUM = 100  # batches of each split that are looked at
OVERLAP = 0.01  # the share of samples that may be in two splits, because the data repeat themselves

pytestmark = pytest.mark.parametrize("data", GROUPS["data"])


def tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def test_all_splits_have_samples_of_one_kind(data: str) -> None:
    cfg = complete(f"data={data}")
    kinds = set()
    for split in SPLITS:
        found = [tensors(batch) for batch in batches(cfg, split, NUM)]
        assert found, f"{split} is empty"
        assert all(tensor.isfinite().all() for batch in found for tensor in batch)
        kinds |= {tuple((tensor.dtype, tensor.shape[1:]) for tensor in batch) for batch in found}
    assert len(kinds) == 1, kinds


def test_no_sample_is_in_two_splits(data: str) -> None:
    cfg = complete(f"data={data}")
    inputs = {split: [tensors(batch)[0] for batch in batches(cfg, split, NUM)] for split in SPLITS}
    samples = {split: {row.numpy().tobytes() for batch in inputs[split] for row in batch} for split in SPLITS}
    for one, other in (("train", "val"), ("train", "test"), ("val", "test")):
        shared = samples[one] & samples[other]
        assert len(shared) <= OVERLAP * len(samples[other]), f"{len(shared)} samples are in {one} and in {other}"


def test_the_seed_decides_the_order(data: str) -> None:
    cfg = complete(f"data={data}").copy()
    first, again = ([tensors(batch)[0] for batch in batches(cfg, "train", 3)] for _ in range(2))
    cfg.seed += 1
    other = [tensors(batch)[0] for batch in batches(cfg, "train", 3)]
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other)), "another seed changes nothing: `seed: ${seed}` in the config?"
