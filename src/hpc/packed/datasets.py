"""Datasets of packed images and of windows into tokens: a batch is one gather from a mapped file."""

import functools

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hpc.data.fetching import copy_to_tensor, empty_batch
from hpc.packed.packed_images import PackedImages, map_pixels
from hpc.packed.token_files import map_file, num_tokens, reject_tokens_outside

MAX_TOKENS_IN_MEMORY = 1 << 26  # of several files that are loaded


class PackedSamples(Dataset):
    """The images of a split of a packed file, in the order of the folder from which they were packed.

    A batch is one gather from the memory map, in the order of the sampler. The order is not changed to suit the disk:
    images of 224 pixels came at the disk's speed when they were read for the first time. Sorted indices, madvise and
    several threads were no faster, and MADV_RANDOM was ten times slower. In memory, the order costs nothing.
    """

    draws = False  # random numbers

    def __init__(self, packed: PackedImages, split: str, *, file: str) -> None:
        self.first, self.end = packed.splits[split]
        self.labels = packed.labels[self.first : self.end]
        self.file = file  # each worker maps it
        self.shape = (3, packed.image_size, packed.image_size)

    def __len__(self) -> int:
        return self.end - self.first

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__(np.array([index]))
        return inputs[0], targets[0]

    def __getitems__(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return images uint8 (batch, 3, size, size) and class numbers int64 (batch,)."""
        images = empty_batch((len(indices), *self.shape), np.uint8)
        out = images.numpy().reshape(len(indices), -1)
        # With "clip", numpy writes into `out` without a copy between; the sampler gives no index that needs clipping.
        map_pixels(self.file).take(indices + self.first, axis=0, out=out, mode="clip")
        return images, torch.from_numpy(self.labels[indices])


class TokenWindows(Dataset):
    """Windows into files laid end to end: window i starts at token i * block_size, and may reach into the next file.

    A batch from one file is one gather from its memory map. Several small files are loaded and treated as one. A batch
    from several large files takes a gather for each of them, which is slower: tools/pack.py makes one file of them.

    Args:
        windows: the numbers of the windows that are samples.
        vocab_size: larger than every token, checked in each batch; None: already known to be so.
    """

    draws = False  # no random numbers

    def __init__(self, files: list[str], windows: range, *, block_size: int, vocab_size: int | None) -> None:
        self.files, self.windows, self.block_size, self.vocab_size = files, windows, block_size, vocab_size
        lengths = [num_tokens(file) for file in files]
        self.ends = np.cumsum(lengths)
        self.begins = self.ends - lengths
        self.start, self.stride = windows.start * block_size, windows.step * block_size
        is_small = len(files) > 1 and self.ends[-1] <= MAX_TOKENS_IN_MEMORY
        self.loaded = _concatenate([map_file(file) for file in files]) if is_small else None

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__(np.array([index]))
        return inputs[0], targets[0]

    def __getitems__(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, each int64 (batch, block_size).

        Raises:
            ConfigError: a token is outside the vocabulary.
        """
        starts = indices * self.stride + self.start
        if self.loaded is not None:
            tokens = all_windows(self.loaded, self.block_size + 1)[starts]
        elif len(self.files) == 1:
            tokens = all_windows_of_file(self.files[0], self.block_size + 1)[starts]
        else:
            tokens = self._from_several(starts)
        if self.vocab_size is not None and (tokens.max() >= self.vocab_size or tokens.min() < 0):
            row, column = np.argwhere((tokens < 0) | (tokens >= self.vocab_size))[0]
            file = int(np.searchsorted(self.ends, starts[row] + column, side="right"))
            reject_tokens_outside(
                self.vocab_size, smallest=int(tokens.min()), largest=int(tokens.max()), file=self.files[file]
            )
        return copy_to_tensor(tokens[:, :-1], np.int64), copy_to_tensor(tokens[:, 1:], np.int64)

    def _from_several(self, starts: np.ndarray) -> np.ndarray:
        """Return windows int64 (batch, block_size + 1), by one gather for each file in which some start."""
        windows = np.empty((len(starts), self.block_size + 1), np.int64)
        files = np.searchsorted(self.ends, starts, side="right")
        for file in map(int, np.unique(files)):
            rows = np.flatnonzero(files == file)
            file_windows = all_windows_of_file(self.files[file], self.block_size + 1)
            local = starts[rows] - self.begins[file]
            is_inside = local < len(file_windows)
            windows[rows[is_inside]] = file_windows[local[is_inside]]
            for row, start in zip(rows[~is_inside], local[~is_inside], strict=True):
                windows[row] = self._across(file, int(start))
        return windows

    def _across(self, file: int, start: int) -> np.ndarray:
        """Return a window that starts at token `start` of a file and reaches into those after it."""
        pieces, missing = [], self.block_size + 1
        while missing:
            pieces.append(map_file(self.files[file])[start : start + missing])
            file, start, missing = file + 1, 0, missing - len(pieces[-1])
        return _concatenate(pieces)


def _concatenate(arrays: list[np.ndarray]) -> np.ndarray:
    dtypes = {array.dtype for array in arrays}
    return np.concatenate(arrays, dtype=dtypes.pop() if len(dtypes) == 1 else np.int64, casting="unsafe")


def all_windows(tokens: np.ndarray, length: int) -> np.ndarray:
    """Return the windows that start at each token, (number, length), as a view that takes no memory."""
    num = max(0, len(tokens) - length + 1)
    return np.ndarray((num, length), tokens.dtype, tokens, 0, (tokens.itemsize, tokens.itemsize))


@functools.lru_cache(maxsize=256)
def all_windows_of_file(file: str, length: int) -> np.ndarray:
    """Return `all_windows` of a file; the view is cached."""
    return all_windows(np.asarray(map_file(file)), length)
