"""Files of text or tokens as samples for predicting the next token."""

from typing import Any

from torch.utils.data import Dataset

from hpc.packed.datasets import TokenWindows
from hpc.packed.packed_file import FileParts
from hpc.packed.staged_data import StagedDataModule
from hpc.packed.token_files import text_checksum, token_parts, vocab_size_and_bytes_per_token, windows_of_split


class NextToken(StagedDataModule):
    """Base class for text data: inputs int64 (block_size,), and as targets the same tokens shifted by one.

    A subclass implements `list_files`.

    Args:
        block_size: tokens that the network sees at once.
        vocab_size: larger than every token; networks read `${data.vocab_size}`. Null: as noted beside the files.
        bytes_per_token: for bits per byte, read as `${data.bytes_per_token}`; 1.0 for bytes. Null: as noted.
        max_eval_windows: use at most so many windows, evenly spread, for validation and for the test.
    """

    def __init__(
        self,
        *,
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
        """Return files for training and for validation; without the latter, a tenth of the former is held out."""
        raise NotImplementedError

    def dataset(self, split: str) -> Dataset:
        split_files, windows = self._windows(split)
        noted_size = vocab_size_and_bytes_per_token(split_files)[0]
        vocab_size = self.vocab_size or noted_size or 0  # 0: the first batch is rejected
        # The tokenizer that made the file, and its checksums, ensure that no token is larger.
        is_large_enough = noted_size is not None and noted_size <= vocab_size
        files = [self._local_file(file) for file in split_files]
        checked_size = None if is_large_enough else vocab_size
        return TokenWindows(files, windows, block_size=self.block_size, vocab_size=checked_size)

    def describe(self, split: str) -> dict[str, Any]:
        split_files, windows = self._windows(split)
        return {"files": text_checksum(split_files), "windows": [windows.start, windows.stop, windows.step]}

    def files_to_stage(self) -> list[FileParts]:
        files, val_files = self.list_files()
        return [token_parts(file) for file in files + val_files]

    def _local_file(self, file: str) -> str:
        """Return the path of the file's copy on this node, or of the file itself if it is not staged."""
        return self.local_path(token_parts(file)) if self.stage else file

    def _windows(self, split: str) -> tuple[list[str], range]:
        """Return the files of a split and the numbers of its windows in them."""
        files, val_files = self.list_files()
        return windows_of_split(
            split, files, val_files=val_files, block_size=self.block_size, max_eval_windows=self.max_eval_windows
        )
