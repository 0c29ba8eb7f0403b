"""Pack many small files into one large file, and verify such a file: tools/pack.py. No torch here."""

import errno
import os
from collections.abc import Sequence

from hpc.config import compose
from hpc.config.errors import ConfigError
from hpc.packed import pack_images, pack_text, packed_file
from hpc.packed.packed_images import reject_hdf5
from hpc.system import home

KEYS = {"images": ("data.dir", "data.image_size", "out"), "text": ("data.files", "tokenizer", "out")}


def pack(words: Sequence[str]) -> list[str]:
    """Pack the files that the words of the command line name; return lines that describe the result.

    Raises:
        ConfigError: the words are wrong, what they name cannot be packed, or packing was interrupted.
    """
    kind = "text" if any(word.startswith("data.files=") for word in words) else "images"
    reject_unused(words, kind)
    own = dict(word.split("=", 1) for word in words if word.startswith(("out=", "tokenizer=")))
    overrides = [word for word in words if word.partition("=")[0] not in own]
    data = compose.compose_overrides([f"data={kind}", *overrides]).data
    out = check_output_path(own.get("out"))
    try:
        if kind == "images":
            files, content, command = pack_images.pack(data, out)
        else:
            files, content, command = pack_text.pack(data, out, tokenizer=own.get("tokenizer", "bytes"))
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        fix = "make room there, or another out=" if is_full else "out=<a file in your own folder>"
        raise ConfigError("out", out, f"The file cannot be written: {error.strerror or error}", fix) from None
    except KeyboardInterrupt:
        rule = "Packing was interrupted, and nothing of it is kept"
        raise ConfigError("out", out, rule, "the same command, which begins anew") from None
    num_before = len(files) + len({os.path.dirname(file) for file in files})
    num_after = sum(os.path.exists(out + ending) for ending in ("", ".json", ".tokenizer.json"))
    return [
        f"{out}: {content}, {os.path.getsize(out) / 1e6:.4g} MB",
        f"inodes: {num_before} before (files and their folders), {num_after} after",
        command,
    ]


def verify(file: str) -> list[str]:
    """Compare a packed file with its checksums; return a line that describes it.

    Raises:
        ConfigError: this program did not make the file, or it has changed since.
    """
    path = os.path.abspath(file)
    reject_hdf5("--verify", path)
    array = packed_file.map_array(path, config_key="--verify")
    notes = packed_file.read_notes(path, array, config_key="--verify")
    if notes is None:
        rule = f"must be a file that this program made, with its notes {path}.json"
        raise ConfigError("--verify", path, rule, f"--verify FILE{packed_file.SUFFIX}")
    parts = packed_file.file_parts(path, array, notes)
    num = packed_file.verify_checksums(parts, config_key="--verify")
    return [f"{path}: unchanged since it was packed ({num} parts, checksum {parts.checksum[:16]})"]


def reject_unused(words: Sequence[str], kind: str) -> None:
    """Raise `ConfigError` for a word that packing ignores, such as data.val_files, which need an out= of their own."""
    keys = [word.partition("=")[0].lstrip("+") for word in words]
    for word, key in zip(words, keys, strict=True):
        if key not in KEYS[kind]:
            rule = f"cannot be used: packing of {kind} takes only {', '.join(KEYS[kind])}"
            raise ConfigError(word, None, rule, "leave it out")
        if keys.count(key) > 1:
            raise ConfigError(key, None, "must be typed only once", f"one {key}=")


def check_output_path(out: str | None) -> str:
    """Return the absolute path of the file to make. Raise `ConfigError` if it cannot be made there."""
    suffix = packed_file.SUFFIX
    if not out:
        raise ConfigError("out", None, "must name the file to make", f"out=<file>{suffix}")
    path = os.path.abspath(home.expand(out))
    if not path.endswith(suffix):
        name = os.path.splitext(out)[0] if path.endswith((".h5", ".hdf5")) else out
        raise ConfigError("out", out, f"must end in {suffix}", f"out={name}{suffix}")
    if os.path.lexists(path):
        raise ConfigError("out", out, "cannot be a file that exists already", f"another name, or: rm '{path}'")
    if not os.access(os.path.dirname(path), os.W_OK):
        rule = "must be in an existing folder in which you may write"
        raise ConfigError("out", out, rule, "mkdir -p that folder, or another out=")
    return path
