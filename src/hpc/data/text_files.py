"""Files of text or tokens, listed. No torch here."""

import errno
import glob
import hashlib
import os
from collections.abc import Sequence
from typing import Any

from hpc.config.errors import ConfigError
from hpc.system.files import open_regular_file

TOKEN_SUFFIXES = (".npy", ".bin")  # any other file is text, read as bytes
ARCHIVE_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".7z", ".tar")
BINARY_SUFFIXES = (*ARCHIVE_SUFFIXES, ".parquet", ".arrow", ".h5", ".pdf", ".pt")
EXAMPLE_SUFFIXES = {".txt": "text", ".json": "json", ".jsonl": "json"}  # and the loader of `datasets` for them


def list_text_files(files: Any, val_files: Any = None) -> tuple[list[str], list[str]]:
    """Return the files for training and, if given, for validation.

    Args:
        files: a path, a glob, a folder, or a list of them.
        val_files: the same, for validation and the test; empty or None: no such files.

    Raises:
        ConfigError: there are no files, one cannot be read, tokens are among text, or a file serves both purposes.
    """
    train_paths = _expand("data.files", files)
    val_paths = _expand("data.val_files", val_files) if val_files else []
    reject_binary_files(train_paths + val_paths)
    for file in train_paths + val_paths:
        if is_token_file(file) != is_token_file(train_paths[0]):
            rule = f"Either all files must hold tokens ({', '.join(TOKEN_SUFFIXES)}) or none of them; "
            rule += f"{train_paths[0]} differs from this one"
            raise ConfigError("data.files", file, rule, "choose with a pattern, as in data.files='folder/*.bin'")
    train_files = set(map(os.path.realpath, train_paths))
    if shared := [file for file in val_paths if os.path.realpath(file) in train_files]:
        rule = "cannot name a file of data.files: validation must not see what is trained on"
        raise ConfigError("data.val_files", shared[0], rule, "leave it out of data.files")
    return train_paths, val_paths


def list_examples(files: Any, val_files: Any = None) -> tuple[list[str], list[str], str]:
    """Return the files for training and for validation, as `list_text_files`, and "text" or "json", which all are.

    Raises:
        ConfigError: as there, or a file is neither, or they differ.
    """
    train_files, eval_files = list_text_files(files, val_files)
    kinds = [EXAMPLE_SUFFIXES.get(os.path.splitext(file)[1].lower()) for file in train_files + eval_files]
    for i, (file, kind) in enumerate(zip(train_files + eval_files, kinds, strict=True)):
        key = "data.files" if i < len(train_files) else "data.val_files"
        if kind is None or kind != kinds[0]:
            rule = "Either all files must be .txt, or all must be .json or .jsonl"
            rule += f"; {train_files[0]} differs from this one" if kind else ""
            raise ConfigError(key, file, rule, f"choose with a pattern, as in {key}='folder/*.txt'")
    return train_files, eval_files, str(kinds[0])


def sort_by_hash(files: list[str]) -> list[str]:
    """Return files in the order of a hash of their names below their common folder: as good as shuffled."""
    root = os.path.commonpath(list(map(os.path.abspath, files)))
    return sorted(files, key=lambda file: hashlib.sha256(os.fsencode(os.path.relpath(file, root))).digest())


def is_token_file(file: str) -> bool:
    """Return whether a file holds tokens rather than text."""
    return file.endswith(TOKEN_SUFFIXES)


def reject_binary_files(files: Sequence[str]) -> None:
    """Raise `ConfigError` for a file whose suffix says that it is neither text nor tokens."""
    if binary := [file for file in files if file.lower().endswith(BINARY_SUFFIXES)]:
        rule = f"The file must be text, tokens ({', '.join(TOKEN_SUFFIXES)}), or bytes of your own under another name"
        fix = "unpack it, or choose with a pattern: data.files='folder/*.txt'"
        raise ConfigError("data.files", binary[0], rule, fix)


def _expand(key: str, patterns: Any) -> list[str]:
    """Return the files with content that paths, globs and folders name, each once."""
    patterns = [patterns] if isinstance(patterns, str) else patterns or []
    fix = f"{key}=<a path, a folder or a glob>"
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigError(key, patterns, "must be a path or a list of paths", fix)
    if repeated := next((pattern for pattern in patterns if patterns.count(pattern) > 1), None):
        rule = "cannot name a file twice, as each file is read once"
        raise ConfigError(key, repeated, rule, "each name once, or copies of the file")
    files: list[str] = []
    for pattern in patterns:
        path = os.path.expanduser(pattern)
        if os.path.isdir(path):
            matches = _files_below(path)
        else:
            matches = [path] if os.path.isfile(path) else sorted(glob.glob(path, recursive=True))
        if not matches:
            raise ConfigError(key, pattern, "There are no such files", fix)
        files += matches
    # Each file once: a glob with ** follows links, also those that lead back to where they are.
    file_of: dict[tuple[int, int], str] = {}
    for file in files:
        if identity := _read_inode(key, file):
            file_of.setdefault(identity, file)
    if not file_of:
        raise ConfigError(key, patterns, "There are no such files with content", fix)
    return list(file_of.values())


def _files_below(folder: str) -> list[str]:
    """Return all files below a folder, through links, without hidden ones."""
    files, visited = [], set()
    for root, folders, names in os.walk(folder, followlinks=True):
        if (real_path := os.path.realpath(root)) in visited:  # a link may lead back
            folders.clear()
            continue
        visited.add(real_path)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [os.path.join(root, name) for name in sorted(names) if not name.startswith(".")]
    return files


def _read_inode(key: str, file: str) -> tuple[int, int] | None:
    """Return the device and inode of a file; None if it is empty. Raise `ConfigError` if it cannot be read."""
    try:
        with open_regular_file(file) as stream:
            status = os.fstat(stream.fileno())
            return (status.st_dev, status.st_ino) if stream.read(1) else None
    except OSError as error:
        fix = "remove this link" if error.errno == errno.ELOOP else f"chmod +r {file}, or leave it out"
        raise ConfigError(key, file, f"The file cannot be read: {error.strerror}", fix) from None
