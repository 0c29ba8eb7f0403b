"""Text, as bytes or as tokens, for predicting the next one; and the text that every machine has."""

import functools
import os
import sysconfig
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..hpc.config import Refused
from ..hpc.parts import Parts
from .fetching import buffer
from .loading import DataModule
from .text_files import list_text, num_tokens, read_only, refuse_tokens_outside, split_text
from .token_files import token_parts, vocabulary

# Tests, what is installed beside the library, and tables and manuals in the shape of code.
NOT_SOURCES = {"test", "tests", "idle_test", "lib2to3", "idlelib", "site-packages", "dist-packages", "__pycache__"}
NOT_SOURCES |= {"encodings", "pydoc_data"}


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
        vocab_size = self.vocab_size or vocabulary(chosen)[0] or 0  # 0: the first batch is refused
        return Windows([self.near(file) for file in chosen], windows, self.block_size, vocab_size)

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
            raise Refused("data", "stdlib", f"this Python comes with its sources in {root}", "data=text data.files=...")
        return list_text(sources)


class Windows(Dataset):
    """Files laid end to end, seen through windows: number i starts at token i * block_size, across files if need be."""

    draws = False  # random numbers

    def __init__(self, files: list[str], windows: range, block_size: int, vocab_size: int) -> None:
        self.files, self.windows, self.block_size, self.vocab_size = files, windows, block_size, vocab_size
        self.ends = np.cumsum([num_tokens(file) for file in files])

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each int64 (batch, block_size). Of each file that they touch, one gather."""
        starts = (self.windows.start + self.windows.step * np.asarray(indices)) * self.block_size
        inputs, targets = (buffer((len(starts), self.block_size), torch.int64) for _ in range(2))
        first = np.searchsorted(self.ends, starts, side="right")
        for file in first[:1] if (first == first[0]).all() else np.unique(first):
            rows = np.flatnonzero(first == file) if len(first) > 1 else np.zeros(1, int)
            tokens = self._gather(int(file), starts[rows])
            self._refuse_outside(tokens, int(file))
            rows = slice(None) if len(rows) == len(starts) else rows
            inputs.numpy()[rows], targets.numpy()[rows] = tokens[:, :-1], tokens[:, 1:]
        return inputs, targets

    def _gather(self, file: int, starts: np.ndarray) -> np.ndarray:
        """Windows that begin in a file, (len(starts), block_size + 1); only the last of them can leave it."""
        every = all_windows(self.files[file], self.block_size + 1)
        starts = starts - (int(self.ends[file]) - num_tokens(self.files[file]))
        if starts.max() < len(every):
            return every[starts]
        rows = [every[start] if start < len(every) else self._across(file, start) for start in starts]
        return np.array(rows, np.int64)  # files may differ in dtype

    def _across(self, file: int, start: int) -> np.ndarray:
        """A window from token `start` of a file into those after it."""
        pieces, missing = [], self.block_size + 1
        while missing:
            pieces.append(read_only(self.files[file])[start : start + missing])
            file, start, missing = file + 1, 0, missing - len(pieces[-1])
        return np.concatenate(pieces, dtype=np.int64, casting="unsafe")

    def _refuse_outside(self, tokens: np.ndarray, file: int) -> None:
        kind = np.iinfo(tokens.dtype)
        if kind.min < 0 or kind.max >= self.vocab_size:  # else no token can be
            refuse_tokens_outside(self.vocab_size, int(tokens.min()), int(tokens.max()), self.files[file])


@functools.lru_cache(maxsize=256)
def all_windows(file: str, length: int) -> np.ndarray:
    """The tokens of a file through a window at each of them, (number, length); a view, which takes no memory."""
    tokens = np.asarray(read_only(file))
    return np.lib.stride_tricks.sliding_window_view(tokens, length) if len(tokens) >= length else tokens[:0]
