"""Make one large file out of many small ones, and verify it. Imports no torch."""

import os
from collections.abc import Sequence

from hpc.config.errors import ConfigError
from hpc.data import file_parts, pack_images, pack_request, pack_text, packed_files, packing, token_files


def pack(words: Sequence[str]) -> list[str]:
    """Pack what these words name; return the lines that say so. Interrupted, the same words go on.

    Raises:
        ConfigError: the words cannot be meant, or what they name cannot be packed.
    """
    asked = pack_request.read(words)
    try:
        if asked.kind == "images":
            return pack_images.pack(asked.data, asked.out)
        return pack_text.pack(asked.data, asked.out, tokenizer=asked.tokenizer)
    except OSError as error:
        fix = "make room there, or another out=" if packing.no_room(error) else "out=<a file in a folder of yours>"
        rule = f"{error.strerror or error}; what is packed so far is kept, and the same command goes on"
        raise ConfigError("out", asked.out, rule, fix) from None
    except KeyboardInterrupt:
        rule = "interrupted; what is packed so far is kept"
        raise ConfigError("out", asked.out, rule, "the same command goes on") from None


def verify(file: str) -> list[str]:
    """Compare a file with its checksums; return the line that says so. Raises `ConfigError` where they differ."""
    path = os.path.abspath(file)
    is_packed = path.endswith(pack_request.SUFFIX["images"])
    if not is_packed and not os.path.exists(f"{path}.json"):
        raise ConfigError("--verify", path, "is a file that this program made", "--verify FILE.h5, or FILE.npy")
    parts = packed_files.read(path).parts if is_packed else token_files.token_parts(path)
    num = file_parts.verify(parts, "data.file" if is_packed else "data.files")
    return [f"{path}: as it was packed ({num} parts, checksum {parts.checksum[:16]})"]
