"""Your own text, as bytes or as tokens."""

from typing import Any

from hpc.data.text_files import list_text_files
from hpc.packed.next_token import NextToken


class Text(NextToken):
    """Files of text or of tokens, for predicting the next byte or token.

    Args:
        files: a path, a glob, a folder, or a list of them; `.npy` and `.bin` (uint16) hold tokens, other files text.
        val_files: the same, for validation and test. null: a tenth of `files` is held out.
        loading: further arguments of NextToken: block_size, vocab_size, global_batch_size, stage, seed, ...
    """

    def __init__(self, files: str | list[str], val_files: str | list[str] | None = None, **loading: Any) -> None:
        super().__init__(**loading)
        self.files, self.val_files = files, val_files

    def list_files(self) -> tuple[list[str], list[str]]:
        """Return (training files, validation files). If the latter are empty, a tenth of the former is held out."""
        return list_text_files(self.files, self.val_files)
