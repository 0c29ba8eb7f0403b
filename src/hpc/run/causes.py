"""The errors that ranks leave in errors/<attempt>/rank-<N>.txt, and which of them was the first. Imports no torch."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

from hpc.run.stacks import WAITS_FOR_RANKS
from hpc.system.files import open_regular_file, write_atomically

MAX_BYTES = 2**20  # of such a file that are read
ENDED = "Ended"  # the type that a healthy rank notes when another one has failed
RANK_0_GONE = "rank 0 is gone"  # the start of its message when rank 0's store does not answer any more
# Messages of gloo, NCCL and torch's store on the ranks that are left when another one is gone.
PEER_GONE = re.compile(
    r"\bgloo\b|nccl|connection (was )?(closed|reset|rejected)|broken pipe|socket timeout|"
    r"timed out (waiting|after)|watchdog|recv.* 0 bytes",
    re.IGNORECASE,
)
BY_TORCH = re.compile(r"RuntimeError|Dist\w*Error|Connection\w+|BrokenPipeError|TimeoutError")
# Faults of the machine, as torch words them: the next start may succeed.
HARDWARE = re.compile(r"CUDA (error|driver)|CU(DNN|BLAS)_STATUS|uncorrectable|DataLoader worker .*(killed|exited)")


@dataclass(frozen=True)
class RankError:
    """The last error of one rank."""

    time: float
    rank: int
    host: str
    error: str  # `Type: message`

    @property
    def line(self) -> str:
        """The error with its place, for a person: `rank 1 on n2: Type: message`."""
        colon = ":" if self.error.partition(":")[0].isidentifier() else ""
        return f"rank {self.rank}{f' on {self.host}' if self.host else ''}{colon} {self.error}"

    @property
    def is_echo(self) -> bool:
        """Return True if this rank failed only because another one had failed."""
        kind, _, message = self.error.partition(": ")
        is_peer_gone = BY_TORCH.fullmatch(kind) and PEER_GONE.search(message)
        return kind == ENDED or (kind == "Hang" and WAITS_FOR_RANKS in message) or bool(is_peer_gone)


def describe_error(error: BaseException) -> str:
    """Return `Type: message` with the first line of the message, and the notes of the error.

    A worker of a DataLoader hands on its error as text, in which a traceback comes first.
    """
    lines = list(filter(str.strip, str(error).splitlines()))
    if "Original Traceback (most recent call last):" in lines:
        lines = lines[1 + max(n for n, line in enumerate(lines) if line.startswith(('  File "', "Original "))) :]
        lines = list(dropwhile(lambda line: line.startswith(" "), lines))  # code; a message may have such lines later
        return ", ".join(map(str.strip, lines)).replace(":, ", ": ")
    return ", ".join([f"{type(error).__name__}: {''.join(lines[:1])}", *getattr(error, "__notes__", ())])


def write_cause(run_dir: Path, attempt: int, *, rank: int, host: str, error: str, stack: str) -> None:
    """Write the file of a rank, whole or not at all.

    Args:
        error: `Type: message`, in one line.
        stack: the traceback, or the stacks of all threads.
    """
    path = errors_folder(run_dir, attempt) / f"rank-{rank}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, f"{time.time():.3f} {error}\nhost {host}\n{stack}", errors="replace")


def errors_folder(run_dir: Path, attempt: int) -> Path:
    """Return the folder for the errors of an attempt's ranks."""
    return run_dir / "errors" / str(attempt)


def first_cause(causes: Sequence[RankError], *, world_size: int = 0, hosts: Sequence[str] = ()) -> RankError | None:
    """Return the earliest error that is no echo; if all are echoes, the rank that was lost; or None.

    Args:
        hosts: names of the nodes; ranks are packed node by node.
    """
    originals = [cause for cause in causes if not cause.is_echo]
    if originals or not causes:
        return min(originals, key=lambda cause: cause.time, default=None)
    host_of = [hosts[rank * len(hosts) // world_size] if hosts else "" for rank in range(world_size)]
    silent = sorted(set(range(world_size)) - {cause.rank for cause in causes})
    time = min(cause.time for cause in causes)
    cut_off = _hosts_without_rank_0(causes, host_of) if silent[:1] in ([], [0]) else []
    if cut_off and len(cut_off) < len(set(hosts)) - 1:  # other nodes than rank 0's have not lost it
        rank = host_of.index(cut_off[0])
        return RankError(time, rank, cut_off[0], "lost rank 0, as no other node did (was the node cut off?)")
    if not silent:
        return min(causes, key=lambda cause: cause.time)
    others = f", as did {len(silent) - 1} more" if silent[1:] else ""
    or_cut_off = f", or {cut_off[0]} cut off" if len(cut_off) == 1 else ""
    return RankError(time, silent[0], host_of[silent[0]], f"ended without an error{others} (killed{or_cut_off}?)")


def _hosts_without_rank_0(causes: Sequence[RankError], host_of: Sequence[str]) -> list[str]:
    """Return the nodes all of whose ranks have lost rank 0; none if those of its own node have, as it ended then."""
    ranks = {cause.rank for cause in causes if cause.error.startswith(f"{ENDED}: {RANK_0_GONE}")}
    hosts = [host for host in dict.fromkeys(host_of) if all(r in ranks for r, h in enumerate(host_of) if h == host)]
    return [] if any(host_of[rank] == host_of[0] for rank in ranks if rank < len(host_of)) else hosts


def read_causes(run_dir: Path, attempt: int) -> list[RankError]:
    """Return the errors that the ranks of an attempt have left; a damaged file counts as missing."""
    causes = (_read_cause(path) for path in errors_folder(run_dir, attempt).glob("rank-*.txt"))
    return [cause for cause in causes if cause]


def _read_cause(path: Path) -> RankError | None:
    try:
        with open_regular_file(path) as stream:
            text = stream.read(MAX_BYTES).decode(errors="replace")
    except OSError:
        return None
    rank = re.fullmatch(r"rank-(\d+)", path.stem)
    head = re.match(r"(\d+(?:\.\d+)?) (.+)\n(?:host (\S+)\n)?", text)
    return RankError(float(head[1]), int(rank[1]), head[3] or "", head[2]) if rank and head else None


def is_deterministic(error: BaseException) -> bool:
    """Return whether the next start would fail alike: not after faults of files, network, hardware or another rank."""
    if not isinstance(error, Exception) or isinstance(error, OSError | MemoryError):
        return False
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "OutOfMemoryError" in kinds:  # torch's: the same shapes need the same memory
        return True
    if kinds & {"DistError", "AcceleratorError"}:
        return False
    is_transient = PEER_GONE.search(str(error)) or HARDWARE.search(str(error))
    return not (isinstance(error, RuntimeError) and is_transient)
