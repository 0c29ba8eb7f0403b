"""Read files that others may have made or damaged: only regular files. Write a file whole or not at all."""

import errno
import json
import os
import socket
import stat
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

MAX_TEXT_BYTES = 2**28  # of a text file: none of ours is larger


def open_regular_file(path: str | Path) -> IO[bytes]:
    """Open a file for reading.

    Raises:
        OSError: the file cannot be opened or is not regular. Reading a pipe would block, and a device may be endless.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        rule = "is a directory" if stat.S_ISDIR(mode) else "must be a regular file"
        raise OSError(errno.EINVAL, rule, str(path))
    return os.fdopen(descriptor, "rb")


def open_for_append(path: Path) -> IO[bytes]:
    """Open a file for reading and appending, or create it. Reject links, which could lead anywhere."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "a+b")


def read_text(path: Path, errors: str = "strict") -> str:
    """Return the whole of a UTF-8 text file.

    Raises:
        OSError: the file cannot be read, is no regular file, or is larger than `MAX_TEXT_BYTES`.
        UnicodeDecodeError: the file is not UTF-8.
    """
    with open_regular_file(path) as stream:
        content = stream.read(MAX_TEXT_BYTES + 1)
    if len(content) > MAX_TEXT_BYTES:
        raise OSError(errno.EFBIG, f"must be at most {MAX_TEXT_BYTES >> 20} MiB", str(path))
    return content.decode(errors=errors)


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is no JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def source_checksum(project: Path, library: Path) -> str:
    """Return a checksum of a project's train.py and src/, and of the library: the same wherever the same code lies.

    A file that is gone once it is read is left out, as is the lock of an editor, a link to nowhere.

    Args:
        library: the package that the project uses, unless it has a copy in src/.
    """
    sources = {path.relative_to(project): path for path in [project / "train.py", *(project / "src").rglob("*.py")]}
    if not (project / "src" / library.name).exists():
        sources |= {Path("src", path.relative_to(library.parent)): path for path in library.rglob("*.py")}
    checksum = 0
    for name, path in sorted(sources.items()):
        with suppress(FileNotFoundError):
            checksum = zlib.crc32(path.read_bytes(), zlib.crc32(str(name).encode(), checksum))
    return f"{checksum:08x}"


def write_atomically(path: Path, text: str, *, errors: str = "strict", is_durable: bool = False) -> None:
    """Write a text file whole or not at all, see `complete_file`. Raises `OSError`."""
    with complete_file(path, is_durable=is_durable) as temporary:
        temporary.write_text(text, encoding="utf-8", errors=errors)


def write_durably(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file whole or not at all, and sync it to the disk: it survives a power cut. Raises `OSError`.

    One process writes it: what a killed one leaves behind, the next one overwrites.

    Args:
        write: called with the stream to write to.
    """
    temporary = path.with_name(f".{path.name}.part")
    with complete_file(path, temporary, is_durable=True), temporary.open("wb") as stream:
        write(stream)


@contextmanager
def complete_file(path: Path, temporary: Path | None = None, *, is_durable: bool = False) -> Iterator[Path]:
    """Yield the path of a temporary file, which takes the place of `path` once the block has written it.

    Whoever reads `path` meanwhile gets the old content. After an error the temporary file is removed.

    Args:
        temporary: None: under a name of its own, as another process may write the same file at the same time.
        is_durable: sync it to the disk, so that it survives a power cut.
    """
    temporary = temporary or temporary_path(path)
    try:
        yield temporary
        if is_durable:
            sync(temporary)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    if is_durable:
        sync(path.parent)


def temporary_path(path: Path) -> Path:
    """Return a path beside `path` that no other thread on any node uses."""
    return path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}.part")


def link_unless_taken(temporary: Path, path: Path) -> bool:
    """Give a complete file its name and return True; False if the name is taken."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return temporary.stat().st_nlink == 2  # NFS may have lost its answer to our own success
    except OSError:  # a file system without hard links
        try:
            with path.open("x", encoding="utf-8") as stream:
                stream.write(temporary.read_text(encoding="utf-8"))
        except FileExistsError:
            return False
    return True


def sync(path: Path) -> None:
    """Sync a file or a folder to the disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
