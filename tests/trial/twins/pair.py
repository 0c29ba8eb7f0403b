"""Run a draw twice: without interruption, and interrupted and resumed.

Each rank executes the train.py of a baked project with words that a person could type.
"""

import importlib
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trial import program
from trial.project import apart
from trial.same import differences
from trial.strike import CLOCK, ENDS, WRITER, Strike
from trial.twins.steps import STOPPED, steps_differ

REJECTED = 2
DEADLINE = 90.0
PLAIN = ["trainer.log_every_n_steps=1", "+trainer.enable_progress_bar=false", "+trainer.enable_model_summary=false"]


@dataclass(frozen=True)
class Ended:
    """The result of a twin: same, different, hung or rejected, with the first difference or the message."""

    kind: str
    said: str = ""
    strikes: tuple[tuple[str, bool], ...] = ()  # and whether each happened


class Unlike(Exception):
    """The twin ended in another way than expected."""


class Hung(Exception):
    """A start did not end."""


def pair(
    project: Path, folder: Path, name: str, drawn: dict[str, Any], patch: str = "", deadline: float = DEADLINE
) -> Ended:
    """Run reference and twin in `folder`, and compare them. `patch`: code that ranks of a resumed run execute first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words = _configured(project, name, drawn)
    if "deepspeed" in drawn["strategy"]:
        importlib.import_module("deepspeed")
    twin = Run(project, folder / "twin", drawn, patch, deadline)
    try:
        reference = Run(project, folder / "reference", drawn, deadline=deadline)
        ended = _compared(reference, twin, words)
    except Hung as error:
        ended = Ended("hung", str(error))
    except Unlike as error:
        ended = Ended("different", str(error))
    finally:
        for file in project.glob(f"configs/*/{name}.yaml"):
            file.unlink()
    if ended.kind == "same":
        shutil.rmtree(folder)
    return Ended(ended.kind, ended.said, tuple(twin.strikes))


def _compared(reference: "Run", twin: "Run", words: list[str]) -> Ended:
    drawn = reference.drawn
    if reference.start(words, None) == [REJECTED] * drawn["ranks"] and not reference.trained():
        return Ended("rejected", reference.last_words())
    reference.must_end([0] * drawn["ranks"])
    if rejected := twin.interrupted(words):
        return Ended("rejected", rejected)
    runs = (reference.run_dir, twin.run_dir)
    if found := steps_differ(*runs, drawn):
        return Ended("different", found)
    how = {"moved": bool(drawn["moves"]), "tolerance": drawn["tolerance"]}
    if lines := apart(differences, *runs, project=reference.project, **how):
        return Ended("different", "; ".join(lines[:3]))
    return Ended("same", "; ".join(f"move rejected: {said}" for said in twin.rejected_moves))


def _configured(project: Path, name: str, drawn: dict[str, Any]) -> list[str]:
    """Write the config files of a draw, and return the arguments that select them."""
    callbacks = {"defaults": ["default"], **drawn["callbacks"]}
    files = {"model": drawn["model"], "data": drawn["data"], "callbacks": callbacks}
    for group, content in files.items():
        (project / "configs" / group / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    chosen = [f"{group}={name}" for group in files]
    return [*chosen, f"strategy={drawn['strategy']}", f"trainer.devices={drawn['ranks']}", *PLAIN, *drawn["words"]]


class Run:
    """A run directory and its starts. `<name>.log` and the records of the ranks are beside it."""

    def __init__(
        self, project: Path, run_dir: Path, drawn: dict[str, Any], patch: str = "", deadline: float = DEADLINE
    ) -> None:
        self.project, self.run_dir, self.drawn, self.patch, self.deadline = project, run_dir, drawn, patch, deadline
        self.starts = 0
        self.codes: list[int] = []
        self.rejected_moves: list[str] = []
        self.strikes: list[tuple[str, bool]] = []
        self.last: program.Program

    def interrupted(self, words: list[str]) -> str:
        """Start, and start again after each interruption, until the run has ended. Return the rejection, or ""."""
        ranks = self.drawn["ranks"]
        first = [*words, *self.drawn["first_words"]]  # an extended run starts with an earlier end
        for number, strike in enumerate([*(Strike(**node) for node in self.drawn["strikes"]), None]):
            moved = self._move_before(number)
            before, ranks = ranks, moved.get("ranks", ranks)
            typed = first if number == 0 else moved.get("words", [])
            self.start(typed, strike, ranks)
            if number == 0 and self.codes == [REJECTED] * ranks and not self.trained():
                return self.last_words()  # the earlier end is rejected
            if moved and self.codes == [REJECTED] * ranks:  # the move is rejected: resume with the previous layout
                self.rejected_moves.append(self.last_words())
                ranks = before
                self.start([], strike, ranks)
            if strike:
                self.strikes.append((str(strike), self.last.was_struck))
            self._must_end_as(strike, ranks)
            if self.codes == [0] * ranks or self._is_finished():
                break  # finished before the interruption, or interrupted after the last step
        if self.drawn["first_words"]:
            if self.start(self.drawn["then_words"], None, ranks) == [REJECTED] * ranks:
                return self.last_words()
            self.must_end([0] * ranks)
        return ""

    def _move_before(self, number: int) -> dict[str, Any]:
        """Return the ranks and arguments with which a start moves the run, or {} if nothing changes."""
        moves = self.drawn["moves"]
        return moves[number - 1] if 0 < number <= len(moves) else {}

    def start(self, words: list[str], strike: Strike | None, ranks: int | None = None) -> list[int]:
        """Start all ranks once, and return their exit codes. Raise `Hung` if they do not end."""
        key = "resume" if (self.run_dir / "config.yaml").exists() else "run_dir"
        environ = {"TRIAL_TRACE": str(self.run_dir.with_name(f"{self.run_dir.name}-{self.starts:02}"))}
        environ |= {"HPC_JOB_END": str(time.time() + 3600)} if strike and strike.deed == CLOCK else {}
        patch = program.AT_ONCE + program.TYPED * any("_target_" in word for word in self.drawn["words"])
        self.last = program.Program(
            self.project, ["train.py", f"{key}={self.run_dir}", *words], self.run_dir.with_suffix(".log"),
            ranks=ranks or self.drawn["ranks"], environ=environ, strike=strike, deadline=self.deadline,
            patch=patch + (self.patch if key == "resume" else ""),
        )  # fmt: skip
        program.run(self.last)
        self.starts += 1
        self.codes = self.last.codes
        if self.last.hung:
            raise Hung(f"ranks {self.last.hung} did not end within {self.last.deadline:g} s")
        self.run_dir.with_name(f"{self.run_dir.name}.codes-{self.starts - 1:02}").write_text(json.dumps(self.codes))
        return self.codes

    def _must_end_as(self, strike: Strike | None, ranks: int) -> None:
        """Raise `Unlike` unless the exit codes are those of this interruption, or of a run that finished before it."""
        if self.codes == [0] * ranks:
            return
        if strike is None:
            self.must_end([0] * ranks)
        elif strike.deed in ENDS:
            if strike.place == WRITER or self.last.was_struck:
                return
            self.must_end([0] * ranks)
        else:
            self.must_end([STOPPED] * ranks)

    def must_end(self, codes: list[int]) -> None:
        if self.codes != codes:
            raise Unlike(f"start {self.starts}: exit codes {self.codes} instead of {codes}: {self.last_words()}")

    def _is_finished(self) -> bool:
        verdict = self.run_dir / "verdict"
        return verdict.exists() and "outcome finished" in verdict.read_text()

    def trained(self) -> bool:
        files = self.run_dir.parent.glob(f"{self.run_dir.name}-{self.starts - 1:02}.*")
        return any('"train"' in file.read_text() for file in files)

    def last_words(self) -> str:
        """Return the message of the rejection, or the last line of a traceback."""
        text = self.last.said()
        if "ConfigError: " in text:
            return " ".join(text.rpartition("ConfigError: ")[2].partition("\n[")[0].split())[:300]
        raised = [line for line in text.splitlines() if line[:1].isalpha() and "Error" in line.split(":")[0]]
        return (raised or text.splitlines() or [""])[-1][:300]
