"""Your own text, as bytes or as tokens, for predicting the next one."""

from typing import Any

from hpc.data.next_token import NextToken
from hpc.data.text_files import list_text


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
