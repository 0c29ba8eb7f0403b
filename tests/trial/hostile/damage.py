"""Hostile contents of files, and damage to them."""

import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trial.hostile.values import changed, data, text


class Bomb:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)
)


def junk(rng: random.Random, canary: Path) -> bytes:
    """Return invalid content of a file."""
    return rng.choice(
        [
            lambda: b"",
            lambda: b"\n",
            lambda: b"\0" * 100,
            lambda: b"\xff\xfe\x00x",
            lambda: rng.randbytes(rng.randrange(1, 300)),
            lambda: b"[" * 100_000,
            lambda: b'{"a":' * 50_000,
            lambda: ("- " * 5000).encode(),
            lambda: LAUGHS.encode(),
            lambda: pickle.dumps(Bomb(canary)),
            lambda: f"!!python/object/apply:os.mkdir [{canary}]\n".encode(),
            lambda: json.dumps(data(rng, canary)).encode(),
            lambda: text(rng, canary, zero=True).encode(errors="surrogateescape"),
            lambda: b"9" * 5000,
            lambda: b"x" * 2_000_000,
            lambda: b"\x1b[2J\x1b]0;owned\x07\n" * 3,
        ]
    )()


def damage(rng: random.Random, file: Path, canary: Path, victim: Path) -> str:
    """Damage a file, and return the kind of damage in one word."""
    deeds: dict[str, Callable[[], Any]] = {
        "replaced": lambda: file.write_bytes(junk(rng, canary)),
        "cut": lambda: os.truncate(file, rng.randrange(file.stat().st_size + 1)),
        "flipped": lambda: _flip(rng, file),
        "changed": lambda: _change(rng, file, canary),
        "line": lambda: _line(rng, file, canary),
        "removed": file.unlink,
        "folder": lambda: (file.unlink(), file.mkdir()),
        "link": lambda: (
            file.unlink(),
            file.symlink_to(rng.choice([victim, file, "/etc/passwd", "/dev/zero", "/nowhere"])),
        ),
        "fifo": lambda: (file.unlink(), os.mkfifo(file)),
        "sparse": lambda: os.truncate(file, 300 * 2**20),
    }
    weights = [3, 3, 2, 12, 4, 1, 1, 2, 1, 0.3]
    [deed] = rng.choices(list(deeds), weights)
    deeds[deed]()
    return deed


def _flip(rng: random.Random, file: Path) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(rng.randrange(1, 5)):
        if content:
            content[rng.randrange(len(content))] = rng.randrange(256)
    file.write_bytes(content)


def _change(rng: random.Random, file: Path, canary: Path) -> None:
    """Change one value of a JSON, JSON lines or YAML file, or one word of another file."""
    import yaml

    words = file.read_bytes().decode(errors="surrogateescape")
    try:
        if file.suffix == ".yaml":
            new = yaml.safe_dump(changed(rng, yaml.safe_load(words), canary), allow_unicode=rng.random() < 0.5)
        elif file.suffix in (".json", ".jsonl") or file.parent.name == "claims":
            lines = words.splitlines() if file.suffix == ".jsonl" else [words]
            at = rng.randrange(len(lines))
            lines[at] = json.dumps(changed(rng, json.loads(lines[at]), canary), ensure_ascii=rng.random() < 0.5)
            new = "\n".join(lines) + "\n"
        else:
            parts = words.split(" ")
            parts[rng.randrange(len(parts))] = text(rng, canary, zero=True)
            new = " ".join(parts)
    except (ValueError, yaml.YAMLError, IndexError, RecursionError):
        new = text(rng, canary, zero=True)
    file.write_bytes(new.encode(errors="surrogateescape"))


def _line(rng: random.Random, file: Path, canary: Path) -> None:
    with file.open("ab") as stream:
        stream.write(text(rng, canary, zero=True).encode(errors="surrogateescape") + rng.choice([b"", b"\n"]))
