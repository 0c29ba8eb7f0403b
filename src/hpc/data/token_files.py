"""The notes that tools/pack.py writes beside a token file `x.npy`: `x.npy.json`. No torch here.

Keys: tokens, dtype, vocab_size (a multiple of 64, so that matrices have whole tiles), bytes_per_token (measured),
tokenizer, end_of_text (the token between files, or null), sources, parts ([tokens, crc32] each), checksum.
"""

import hashlib
import io
import json
import os
from collections.abc import Sequence
from typing import Any

from hpc.config.errors import ConfigError
from hpc.data.file_parts import COPY_OR_PACK_AGAIN, FileParts
from hpc.data.packing import write_at
from hpc.data.text_files import is_token_file, map_file

NUMBER_KEYS = ("tokens", "vocab_size", "bytes_per_token")


def read_metadata(file: str) -> dict[str, Any] | None:
    """Return the notes of a token file; None if it has none.

    Raises:
        ConfigError: the notes cannot be read, or are those of another file.
    """
    path = f"{file}.json"
    if not os.path.exists(path):
        return None
    try:
        with open(path, encoding="utf-8") as stream:
            notes = json.load(stream)
        numbers = [notes[key] + 0 for key in NUMBER_KEYS]  # raises TypeError for anything but a number
        dtype, is_unchanged = notes["dtype"], notes["checksum"] == notes_checksum(notes)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        rule = f"The file must be as tools/pack.py has written it ({reason})"
        raise ConfigError("data.files", path, rule, COPY_OR_PACK_AGAIN) from None
    tokens = map_file(file)
    if not is_unchanged or (len(tokens), str(tokens.dtype)) != (numbers[0], dtype):
        rule = f"The file must hold {numbers[0]} tokens of {dtype}, as noted in {path}; "
        rule += f"it holds {len(tokens)} tokens of {tokens.dtype}" if is_unchanged else "these notes have changed"
        raise ConfigError("data.files", file, rule, COPY_OR_PACK_AGAIN)
    return notes


def notes_checksum(notes: dict[str, Any]) -> str:
    """Return a checksum of the notes without their own checksum; through those of the parts, it covers the tokens."""
    rest = {key: value for key, value in notes.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def vocab_size_and_bytes_per_token(files: Sequence[str]) -> tuple[int | None, float | None]:
    """Return (vocabulary size, bytes per token) of text, or as noted beside token files; (None, None) if unknown.

    Raises:
        ConfigError: the files are of several tokenizers.
    """
    if not is_token_file(files[0]):
        return 256, 1.0
    notes_of = {file: notes for file in files if (notes := read_metadata(file))}
    if len(notes_of) < len(files):
        return None, None
    tokenizer = notes_of[files[0]]["tokenizer"]
    for file, notes in notes_of.items():
        if notes["tokenizer"] != tokenizer:
            rule = "All files must be of one tokenizer; "
            rule += f"{files[0]} is of {tokenizer}, and this one of {notes['tokenizer']}"
            raise ConfigError("data.files", file, rule, "files of one tokenizer")
    num = sum(notes["tokens"] for notes in notes_of.values())
    size = sum(notes["tokens"] * notes["bytes_per_token"] for notes in notes_of.values())
    return max(notes["vocab_size"] for notes in notes_of.values()), size / num


def text_checksum(files: Sequence[str]) -> str:
    """Return a checksum of the files' names, sizes and noted checksums; a copy of their folder has the same."""
    root = os.path.commonpath([os.path.dirname(os.path.abspath(file)) for file in files])
    digest = hashlib.sha256()
    for file in files:
        notes = read_metadata(file) if is_token_file(file) else None
        facts = [os.path.relpath(os.path.abspath(file), root), os.path.getsize(file), notes and notes["checksum"]]
        digest.update(repr(facts).encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def token_parts(file: str) -> FileParts:
    """Return the parts of a packed token file and their checksums. Raise `ConfigError` if it was not packed."""
    notes = read_metadata(file) if is_token_file(file) else None
    if notes is None:
        rule = f"Staging copies packed files, and {file} was not packed"
        fix = "python tools/pack.py data.files=... out=<file>.npy, or data.stage=false"
        raise ConfigError("data.stage", True, rule, fix)
    tokens = map_file(file)
    sizes = [num * tokens.itemsize for num, _ in notes["parts"]]
    offset = os.path.getsize(file) - tokens.nbytes
    return FileParts(file, offset, sizes, [crc for _, crc in notes["parts"]], notes["checksum"])


def npy_header(num: int, dtype: str) -> bytes:
    """Return the bytes before `num` tokens in a .npy file; their length does not depend on `num`."""
    import numpy as np

    stream = io.BytesIO()
    form: dict[str, Any] = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (num,)}
    np.lib.format.write_array_header_1_0(stream, form)
    return stream.getvalue()


def write_header_and_notes(descriptor: int, out: str, *, notes: dict[str, Any], done: list[Any]) -> None:
    """Write the header before the tokens, and the notes beside them, before the token file gets its name.

    Args:
        notes: the result of `tokenizing.token_metadata`; completed in place.
        done: for each part, (bytes of tokens, their crc32, bytes of text).

    Raises:
        OSError: the disk is full, for example.
    """
    token_bytes = {"uint8": 1, "uint16": 2, "uint32": 4}[notes["dtype"]]
    num = sum(size for size, _, _ in done) // token_bytes
    if not num:
        rule = "must hold text; the tokenizer makes no token of it"
        raise ConfigError("data.files", None, rule, "files that are not empty, or another tokenizer=")
    write_at(descriptor, memoryview(npy_header(num, notes["dtype"])), offset=0)
    notes["tokens"], notes["parts"] = num, [[size // token_bytes, crc] for size, crc, _ in done]
    notes["bytes_per_token"] = sum(length for _, _, length in done) / num
    notes["checksum"] = notes_checksum(notes)
    with open(f"{out}.json.part", "w", encoding="utf-8") as stream:
        json.dump(notes, stream)
    os.replace(f"{out}.json.part", f"{out}.json")
