"""One writer per run directory: who may write here is whoever made the highest number in claims/. Imports no torch.

Nothing here compares clocks or times of files: nodes disagree about them, and NFS keeps them for a while.
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
from hpc.run import directory
from hpc.system import files, process

BEAT = 2.0  # seconds between two beats
LOOK = 0.25  # seconds between two looks at another's heartbeat


class Claim:
    """This process's right to write into a run directory, until a higher number is there. Its heart beats by itself."""

    def __init__(self, folder: Path, attempt: int, text: str) -> None:
        self.attempt = attempt
        self._folder, self._text, self._count = folder, text, 0
        self._lock, self._released = threading.Lock(), threading.Event()
        threading.Thread(target=self._live, daemon=True, name="claim").start()

    def beat(self) -> None:
        """Show that this process lives. A disk that fails is no reason to raise."""
        with self._lock, suppress(OSError):
            self._count += 1
            _beat(self._folder, self.attempt, self._count)

    def mine(self) -> bool:
        """May this process still write? False for good once another has taken over or the claim was deleted.

        Asks the file system (milliseconds), so that what is done right after a True can hardly come too late.
        """
        self.beat()  # NFS shows a folder afresh after a change of one's own
        try:
            claim = self._path.read_text(encoding="utf-8", errors="replace")
            return claim == self._text and newest(self._folder.parent) == self.attempt
        except FileNotFoundError:
            return False
        except OSError:
            return True  # nobody can tell: where it matters, the write that follows fails, too

    def release(self) -> None:
        """Say goodbye: the next one need not wait to see whether this process still lives."""
        self._released.set()
        self._text = json.dumps(json.loads(self._text) | {"released": True})
        with suppress(OSError):
            _aside(self._path, self._text).replace(self._path)

    def _live(self) -> None:
        while not self._released.wait(BEAT):
            self.beat()

    @property
    def _path(self) -> Path:
        return _file(self._folder, self.attempt)


def take(run_dir: Path, who: Mapping[str, Any], watch_seconds: float = 8) -> Claim:
    """Claim the next attempt at a run, on rank 0 alone; whoever held the directory before is fenced off from then on.

    Args:
        who: "job", "host", "pid" and "restart", how often the scheduler has started the job again.
        watch_seconds: how long one who has not said goodbye is watched for a heartbeat.

    Raises:
        ConfigError: another process writes into the directory, or has come first, or it cannot be written.
    """
    folder = run_dir / "claims"
    stop = "qdel" if "PBS_JOBID" in os.environ else "scancel"
    text = json.dumps({**who, "stop": stop, "process": process.identity(os.getpid())})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        aside = _aside(folder / "new", text)  # before the look around, which NFS answers afresh after it
        try:
            last = newest(run_dir)
            if last and _lives(run_dir, last, who, watch_seconds):
                raise _held(run_dir, last)
            attempt = 1 + max(last, *(_whole(event.get("attempt")) for event in directory.events(run_dir)), 0)
            _beat(folder, attempt, 0)  # first, so that whoever sees the claim finds a heartbeat
            if not link(aside, _file(folder, attempt)):
                raise _held(run_dir, attempt)  # made since we looked: it lives
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        rule = f"must be a directory one can write: {error.strerror or error}"
        raise ConfigError("run_dir", run_dir, rule, "run_dir=<a directory>, or make it writable") from None
    return Claim(folder, attempt, text)


def newest(run_dir: Path) -> int:
    """The attempt that owns the run; 0: none has."""
    try:
        names = os.listdir(run_dir / "claims")
    except FileNotFoundError:
        return 0
    return max((int(found[1]) for name in names if (found := re.fullmatch(r"(\d{6,})\.json", name))), default=0)


def of_earlier_start(run_dir: Path, who: Mapping[str, Any]) -> bool:
    """Has this job claimed the directory last, before the scheduler started it again?"""
    return _earlier_start(_read(run_dir / "claims", newest(run_dir)), who)


def _earlier_start(claim: Mapping[str, Any], who: Mapping[str, Any]) -> bool:
    same = bool(claim.get("job")) and claim.get("job") == who.get("job")
    return same and _whole(claim.get("restart")) < _whole(who.get("restart"))


def _lives(run_dir: Path, attempt: int, who: Mapping[str, Any], seconds: float) -> bool:
    """Does this attempt's heartbeat change within so many seconds? It may end meanwhile."""
    path = run_dir / "claims" / f"{attempt:06}.beat"
    seen, limit = _text(path), time.monotonic() + seconds
    while not _ended(run_dir, attempt, who) and time.monotonic() < limit:
        time.sleep(LOOK)
        if (now := _text(path)) and now != seen:
            return True
    return False


def _ended(run_dir: Path, attempt: int, who: Mapping[str, Any]) -> bool:
    """Is it certain, without watching, that this attempt writes no more?"""
    if any(event.get("event") == "end" and event.get("attempt") == attempt for event in directory.events(run_dir)):
        return True
    claim = _read(run_dir / "claims", attempt)
    if claim.get("released"):
        return True
    if _earlier_start(claim, who):
        return True  # the scheduler starts a job again when it takes the former start for dead
    theirs, mine = claim.get("process"), process.identity(os.getpid())
    if not theirs or not mine or (claim.get("host"), theirs[:2]) != (who.get("host"), mine[:2]):
        return False
    return process.identity(theirs[2]) != theirs


def _beat(folder: Path, attempt: int, count: int) -> None:
    path, text = folder / f"{attempt:06}.beat", f"{count:012}\n"
    try:
        _aside(path, text).replace(path)
    except OSError:  # a full disk must not make the living look dead: as many bytes, in place
        with path.open("r+", encoding="utf-8") as stream:
            stream.write(text)


def link(aside: Path, path: Path) -> bool:
    """Give a whole file its name, unless the name is taken."""
    try:
        os.link(aside, path)
    except FileExistsError:
        return aside.stat().st_nlink == 2  # NFS may have lost its answer to our own success
    except OSError:  # a file system without hard links
        try:
            with path.open("x", encoding="utf-8") as stream:
                stream.write(aside.read_text(encoding="utf-8"))
        except FileExistsError:
            return False
    return True


def _held(run_dir: Path, attempt: int) -> ConfigError:
    claim = _read(run_dir / "claims", attempt)
    job, host = claim.get("job"), claim.get("host")
    name = f"job {job}" if job else f"process {claim['pid']}" if claim.get("pid") else "another process"
    stop = f"{claim.get('stop', 'scancel')} {job}, or " if job else ""
    rule = f"{name}{f' on {host}' if host else ''} writes into it"
    return ConfigError("run_dir", run_dir, rule, f"{stop}wait till it has ended, or another run_dir=")


def _read(folder: Path, attempt: int) -> dict[str, Any]:
    """A claim; one that is damaged says nothing."""
    try:
        claim = files.parse_json(_text(_file(folder, attempt)) or "{}")
    except ValueError:
        return {}
    if not isinstance(claim, dict):
        return {}
    known = claim.get("process")
    return claim if known is None or (isinstance(known, list) and len(known) == 4) else claim | {"process": None}


def _aside(path: Path, text: str) -> Path:
    """A file beside its place, under a name that no other thread on any node uses."""
    aside = path.with_name(f".{path.name}-{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}")
    aside.write_text(text, encoding="utf-8")
    return aside


def _file(folder: Path, attempt: int) -> Path:
    return folder / f"{attempt:06}.json"


def _text(path: Path) -> str | None:
    """Read through an open of its own: that is when NFS asks the server."""
    try:
        return files.read_text(path, errors="replace")
    except OSError:
        return None


def _whole(value: Any) -> int:
    return int(value) if str(value).isdecimal() else 0
