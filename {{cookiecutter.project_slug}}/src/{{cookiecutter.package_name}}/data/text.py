"""Text, as bytes or as tokens, for predicting the next one; and the text that every machine has."""

import os
import sysconfig
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..hpc.config import Refused
from .loading import DataModule
from .text_files import list_text, num_tokens, read_only, refuse_tokens_outside, split_text

# Tests, what is installed beside the library, and tables and manuals in the shape of code.
NOT_SOURCES = {"test", "tests", "idle_test", "lib2to3", "idlelib", "site-packages", "dist-packages", "__pycache__"}
NOT_SOURCES |= {"encodings", "pydoc_data"}


class NextToken(DataModule):
    """Inputs int64 (block_size,); targets are the same tokens one place on. A subclass says which files.

    Args:
        block_size: tokens a network sees at once.
        vocab_size: larger than every token; networks read `${data.vocab_size}`.
        bytes_per_token: for bits per byte, read as `${data.bytes_per_token}`; 1.0 for bytes.
        max_eval_windows: validation and test take at most so many windows, evenly spread.
    """

    def __init__(
        self,
        block_size: int,
        vocab_size: int = 256,
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
        return Windows(chosen, windows, self.block_size, self.vocab_size)


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

    def __init__(self, files: list[str], windows: range, block_size: int, vocab_size: int) -> None:
        self.files, self.windows, self.block_size, self.vocab_size = files, windows, block_size, vocab_size
        self.ends = np.cumsum([num_tokens(file) for file in files])

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each int64 (batch, block_size)."""
        tokens = np.stack([self._window(self.windows[index] * self.block_size) for index in indices])
        self._refuse_outside(indices, tokens)
        windows = torch.from_numpy(tokens)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _refuse_outside(self, indices: list[int], tokens: np.ndarray) -> None:
        if tokens.min() >= 0 and tokens.max() < self.vocab_size:
            return
        for index, window in zip(indices, tokens, strict=True):
            file = self.files[np.searchsorted(self.ends, self.windows[index] * self.block_size, side="right")]
            refuse_tokens_outside(self.vocab_size, int(window.min()), int(window.max()), file)

    def _window(self, start: int) -> np.ndarray:
        window = np.empty(self.block_size + 1, dtype=np.int64)
        file, filled = int(np.searchsorted(self.ends, start, side="right")), 0
        while filled < len(window):
            tokens = read_only(self.files[file])
            offset = start + filled - (int(self.ends[file]) - len(tokens))
            piece = tokens[offset : offset + len(window) - filled]
            window[filled : filled + len(piece)] = piece
            file, filled = file + 1, filled + len(piece)
        return window
