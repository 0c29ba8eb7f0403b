"""A start of a run: who may write now, which attempt this is, and from which checkpoint it goes on."""

import os
import socket
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import checkpoint, claim, launch, rundir
from .checkpoint import Checkpoint
from .claim import Claim
from .config import Refused
from .launch import Place

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


def alone(run_dir: Path, host: str, environ: MutableMapping[str, str]) -> Beginning:
    """For one process, or the one that will start others. Raises `Refused`."""
    if BEGUN in environ:
        attempt, _, path = environ[BEGUN].partition(" ")
        return Beginning([host], int(attempt), checkpoint.read(Path(path)) if path else None)
    mine = claim.take(run_dir, _who(environ))
    newest = None
    for candidate in _candidates(run_dir):
        if not _flawed(candidate, checkpoint.flaw(candidate)):
            newest = candidate
            break
    _refuse_nothing(run_dir, newest)
    environ[BEGUN] = f"{mine.attempt} {newest.path if newest else ''}"
    return Beginning([host], mine.attempt, newest, mine)


def together(
    run_dir: Path, place: Place, hosts: list[str], store: Any, seconds: float, environ: MutableMapping[str, str]
) -> Beginning:
    """For ranks that have met. Each of them reads a share of a checkpoint's files to see whether it is whole.

    Raises:
        Refused: on every rank: another job writes there, or the run got somewhere and no whole checkpoint is left.
    """
    mine: Claim | None = None
    said: dict[str, Any] = {"refused": None}
    if place.rank == 0:
        try:
            mine = claim.take(run_dir, _who(environ))
            said |= {"attempt": mine.attempt, "candidates": [str(found.path) for found in _candidates(run_dir)]}
        except Refused as refused:
            said["refused"] = told(refused)
    first = launch.exchange(store, place, "begin", said, seconds)[0]
    if first["refused"]:
        raise Refused(*first["refused"])
    newest = None
    for path in map(Path, first["candidates"]):
        found = checkpoint.read(path)
        flaw = checkpoint.flaw(found, place.rank, place.world_size) if found else "is not seen from this node"
        said = {"flaw": flaw, "host": socket.gethostname()}
        flaws = launch.exchange(store, place, f"flaw/{path.name}", said, seconds)
        if not _flawed(path, next((flaw["flaw"] for flaw in flaws if flaw["flaw"]), ""), place.rank == 0):
            newest = found
            break
    _refuse_nothing(run_dir, newest)
    return Beginning(hosts, first["attempt"], newest, mine, store)


def told(refused: Refused) -> list[str | None]:
    """A refusal as it is sent to other ranks."""
    return [refused.key, None if refused.value is None else str(refused.value), refused.rule, refused.fix]


def _who(environ: MutableMapping[str, str]) -> dict[str, Any]:
    restart = environ.get("SLURM_RESTART_COUNT", "0")
    return {"job": launch.job_id(environ), "restart": restart, "host": socket.gethostname(), "pid": os.getpid()}


def _candidates(run_dir: Path) -> Sequence[Checkpoint]:
    return checkpoint.known(run_dir, [event for event in rundir.events(run_dir) if event.get("event") == "start"])


def _flawed(found: Checkpoint | Path, flaw: str, speaks: bool = True) -> bool:
    if flaw and speaks:
        path = found if isinstance(found, Path) else found.path
        print(f"warning: {path} is damaged and not used: {flaw}", flush=True)
    return bool(flaw)


def _refuse_nothing(run_dir: Path, newest: Checkpoint | None) -> None:
    """A run that got somewhere does not start from nothing without being told so."""
    reached = max((event.get("step") or event.get("from_step") or 0 for event in rundir.events(run_dir)), default=0)
    there = any(not path.name.endswith(checkpoint.PART) for path in run_dir.glob("checkpoints/step-*"))
    if newest is None and (reached or there):
        rule = f"it came to step {reached} or further, and none of its checkpoints is whole"
        raise Refused("resume", run_dir, rule, f"rm -r {run_dir}/checkpoints {run_dir}/attempts.jsonl to start it anew")
