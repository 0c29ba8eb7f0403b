"""What ranks leave when a run fails, errors/<attempt>/rank-<N>.txt, and which of them was the first cause. No torch."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc.run.stacks import WAITS
from hpc.system.files import open_regular_file

TAIL = 2**20  # bytes of such a file that are read
ENDED = "Ended"  # the type of what a rank notes that was well when another failed
# What gloo, NCCL and torch's store say on the ranks that are left when a peer is gone.
PEER_GONE = re.compile(
    r"\bgloo\b|nccl|connection (was )?(closed|reset|rejected)|broken pipe|socket timeout|"
    r"timed out (waiting|after)|watchdog|recv.* 0 bytes",
    re.IGNORECASE,
)
BY_TORCH = re.compile(r"RuntimeError|Dist\w*Error|Connection\w+|BrokenPipeError|TimeoutError")
# Faults of the machine, as torch words them: the next start may do better.
HARDWARE = re.compile(r"CUDA (error|driver)|CU(DNN|BLAS)_STATUS|uncorrectable|DataLoader worker .*(killed|exited)")


@dataclass(frozen=True)
class Cause:
    """What one rank said last."""

    time: float
    rank: int
    host: str
    said: str  # `Type: message`

    @property
    def line(self) -> str:
        """As a person reads it: `rank 1 on n2: Type: message`."""
        colon = ":" if self.said.partition(":")[0].isidentifier() else ""
        return f"rank {self.rank}{f' on {self.host}' if self.host else ''}{colon} {self.said}"

    @property
    def echo(self) -> bool:
        """Did it only notice that another one had failed?"""
        kind, _, message = self.said.partition(": ")
        gone = BY_TORCH.fullmatch(kind) and PEER_GONE.search(message)
        return kind == ENDED or (kind == "Hang" and WAITS in message) or bool(gone)


def note(run_dir: Path, attempt: int, rank: int, host: str, said: str, stack: str) -> None:
    """Leave a file, whole or not at all.

    Args:
        said: `Type: message`, in one line.
        stack: the traceback, or the stacks of all threads.
    """
    path = folder(run_dir, attempt) / f"rank-{rank}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}")
    aside.write_text(f"{time.time():.3f} {said}\nhost {host}\n{stack}", encoding="utf-8", errors="replace")
    aside.replace(path)


def folder(run_dir: Path, attempt: int) -> Path:
    return run_dir / "errors" / str(attempt)


def first(causes: Sequence[Cause], world_size: int = 0, hosts: Sequence[str] = ()) -> Cause | None:
    """The original, not the echoes; where there are only echoes, a rank that left without a word; or None.

    Args:
        hosts: the nodes' names; ranks are packed node by node.
    """
    originals = [cause for cause in causes if not cause.echo]
    silent = sorted(set(range(world_size)) - {cause.rank for cause in causes})
    if causes and silent and not originals:
        others = f" and {len(silent) - 1} more" if silent[1:] else ""
        host = hosts[silent[0] * len(hosts) // world_size] if hosts else ""
        return Cause(min(cause.time for cause in causes), silent[0], host, f"left without a word{others} (killed?)")
    return min(originals or causes, key=lambda cause: cause.time, default=None)


def read(run_dir: Path, attempt: int) -> list[Cause]:
    """What the ranks of an attempt have left; a damaged file counts as missing."""
    found = (_read(path) for path in folder(run_dir, attempt).glob("rank-*.txt"))
    return [cause for cause in found if cause]


def _read(path: Path) -> Cause | None:
    try:
        with open_regular_file(path) as stream:
            text = stream.read(TAIL).decode(errors="replace")
    except OSError:
        return None
    rank = re.fullmatch(r"rank-(\d+)", path.stem)
    told = re.match(r"(\d+(?:\.\d+)?) (.+)\n(?:host (\S+)\n)?", text)
    if not rank or not told:
        return None
    rule = re.search(r"(?m)^\s*rule: (.+)", text) if told[2].startswith("ConfigError") else None
    return Cause(float(told[1]), int(rank[1]), told[3] or "", told[2] + (f": {rule[1]}" if rule else ""))


def deterministic(error: BaseException) -> bool:
    """Would the next start fail in the same way? Not after faults of files, network, hardware or another rank."""
    if not isinstance(error, Exception) or isinstance(error, OSError | MemoryError):
        return False
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "OutOfMemoryError" in kinds:  # torch's: the same shapes need the same memory
        return True
    if kinds & {"DistError", "AcceleratorError"}:
        return False
    passing = PEER_GONE.search(str(error)) or HARDWARE.search(str(error))
    return not (isinstance(error, RuntimeError) and passing)
