"""Pack many small files into one large file, and verify such a file: tools/pack.py. No torch here."""

import os
from collections.abc import Sequence

from hpc.config.errors import ConfigError
from hpc.data import file_parts, pack_images, pack_request, pack_text, packed_files, packing, token_files


def pack(words: Sequence[str]) -> list[str]:
    """Pack the files that the words of the command line name; return lines that describe the result.

    After an interruption, the same words continue where it stopped.

    Raises:
        ConfigError: the words are wrong, or what they name cannot be packed.
    """
    request = pack_request.read_request(words)
    try:
        if request.kind == "images":
            return pack_images.pack(request.data, request.out)
        return pack_text.pack(request.data, request.out, tokenizer=request.tokenizer)
    except OSError as error:
        fix = "make room there, or another out=" if packing.is_disk_full(error) else "out=<a file in your own folder>"
        rule = f"The file cannot be written: {error.strerror or error}. Finished parts are kept for the same command"
        raise ConfigError("out", request.out, rule, fix) from None
    except KeyboardInterrupt:
        rule = "Packing was interrupted. Finished parts are kept"
        raise ConfigError("out", request.out, rule, "the same command: it continues") from None


def verify(file: str) -> list[str]:
    """Compare a packed file with its checksums; return a line that describes it.

    Raises:
        ConfigError: this program did not make the file, or it has changed since.
    """
    path = os.path.abspath(file)
    has_images = path.endswith(pack_request.SUFFIXES["images"])
    if not has_images and not os.path.exists(f"{path}.json"):
        raise ConfigError("--verify", path, "must be a file that this program made", "--verify FILE.h5, or FILE.npy")
    parts = packed_files.read_packed_header(path).parts if has_images else token_files.token_parts(path)
    num = file_parts.verify_checksums(parts, config_key="data.file" if has_images else "data.files")
    return [f"{path}: unchanged since it was packed ({num} parts, checksum {parts.checksum[:16]})"]
