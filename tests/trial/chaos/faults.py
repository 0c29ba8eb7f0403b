"""Faults of a cluster, each injected into a run that trains."""

import json
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from slurm_nodes import Slurm
from slurm_project import wait_for

INTERVAL = 10  # steps from one checkpoint to the next
HANG = 15.0  # seconds without a step, after which the ranks exit
SOON = 60.0  # seconds within which the event that a fault waits for must happen


@dataclass
class Run:
    """A submitted run, observed through its files and through Slurm."""

    slurm: Slurm
    job: str
    run_dir: Path
    disk: Path  # the small file system with the checkpoints
    heal: list[Callable[[], None]] = field(default_factory=list)  # functions that repair the nodes

    def steps(self) -> list[tuple[int, int]]:
        """Return (attempt, step) of each completed step, in order."""
        path = self.run_dir / "steps"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(attempt), int(step)) for attempt, step in map(str.split, lines)]

    def starts(self) -> list[dict]:
        """Return the start events of attempts.jsonl."""
        path = self.run_dir / "attempts.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == "start"]

    def outcome(self) -> str:
        path = self.run_dir / "verdict"
        found = re.search(r"(?m)^outcome (\w+)", path.read_text()) if path.exists() else None
        return found[1] if found else ""

    def checkpoints(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        return sorted(path.parent for path in self.run_dir.glob("checkpoints/step-*[0-9]/manifest.json"))

    def parts(self) -> list[int]:
        """Return the steps of checkpoints that are being written or were left incomplete."""
        found = (re.fullmatch(r"step-(\d+)-\d+\.part", path.name) for path in self.run_dir.glob("checkpoints/*.part"))
        return sorted(int(name[1]) for name in found if name)

    def log(self) -> str:
        return "".join(path.read_text(errors="replace") for path in self.run_dir.glob("job-*.log"))

    def hosts(self) -> list[str]:
        return self.starts()[-1]["hosts"]

    def node(self, rank: int) -> str:
        hosts, ranks = self.hosts(), self.starts()[-1]["world_size"]
        return hosts[rank % ranks * len(hosts) // ranks]

    def kill(self, *ranks: int) -> None:
        """Kill ranks of one node with SIGKILL."""
        pids = [(self.run_dir / f"pid-{rank}").read_text() for rank in ranks]
        self.slurm.exec(self.node(ranks[0]), "kill", "-9", *pids)

    def pace(self, seconds: float) -> None:
        """Set how many seconds each step sleeps."""
        aside = self.run_dir / ".pace"
        aside.write_text(str(seconds))
        aside.replace(self.run_dir / "pace")


# Each function takes a run and a random number, which chooses the rank or node.


def warn(signal: str, run: Run, pick: int) -> None:
    run.slurm.cancel(f"--signal={signal}", run.job)


def requeue(run: Run, pick: int) -> None:
    run.slurm.call("scontrol", "requeue", run.job)


def preempt(mode: str, run: Run, pick: int) -> None:
    """Let a short job with a higher priority take one of the run's nodes."""
    run.slurm.call("scontrol", "update", "PartitionName=main", f"PreemptMode={mode}")
    options = ("--partition=urgent", "--exclusive", f"--nodelist={run.node(pick)}", "--output=/dev/null")
    run.slurm.sbatch(*options, "--wrap=true")


def suspend(run: Run, pick: int) -> None:
    """Suspend the job for longer than a step may take."""
    run.slurm.call("scontrol", "suspend", run.job)
    time.sleep(HANG + 3)
    run.slurm.call("scontrol", "resume", run.job)


def kill_rank(run: Run, pick: int) -> None:
    run.kill(pick % run.starts()[-1]["world_size"])


def kill_ranks_of_a_node(run: Run, pick: int) -> None:
    ranks = range(run.starts()[-1]["world_size"])
    run.kill(*[rank for rank in ranks if run.node(rank) == run.node(pick)])


def kill_slurmstepd(run: Run, pick: int) -> None:
    """Kill the slurmstepd of one node. Its ranks keep running, but Slurm does not learn when they end."""
    node = run.node(pick)
    pids = run.slurm.exec(node, "pgrep", "-f", rf"^slurmstepd: \[{run.job}\.0\]").stdout.split()
    run.slurm.exec(node, "kill", "-9", *pids)


def stop_slurmd(run: Run, pick: int) -> None:
    node = run.node(pick)
    run.heal.append(partial(run.slurm.reboot, node))
    run.pace(1.0)  # Slurm needs a while to notice
    run.slurm.stop_slurmd(node)


def cut_link(run: Run, pick: int) -> None:
    node = run.node(pick)
    run.heal.append(partial(run.slurm.reboot, node))
    run.slurm.cut(node)


def fill_disk(run: Run, pick: int) -> None:
    """Fill the disk so that only half of a checkpoint fits, until a save has failed."""
    wait_for(lambda: run.checkpoints(), SOON, "a checkpoint")
    size = sum(path.stat().st_size for path in run.checkpoints()[-1].iterdir())
    filler, said = run.disk / "filler", run.log().count("was not written")
    limit = time.monotonic() + SOON
    try:
        with filler.open("wb") as stream:
            while run.log().count("was not written") == said:
                if time.monotonic() > limit:
                    raise TimeoutError("no save has failed on a full disk")
                state = os.statvfs(run.disk)
                if (more := state.f_bavail * state.f_frsize - size // 2) > 0:  # an older checkpoint was removed
                    with suppress(OSError):  # a save has taken some of the space in the meantime
                        os.posix_fallocate(stream.fileno(), stream.seek(0, os.SEEK_END), more)
                time.sleep(0.02)
    finally:
        filler.unlink()


def kill_during_save(run: Run, pick: int) -> None:
    limit = time.monotonic() + SOON
    old = run.parts()
    while not set(run.parts()) - set(old):
        if time.monotonic() > limit:
            raise TimeoutError("nothing is saved")
        time.sleep(0.002)
    kill_rank(run, pick)


def truncate_newest(run: Run, pick: int) -> None:
    """Kill a run, and truncate its newest checkpoint while the job is pending. It must resume from the one before."""
    wait_for(lambda: len(run.checkpoints()) > 1, SOON, "two checkpoints")
    kill_rank(run, pick)
    wait_for(lambda: run.slurm.show(run.job)["JobState"] == "PENDING", SOON, "the job is requeued")
    files = sorted(path for path in run.checkpoints()[-1].iterdir() if path.name != "manifest.json")
    path = files[pick % len(files)]
    os.truncate(path, path.stat().st_size // 2)


def hold_for_ever(run: Run, pick: int) -> None:
    (run.run_dir / f"hold-{pick % run.starts()[-1]['world_size']}").touch()


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        intervals: how many checkpoint intervals may be recomputed; 0 if all ranks can save before they end.
        restarts: whether the run must start again.
    """

    strike: Callable[[Run, int], None]
    intervals: int = 1
    restarts: bool = True


KINDS = {
    "warning signal": Kind(partial(warn, "USR1"), 0),
    "scancel --signal=TERM": Kind(partial(warn, "TERM"), 0),
    "requeue by the admin": Kind(requeue),
    "preemption that requeues": Kind(partial(preempt, "REQUEUE"), 0),
    "preemption that cancels": Kind(partial(preempt, "CANCEL"), 0),
    "suspension": Kind(suspend, restarts=False),
    "kill -9 of a rank": Kind(kill_rank),
    "kill -9 of all ranks of a node": Kind(kill_ranks_of_a_node),
    "kill -9 of a slurmstepd": Kind(kill_slurmstepd),
    "a slurmd gone": Kind(stop_slurmd),
    "the link of a node cut": Kind(cut_link),
    "disk full during a save": Kind(fill_disk, restarts=False),
    "kill -9 during a save": Kind(kill_during_save),
    "the newest checkpoint truncated": Kind(truncate_newest, 2),
    "a rank that sleeps for ever": Kind(hold_for_ever),
}
