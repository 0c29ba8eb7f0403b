"""What tools/pack.py leaves beside a token file `x.npy`: `x.npy.json` says vocabulary and checksums. No torch.

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


def read_notes(file: str) -> dict[str, Any] | None:
    """What is noted of a token file; None: nothing.

    Raises:
        ConfigError: the note cannot be read, or is that of another file.
    """
    path = f"{file}.json"
    if not os.path.exists(path):
        return None
    try:
        with open(path, encoding="utf-8") as stream:
            noted = json.load(stream)
        numbers = [noted[key] + 0 for key in NUMBER_KEYS]
        dtype, whole = noted["dtype"], noted["checksum"] == notes_checksum(noted)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "data.files", path, f"is what tools/pack.py has written; {error!r}", COPY_OR_PACK_AGAIN
        ) from None
    tokens = map_file(file)
    if not whole or (len(tokens), str(tokens.dtype)) != (numbers[0], dtype):
        rule = f"{path} describes it: {numbers[0]} tokens, {dtype}; it holds {len(tokens)}, {tokens.dtype}"
        raise ConfigError("data.files", file, rule, COPY_OR_PACK_AGAIN)
    return noted


def notes_checksum(noted: dict[str, Any]) -> str:
    """Of all that is noted and, through the parts, of the tokens."""
    rest = {key: value for key, value in noted.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_vocabulary(files: Sequence[str]) -> tuple[int | None, float | None]:
    """(vocabulary size, bytes per token) of text, or as noted of token files; None: not known.

    Raises:
        ConfigError: files of several tokenizers.
    """
    if not is_token_file(files[0]):
        return 256, 1.0
    known = {file: noted for file in files if (noted := read_notes(file))}
    if len(known) < len(files):
        return None, None
    first = known[files[0]]
    for file, noted in known.items():
        if noted["tokenizer"] != first["tokenizer"]:
            rule = f"one tokenizer made all files; {files[0]} is of {first['tokenizer']}, this of {noted['tokenizer']}"
            raise ConfigError("data.files", file, rule, "files of one tokenizer")
    num = sum(noted["tokens"] for noted in known.values())
    size = sum(noted["tokens"] * noted["bytes_per_token"] for noted in known.values())
    return max(noted["vocab_size"] for noted in known.values()), size / num


def describe_text(files: Sequence[str]) -> str:
    """By what files are known again, in a copy of their folder, too: names, sizes, checksums of what was packed."""
    root = os.path.commonpath([os.path.dirname(os.path.abspath(file)) for file in files])
    digest = hashlib.sha256()
    for file in files:
        noted = read_notes(file) if is_token_file(file) else None
        known = [os.path.relpath(os.path.abspath(file), root), os.path.getsize(file), noted and noted["checksum"]]
        digest.update(repr(known).encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def token_parts(file: str) -> FileParts:
    """The checksums of a packed token file. Raises `ConfigError` where there are none."""
    noted = read_notes(file) if is_token_file(file) else None
    if noted is None:
        fix = "python tools/pack.py data.files=... out=<file>.npy, or data.stage=false"
        raise ConfigError("data.stage", True, f"copies packed files; {file} was not packed", fix)
    tokens = map_file(file)
    sizes = [num * tokens.itemsize for num, _ in noted["parts"]]
    offset = os.path.getsize(file) - tokens.nbytes
    return FileParts(file, offset, sizes, [crc for _, crc in noted["parts"]], noted["checksum"])


def npy_header(num: int, dtype: str) -> bytes:
    """What stands before the tokens in a .npy file; always of the same length."""
    import numpy as np

    stream = io.BytesIO()
    form: dict[str, Any] = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (num,)}
    np.lib.format.write_array_header_1_0(stream, form)
    return stream.getvalue()


def write_header_and_notes(descriptor: int, out: str, *, notes: dict[str, Any], done: list[Any]) -> None:
    """The header before the tokens, and the note beside them: it is there when the tokens get their name.

    Args:
        notes: as `tokenizing.described`; completed here.
        done: of each part (bytes of tokens, their crc32, bytes of text).

    Raises:
        OSError: the disk is full, say.
    """
    item = {"uint8": 1, "uint16": 2, "uint32": 4}[notes["dtype"]]
    num = sum(size for size, _, _ in done) // item
    write_at(descriptor, memoryview(npy_header(num, notes["dtype"])), offset=0)
    notes["tokens"], notes["parts"] = num, [[size // item, crc] for size, crc, _ in done]
    notes["bytes_per_token"] = sum(length for _, _, length in done) / num
    notes["checksum"] = notes_checksum(notes)
    with open(f"{out}.json.part", "w", encoding="utf-8") as stream:
        json.dump(notes, stream)
    os.replace(f"{out}.json.part", f"{out}.json")
