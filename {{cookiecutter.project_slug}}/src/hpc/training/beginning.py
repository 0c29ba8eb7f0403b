"""A start of a run: who may write now, which attempt this is, and from which checkpoint it goes on."""

import os
import shlex
import socket
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc.checkpoint import on_disk
from hpc.checkpoint.on_disk import Checkpoint
from hpc.config.errors import ConfigError
from hpc.launch import meeting, placement
from hpc.launch.placement import Placement
from hpc.run import claim, directory
from hpc.run.claim import Claim

# For the processes that Lightning starts on this machine: they must not begin again.
BEGUN = "HPC_BEGUN"


@dataclass(frozen=True)
class Beginning:
    """What all ranks know of this start; rank 0 has the claim."""

    hosts: list[str]
    attempt: int
    checkpoint: Checkpoint | None
    claim: Claim | None = None
    store: Any = None  # serves the ranks as long as rank 0 holds it


def apart(place: Placement, environ: MutableMapping[str, str]) -> None:
    """A run that another one has started, by a hook of somebody's, say, is none of its ranks: it begins by itself."""
    if BEGUN in environ and not placement.is_lightning_child(place):
        for inherited in (BEGUN, directory.CHOSEN):
            environ.pop(inherited, None)


def alone(run_dir: Path, host: str, environ: MutableMapping[str, str]) -> Beginning:
    """For one process, or the one that will start others. Raises `ConfigError`."""
    if BEGUN in environ:
        attempt, _, path = environ[BEGUN].partition(" ")
        return Beginning([host], int(attempt), on_disk.read(Path(path)) if path else None)
    mine = claim.take(run_dir, who(environ))
    with _given_back(mine):
        newest = None
        for candidate in _candidates(run_dir):
            if not _flawed(candidate, on_disk.flaw(candidate)):
                newest = candidate
                break
        _reject_nothing(run_dir, newest, _reached(run_dir))
    environ[BEGUN] = f"{mine.attempt} {newest.path if newest else ''}"
    return Beginning([host], mine.attempt, newest, mine)


def together(
    run_dir: Path, place: Placement, hosts: list[str], store: Any, seconds: float, environ: MutableMapping[str, str]
) -> Beginning:
    """For ranks that have met. Each of them reads a share of a checkpoint's files to see whether it is whole.

    Raises:
        ConfigError: on every rank: another job writes there, or the run got somewhere and no whole checkpoint is left.
    """
    mine: Claim | None = None
    said: dict[str, Any] = {"rejected": None}
    if place.rank == 0:
        try:
            mine = claim.take(run_dir, who(environ))
            candidates = [str(found.path) for found in _candidates(run_dir)]
            said |= {"attempt": mine.attempt, "candidates": candidates, "reached": _reached(run_dir)}
        except ConfigError as rejected:
            said["rejected"] = rejected.parts()
    with _given_back(mine):
        first = meeting.all_gather_json(store, place, topic="begin", value=said, timeout_seconds=seconds)[0]
        if first["rejected"]:
            raise ConfigError(*first["rejected"])
        newest = None
        for path in map(Path, first["candidates"]):
            found = on_disk.read(path)
            flaw = on_disk.flaw(found, place.rank, place.world_size) if found else "is not seen from this node"
            said = {"flaw": flaw, "host": socket.gethostname()}
            flaws = meeting.all_gather_json(
                store, place, topic=f"flaw/{path.name}", value=said, timeout_seconds=seconds
            )
            if not _flawed(path, next((flaw["flaw"] for flaw in flaws if flaw["flaw"]), ""), place.rank == 0):
                newest = found
                break
        _reject_nothing(run_dir, newest, first["reached"])
    return Beginning(hosts, first["attempt"], newest, mine, store)


@contextmanager
def _given_back(mine: Claim | None) -> Iterator[None]:
    """After a rejection the next start need not wait to see whether this process still lives."""
    try:
        yield
    except ConfigError:
        if mine:
            mine.release()
        raise


def who(environ: Mapping[str, str]) -> dict[str, Any]:
    """This process, as its claim names it."""
    restart = environ.get("SLURM_RESTART_COUNT", "0")
    return {"job": placement.job_id(environ), "restart": restart, "host": socket.gethostname(), "pid": os.getpid()}


def _candidates(run_dir: Path) -> Sequence[Checkpoint]:
    _reject_others(run_dir)
    on_disk.recover(run_dir / "checkpoints")
    for path in _written(run_dir):
        if not on_disk.read(path):
            _flawed(path, f"{on_disk.MANIFEST} cannot be read")
    starts = [event for event in directory.events(run_dir) if event.get("event") == "start"]
    known = on_disk.known(run_dir, starts)
    if known and known[0].version < on_disk.VERSION:
        rule = "a run must go on with the version that wrote its checkpoint: an older one kept other state"
        fix = f"run the code that wrote it, or begin a new run from its weights: ckpt={known[0].path}"
        raise ConfigError("resume", run_dir, rule, fix)
    return known


def _written(run_dir: Path) -> list[Path]:
    """The folders that are checkpoints, or were meant to be."""
    return [path for path in on_disk.ours(run_dir / "checkpoints") if not path.name.endswith(on_disk.PART)]


def _reject_others(run_dir: Path) -> None:
    """A new run does not mix its checkpoints with those of another program, which may have the same names."""
    folder = run_dir / "checkpoints"
    if (run_dir / "config.yaml").exists() or directory.events(run_dir) or not folder.is_dir():
        return
    mine = {path.name for path in on_disk.ours(folder)}
    if others := sorted(path.name for path in folder.iterdir() if path.name not in mine):
        rule = f"a new run must not write into checkpoints of another program: {folder} holds {others[0]}"
        raise ConfigError("run_dir", run_dir, rule, "run_dir=<a new directory>")


def _flawed(found: Checkpoint | Path, flaw: str, speaks: bool = True) -> bool:
    if flaw and speaks:
        path = found if isinstance(found, Path) else found.path
        print(f"warning: {path} is damaged and not used: {flaw}", flush=True)
    return bool(flaw)


def _reached(run_dir: Path) -> int | None:
    """The step that the run has come to, or further; None: nowhere."""
    reached = max((event.get("step") or event.get("from_step") or 0 for event in directory.events(run_dir)), default=0)
    return reached if reached or _written(run_dir) else None


def _reject_nothing(run_dir: Path, newest: Checkpoint | None, reached: int | None) -> None:
    """A run that got somewhere does not start from nothing without being told so."""
    if newest is None and reached is not None:
        rule = f"it came to step {reached} or further, and none of its checkpoints is whole"
        these = shlex.join([f"{run_dir}/checkpoints", f"{run_dir}/attempts.jsonl"])
        raise ConfigError("resume", run_dir, rule, f"rm -r {these} to start it anew")
