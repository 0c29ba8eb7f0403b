"""Read files that others may have made or damaged: only regular files. Write a file whole or not at all."""

import errno
import json
import os
import socket
import stat
import zlib
from pathlib import Path
from typing import IO, Any

MAX_TEXT_BYTES = 2**28  # bytes of a text: none of ours is larger


def open_regular_file(path: str | Path) -> IO[bytes]:
    """A file to read. A pipe would be waited for, and a device may have no end: both raise `OSError`."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(kind := os.fstat(number).st_mode):
        os.close(number)
        is_folder = stat.S_ISDIR(kind)
        raise OSError(errno.EINVAL, "is a directory" if is_folder else "must be a regular file", str(path))
    return os.fdopen(number, "rb")


def open_for_append(path: Path) -> IO[bytes]:
    """A file to read and to add to, which is made where there is none; no link, which could lead anywhere."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "a+b")


def read_text(path: Path, errors: str = "strict") -> str:
    """The whole of a UTF-8 text. Raises `OSError`, `UnicodeDecodeError`."""
    with open_regular_file(path) as stream:
        content = stream.read(MAX_TEXT_BYTES + 1)
    if len(content) > MAX_TEXT_BYTES:
        raise OSError(errno.EFBIG, f"must be at most {MAX_TEXT_BYTES >> 20} MB", str(path))
    return content.decode(errors=errors)


def parse_json(words: str | bytes) -> Any:
    """JSON. Raises `ValueError` for whatever is none, also where it is nested too deeply."""
    try:
        return json.loads(words)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def source_checksum(code: Path) -> str:
    """Of the sources, the same wherever the same code lies."""
    total = 0
    for path in sorted([code / "train.py", *(code / "src").rglob("*.py")]):
        total = zlib.crc32(path.read_bytes(), zlib.crc32(str(path.relative_to(code)).encode(), total))
    return f"{total:08x}"


def write_atomically(path: Path, text: str) -> None:
    """Write a file whole or not at all: whoever reads it at this moment has the old one."""
    aside = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.part")  # another may write it, too
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
