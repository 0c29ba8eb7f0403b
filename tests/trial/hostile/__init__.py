"""Hostile input: what others type, set and leave in files, drawn and given to the programs of a baked project.

A program must work, or print one sentence and exit with code 2: no traceback, no hang, nothing executed, nothing
written elsewhere, no escape code on the terminal.
"""

import contextlib
import gc
import os
import random
import re
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trial import program
from trial import project as projects
from trial.campaign import ALL, Campaign, Control, Outcome
from trial.hostile import job_scripts
from trial.hostile.case import Case, Ground

DEADLINE = 30.0  # seconds for one case
MEMORY = 6 * 2**30  # bytes of address space for one case
# Control characters, except line feed, tab and those that a progress bar needs.
RAW = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
SENTENCE = re.compile(r"ConfigError: |usage: |Nothing was generated")
SOUND = [
    "trainer.max_steps=3",
    "+trainer.limit_test_batches=1",
    "+trainer.limit_val_batches=1",
    "callbacks.progress=null",
    "checkpoint.every_n_steps=2",
    "callbacks.monitor.every_seconds=1",
    "checkpoint.monitor=null",
]
# Deeds of a program that must be found, and as what.
WRONG = {
    "traceback": "1 / 0",
    "exit code": "sys.exit(3)",
    "hung": "time.sleep(60)",
    "executed": '(folder / "canary").touch()',
    "written outside": '(folder / "victim").write_text("spoilt")',
    "escape code": 'print("\\x1b]0;owned\\x07")',
    "no sentence": "sys.exit(2)",
}


class Hostile(Campaign):
    name, unit = "hostile", "input"
    GOOD, ACCEPTED = ("right", "rejected"), ("right",)

    def __enter__(self) -> "Hostile":
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        projects.warm_project(self.project, self.folder / "cache")
        from trial.hostile import base, kinds

        self.kinds = kinds.KINDS
        base.prepare(self.folder / "base", self.project, SOUND)
        gc.collect()
        gc.freeze()  # without this, garbage collection in a child would copy the pages that it shares with this process
        return self

    def draw(self, seed: int, number: int) -> dict[str, Any]:
        rng = random.Random(f"{seed}-{number}")
        [kind] = rng.choices(list(self.kinds), [weight for _, weight, _ in self.kinds.values()])
        return {"kind": kind, "state": rng.getrandbits(64)}

    def kind(self, drawn: dict[str, Any]) -> str:
        return drawn["kind"]

    @property
    def FLOORS(self) -> dict[str, float]:  # type: ignore[override]
        return {ALL: 0.2} | {kind: share for kind, (_, _, share) in self.kinds.items()}

    def attempt(self, drawn: dict[str, Any], place: Path, *, patch: str = "") -> Outcome:
        shutil.rmtree(place, ignore_errors=True)
        ground = Ground(place, self.project, self.folder / "base")
        case = self.kinds[drawn["kind"]][0](random.Random(drawn["state"]), ground)
        ground.watch([self.folder, self.project], but=ground.open, names=("base", "__pycache__", "said"))
        pid = program.fork(lambda: self._enter(case, ground, patch), ground.said / "out", ground.said / "err")
        code = program.ended(pid, drawn.get("deadline", DEADLINE))
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        printed = [(ground.said / name).read_bytes().decode(errors="surrogateescape") for name in ("out", "err")]
        flaw = judged(case, code, ground, printed, may_be_silent=drawn["kind"] == "environment")
        script = ""
        if code == 0 and case.inspect == "bash" and not flaw:
            flaw = job_scripts.flaw(printed[0], ground, case.scripted)
            script = f"\n{case.scripted}\n{printed[0]}"
        ground.close()
        harm = next(iter(ground.counts), "")  # "executed", or "written outside"
        if result := "executed" if "executed" in ground.counts else harm or flaw:
            lines = [repr(line) for line in "\n".join(printed).splitlines()[-18:]]
            told = [f"{case.program} {case.words} {case.environ or ''}", f"exit code {code}", *lines, *ground.harmed]
            return Outcome(result, "\n".join(told) + script)
        shutil.rmtree(place)
        return Outcome("right" if code == 0 else "rejected")

    def _enter(self, case: Case, ground: Ground, patch: str) -> None:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        os.environ.pop("XDG_CACHE_HOME")
        os.environ |= {"HOME": str(ground.open / "home"), "TMPDIR": str(ground.open)} | case.environ
        os.chdir(ground.open)
        from trial.hostile import programs

        exec(patch, {"__name__": "patch", "programs": programs, "folder": ground.folder})
        programs.enter(case, self.project)

    def controls(self) -> Iterator[Control]:
        drawn = {"kind": "personal clusters.yaml", "state": 0, "deadline": 12.0}
        for result, deed in WRONG.items():
            patch = f"import sys, time\nprograms.enter = lambda *_: {deed}"
            yield Control(result, patch, [drawn], result)


def judged(case: Case, code: int | None, ground: Ground, printed: list[str], *, may_be_silent: bool) -> str:
    """Return what is wrong with the end of a program and with its output, or ""."""
    from trial.hostile import training

    if code is None:
        return "hung"
    if "Traceback (most recent call last)" in printed[1]:
        return "traceback"
    if any(RAW.search(line) for text in printed for line in text.split("\n")):
        return "escape code"
    is_run = case.inspect == "run"
    if is_run and code in (0, 1, 2) and (flaw := training.judged(case, code, ground, "".join(printed))):
        return flaw
    silent = may_be_silent and not printed[1]  # only one rank prints an error that all ranks see
    if code == 2 and not silent and not SENTENCE.search(printed[1]):
        return "no sentence"
    return "exit code" if code not in (0, 2) and not is_run else ""
