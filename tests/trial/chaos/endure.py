"""Inject faults into a run one after another, and see that it trains again after each."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import slurm_nodes
from slurm_project import QUIET

from trial.chaos.faults import HANG, INTERVAL, KINDS, Run

ENDS = 90.0  # seconds until a failed attempt must have ended: Slurm detects a lost node in 20, ranks exit in HANG + 20
GOES_ON = 180.0  # seconds within which the run must train again
# Each layout has four ranks.
LAYOUTS = {
    "ddp": ("trainer=ddp_4node", "trainer.num_nodes=4", "trainer.devices=1"),
    "fsdp": ("trainer=fsdp_4node", "trainer.num_nodes=2", "trainer.devices=2"),
    "deepspeed": ("trainer=deepspeed_4node", "trainer.num_nodes=4", "trainer.devices=1"),
}
WORDS = [
    "cluster=test", "cluster.time=1:00:00", "callbacks=victim", *QUIET[1:],
    "model.network.depths=[1,1]", "model.network.widths=[16,32]",
    f"checkpoint.every_n_steps={INTERVAL}", "checkpoint.keep=3", "faults.retries=20",
    f"faults.hang_minutes={HANG / 60}",
]  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A planned fault: its kind, the steps of the attempt before it (`after`), and the rank or node (`pick`)."""

    kind: str
    after: int
    pick: int


@dataclass(frozen=True)
class Struck:
    """The result of a fault. `ended`: seconds until the attempt ended. `again`: seconds until the first new step."""

    kind: str
    strategy: str
    recomputed: int = 0
    ended: float | None = None
    again: float = 0.0
    hung: bool = False
    wrong: str = ""


def endure(run: Run, strategy: str, faults: Sequence[Fault], struck: list[Struck]) -> None:
    """Inject faults into a run one after another, each once the run trains again, and wait until the run has ended.

    The result of each is added to `struck`.

    Raises:
        TimeoutError: the run does not train, or does not end.
    """
    try:
        for fault in faults:
            run.pace(0.08)
            reach(run, fault.after)
            struck.append(survive(run, strategy, fault))
            print(f"  {strategy}: {struck[-1]}", flush=True)
            if struck[-1].wrong:
                return
        run.pace(0.01)
        state = run.slurm.wait(run.job, 2 * GOES_ON)["JobState"]
        if (state, run.outcome()) != ("COMPLETED", "finished"):
            raise RuntimeError(f"the run ended as {state}, outcome {run.outcome()!r}")
    finally:
        while run.heal:
            run.heal.pop()()
        run.slurm.cancel(run.job)


def reach(run: Run, steps: int) -> None:
    """Wait until the newest attempt has done this number of steps."""
    limit = time.monotonic() + GOES_ON
    while True:
        attempt = run.starts()[-1]["attempt"] if run.starts() else 0
        if sum(done == attempt for done, _ in run.steps()) >= steps:
            return
        if time.monotonic() > limit or run.slurm.show(run.job)["JobState"] in slurm_nodes.ENDED:
            raise TimeoutError(f"the run does not train: {run.slurm.show(run.job)}")
        time.sleep(0.02)


def survive(run: Run, strategy: str, fault: Fault) -> Struck:
    """Inject one fault, wait until the run trains again, and return the result."""
    kind = KINDS[fault.kind]
    old, restarts = run.starts()[-1]["attempt"], run.slurm.show(run.job)["Restarts"]
    began = time.monotonic()
    num_starts = len(run.starts())
    kind.strike(run, fault.pick)
    if not kind.restarts:
        return unharmed(run, strategy, fault, began=began, num_starts=num_starts)
    ended = None
    again = waited = False
    while not again:
        time.sleep(0.1)
        seconds = time.monotonic() - began
        record = run.slurm.show(run.job)
        if ended is None and (record["JobState"] != "RUNNING" or record["Restarts"] != restarts):
            ended = seconds
        steps = run.steps()
        highest = max(step for attempt, step in steps if attempt <= old)
        again = any(attempt > old and step > highest for attempt, step in steps) or run.outcome() == "finished"
        waited = seconds > GOES_ON or record["JobState"] in slurm_nodes.ENDED - {"COMPLETED"}
        if waited:
            why = f"does not train after {seconds:.0f} s, {record['JobState']}"
            return Struck(fault.kind, strategy, 0, ended, seconds, hung=ended is None, wrong=why)
    while run.heal:
        run.heal.pop()()
    recomputed, allowed = again_computed(run, old, highest, kind.intervals)
    wrong = f"{recomputed} steps computed again, {allowed} allowed" if recomputed > allowed else ""
    hung = ended is not None and ended > ENDS
    return Struck(fault.kind, strategy, recomputed, round(ended or 0, 1), round(seconds, 1), hung, wrong)


def again_computed(run: Run, old: int, highest: int, intervals: int) -> tuple[int, int]:
    """Return the number of recomputed steps, and the number that is allowed.

    If the fault interrupted a save, that checkpoint is missing. The steps since the save began are then allowed, too.
    """
    starts = [start["from_step"] for start in run.starts() if start["attempt"] > old]
    recomputed = highest - min(starts, default=highest)
    begun = highest // INTERVAL * INTERVAL
    unfinished = highest - begun if intervals and starts and min(starts) <= begun - INTERVAL else 0
    return recomputed, intervals * INTERVAL + unfinished


def unharmed(run: Run, strategy: str, fault: Fault, *, began: float, num_starts: int) -> Struck:
    """Wait until a run that was not interrupted has a later complete checkpoint, and return the result."""
    known, (_, step), seconds = {path.name for path in run.checkpoints()}, run.steps()[-1], 0.0
    while all(path.name in known or int(path.name[5:14]) == step for path in run.checkpoints()):
        if (seconds := time.monotonic() - began) > GOES_ON:
            return Struck(fault.kind, strategy, again=seconds, wrong="no later checkpoint")
        time.sleep(0.05)
    if len(run.starts()) != num_starts:
        return Struck(fault.kind, strategy, again=seconds, wrong="it has started again")
    return Struck(fault.kind, strategy, again=round(time.monotonic() - began, 1))


def table(struck: Sequence[Struck]) -> str:
    """Return the results as a Markdown table with one row per kind of fault."""
    lines = [
        "| fault | times | lost | hung | steps done again, at most | seconds till it ended | seconds till a new step |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in [*KINDS, "all"]:
        these = [one for one in struck if one.kind == kind or kind == "all"]
        if not these:
            continue
        lost, hung = sum(bool(one.wrong) for one in these), sum(one.hung for one in these)
        ended = [one.ended for one in these if one.ended]
        ends = f"{statistics.median(ended):.0f}, at most {max(ended):.0f}" if ended else "goes on"
        again = [one.again for one in these]
        lines.append(
            f"| {kind} | {len(these)} | {lost} | {hung} | {max(one.recomputed for one in these)} | {ends} | "
            f"{statistics.median(again):.0f}, at most {max(again):.0f} |"
        )
    return "\n".join(lines) + "\n"
