"""What tools/pack.py is asked to pack, read from its words; what cannot be meant is rejected."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from omegaconf import DictConfig

from hpc.config import compose
from hpc.config.errors import ConfigError
from hpc.launch import placement
from hpc.system import home

SUFFIX = {"images": ".h5", "text": ".npy"}
USED = {"images": ("data.dir", "data.image_size", "out"), "text": ("data.files", "data.vocab_size", "tokenizer", "out")}


@dataclass(frozen=True)
class Request:
    """What is packed, and into which file."""

    kind: str  # images or text
    data: DictConfig  # as configs/data/<kind>.yaml and the words say
    out: str
    tokenizer: str  # of text: bytes, bpe, or the file of a tokenizer


def read(words: Sequence[str]) -> Request:
    """Return what these words ask for. Raises `ConfigError`."""
    reject_in_a_job(words)
    kind = "text" if any(word.startswith("data.files=") for word in words) else "images"
    reject_unused(words, kind)
    own = dict(word.split("=", 1) for word in words if word.startswith(("out=", "tokenizer=")))
    overrides = [word for word in words if word.partition("=")[0] not in own]
    data = compose.compose_overrides([f"data={kind}", *overrides]).data
    return Request(kind, data, place(own.get("out"), SUFFIX[kind]), own.get("tokenizer", "bytes"))


def reject_in_a_job(words: Sequence[str]) -> None:
    """Raise `ConfigError` in a job: GPUs would wait for small files to be read, and the next job's once more."""
    if placement.in_job(os.environ):
        rule = "data are prepared once, on a login node; a job trains on what is there"
        command = " ".join(shlex.quote(word) for word in words)
        raise ConfigError("tools/pack.py", None, rule, f"on a login node: python tools/pack.py {command}")


def reject_unused(words: Sequence[str], kind: str) -> None:
    """Raise `ConfigError` for a word that packing ignores: files for validation, say, are packed into another out=."""
    keys = [word.partition("=")[0].lstrip("+") for word in words]
    for word, key in zip(words, keys, strict=True):
        if key not in USED[kind]:
            raise ConfigError(word, None, f"packing of {kind} takes {', '.join(USED[kind])}", "leave it out")
        if keys.count(key) > 1:
            raise ConfigError(word, None, "is typed once", f"one {key}=")
    if "data.vocab_size" in keys and not any(word.startswith("tokenizer=") for word in words):
        rule = "is what a BPE learns, or the least that a tokenizer must have; bytes are 256"
        raise ConfigError("data.vocab_size", None, rule, "tokenizer=bpe as well, or leave it out")


def place(out: str | None, suffix: str) -> str:
    """Return the path of the file that is made. Raises `ConfigError` where it cannot be made there."""
    if not out:
        raise ConfigError("out", None, "names the file that is made", f"out=<file>{suffix}")
    path = os.path.abspath(home.expand(out))
    if not path.endswith(suffix):
        raise ConfigError("out", out, f"ends in {suffix}", f"out={out}{suffix}")
    if os.path.lexists(path):
        raise ConfigError("out", out, "is there already", f"another name, or: rm '{path}'")
    if not os.access(os.path.dirname(path), os.W_OK):
        raise ConfigError("out", out, "lies in a folder that is there, and is yours", "mkdir -p it, or another out=")
    return path
