"""A checkpoint is whole or absent: written aside, made durable, renamed. Knows folders and files, not what is in them.

A folder `step-*` has a manifest with the size and checksum of every file in it, and is looked at by that manifest:
neither its name nor a clock says that it is whole, or which one is the newest.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc.config.errors import ConfigError
from hpc.system.files import open_regular_file, parse_json, read_text

VERSION = 2  # of what a checkpoint holds; weights are read from older ones, too
MANIFEST = "manifest.json"
PART = ".part"
OLD = f".old{PART}"  # how the name of a folder ends that is no checkpoint any more
# What may be removed. A folder `checkpoints` may hold others' files, too: step-500, step-1.ckpt.part.
OURS = re.compile(r"step-\d{9,}(-averaged)?((\.old|\.universal-\w+)?\.part)?")
AVERAGED = "-averaged"
LAST, BEST = "last.ckpt", "best.ckpt"  # links to checkpoints beside them
CHUNK = 16 * 2**20  # bytes read at once for a checksum


@dataclass(frozen=True)
class Checkpoint:
    """What the manifest of a checkpoint folder says."""

    path: Path
    step: int  # optimizer steps done
    attempt: int  # the attempt that wrote it
    files: dict[str, tuple[int, int]]  # name: bytes, CRC-32
    note: dict[str, Any]  # what else was noted: strategy, world size, seconds to write
    version: int = VERSION


def place(run_dir: Path, step: int, averaged: bool = False) -> Path:
    """Where the checkpoint of a step belongs; `averaged`: of the weights that were made of those of all steps."""
    return run_dir / "checkpoints" / f"step-{step:09d}{AVERAGED * averaged}"


def aside(final: Path) -> Path:
    """Where it is written until it is whole. What was left behind, of any step, goes: the disk may be full of it."""
    part = final.with_name(final.name + PART)
    recover(final.parent)
    for left in ours(final.parent):
        if left.name.endswith(PART):
            shutil.rmtree(left, ignore_errors=True)
    part.mkdir(parents=True)
    return part


def ours(folder: Path) -> list[Path]:
    """The folders in it that were made here, by name."""
    return sorted(path for path in folder.glob("step-*") if OURS.fullmatch(path.name) and not path.is_symlink())


def recover(folder: Path) -> None:
    """Give a checkpoint its name back whose successor of the same step got no further than taking it away."""
    for old in ours(folder):
        final = old.with_name(old.name.removesuffix(OLD))
        if old.name.endswith(OLD) and not final.exists() and read(old):
            with suppress(OSError):  # another process, which starts the same run, was first
                old.rename(final)


def names(folder: Path) -> list[str]:
    """The files of a checkpoint folder, below it too; all but the manifest."""
    found = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    return sorted(name for name in found if name != MANIFEST)


def sums(folder: Path, names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Size and CRC-32 of files. Raises OSError."""
    return {name: _sum(folder / name) for name in names}


def make_durable(folder: Path) -> None:
    """What this node has written there survives a power cut. Raises OSError."""
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def publish(part: Path, final: Path, files: Mapping[str, tuple[int, int]], note: Mapping[str, Any]) -> None:
    """Write the manifest and give a complete folder its name. What lay there before goes. Raises OSError."""
    text = json.dumps({"version": VERSION, **note, "files": files}, indent=1)
    (part / MANIFEST).write_text(text, encoding="utf-8")
    _sync(part / MANIFEST)
    _sync(part)
    old = _discarded(final) if final.exists() else None
    part.rename(final)
    _sync(final.parent)
    if old:
        shutil.rmtree(old, ignore_errors=True)


def point(link: Path, final: Path) -> None:
    """Let a symbolic link lead to a checkpoint beside it, from one moment to the next. Raises OSError."""
    new = link.with_name(f".{link.name}{PART}")
    new.unlink(missing_ok=True)
    new.symlink_to(final.name)
    new.replace(link)


def settle(newest: Path, best: Path | None) -> bool:
    """Let both links lead where the run that goes on from `newest` knows them; is its best one there?

    They lead elsewhere where a process died between a checkpoint and its links, or where later checkpoints are damaged.
    """
    _unfollow(newest.with_name(LAST))
    _unfollow(newest.with_name(BEST))
    there = best is not None and read(best) is not None
    with suppress(OSError):  # the next checkpoint will say what is wrong with this disk
        point(newest.with_name(LAST), newest)
        if best and there:
            point(newest.with_name(BEST), best)
        elif newest.with_name(BEST).is_symlink():
            newest.with_name(BEST).unlink()
    return there


def _unfollow(link: Path) -> None:
    """Who copied this run has copied what a link leads to (`scp -r`): that is a checkpoint, and gets its own name."""
    copied = None if link.is_symlink() else read(link)
    if copied is None:
        return
    final = place(link.parent.parent, copied.step, bool(copied.note.get("averaged")))
    if (there := read(final)) and there.files != copied.files:
        return  # whatever it is
    old = final.with_name(final.name + OLD)
    with suppress(OSError):  # another process, which starts the same run, was first
        shutil.rmtree(old, ignore_errors=True)
        link.rename(old)
        recover(link.parent)
        shutil.rmtree(old, ignore_errors=True)


def known(run_dir: Path, starts: Sequence[Mapping[str, Any]] = ()) -> list[Checkpoint]:
    """The checkpoints of a run that have a manifest, newest first.

    Args:
        starts: the start events of its attempts. What a process wrote after a later attempt had gone on from an earlier
            step (its node was cut off for a while, say) is no part of the run any more and left out.

    Raises:
        ConfigError: one was written by a newer version of this project.
    """
    found = [read(path) for path in run_dir.glob("checkpoints/step-*") if not path.name.endswith(PART)]
    there = [checkpoint for checkpoint in found if checkpoint and not _overtaken(checkpoint, starts)]
    return sorted(there, key=lambda found: (found.step, found.attempt, found.note.get("averaged", False)), reverse=True)


def read(path: Path) -> Checkpoint | None:
    """What a folder's manifest says; None where none can be read. Raises `ConfigError` for a newer version."""
    try:
        note = parse_json(read_text(path / MANIFEST))
        version = int(note.pop("version"))
        if version > VERSION:  # before anything else, which it may say otherwise
            rule = f"was written by a newer version of this project (its checkpoints: {version}, known here: {VERSION})"
            raise ConfigError("resume", path, rule, "run the code that wrote it")
        step, attempt = int(note.pop("step")), int(note.pop("attempt"))
        files = {str(name): (int(size), int(crc)) for name, (size, crc) in note.pop("files").items()}
        if "logs" in note:
            note["logs"] = {str(name): int(position) for name, position in note["logs"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    return Checkpoint(path, step, attempt, files, note, version)


def flaw(checkpoint: Checkpoint, rank: int = 0, num_ranks: int = 1) -> str:
    """What is wrong with a checkpoint's files, "" if nothing. Of several ranks each reads a share of them."""
    for name, (size, crc) in sorted(checkpoint.files.items())[rank::num_ranks]:
        try:
            found = _sum(checkpoint.path / name)
        except OSError as error:
            return f"{name}: {error.strerror}"
        if found[0] != size:
            return f"{name} has {found[0]} bytes instead of {size}"
        if found[1] != crc:
            return f"{name} is not what was written"
    return ""


def prune(newest: Path, keep: int) -> None:
    """Remove all but the last `keep` up to the newest and what best.ckpt leads to; called when the newest is whole.

    Not what will be the best: until it is whole, its predecessor is.
    """
    link, folders = newest.with_name(BEST), ours(newest.parent)
    best = os.readlink(link) if link.is_symlink() else ""
    kept = {path.name for path in [path for path in folders if not path.name.endswith(PART) and path <= newest][-keep:]}
    for path in folders:
        if path.name not in kept | {newest.name, best}:
            with suppress(OSError):  # what cannot be removed does no harm
                left = path if path.name.endswith(PART) else _discarded(path)
                (left / MANIFEST).unlink(missing_ok=True)  # first: half of it is nothing that `recover` brings back
                shutil.rmtree(left)


def _discarded(path: Path) -> Path:
    """No checkpoint any more, from one moment to the next: removing its files takes longer. Raises OSError."""
    old = path.with_name(path.name + OLD)
    shutil.rmtree(old, ignore_errors=True)
    return path.rename(old)


def _overtaken(checkpoint: Checkpoint, starts: Sequence[Mapping[str, Any]]) -> bool:
    later = [start for start in starts if start.get("attempt", 0) > checkpoint.attempt]
    return any(checkpoint.step > start.get("from_step", 0) for start in later)


def _sum(path: Path) -> tuple[int, int]:
    size = crc = 0
    with open_regular_file(path) as stream:
        while chunk := stream.read(CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
