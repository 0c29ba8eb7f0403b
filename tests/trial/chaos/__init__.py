"""Chaos: random faults are injected into training on a real Slurm.

Every run must end, and be the same as a run without faults. A draw is a run with some faults.
"""

import os
import random
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import slurm_nodes
from marked_text import put as put_text
from slurm_project import Desk, made_for_tests

from trial.campaign import Campaign, Outcome, Tried
from trial.chaos import endure
from trial.chaos.endure import LAYOUTS, WORDS, Fault, Struck
from trial.chaos.faults import INTERVAL, KINDS, Run
from trial.project import apart, put
from trial.same import differences

STEPS = 40  # the most steps of a run per injected fault
PER_RUN = 5
# One node more than a run uses: the run resumes on the spare node while the lost node is still cut off.
NODES = (*slurm_nodes.NODES, "n5")
CALLBACKS = """\
defaults: [default]
progress: null
victim:
  _target_: my_research.victim.Victim
  run_dir: ${run_dir}
"""
OF_THE_TRIAL = re.compile(r"^(steps|pid-\d+|\.?pace|hold-\d+)$")  # files that the victim writes and reads
missing = slurm_nodes.missing


class Chaos(Campaign):
    name, unit = "chaos", "run"
    GOOD, ACCEPTED = ("survived",), ("survived",)
    FLOORS: ClassVar = dict.fromkeys(KINDS, 1.0)  # each fault strikes, and is survived

    def __init__(self, folder: Path, project: Path | None = None, strategies: Sequence[str] = tuple(LAYOUTS)) -> None:
        super().__init__(folder, project)
        self.strategies, self.stack = strategies, ExitStack()
        self.disk = folder / "disk"  # a small file system that all nodes share
        self.faults: dict[int, int] = {}  # by seed
        self.references: dict[tuple[str, int], Path] = {}
        self.struck: list[Struck] = []

    def __enter__(self) -> "Chaos":
        prepare(self.project)
        self.disk.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256M", "tmpfs", self.disk], check=True)
        self.stack.callback(subprocess.run, ["umount", "--lazy", self.disk], check=True)
        (self.folder / "slurm").mkdir()
        slurm = self.stack.enter_context(slurm_nodes.cluster(self.folder / "slurm", NODES))
        self.desk = Desk(slurm, self.project)
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def numbers(self, seed: int, count: int) -> Sequence[int]:
        self.faults[seed] = count
        return range(len(plan(count, seed, self.strategies)))

    def draw(self, seed: int, number: int) -> tuple[str, list[Fault]]:
        return plan(self.faults[seed], seed, self.strategies)[number]

    def kind(self, drawn: tuple[str, list[Fault]]) -> str:
        return drawn[0]

    def replay(self, seed: int, number: int) -> str:
        return f"{super().replay(seed, number)} --count {self.faults[seed]}"

    def attempt(self, drawn: tuple[str, list[Fault]], place: Path, *, patch: str = "") -> Outcome:
        strategy, faults = drawn
        steps = STEPS * max(len(faults), 1)
        if (strategy, steps) not in self.references:
            run, lines = self._endured(strategy, [], f"reference-{strategy}-{steps}", steps)
            self.references[strategy, steps] = run.run_dir
            if lines:
                return self._outcome(run, [], [], lines)
        before = len(self.struck)
        run, lines = self._endured(strategy, faults, place.name, steps)
        if not lines:
            runs = (self.references[strategy, steps], run.run_dir)
            lines = apart(differences, *runs, others=OF_THE_TRIAL, project=self.project)[:20]
        return self._outcome(run, faults, self.struck[before:], lines)

    def _endured(self, strategy: str, faults: Sequence[Fault], name: str, steps: int) -> tuple[Run, list[str]]:
        """Submit a run, inject faults, and wait for its end. Return it, and what went wrong."""
        run_dir = self.project / "runs" / name
        run_dir.mkdir(parents=True)
        (self.disk / name).mkdir()
        (run_dir / "checkpoints").symlink_to(self.disk / name)
        job, _ = self.desk.submit(*WORDS, *LAYOUTS[strategy], f"trainer.max_steps={steps}", f"run_dir={run_dir}")
        run, struck = Run(self.desk.slurm, job, run_dir, self.disk), []
        try:
            endure.endure(run, strategy, faults, struck)
            lines = [f"{one.kind}: {one.wrong or 'hung'}" for one in struck if one.wrong or one.hung]
        except Exception as error:
            lines = [f"{type(error).__name__}: {error}"]
        self.struck += struck
        return run, lines

    def _outcome(self, run: Run, faults: Sequence[Fault], struck: Sequence[Struck], lines: list[str]) -> Outcome:
        planned, good = Counter(one.kind for one in faults), Counter(one.kind for one in struck if not one.wrong)
        accepted = {kind: (good[kind], total) for kind, total in planned.items()}
        if lines:
            said = [f"{run.run_dir}:", *lines, *run.log().splitlines()[-60:]]
            return Outcome("lost", "\n".join(said), planned, accepted)
        return Outcome("survived", ", ".join(planned), planned, accepted)

    def publish(self, done: Sequence[Tried], asked: Any) -> None:
        minutes = sum(one.outcome.seconds for one in done) / 60
        command = f"make chaos FAULTS={asked.count} SEED={asked.seed}"
        text = f"{endure.table(self.struck)}\n`{command}`, {minutes:.0f} minutes on {os.cpu_count()} cores.\n"
        print(text)
        if asked.out:
            put_text(text, asked.out, name="faults")


def plan(faults: int, seed: int, strategies: Sequence[str] = tuple(LAYOUTS)) -> list[tuple[str, list[Fault]]]:
    """Return (strategy, planned faults) of each run. No kind occurs a second time before all have occurred once."""
    rng = random.Random(seed)
    kinds: list[str] = []
    while len(kinds) < faults:
        kinds += rng.sample(list(KINDS), len(KINDS))
    planned = [Fault(kind, rng.randrange(1, 2 * INTERVAL), rng.randrange(10**6)) for kind in kinds[:faults]]
    runs = max(-(-faults // PER_RUN), min(faults, len(strategies)))
    return [(strategies[run % len(strategies)], planned[run::runs]) for run in range(runs)]


def prepare(project: Path) -> Path:
    """Add the callback for fault injection to a baked project."""
    made_for_tests(project)
    put(project, "victim")
    (project / "configs/callbacks/victim.yaml").write_text(CALLBACKS)
    return project
