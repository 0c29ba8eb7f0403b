"""One writer per run directory: the owner is whoever made the highest number in claims/. Imports no torch.

Nothing here compares clocks or times of files: nodes disagree about them, and NFS caches them for a while.
"""

import json
import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc.config.errors import ConfigError
from hpc.launch import placement
from hpc.run import attempt_log
from hpc.system import files, process

BEAT_SECONDS = 2.0  # between two heartbeats
POLL_SECONDS = 0.25  # between two looks at another process's heartbeat


class Claim:
    """This process's right to write into a run directory, until a higher number is there. A thread keeps it alive."""

    def __init__(self, folder: Path, attempt: int, *, text: str) -> None:
        self.attempt = attempt
        self._folder, self._text, self._count = folder, text, 0
        self._lock, self._released = threading.Lock(), threading.Event()
        threading.Thread(target=self._beat_until_released, daemon=True, name="claim").start()

    def beat(self) -> None:
        """Show that this process is alive. A disk that fails is no reason to raise."""
        with self._lock, suppress(OSError):
            self._count += 1
            _write_beat(self._folder, self.attempt, self._count)

    def may_write(self) -> bool:
        """Return whether this process still owns the run directory.

        False for good once another process has taken over or the claim was deleted. It asks the file system, which
        takes milliseconds, so that a write right after a True can hardly come too late.
        """
        self.beat()  # NFS lists a folder anew after a change of one's own
        try:
            text = self._path.read_text(encoding="utf-8", errors="replace")
            return text == self._text and newest_attempt(self._folder.parent) == self.attempt
        except FileNotFoundError:
            return False
        except OSError:
            return True  # unknown; where it matters, the write that follows fails as well

    def release(self) -> None:
        """Give the claim up, so that the next process need not wait to see whether this one is still alive."""
        self._released.set()
        self._text = json.dumps(json.loads(self._text) | {"released": True})
        with suppress(OSError):
            files.write_atomically(self._path, self._text)

    def _beat_until_released(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            self.beat()

    @property
    def _path(self) -> Path:
        return _claim_path(self._folder, self.attempt)


def claimant_record(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return job, key of its start, host and process id of this process, as its claim records them."""
    start = placement.start_key(environ)
    return {"job": placement.job_id(environ), "restart": start, "host": socket.gethostname(), "pid": os.getpid()}


def take_claim(run_dir: Path, claimant: Mapping[str, Any], *, watch_seconds: float = 8) -> Claim:
    """Claim the next attempt at a run, on rank 0 alone; an earlier owner may not write any more from then on.

    Args:
        claimant: as `claimant_record` returns it.
        watch_seconds: how long an owner that has not released its claim is watched for a heartbeat.

    Raises:
        ConfigError: another process writes into the directory, or was faster, or the directory cannot be written.
    """
    folder = run_dir / "claims"
    stop = "qdel" if "PBS_JOBID" in os.environ else "scancel"
    text = json.dumps({**claimant, "stop": stop, "process": process.identity(os.getpid())})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = files.temporary_path(folder / "new")
        temporary.write_text(text, encoding="utf-8")  # first: NFS lists the folder anew after that
        try:
            last = newest_attempt(run_dir)
            if last and _wait_for_heartbeat(run_dir, last, claimant=claimant, timeout_seconds=watch_seconds):
                raise _claimed_error(run_dir, last)
            recorded = (_whole_number(event.get("attempt")) for event in attempt_log.read_events(run_dir))
            attempt = 1 + max(last, *recorded, 0)
            _write_beat(folder, attempt, 0)  # first, so that whoever sees the claim finds a heartbeat
            if not files.link_unless_taken(temporary, _claim_path(folder, attempt)):
                raise _claimed_error(run_dir, attempt)  # made since we looked, so its process is alive
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        given = f"{run_dir} ({error.strerror or error})"
        fix = "run_dir=<a directory that you may write to>"
        raise ConfigError("run_dir", given, "must be a folder that can be written", fix) from None
    return Claim(folder, attempt, text=text)


def newest_attempt(run_dir: Path) -> int:
    """Return the number of the attempt that owns the run; 0 if none does."""
    try:
        names = os.listdir(run_dir / "claims")
    except FileNotFoundError:
        return 0
    return max((int(match[1]) for name in names if (match := re.fullmatch(r"(\d{6,})\.json", name))), default=0)


def is_claim_before_requeue(run_dir: Path, claimant: Mapping[str, Any]) -> bool:
    """Return whether the last claim is of this job, before the scheduler started it again."""
    return _is_before_requeue(_read_claim(run_dir / "claims", newest_attempt(run_dir)), claimant)


def _is_before_requeue(claim: Mapping[str, Any], claimant: Mapping[str, Any]) -> bool:
    is_same_job = bool(claim.get("job")) and claim.get("job") == claimant.get("job")
    before, now = str(claim.get("restart", 0)), str(claimant.get("restart", 0))
    if now.startswith("pbs-"):  # PBS does not count; an earlier start makes no claim after a later one
        return is_same_job and before != now
    return is_same_job and _whole_number(before) < _whole_number(now)


def _wait_for_heartbeat(run_dir: Path, attempt: int, *, claimant: Mapping[str, Any], timeout_seconds: float) -> bool:
    """Wait until this attempt's heartbeat changes, and return True; False if it ends or the time is up."""
    path = run_dir / "claims" / f"{attempt:06}.beat"
    first_beat, limit = _read_text(path), time.monotonic() + timeout_seconds
    while not _has_ended(run_dir, attempt, claimant=claimant) and time.monotonic() < limit:
        time.sleep(POLL_SECONDS)
        if (beat := _read_text(path)) and beat != first_beat:
            return True
    return False


def _has_ended(run_dir: Path, attempt: int, *, claimant: Mapping[str, Any]) -> bool:
    """Return whether it is certain, without watching, that this attempt writes no more."""
    events = attempt_log.read_events(run_dir)
    if any(event.get("event") == "end" and event.get("attempt") == attempt for event in events):
        return True
    claim = _read_claim(run_dir / "claims", attempt)
    if claim.get("released"):
        return True
    if _is_before_requeue(claim, claimant):
        return True  # the scheduler starts a job again when it considers the earlier start dead
    owner, own = claim.get("process"), process.identity(os.getpid())
    if not owner or not own or (claim.get("host"), owner[:2]) != (claimant.get("host"), own[:2]):
        return False
    return process.identity(owner[2]) != owner


def _write_beat(folder: Path, attempt: int, count: int) -> None:
    path, text = folder / f"{attempt:06}.beat", f"{count:012}\n"
    try:
        files.write_atomically(path, text)
    except OSError:  # a full disk must not make a living process look dead: overwrite as many bytes in place
        with path.open("r+", encoding="utf-8") as stream:
            stream.write(text)


def _claimed_error(run_dir: Path, attempt: int) -> ConfigError:
    claim = _read_claim(run_dir / "claims", attempt)
    job, host = claim.get("job"), claim.get("host")
    name = f"Job {job}" if job else f"Process {claim['pid']}" if claim.get("pid") else "Another process"
    stop = f"{claim.get('stop', 'scancel')} {job}, or " if job else ""
    rule = f"{name}{f' on {host}' if host else ''} writes into it, and a run directory can have only one writer"
    return ConfigError("run_dir", run_dir, rule, f"{stop}wait until it has ended, or run_dir=<another directory>")


def _read_claim(folder: Path, attempt: int) -> dict[str, Any]:
    """Return the content of a claim; {} if it is damaged."""
    try:
        claim = files.parse_json(_read_text(_claim_path(folder, attempt)) or "{}")
    except ValueError:
        return {}
    if not isinstance(claim, dict):
        return {}
    identity = claim.get("process")
    is_valid = identity is None or (isinstance(identity, list) and len(identity) == 4)
    return claim if is_valid else claim | {"process": None}


def _claim_path(folder: Path, attempt: int) -> Path:
    return folder / f"{attempt:06}.json"


def _read_text(path: Path) -> str | None:
    """Return the text of a file, opened anew: that is when NFS asks the server. None if it cannot be read."""
    try:
        return files.read_text(path, errors="replace")
    except OSError:
        return None


def _whole_number(value: Any) -> int:
    return int(value) if str(value).isdecimal() else 0
