"""Files of text or tokens: listed, split into training, validation and test, memory-mapped. Imports no torch."""

import errno
import functools
import glob
import hashlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpc.config.errors import ConfigError
from hpc.system.files import open_regular_file

if TYPE_CHECKING:
    import numpy as np

TOKEN_SUFFIXES = (".npy", ".bin")  # any other file is text, read as bytes
BINARY_SUFFIXES = (
    ".gz",
    ".bz2",
    ".xz",
    ".zst",
    ".lz4",
    ".zip",
    ".7z",
    ".tar",
    ".parquet",
    ".arrow",
    ".h5",
    ".pdf",
    ".pt",
)
SPLIT_TWENTIETHS = {"train": (0, 18), "val": (18, 19), "test": (19, 20)}


def list_text(files: Any, val_files: Any = None) -> tuple[list[str], list[str]]:
    """Files for training and, if given, for validation. Each: a path, a glob, a folder, or a list of them.

    Raises:
        ConfigError: nothing found, a file that cannot be read, tokens among text, or a file for both purposes.
    """
    train = _expand("data.files", files)
    val = _expand("data.val_files", val_files) if val_files else []
    reject_binary_files(train + val)
    for file in train + val:
        if is_token_file(file) != is_token_file(train[0]):
            rule = f"either all files hold tokens ({', '.join(TOKEN_SUFFIXES)}) or none does; {train[0]} is not like it"
            raise ConfigError("data.files", file, rule, "choose with a pattern, as in data.files='folder/*.bin'")
    known = set(map(os.path.realpath, train))
    if both := [file for file in val if os.path.realpath(file) in known]:
        raise ConfigError("data.val_files", both[0], "what validates is not trained on", "leave it out of data.files")
    return train, val


def split_text(
    split: str, files: list[str], *, val_files: list[str], block_size: int, max_eval_windows: int | None = None
) -> tuple[list[str], range]:
    """The files of "train", "val" or "test", to be laid end to end, and which windows of them are its samples.

    `val_files` serve val and test. Without them the files, in the order of a hash of their names, are cut at 18 and 19
    twentieths; fewer than 20 files stay together, and their windows are cut instead.
    """
    share: tuple[int, int] = SPLIT_TWENTIETHS[split]
    if val_files:
        files, share = (files if split == "train" else val_files), (0, 20)
    elif len(files) >= 20:
        files, share = sort_by_hash(files)[_part(len(files), share)], (0, 20)
    windows = range(max(0, sum(map(num_tokens, files)) - 1) // block_size)
    windows = windows[_part(len(windows), share)]
    if max_eval_windows and split != "train":
        windows = windows[:: max(1, -(-len(windows) // max_eval_windows))]
    return files, windows


def sort_by_hash(files: list[str]) -> list[str]:
    """Files in the order of a hash of their names below the folder that they share: as good as shuffled."""
    root = os.path.commonpath(list(map(os.path.abspath, files)))
    return sorted(files, key=lambda file: hashlib.sha256(os.fsencode(os.path.relpath(file, root))).digest())


def is_token_file(file: str) -> bool:
    """Whether a file holds tokens rather than text."""
    return file.endswith(TOKEN_SUFFIXES)


def num_tokens(file: str) -> int:
    """Tokens in a token file, bytes in any other."""
    return len(map_file(file)) if is_token_file(file) else os.path.getsize(file)


@functools.lru_cache(maxsize=256)  # each holds a file descriptor
def map_file(file: str) -> "np.ndarray":
    """A file as a memory-mapped array of one dimension: `.npy` as it says, `.bin` as uint16, any other as bytes.

    Raises:
        ConfigError: a token file that does not hold integers in one dimension.
    """
    import numpy as np

    rule = "a .npy file holds integers in one dimension, a .bin file uint16 in little-endian order"
    try:
        if file.endswith(".npy"):
            array = np.load(file, mmap_mode="r")
        else:
            array = np.memmap(file, dtype="<u2" if is_token_file(file) else np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise ConfigError("data.files", file, f"{rule}; {error}", "write the file again") from None
    if array.ndim != 1 or array.dtype.kind not in "ui":
        raise ConfigError("data.files", file, f"{rule}; this is {array.dtype} {array.shape}", "write the file again")
    return array


def reject_tokens_outside(vocab_size: int, *, smallest: int, largest: int, file: str) -> None:
    """A token beyond the network's outputs would stop the run in the middle, on a GPU without a message."""
    if smallest < 0:
        raise ConfigError("data.files", file, f"tokens are not negative; here is {smallest}", "write the file again")
    if largest >= vocab_size:
        fix = 256 if largest < 256 else max(50304, -(-(largest + 1) // 64) * 64)  # 50304: GPT-2's 50257, in whole tiles
        rule = f"is larger than every token; {file} holds {largest}"
        raise ConfigError("data.vocab_size", vocab_size or "null", rule, f"data.vocab_size={fix}")


def _expand(key: str, patterns: Any) -> list[str]:
    patterns = [patterns] if isinstance(patterns, str) else patterns or []
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigError(key, patterns, "must be a path or a list of paths", f"{key}=<a path, a folder or a glob>")
    if twice := next((pattern for pattern in patterns if patterns.count(pattern) > 1), None):
        raise ConfigError(key, twice, "is named twice, and each file is read once", "each once, or copies")
    files: list[str] = []
    for pattern in patterns:
        path = os.path.expanduser(pattern)
        exists = [path] if os.path.isfile(path) else sorted(glob.glob(path, recursive=True))
        found = _files_below(path) if os.path.isdir(path) else exists
        if not found:
            raise ConfigError(key, pattern, "names files; there are none", f"{key}=<a path, a folder or a glob>")
        files += found
    # Each once: a glob with ** follows links, also those that lead back to where they are.
    once: dict[tuple[int, int], str] = {}
    for file in files:
        if same := _content(key, file):
            once.setdefault(same, file)
    files = list(once.values())
    if not files:
        raise ConfigError(
            key, patterns, "names files with content; there are none", f"{key}=<a path, a folder or a glob>"
        )
    return files


def reject_binary_files(files: Sequence[str]) -> None:
    """Raise `ConfigError` for a file that would be read as bytes, and holds other things than text."""
    if found := [file for file in files if file.lower().endswith(BINARY_SUFFIXES)]:
        rule = f"must be text, tokens ({', '.join(TOKEN_SUFFIXES)}), or bytes of your own under another name"
        raise ConfigError(
            "data.files", found[0], rule, "unpack it, or choose with a pattern: data.files='folder/*.txt'"
        )


def _files_below(folder: str) -> list[str]:
    found, seen = [], set()
    for root, folders, names in os.walk(folder, followlinks=True):
        if (place := os.path.realpath(root)) in seen:  # a link may lead back
            folders.clear()
            continue
        seen.add(place)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [os.path.join(root, name) for name in sorted(names) if not name.startswith(".")]
    return found


def _content(key: str, file: str) -> tuple[int, int] | None:
    """What tells a file from all others; None: it is empty."""
    if file.endswith(".part"):
        rule = "is a whole file; this one is from a packing that was interrupted"
        raise ConfigError(key, file, rule, "the same tools/pack.py again, then the file that it makes")
    try:
        with open_regular_file(file) as stream:
            found = os.fstat(stream.fileno())
            return (found.st_dev, found.st_ino) if stream.read(1) else None
    except OSError as error:
        fix = "remove this link" if error.errno == errno.ELOOP else f"chmod +r {file}, or leave it out"
        raise ConfigError(key, file, f"can be read; {error.strerror}", fix) from None


def _part(num: int, twentieths: tuple[int, int]) -> slice:
    return slice(num * twentieths[0] // 20, num * twentieths[1] // 20)
