"""Files of text or tokens as samples for predicting the next token."""

from typing import Any

from torch.utils.data import Dataset

from hpc.data.data_module import DataModule
from hpc.data.file_parts import FileParts
from hpc.data.text_files import split_text
from hpc.data.token_files import describe_text, read_vocabulary, token_parts
from hpc.data.token_windows import TokenWindows


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
        """Return files for training and for validation; of the former a tenth is held out when the latter are none."""
        raise NotImplementedError

    def dataset(self, split: str) -> Dataset:
        chosen, windows = split_text(split, *self.list_files(), self.block_size, self.max_eval_windows)
        told = read_vocabulary(chosen)[0]
        vocab_size = self.vocab_size or told or 0  # 0: the first batch is rejected
        known = told is not None and told <= vocab_size  # by the tokenizer that made the file, and its checksums
        files, largest = [self.near(file) for file in chosen], None if known else vocab_size
        return TokenWindows(files, windows, block_size=self.block_size, vocab_size=largest)

    def describe(self, split: str) -> dict[str, Any]:
        chosen, windows = split_text(split, *self.list_files(), self.block_size, self.max_eval_windows)
        return {"files": describe_text(chosen), "windows": [windows.start, windows.stop, windows.step]}

    def files_to_stage(self) -> list[FileParts]:
        files, val_files = self.list_files()
        return [token_parts(file) for file in files + val_files]

    def near(self, file: str) -> str:
        """Return the file itself, or its copy on this node."""
        return self.local_path(token_parts(file)) if self.stage else file
