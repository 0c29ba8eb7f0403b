"""Windows into files of tokens, for predicting the next one: a batch is one gather out of mapped files."""

import functools

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from hpc.data.fetching import copy_to_tensor
from hpc.data.text_files import map_file, num_tokens, reject_tokens_outside

MAX_TOKENS_IN_MEMORY = 1 << 26  # tokens


class TokenWindows(Dataset):
    """Files laid end to end, seen through windows: number i starts at token i * block_size, across files if need be.

    One file is read through its memory map, a batch in one gather. So are several, in memory, if together they are
    small. Of many that are large, each is gathered from by itself, which is slower: tools/pack.py makes one of them.

    Args:
        vocab_size: larger than every token, which is looked at in each batch; None: that is known.
    """

    draws = False  # random numbers

    def __init__(self, files: list[str], windows: range, *, block_size: int, vocab_size: int | None) -> None:
        self.files, self.windows, self.block_size, self.vocab_size = files, windows, block_size, vocab_size
        lengths = [num_tokens(file) for file in files]
        self.ends = np.cumsum(lengths)
        self.begins = self.ends - lengths
        self.start, self.stride = windows.start * block_size, windows.step * block_size
        small = len(files) > 1 and self.ends[-1] <= MAX_TOKENS_IN_MEMORY
        self.loaded = _together([map_file(file) for file in files]) if small else None

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__(np.array([index]))
        return inputs[0], targets[0]

    def __getitems__(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each int64 (batch, block_size).

        Raises:
            ConfigError: a token is outside of the vocabulary.
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
        """Return windows int64 (batch, block_size + 1): one gather for each file that they begin in."""
        windows = np.empty((len(starts), self.block_size + 1), np.int64)
        files = np.searchsorted(self.ends, starts, side="right")
        for file in map(int, np.unique(files)):
            rows = np.flatnonzero(files == file)
            every, local = all_windows_of_file(self.files[file], self.block_size + 1), starts[rows] - self.begins[file]
            inside = local < len(every)
            windows[rows[inside]] = every[local[inside]]
            for row, start in zip(rows[~inside], local[~inside], strict=True):
                windows[row] = self._across(file, int(start))
        return windows

    def _across(self, file: int, start: int) -> np.ndarray:
        """Return a window from token `start` of a file into those after it."""
        pieces, missing = [], self.block_size + 1
        while missing:
            pieces.append(map_file(self.files[file])[start : start + missing])
            file, start, missing = file + 1, 0, missing - len(pieces[-1])
        return _together(pieces)


def _together(arrays: list[np.ndarray]) -> np.ndarray:
    dtypes = {array.dtype for array in arrays}
    return np.concatenate(arrays, dtype=dtypes.pop() if len(dtypes) == 1 else np.int64, casting="unsafe")


def all_windows(tokens: np.ndarray, length: int) -> np.ndarray:
    """Return tokens through a window at each of them, (number, length); a view, which takes no memory."""
    num = max(0, len(tokens) - length + 1)
    return np.ndarray((num, length), tokens.dtype, tokens, 0, (tokens.itemsize, tokens.itemsize))


@functools.lru_cache(maxsize=256)
def all_windows_of_file(file: str, length: int) -> np.ndarray:
    """Return `all_windows` of a file, made once."""
    return all_windows(np.asarray(map_file(file)), length)
