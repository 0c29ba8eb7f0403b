"""Inject random faults into training on a real Slurm: python tests/chaos.py --faults 100 --seed 1

Every run must end, with exactly the weights and curves of a run without faults.
"""

import argparse
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import slurm_nodes
from cookiecutter.main import cookiecutter
from faults import HANG, INTERVAL, KINDS, Run
from marked_text import put
from slurm_project import QUIET, Desk, made_for_tests

HERE = Path(__file__).resolve().parent
STEPS = 40  # the most steps of a run per injected fault
ENDS = 90.0  # seconds until a failed attempt must have ended: Slurm detects a lost node in 20, ranks exit in HANG + 20
GOES_ON = 180.0  # seconds within which the run must train again
PER_RUN = 5
# One node more than a run uses: the run resumes on the spare node while the lost node is still cut off.
NODES = (*slurm_nodes.NODES, "n5")
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
CALLBACKS = """\
defaults: [default]
progress: null
victim:
  _target_: my_research.victim.Victim
  run_dir: ${run_dir}
"""


@dataclass(frozen=True)
class Strike:
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


def plan(faults: int, seed: int, *, strategies: Sequence[str] = tuple(LAYOUTS)) -> list[tuple[str, list[Strike]]]:
    """Return (strategy, planned faults) of each run. No kind occurs a second time before all have occurred once."""
    rng = random.Random(seed)
    kinds: list[str] = []
    while len(kinds) < faults:
        kinds += rng.sample(list(KINDS), len(KINDS))
    strikes = [Strike(kind, rng.randrange(1, 2 * INTERVAL), rng.randrange(10**6)) for kind in kinds[:faults]]
    runs = max(-(-faults // PER_RUN), min(faults, len(strategies)))
    return [(strategies[run % len(strategies)], strikes[run::runs]) for run in range(runs)]


@contextmanager
def ground(folder: Path, bake: Callable[[], Path]) -> Iterator[tuple[Desk, Path]]:
    """Start a cluster with a project on it, and mount a small file system that all nodes share."""
    disk = folder / "disk"
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256M", "tmpfs", disk], check=True)
    try:
        (folder / "slurm").mkdir()
        with slurm_nodes.cluster(folder / "slurm", NODES) as slurm:
            yield Desk(slurm, prepared(bake())), disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def prepared(project: Path) -> Path:
    """Add the callback for fault injection to a baked project."""
    made_for_tests(project)
    (project / "src/my_research/victim.py").write_text((HERE / "victim.py").read_text())
    (project / "configs/callbacks/victim.yaml").write_text(CALLBACKS)
    return project


def submitted(desk: Desk, disk: Path, strategy: str, name: str, steps: int) -> Run:
    run_dir = desk.project / "runs" / name
    run_dir.mkdir(parents=True)
    (disk / name).mkdir()
    (run_dir / "checkpoints").symlink_to(disk / name)
    job, _ = desk.submit(*WORDS, *LAYOUTS[strategy], f"trainer.max_steps={steps}", f"run_dir={run_dir}")
    return Run(desk.slurm, job, run_dir, disk)


def endure(run: Run, strategy: str, strikes: Sequence[Strike]) -> list[Struck]:
    """Inject faults into a run one after another, each once the run trains again, and wait until the run has ended.

    Raises:
        TimeoutError: the run does not train, or does not end.
    """
    struck = []
    try:
        for strike in strikes:
            run.pace(0.08)
            reach(run, strike.after)
            struck.append(survive(run, strategy, strike))
            print(f"  {strategy}: {struck[-1]}", flush=True)
            if struck[-1].wrong:
                return struck
        run.pace(0.01)
        state = run.slurm.wait(run.job, 2 * GOES_ON)["JobState"]
        if (state, run.outcome()) != ("COMPLETED", "finished"):
            raise RuntimeError(f"the run ended as {state}, outcome {run.outcome()!r}")
        return struck
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


def survive(run: Run, strategy: str, strike: Strike) -> Struck:
    """Inject one fault, wait until the run trains again, and return the result."""
    kind = KINDS[strike.kind]
    old, restarts = run.starts()[-1]["attempt"], run.slurm.show(run.job)["Restarts"]
    began = time.monotonic()
    num_starts = len(run.starts())
    kind.strike(run, strike.pick)
    if not kind.restarts:
        return unharmed(run, strategy, strike, began=began, num_starts=num_starts)
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
            return Struck(strike.kind, strategy, 0, ended, seconds, hung=ended is None, wrong=why)
    while run.heal:
        run.heal.pop()()
    recomputed, allowed = again_computed(run, old, highest, kind.intervals)
    wrong = f"{recomputed} steps computed again, {allowed} allowed" if recomputed > allowed else ""
    hung = ended is not None and ended > ENDS
    return Struck(strike.kind, strategy, recomputed, round(ended or 0, 1), round(seconds, 1), hung, wrong)


def again_computed(run: Run, old: int, highest: int, intervals: int) -> tuple[int, int]:
    """Return the number of recomputed steps, and the number that is allowed.

    If the fault interrupted a save, that checkpoint is missing. The steps since the save began are then allowed, too.
    """
    starts = [start["from_step"] for start in run.starts() if start["attempt"] > old]
    recomputed = highest - min(starts, default=highest)
    begun = highest // INTERVAL * INTERVAL
    unfinished = highest - begun if intervals and starts and min(starts) <= begun - INTERVAL else 0
    return recomputed, intervals * INTERVAL + unfinished


def unharmed(run: Run, strategy: str, strike: Strike, *, began: float, num_starts: int) -> Struck:
    """Wait until a run that was not interrupted has a later complete checkpoint, and return the result."""
    known, (_, step), seconds = {path.name for path in run.checkpoints()}, run.steps()[-1], 0.0
    while all(path.name in known or int(path.name[5:14]) == step for path in run.checkpoints()):
        if (seconds := time.monotonic() - began) > GOES_ON:
            return Struck(strike.kind, strategy, again=seconds, wrong="no later checkpoint")
        time.sleep(0.05)
    if len(run.starts()) != num_starts:
        return Struck(strike.kind, strategy, again=seconds, wrong="it has started again")
    return Struck(strike.kind, strategy, again=round(time.monotonic() - began, 1))


def campaign(
    desk: Desk, disk: Path, runs: Sequence[tuple[str, list[Strike]]], *, seed: int
) -> tuple[list[Struck], list[str]]:
    """Run the faults of a plan, and return their results and the errors that were found."""
    struck: list[Struck] = []
    wrong: list[str] = []
    references: dict[str, Path] = {}
    steps = STEPS * max(len(strikes) for _, strikes in runs)
    for number, (strategy, strikes) in enumerate(runs):
        for name, faults_now in ((f"reference-{strategy}", []), (f"{number:02}-{strategy}", strikes)):
            if strategy in references and not faults_now:
                continue
            print(f"{name}: {', '.join(strike.kind for strike in faults_now)}", flush=True)
            run = submitted(desk, disk, strategy, name, steps)
            try:
                found = endure(run, strategy, faults_now)
                said = [f"{one.kind}: {one.wrong or 'hung'}" for one in found if one.wrong or one.hung]
            except Exception as error:
                found, said = [], [f"{type(error).__name__}: {error}"]
            struck += found
            if not faults_now:
                references[strategy] = run.run_dir
            elif not said:
                said = compared(desk, references[strategy], run.run_dir)
            if said:
                wrong += [f"{run.run_dir} (seed {seed}): {line}" for line in said]
                print("\n".join([*wrong[-len(said) :], *run.log().splitlines()[-60:]]), flush=True)
    return struck, wrong


def compared(desk: Desk, reference: Path, run_dir: Path) -> list[str]:
    done = desk.python(str(HERE / "same_run.py"), str(desk.project), str(reference), str(run_dir))
    return (done.stdout + done.stderr).splitlines()[:20] if done.returncode else []


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a page with marks, between which the table goes")
    asked = parser.parse_args()
    if reason := slurm_nodes.missing():
        print(f"the fault run is left out: {reason}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # SystemExit removes the nodes and mounts
    folder, began = Path(tempfile.mkdtemp(prefix="chaos")), time.monotonic()
    with ground(folder, partial(baked, folder)) as (desk, disk):
        struck, wrong = campaign(desk, disk, plan(asked.faults, asked.seed), seed=asked.seed)
    minutes = (time.monotonic() - began) / 60
    command = f"make chaos FAULTS={asked.faults} SEED={asked.seed}"
    text = f"{table(struck)}\n`{command}`, {minutes:.0f} minutes on {os.cpu_count()} cores.\n"
    print(text)
    if asked.out:
        put(text, asked.out, name="faults")
    if wrong or len(struck) != asked.faults:
        print("\n".join(wrong), f"{len(struck)} of {asked.faults} faults struck; the runs are in {folder}", sep="\n")
        return 1
    shutil.rmtree(folder)
    return 0


def baked(folder: Path) -> Path:
    """Bake a project with the default answers."""
    template, answers = str(HERE.parent), {"cluster": "local"}
    return Path(
        cookiecutter(template, no_input=True, default_config=True, extra_context=answers, output_dir=str(folder))
    )


if __name__ == "__main__":
    sys.exit(main())
