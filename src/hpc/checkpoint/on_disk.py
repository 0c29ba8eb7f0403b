"""Checkpoints as folders that are whole or absent: written under another name, made durable, renamed.

This module knows folders and files, not what is in them. A folder `step-*` has a manifest with the size and checksum of
every file in it, and only the manifest counts: neither the folder's name nor a clock says that it is whole, or which
one is the newest. It is written last and removed first. Each name is used once, as step and attempt are in it: no
checkpoint is ever replaced by another one.
"""

import errno
import json
import os
import re
import shlex
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc.config.errors import ConfigError
from hpc.system.files import open_regular_file, parse_json, read_text, sync

VERSION = 3  # of the content of a checkpoint; weights are read from older ones, too
MANIFEST = "manifest.json"
PART = ".part"  # end of the name of a folder that is being written
# Names of folders that this project makes and may remove. `checkpoints` may hold other people's files as well, such as
# step-500 and step-1.ckpt.part.
OWN_NAMES = re.compile(r"step-\d{9,}(-\d{3,}){0,2}(-averaged)?((\.universal-\w+)?\.part)?")
AVERAGED = "-averaged"
LAST, BEST = "last.ckpt", "best.ckpt"  # links to checkpoints beside them
CHUNK_BYTES = 16 * 2**20  # read at once for a checksum


@dataclass(frozen=True)
class Checkpoint:
    """The manifest of a checkpoint folder."""

    path: Path
    step: int  # optimizer steps done
    attempt: int  # the attempt that wrote it
    files: dict[str, tuple[int, int]]  # name: bytes, CRC-32
    details: dict[str, Any]  # all else in the manifest: strategy, world size, seconds to write
    version: int = VERSION


def checkpoint_path(run_dir: Path, step: int, attempt: int, *, num_before: int = 0, averaged: bool = False) -> Path:
    """Return the folder for the checkpoint of a step. Names sort by age.

    Args:
        num_before: how many checkpoints of this step the attempt has saved before this one.
        averaged: it holds the weights that were averaged over all steps.
    """
    repeated = f"-{num_before:03d}" if num_before else ""
    return run_dir / "checkpoints" / f"step-{step:09d}-{attempt:03d}{repeated}{AVERAGED * averaged}"


def make_part_folder(final: Path) -> Path:
    """Make the folder in which a checkpoint is written until it is whole, and return it.

    Unfinished folders of all steps are removed first: the disk may be full of them.
    """
    part = final.with_name(final.name + PART)
    for folder in own_folders(final.parent):
        if folder.name.endswith(PART):
            shutil.rmtree(folder, ignore_errors=True)
    part.mkdir(parents=True)
    return part


def own_folders(folder: Path) -> list[Path]:
    """Return the folders in a folder that this project made, judged by their names."""
    return sorted(path for path in folder.glob("step-*") if OWN_NAMES.fullmatch(path.name) and not path.is_symlink())


def file_names(folder: Path) -> list[str]:
    """Return the files of a checkpoint folder and of folders in it, without the manifest."""
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    return sorted(name for name in names if name != MANIFEST)


def checksums(folder: Path, names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return size in bytes and CRC-32 of files. Raises OSError."""
    return {name: _checksum(folder / name) for name in names}


def make_durable(folder: Path) -> None:
    """Sync what this node has written in a folder, so that it survives a power cut. Raises OSError."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def publish(part: Path, final: Path, *, files: Mapping[str, tuple[int, int]], details: Mapping[str, Any]) -> None:
    """Write the manifest and give a complete folder its name. Raises OSError, also if something has that name."""
    manifest = json.dumps({"version": VERSION, **details, "files": files}, indent=1)
    (part / MANIFEST).write_text(manifest, encoding="utf-8")
    sync(part / MANIFEST)
    sync(part)
    if final.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final))
    part.rename(final)
    sync(final.parent)


def remove(path: Path) -> None:
    """Remove a checkpoint, if it exists: the manifest first, so that half of it is none. Raises OSError."""
    (path / MANIFEST).unlink(missing_ok=True)
    if path.exists():
        shutil.rmtree(path)


def set_link(link: Path, final: Path) -> None:
    """Let a symbolic link lead to a checkpoint beside it, atomically. Raises OSError."""
    new = link.with_name(f".{link.name}{PART}")
    new.unlink(missing_ok=True)
    new.symlink_to(final.name)
    new.replace(link)


def repair_links(newest: Path, best: Path | None) -> bool:
    """Set both links as the run that resumes from `newest` knows them. Return whether its best checkpoint exists.

    They differ where a process died between a checkpoint and its links, or where later checkpoints are damaged.
    """
    has_best = best is not None and read_manifest(best) is not None
    with suppress(OSError):  # the next checkpoint will report what is wrong with this disk
        set_link(newest.with_name(LAST), newest)
        if best and has_best:
            set_link(newest.with_name(BEST), best)
        elif newest.with_name(BEST).is_symlink():
            newest.with_name(BEST).unlink()
    return has_best


def reject_copied_links(folder: Path) -> None:
    """Raise `ConfigError` if `scp -r` or `cp -rL` has put a copy of a checkpoint in the place of a link to it."""
    for link in (folder / LAST, folder / BEST):
        copy = None if link.is_symlink() else read_manifest(link)
        if copy is None:
            continue
        averaged = bool(copy.details.get("averaged"))
        path = checkpoint_path(folder.parent, copy.step, copy.attempt, averaged=averaged)
        original = read_manifest(path)
        if original and original.files == copy.files:
            fix = f"rm -r {shlex.quote(str(link))}"
        else:
            remove_damaged = f"rm -r {shlex.quote(str(path))} && " if path.exists() else ""
            fix = f"{remove_damaged}mv {shlex.quote(str(link))} {shlex.quote(str(path))}"
        rule = "must be a link to a checkpoint beside it; scp -r and cp -rL make a folder of it, rsync -a does not"
        raise ConfigError("resume", link, rule, fix)


def list_checkpoints(run_dir: Path, starts: Sequence[Mapping[str, Any]] = ()) -> list[Checkpoint]:
    """Return the checkpoints of a run that have a manifest, newest first.

    Args:
        starts: the start events of its attempts. Skips checkpoints of an older attempt beyond the step from which a
            later attempt resumed: the older one went on writing, its node being cut off for a while, say.

    Raises:
        ConfigError: one was written by a newer version of this project.
    """
    manifests = [read_manifest(path) for path in run_dir.glob("checkpoints/step-*") if not path.name.endswith(PART)]
    checkpoints = [checkpoint for checkpoint in manifests if checkpoint and not _is_overtaken(checkpoint, starts)]

    def age(checkpoint: Checkpoint) -> tuple[int, int, int, bool]:
        details = checkpoint.details
        return checkpoint.step, checkpoint.attempt, details.get("batches", 0), details.get("averaged", False)

    return sorted(checkpoints, key=age, reverse=True)


def read_manifest(path: Path) -> Checkpoint | None:
    """Return the manifest of a folder; None if it cannot be read. Raises `ConfigError` for a newer version."""
    try:
        details = parse_json(read_text(path / MANIFEST))
        version = int(details.pop("version"))
        if version > VERSION:  # before anything else, which may have another meaning there
            rule = f"must not be a checkpoint of a newer version of this project (format {version}, known: {VERSION})"
            raise ConfigError("resume", path, rule, "run the code that wrote it")
        step, attempt = int(details.pop("step")), int(details.pop("attempt"))
        files = {str(name): (int(size), int(crc)) for name, (size, crc) in details.pop("files").items()}
        details |= {name: int(details[name]) for name in ("stepped", "batches", "world_size") if name in details}
        if "logs" in details:
            details["logs"] = {str(name): int(position) for name, position in details["logs"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    return Checkpoint(path, step, attempt, files, details, version)


def find_flaw(checkpoint: Checkpoint, *, rank: int = 0, num_ranks: int = 1) -> str:
    """Return what is wrong with a checkpoint's files; "" if nothing. Of several ranks each reads a share of them."""
    for name, (size, crc) in sorted(checkpoint.files.items())[rank::num_ranks]:
        try:
            actual_size, actual_crc = _checksum(checkpoint.path / name)
        except OSError as error:
            return f"{name}: {error.strerror}"
        if actual_size != size:
            return f"{name} has {actual_size} bytes instead of {size}"
        if actual_crc != crc:
            return f"{name} has changed since it was written"
    return ""


def prune(newest: Path, keep: int) -> None:
    """Remove all checkpoints but the last `keep` up to the newest, and the one that best.ckpt leads to.

    To be called when the newest is whole. best.ckpt counts as it is now: the best checkpoint stays until a better one
    is whole, too.
    """
    link, folders = newest.with_name(BEST), own_folders(newest.parent)
    best = os.readlink(link) if link.is_symlink() else ""
    whole = [path for path in folders if not path.name.endswith(PART) and path <= newest]
    kept = {path.name for path in whole[-keep:]} | {newest.name, best}
    for path in folders:
        if path.name not in kept:
            with suppress(OSError):  # what cannot be removed does no harm
                remove(path)


def _is_overtaken(checkpoint: Checkpoint, starts: Sequence[Mapping[str, Any]]) -> bool:
    later = [start for start in starts if start.get("attempt", 0) > checkpoint.attempt]
    return any(checkpoint.step > start.get("from_step", 0) for start in later)


def _checksum(path: Path) -> tuple[int, int]:
    size = crc = 0
    with open_regular_file(path) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc
