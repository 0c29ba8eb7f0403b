"""The request to tools/pack.py: which files to pack into which file, from the words of its command line."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from omegaconf import DictConfig

from hpc.config import compose
from hpc.config.errors import ConfigError
from hpc.launch import placement
from hpc.system import home

SUFFIXES = {"images": ".h5", "text": ".npy"}
KEYS = {"images": ("data.dir", "data.image_size", "out"), "text": ("data.files", "data.vocab_size", "tokenizer", "out")}


@dataclass(frozen=True)
class PackRequest:
    """The files to pack, and the file to make of them."""

    kind: str  # images or text
    data: DictConfig  # configs/data/<kind>.yaml with the words of the command line
    out: str
    tokenizer: str  # for text: bytes, bpe, or the file of a tokenizer


def read_request(words: Sequence[str]) -> PackRequest:
    """Return the request of a command line. Raise `ConfigError` for words that are wrong."""
    reject_in_job(words)
    kind = "text" if any(word.startswith("data.files=") for word in words) else "images"
    reject_unused(words, kind)
    own = dict(word.split("=", 1) for word in words if word.startswith(("out=", "tokenizer=")))
    overrides = [word for word in words if word.partition("=")[0] not in own]
    data = compose.compose_overrides([f"data={kind}", *overrides]).data
    return PackRequest(kind, data, check_output_path(own.get("out"), SUFFIXES[kind]), own.get("tokenizer", "bytes"))


def reject_in_job(words: Sequence[str]) -> None:
    """Raise `ConfigError` in a job: its GPUs would wait for small files, and the next job's again."""
    if placement.is_in_job(os.environ):
        rule = "cannot run in a job: data are packed once, on a login node, and jobs train on the result"
        command = " ".join(shlex.quote(word) for word in words)
        raise ConfigError("tools/pack.py", None, rule, f"on a login node: python tools/pack.py {command}")


def reject_unused(words: Sequence[str], kind: str) -> None:
    """Raise `ConfigError` for a word that packing ignores, such as data.val_files, which need an out= of their own."""
    keys = [word.partition("=")[0].lstrip("+") for word in words]
    for word, key in zip(words, keys, strict=True):
        if key not in KEYS[kind]:
            rule = f"cannot be used: packing of {kind} takes only {', '.join(KEYS[kind])}"
            raise ConfigError(word, None, rule, "leave it out")
        if keys.count(key) > 1:
            raise ConfigError(key, None, "must be typed only once", f"one {key}=")
    if "data.vocab_size" in keys and not any(word.startswith("tokenizer=") for word in words):
        rule = "cannot be chosen for text that is packed as bytes, which has a vocabulary of 256"
        raise ConfigError("data.vocab_size", None, rule, "tokenizer=bpe as well, or leave it out")


def check_output_path(out: str | None, suffix: str) -> str:
    """Return the absolute path of the file to make. Raise `ConfigError` if it cannot be made there."""
    if not out:
        raise ConfigError("out", None, "must name the file to make", f"out=<file>{suffix}")
    path = os.path.abspath(home.expand(out))
    if not path.endswith(suffix):
        raise ConfigError("out", out, f"must end in {suffix}", f"out={out}{suffix}")
    if os.path.lexists(path):
        raise ConfigError("out", out, "cannot be a file that exists already", f"another name, or: rm '{path}'")
    if not os.access(os.path.dirname(path), os.W_OK):
        rule = "must be in an existing folder in which you may write"
        raise ConfigError("out", out, rule, "mkdir -p that folder, or another out=")
    return path
