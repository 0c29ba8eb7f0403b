"""Batches as a loader fetches them: whole, with the random numbers of their samples, and ahead of a GPU."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, get_worker_info

from ..hpc import randomness
from ..hpc.ahead import ahead
from ..hpc.config import Refused
from ..hpc.sampler import ResumableLoader, sample_seeds


class Loader(ResumableLoader):
    """Without worker processes, a thread may fetch batches ahead, and pin them: the GPU waits for neither.

    On a CPU it would take from training what it gives to it. Nor may it fetch what draws random numbers, which
    training in this process draws, too.
    """

    num_ahead = 0  # batches

    def __iter__(self) -> Any:
        batches = super().__iter__()
        if not self.num_ahead:
            return batches
        return ahead(_on_device(batches, torch.cuda.current_device()) if self.pin_memory else batches, self.num_ahead)


def _on_device(batches: Iterator[Any], device: int) -> Iterator[Any]:
    """Iterated by a thread, which would otherwise pin memory with the first GPU of the node."""
    torch.cuda.set_device(device)
    yield from batches


class Indexed(Dataset):
    """A dataset that is asked for (epoch, indices) and returns (inputs, targets, indices); -1 stands for padding.

    A refusal is returned, not raised: a DataLoader worker would turn it into a RuntimeError of another wording.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self.draws = getattr(dataset, "draws", not isinstance(dataset, TensorDataset))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, batch: tuple[int, list[int]]) -> tuple[Tensor, Tensor, Tensor] | Refused:
        epoch, indices = batch
        try:
            inputs, targets = self._samples(epoch, [max(i, 0) for i in indices])
        except Refused as refused:
            return refused
        return inputs, targets, torch.tensor(indices)

    def _samples(self, epoch: int, indices: list[int]) -> tuple[Tensor, Tensor]:
        if isinstance(self.dataset, TensorDataset):
            inputs, targets = self.dataset[indices]
            return inputs, targets
        if not self.draws:
            return self.dataset.__getitems__(indices)
        with nullcontext() if get_worker_info() else isolate_rng(include_cuda=False):
            return self._drawing_samples(indices, sample_seeds(self.seed, epoch, indices))

    def _drawing_samples(self, indices: list[int], seeds: list[int]) -> tuple[Tensor, Tensor]:
        if hasattr(self.dataset, "__getitems__"):
            randomness.begin(seeds[0])
            return self.dataset.__getitems__(indices)
        samples = [self._sample(index, seed) for index, seed in zip(indices, seeds, strict=True)]
        inputs = torch.stack([torch.as_tensor(sample[0]) for sample in samples])
        return inputs, torch.stack([torch.as_tensor(sample[1]) for sample in samples])

    def _sample(self, index: int, seed: int) -> Any:
        randomness.begin(seed)
        return self.dataset[index]


def buffer(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An empty tensor for a batch; pinned where it goes to a GPU from here, so that it is not copied once more."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=torch.cuda.is_available() and get_worker_info() is None)
