"""Files of text or tokens as arrays: mapped, split into training, validation and test; notes of packed ones.

No torch here.
"""

import functools
import hashlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpc.config.errors import ConfigError
from hpc.data.text_files import is_token_file, sort_by_hash
from hpc.packed.packed_file import FileParts, file_parts, map_array, read_notes

if TYPE_CHECKING:
    import numpy as np

SPLIT_TWENTIETHS = {"train": (0, 18), "val": (18, 19), "test": (19, 20)}


def windows_of_split(
    split: str, files: list[str], *, val_files: list[str], block_size: int, max_eval_windows: int | None = None
) -> tuple[list[str], range]:
    """Return the files of "train", "val" or "test", and the numbers of their windows that are its samples.

    The windows are those of the files laid end to end. With `val_files`, val and test use all of these. Without, the
    files are sorted by a hash of their names and cut at 18 and 19 twentieths. Fewer than 20 files stay together, and
    their windows are cut instead.
    """
    share: tuple[int, int] = SPLIT_TWENTIETHS[split]
    if val_files:
        files, share = (files if split == "train" else val_files), (0, 20)
    elif len(files) >= 20:
        files, share = sort_by_hash(files)[_slice_of_share(len(files), share)], (0, 20)
    windows = range(max(0, sum(map(num_tokens, files)) - 1) // block_size)
    windows = windows[_slice_of_share(len(windows), share)]
    if max_eval_windows and split != "train":
        windows = windows[:: max(1, -(-len(windows) // max_eval_windows))]
    return files, windows


def num_tokens(file: str) -> int:
    """Return the number of tokens in a token file, of bytes in any other."""
    return len(map_file(file)) if is_token_file(file) else os.path.getsize(file)


@functools.lru_cache(maxsize=256)  # each holds a file descriptor
def map_file(file: str) -> "np.memmap":
    """Map a file into memory as a one-dimensional array: `.npy` by its header, `.bin` as uint16, others as bytes.

    Raises:
        ConfigError: a token file does not hold integers in one dimension.
    """
    import numpy as np

    if file.endswith(".npy"):
        array = map_array(file, config_key="data.files")
    else:
        try:
            array = np.memmap(file, dtype="<u2" if is_token_file(file) else np.uint8, mode="r")
        except (OSError, ValueError) as error:
            rule = f"A .bin file must hold uint16 in little-endian order. This one cannot be read: {error}"
            raise ConfigError("data.files", file, rule, "write the file again") from None
    if array.ndim != 1 or array.dtype.kind not in "ui":
        rule = f"A .npy file must hold integers in one dimension; this one holds {array.dtype} of shape {array.shape}"
        raise ConfigError("data.files", file, rule, "write the file again")
    return array


def reject_tokens_outside(vocab_size: int, *, smallest: int, largest: int, file: str) -> None:
    """Raise `ConfigError` for a token that is negative or beyond the vocabulary, which is the network's outputs.

    Such a token would stop the run in the middle; on a GPU, without a clear message.
    """
    if smallest < 0:
        rule = f"Tokens cannot be negative; this file holds {smallest}"
        raise ConfigError("data.files", file, rule, "write the file again")
    if largest >= vocab_size:
        # 50304 is the vocabulary of GPT-2 (50257), rounded up to whole tiles of matrices.
        size = 256 if largest < 256 else max(50304, -(-(largest + 1) // 64) * 64)
        rule = f"must be larger than every token ({file} holds {largest})"
        raise ConfigError("data.vocab_size", vocab_size or "null", rule, f"data.vocab_size={size}")


def read_token_notes(file: str) -> dict[str, Any] | None:
    """Return the notes of a token file; None if it has none. Raise `ConfigError` as `read_notes`."""
    is_array = file.endswith(".npy")
    return read_notes(file, map_file(file), config_key="data.files") if is_array else None


def vocab_size_and_bytes_per_token(files: Sequence[str]) -> tuple[int | None, float | None]:
    """Return (vocabulary size, bytes per token) of text, or as noted beside token files; (None, None) if unknown.

    Raises:
        ConfigError: the files are of several tokenizers.
    """
    if not is_token_file(files[0]):
        return 256, 1.0
    notes_of = {file: notes for file in files if (notes := read_token_notes(file))}
    if len(notes_of) < len(files):
        return None, None
    tokenizer = notes_of[files[0]]["tokenizer"]
    for file, notes in notes_of.items():
        if notes["tokenizer"] != tokenizer:
            rule = "All files must be of one tokenizer; "
            rule += f"{files[0]} is of {tokenizer}, and this one of {notes['tokenizer']}"
            raise ConfigError("data.files", file, rule, "files of one tokenizer")
    num = sum(map(num_tokens, files))
    size = sum(num_tokens(file) * notes["bytes_per_token"] for file, notes in notes_of.items())
    return max(notes["vocab_size"] for notes in notes_of.values()), size / num


def text_checksum(files: Sequence[str]) -> str:
    """Return a checksum of the files' names, sizes and noted checksums; a copy of their folder has the same."""
    root = os.path.commonpath([os.path.dirname(os.path.abspath(file)) for file in files])
    digest = hashlib.sha256()
    for file in files:
        notes = read_token_notes(file)
        facts = [os.path.relpath(os.path.abspath(file), root), os.path.getsize(file), notes and notes["checksum"]]
        digest.update(repr(facts).encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def token_parts(file: str) -> FileParts:
    """Return the parts of a packed token file and their checksums. Raise `ConfigError` if it was not packed."""
    notes = read_token_notes(file)
    if notes is None:
        rule = f"Staging copies packed files, and {file} was not packed"
        fix = "python tools/pack.py data.files=... out=<file>.npy, or data.stage=false"
        raise ConfigError("data.stage", True, rule, fix)
    return file_parts(file, map_file(file), notes)


def _slice_of_share(num: int, twentieths: tuple[int, int]) -> slice:
    return slice(num * twentieths[0] // 20, num * twentieths[1] // 20)
