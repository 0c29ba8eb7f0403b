"""Text, as bytes or as tokens, for predicting the next one; and the text that every machine has."""

import functools
import os
import sysconfig
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from hpc.config.errors import ConfigError
from hpc.data.data_module import DataModule
from hpc.data.fetching import tensor
from hpc.data.file_parts import Parts
from hpc.data.text_files import list_text, num_tokens, read_only, reject_tokens_outside, split_text
from hpc.data.token_files import describe, token_parts, vocabulary

# Tests, what is installed beside the library, and tables and manuals in the shape of code.
NOT_SOURCES = {"test", "tests", "idle_test", "lib2to3", "idlelib", "site-packages", "dist-packages", "__pycache__"}
NOT_SOURCES |= {"encodings", "pydoc_data"}

IN_MEMORY = 1 << 26  # tokens


class NextToken(DataModule):
    """Inputs int64 (block_size,); targets are the same tokens one place on. A subclass says which files.

    Args:
        block_size: tokens a network sees at once.
        vocab_size: larger than every token; networks read `${data.vocab_size}`. Null: as the files say.
        bytes_per_token: for bits per byte, read as `${data.bytes_per_token}`; 1.0 for bytes. Null: as the files say.
        max_eval_windows: validation and test take at most so many windows, evenly spread.
    """

    def __init__(
        self,
        block_size: int,
        vocab_size: int | None = None,
        bytes_per_token: float | None = None,
        max_eval_windows: int | None = None,
        **loading: Any,
    ) -> None:
        super().__init__(**loading)
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.bytes_per_token = bytes_per_token
        self.max_eval_windows = max_eval_windows

    def list_files(self) -> tuple[list[str], list[str]]:
        """Files for training and for validation; of the former a tenth is held out when the latter are none."""
        raise NotImplementedError

    def dataset(self, split: str) -> Dataset:
        chosen, windows = split_text(split, *self.list_files(), self.block_size, self.max_eval_windows)
        told = vocabulary(chosen)[0]
        vocab_size = self.vocab_size or told or 0  # 0: the first batch is rejected
        known = told is not None and told <= vocab_size  # by the tokenizer that made the file, and its checksums
        return Windows([self.near(file) for file in chosen], windows, self.block_size, None if known else vocab_size)

    def describe(self, split: str) -> dict[str, Any]:
        chosen, windows = split_text(split, *self.list_files(), self.block_size, self.max_eval_windows)
        return {"files": describe(chosen), "windows": [windows.start, windows.stop, windows.step]}

    def to_stage(self) -> list[Parts]:
        files, val_files = self.list_files()
        return [token_parts(file) for file in files + val_files]

    def near(self, file: str) -> str:
        """The file itself, or its copy on this node."""
        return self.nearest(token_parts(file)) if self.stage else file


class Text(NextToken):
    """Your own text or tokens.

    Args:
        files: a path, a glob, a folder, or a list of them; `.npy` and `.bin` (uint16) hold tokens, others text.
        val_files: the same, for validation and test.
    """

    def __init__(self, files: str | list[str], val_files: str | list[str] | None = None, **windows: Any) -> None:
        super().__init__(**windows)
        self.files, self.val_files = files, val_files

    def list_files(self) -> tuple[list[str], list[str]]:
        return list_text(self.files, self.val_files)


class StandardLibrary(NextToken):
    """The sources of Python's own standard library, as bytes: about 10 MB of real text, without a download."""

    def list_files(self) -> tuple[list[str], list[str]]:
        root = sysconfig.get_paths()["stdlib"]
        sources: list[str] = []
        for folder, below, names in os.walk(root):
            below[:] = sorted(set(below) - NOT_SOURCES)
            sources += [os.path.join(folder, name) for name in sorted(names) if name.endswith(".py")]
        if not sources:
            raise ConfigError("data", "stdlib", f"this Python comes with its sources in {root}", "data=text data.files=...")
        return list_text(sources)


class Windows(Dataset):
    """Files laid end to end, seen through windows: number i starts at token i * block_size, across files if need be.

    One file is read through its memory map, a batch in one gather. So are several, in memory, if together they are
    small. Of many that are large, each is gathered from by itself, which is slower: tools/pack.py makes one of them.

    Args:
        vocab_size: larger than every token, which is looked at in each batch; None: that is known.
    """

    draws = False  # random numbers

    def __init__(self, files: list[str], windows: range, block_size: int, vocab_size: int | None) -> None:
        self.files, self.windows, self.block_size, self.vocab_size = files, windows, block_size, vocab_size
        lengths = [num_tokens(file) for file in files]
        self.ends = np.cumsum(lengths)
        self.begins = self.ends - lengths
        self.start, self.stride = windows.start * block_size, windows.step * block_size
        small = len(files) > 1 and self.ends[-1] <= IN_MEMORY
        self.loaded = _together([read_only(file) for file in files]) if small else None

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
            tokens = all_windows_of(self.files[0], self.block_size + 1)[starts]
        else:
            tokens = self._from_several(starts)
        if self.vocab_size is not None and (tokens.max() >= self.vocab_size or tokens.min() < 0):
            row, column = np.argwhere((tokens < 0) | (tokens >= self.vocab_size))[0]
            file = int(np.searchsorted(self.ends, starts[row] + column, side="right"))
            reject_tokens_outside(self.vocab_size, int(tokens.min()), int(tokens.max()), self.files[file])
        return tensor(tokens[:, :-1], np.int64), tensor(tokens[:, 1:], np.int64)

    def _from_several(self, starts: np.ndarray) -> np.ndarray:
        """Windows int64 (batch, block_size + 1): one gather for each file that they begin in."""
        windows = np.empty((len(starts), self.block_size + 1), np.int64)
        files = np.searchsorted(self.ends, starts, side="right")
        for file in map(int, np.unique(files)):
            rows = np.flatnonzero(files == file)
            every, local = all_windows_of(self.files[file], self.block_size + 1), starts[rows] - self.begins[file]
            inside = local < len(every)
            windows[rows[inside]] = every[local[inside]]
            for row, start in zip(rows[~inside], local[~inside], strict=True):
                windows[row] = self._across(file, int(start))
        return windows

    def _across(self, file: int, start: int) -> np.ndarray:
        """A window from token `start` of a file into those after it."""
        pieces, missing = [], self.block_size + 1
        while missing:
            pieces.append(read_only(self.files[file])[start : start + missing])
            file, start, missing = file + 1, 0, missing - len(pieces[-1])
        return _together(pieces)


def _together(arrays: list[np.ndarray]) -> np.ndarray:
    dtypes = {array.dtype for array in arrays}
    return np.concatenate(arrays, dtype=dtypes.pop() if len(dtypes) == 1 else np.int64, casting="unsafe")


def all_windows(tokens: np.ndarray, length: int) -> np.ndarray:
    """Tokens through a window at each of them, (number, length); a view, which takes no memory."""
    num = max(0, len(tokens) - length + 1)
    return np.ndarray((num, length), tokens.dtype, tokens, 0, (tokens.itemsize, tokens.itemsize))


@functools.lru_cache(maxsize=256)
def all_windows_of(file: str, length: int) -> np.ndarray:
    return all_windows(np.asarray(read_only(file)), length)
