"""The start of an attempt: the right to write, the number of the attempt, and the checkpoint that it resumes from."""

import shlex
import socket
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc.checkpoint import on_disk
from hpc.checkpoint.on_disk import Checkpoint
from hpc.config.errors import ConfigError
from hpc.launch import placement, rendezvous
from hpc.launch.placement import Placement
from hpc.run import attempt_log, claim, directory
from hpc.run.claim import Claim

# Tells the processes that Lightning starts on this machine that the attempt has begun: "<attempt> <checkpoint>".
BEGUN_VARIABLE = "HPC_BEGUN"


@dataclass(frozen=True)
class AttemptStart:
    """The start of an attempt, as all ranks know it; rank 0 has the claim."""

    hosts: list[str]
    attempt: int
    checkpoint: Checkpoint | None
    claim: Claim | None = None
    store: Any = None  # serves the ranks as long as rank 0 holds it


def forget_parent_run(place: Placement, environ: MutableMapping[str, str]) -> None:
    """Remove variables inherited from a parent run, when a hook of that run launched this one as a run of its own."""
    if BEGUN_VARIABLE in environ and not placement.is_lightning_child(place):
        for inherited in (BEGUN_VARIABLE, directory.RUN_DIR_VARIABLE):
            environ.pop(inherited, None)


def claim_and_find_checkpoint(run_dir: Path, host: str, *, environ: MutableMapping[str, str]) -> AttemptStart:
    """Claim the run directory and find the newest whole checkpoint, in the process that may start others.

    Those others find the result in `environ`.

    Raises:
        ConfigError: another job writes there, or the run has reached a step and no whole checkpoint is left.
    """
    if BEGUN_VARIABLE in environ:
        attempt, _, path = environ[BEGUN_VARIABLE].partition(" ")
        return AttemptStart([host], int(attempt), on_disk.read_manifest(Path(path)) if path else None)
    own_claim = claim.take_claim(run_dir, claim.claimant_record(environ))
    with _release_if_rejected(own_claim):
        newest = None
        for checkpoint in _list_candidates(run_dir):
            flaw = on_disk.find_flaw(checkpoint)
            if not flaw:
                newest = checkpoint
                break
            _warn_of_damage(checkpoint.path, flaw)
        _reject_lost_progress(run_dir, newest, reached_step=_reached_step(run_dir))
    environ[BEGUN_VARIABLE] = f"{own_claim.attempt} {newest.path if newest else ''}"
    return AttemptStart([host], own_claim.attempt, newest, own_claim)


def claim_and_find_checkpoint_on_all_ranks(
    run_dir: Path,
    place: Placement,
    *,
    hosts: list[str],
    store: Any,
    timeout_seconds: float,
    environ: MutableMapping[str, str],
) -> AttemptStart:
    """Claim the run directory on rank 0 and find the newest checkpoint that is whole, on ranks that have met.

    Each rank reads a share of a checkpoint's files.

    Raises:
        ConfigError: on every rank: another job writes there, or the run has reached a step and no whole checkpoint is
            left.
    """
    own_claim: Claim | None = None
    answer: dict[str, Any] = {"rejected": None}
    if place.rank == 0:
        try:
            own_claim = claim.take_claim(run_dir, claim.claimant_record(environ))
            candidates = [str(checkpoint.path) for checkpoint in _list_candidates(run_dir)]
            answer |= {"attempt": own_claim.attempt, "candidates": candidates, "reached": _reached_step(run_dir)}
        except ConfigError as error:
            answer["rejected"] = error.parts()
    with _release_if_rejected(own_claim):
        first = rendezvous.all_gather_json(store, place, topic="begin", value=answer, timeout_seconds=timeout_seconds)[
            0
        ]
        if first["rejected"]:
            raise ConfigError(*first["rejected"])
        newest = None
        for path in map(Path, first["candidates"]):
            checkpoint = on_disk.read_manifest(path)
            flaw = "it is not visible on this node"
            if checkpoint:
                flaw = on_disk.find_flaw(checkpoint, rank=place.rank, num_ranks=place.world_size)
            value = {"flaw": flaw, "host": socket.gethostname()}
            answers = rendezvous.all_gather_json(
                store, place, topic=f"flaw/{path.name}", value=value, timeout_seconds=timeout_seconds
            )
            flaws = [rank["flaw"] for rank in answers if rank["flaw"]]
            if not flaws:
                newest = checkpoint
                break
            if place.rank == 0:
                _warn_of_damage(path, flaws[0])
        _reject_lost_progress(run_dir, newest, reached_step=first["reached"])
    return AttemptStart(hosts, first["attempt"], newest, own_claim, store)


@contextmanager
def _release_if_rejected(own_claim: Claim | None) -> Iterator[None]:
    """Release the claim on `ConfigError`, so that the next start need not wait to see whether this process is alive."""
    try:
        yield
    except ConfigError:
        if own_claim:
            own_claim.release()
        raise


def _list_candidates(run_dir: Path) -> Sequence[Checkpoint]:
    """Return the checkpoints that the run may resume from, newest first. Raises `ConfigError`."""
    _reject_foreign_checkpoints(run_dir)
    on_disk.reject_copied_links(run_dir / "checkpoints")
    for path in _checkpoint_folders(run_dir):
        if not on_disk.read_manifest(path):
            _warn_of_damage(path, f"{on_disk.MANIFEST} cannot be read")
    checkpoints = on_disk.list_checkpoints(run_dir, attempt_log.read_starts(run_dir))
    if checkpoints and checkpoints[0].version < on_disk.VERSION:
        rule = "A run must be resumed with the version that wrote its checkpoint, as an older version saved other state"
        fix = f"run the code that wrote it, or start a new run from its weights: ckpt={checkpoints[0].path}"
        raise ConfigError("resume", run_dir, rule, fix)
    return checkpoints


def _checkpoint_folders(run_dir: Path) -> list[Path]:
    """Return the folders that are checkpoints or are named like one."""
    return [path for path in on_disk.own_folders(run_dir / "checkpoints") if not path.name.endswith(on_disk.PART)]


def _reject_foreign_checkpoints(run_dir: Path) -> None:
    """Raise `ConfigError` if a new run would write among another program's checkpoints, perhaps of the same names."""
    folder = run_dir / "checkpoints"
    if (run_dir / "config.yaml").exists() or attempt_log.read_events(run_dir) or not folder.is_dir():
        return
    own_names = {path.name for path in on_disk.own_folders(folder)}
    if foreign_names := sorted(path.name for path in folder.iterdir() if path.name not in own_names):
        rule = f"A new run must not write into checkpoints of another program; {folder} holds {foreign_names[0]}"
        raise ConfigError("run_dir", run_dir, rule, "run_dir=<a new directory>")


def _warn_of_damage(path: Path, flaw: str) -> None:
    print(f"warning: {path} is damaged and not used: {flaw}", flush=True)


def _reached_step(run_dir: Path) -> int | None:
    """Return a step that the run has reached, perhaps with more after it; None if it left no checkpoint at all."""
    events = attempt_log.read_events(run_dir)
    step = max((event.get("step") or event.get("from_step") or 0 for event in events), default=0)
    return step if step or _checkpoint_folders(run_dir) else None


def _reject_lost_progress(run_dir: Path, newest: Checkpoint | None, *, reached_step: int | None) -> None:
    """Raise `ConfigError` if a run that has made progress would silently start from the beginning."""
    if newest is None and reached_step is not None:
        rule = f"The run reached step {reached_step} or further, and none of its checkpoints is whole"
        paths = shlex.join([f"{run_dir}/checkpoints", f"{run_dir}/attempts.jsonl"])
        raise ConfigError("resume", run_dir, rule, f"rm -r {paths} to start it anew")
