"""Run a draw twice: without interruption, and interrupted and resumed.

Ranks are forked from a process that has imported the libraries. Each executes the train.py of a baked project with
words that a person could type.
"""

import importlib
import json
import os
import shutil
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from forked import fork, placed, wait
from twin_compare import differences

HERE = Path(__file__).resolve().parent
CONTINUE, REJECTED = 85, 2
LIBRARIES = (
    "lightning.pytorch.callbacks", "torch.distributed.checkpoint", "torch.utils.tensorboard", "torchmetrics",
    "hydra.core.override_parser.overrides_parser", "torchdata.stateful_dataloader",
    "tensorboard.backend.event_processing.event_accumulator", "hydra",
)  # fmt: skip
# Ranks agree at every step instead of once a second, so that a short run stops at the requested step.
AT_ONCE = "from hpc.resume import agreement; agreement.INTERVAL_SECONDS = 0\n"
# Allow `_target_` on the command line, as a draw types whole loggers.
TYPED = "import re; from hpc.config import typed_words; typed_words.CODE_KEYS = re.compile('(?!)')\n"
PLAIN = ["trainer.log_every_n_steps=1", "+trainer.enable_progress_bar=false", "+trainer.enable_model_summary=false"]
KEPT_ENVIRONMENT = ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV")


@dataclass(frozen=True)
class Outcome:
    """The result of a twin: same, different, hung or rejected, with the first difference or the message."""

    kind: str
    said: str = ""
    seconds: float = 0.0
    strikes: tuple[tuple[str, bool], ...] = ()  # kind and place, and whether it happened


class Unlike(Exception):
    """The twin ended in another way than expected."""


def prepare(project: Path) -> None:
    """Put the drawn module into a baked project, and import what all runs need."""
    for name, source in (
        ("drawn", "drawn_module"),
        ("drawn_trace", "drawn_trace"),
        ("changed_weights", "hpc/strategies/changed_weights"),
    ):
        (project / f"src/my_research/{name}.py").write_text((HERE / f"{source}.py").read_text())
    assert "hpc" not in sys.modules, "runs are forked from this process, and must import hpc from this project"
    sys.path[:0] = [str(project), str(project / "src")]
    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "XDG_CONFIG_HOME": os.devnull}
    for library in LIBRARIES:
        importlib.import_module(library)


def twin(project: Path, folder: Path, name: str, draw: dict[str, Any], patch: str = "") -> Outcome:
    """Run reference and twin in `folder`, and compare them. `patch`: code that ranks of a resumed run execute first."""
    began = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words = configured(project, name, draw)
    if "deepspeed" in draw["strategy"]:
        importlib.import_module("deepspeed")
    run = Run(project, folder / "twin", draw, patch)
    try:
        reference = Run(project, folder / "reference", draw)
        if reference.start(words, None) == [REJECTED] * draw["ranks"] and not reference.trained():
            return Outcome("rejected", reference.last_words(), time.monotonic() - began)
        reference.must_end([0] * draw["ranks"])
        if rejected := run.interrupted(words):
            return Outcome("rejected", rejected, time.monotonic() - began)
        found = differences(reference.run_dir, run.run_dir, draw)
        moves = "; ".join(f"move rejected: {said}" for said in run.rejected_moves)
        outcome = Outcome("different", found) if found else Outcome("same", moves)
    except TimeoutError as error:
        outcome = Outcome("hung", str(error))
    except Unlike as error:
        outcome = Outcome("different", str(error))
    finally:
        for file in project.glob(f"configs/*/{name}.yaml"):
            file.unlink()
    if outcome.kind == "same":
        shutil.rmtree(folder)
    return Outcome(outcome.kind, outcome.said, time.monotonic() - began, tuple(run.strikes))


def configured(project: Path, name: str, draw: dict[str, Any]) -> list[str]:
    """Write the config files of a draw, and return the arguments that select them."""
    files = {"model": draw["model"], "data": draw["data"], "callbacks": {"defaults": ["default"], **draw["callbacks"]}}
    for group, content in files.items():
        (project / "configs" / group / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    chosen = [f"{group}={name}" for group in files]
    return [*chosen, f"strategy={draw['strategy']}", f"trainer.devices={draw['ranks']}", *PLAIN, *draw["words"]]


class Run:
    """A run directory and its starts. `<name>.log` and the records of the ranks are beside it."""

    def __init__(self, project: Path, run_dir: Path, draw: dict[str, Any], patch: str = "") -> None:
        self.project, self.run_dir, self.draw, self.patch = project, run_dir, draw, patch
        self.starts = 0
        self.codes: list[int] = []
        self.rejected_moves: list[str] = []
        self.strikes: list[tuple[str, bool]] = []
        self.log = run_dir.with_suffix(".log")

    def interrupted(self, words: list[str]) -> str:
        """Start, and start again after each interruption, until the run has ended. Return the rejection, or ""."""
        ranks = self.draw["ranks"]
        first = [*words, *self.draw["first_words"]]  # an extended run starts with an earlier end
        for number, strike in enumerate([*self.draw["strikes"], None]):
            moved = strike_before(self.draw, number)
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
                self.strikes.append((f"{strike['how']} in {strike['where']}", self.was_struck()))
            self.must_end_as(strike, ranks)
            if self.codes == [0] * ranks or self.is_finished():
                break  # finished before the interruption, or interrupted after the last step
        if self.draw["first_words"]:
            if self.start(self.draw["then_words"], None, ranks) == [REJECTED] * ranks:
                return self.last_words()
            self.must_end([0] * ranks)
        return ""

    def start(self, words: list[str], strike: dict[str, Any] | None, ranks: int | None = None) -> list[int]:
        """Start all ranks once, and return their exit codes. Raise TimeoutError if they do not end."""
        ranks = ranks or self.draw["ranks"]
        key = "resume" if (self.run_dir / "config.yaml").exists() else "run_dir"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environ = {name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ}
        environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "XDG_CONFIG_HOME": os.devnull}
        environ |= {"TWIN_TRACE": str(self.run_dir.with_name(f"{self.run_dir.name}-{self.starts:02}"))}
        environ |= {"TWIN_STRIKE": json.dumps(strike)} if strike else {}
        environ |= {"HPC_JOB_END": str(time.time() + 3600)} if strike and strike["how"] == "clock" else {}
        patch = (
            AT_ONCE
            + TYPED * any("_target_" in word for word in self.draw["words"])
            + (self.patch if key == "resume" else "")
        )
        with self.log.open("a") as stream:
            stream.write(f"--- {key}={self.run_dir} {' '.join(words)} {strike or ''}\n")
        arguments = [f"{key}={self.run_dir}", *words]
        places = [placed(rank, ranks, port) if ranks > 1 else {} for rank in range(ranks)]
        pids = [fork(self.project, self.log, arguments, environ | place, patch) for place in places]
        self.starts += 1
        self.codes = wait(pids)
        self.run_dir.with_name(f"{self.run_dir.name}.codes-{self.starts - 1:02}").write_text(json.dumps(self.codes))
        return self.codes

    def must_end_as(self, strike: dict[str, Any] | None, ranks: int) -> None:
        """Raise `Unlike` unless the exit codes are those of this interruption, or of a run that finished before it."""
        if self.codes == [0] * ranks:
            return
        if strike is None:
            self.must_end([0] * ranks)
        elif strike["how"] in ("raise", "SIGKILL", "SIGINT"):
            if strike["where"] == "save" or self.was_struck():
                return
            self.must_end([0] * ranks)
        else:
            self.must_end([CONTINUE] * ranks)

    def must_end(self, codes: list[int]) -> None:
        if self.codes != codes:
            raise Unlike(f"start {self.starts}: exit codes {self.codes} instead of {codes}: {self.last_words()}")

    def was_struck(self) -> bool:
        return any('"struck"' in file.read_text() for file in self.written())

    def is_finished(self) -> bool:
        verdict = self.run_dir / "verdict"
        return verdict.exists() and "outcome finished" in verdict.read_text()

    def trained(self) -> bool:
        return any('"train"' in file.read_text() for file in self.written())

    def written(self) -> list[Path]:
        return list(self.run_dir.parent.glob(f"{self.run_dir.name}-{self.starts - 1:02}.*"))

    def last_words(self) -> str:
        """Return the message of the rejection, or the last line of a traceback."""
        text = self.log.read_text(errors="replace").rpartition("\n--- ")[2]
        if "ConfigError: " in text:
            return " ".join(text.rpartition("ConfigError: ")[2].partition("\n[")[0].split())[:300]
        raised = [line for line in text.splitlines() if line[:1].isalpha() and "Error" in line.split(":")[0]]
        return (raised or text.splitlines() or [""])[-1][:300]


def strike_before(draw: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the ranks and arguments with which a start moves the run, or {} if nothing changes."""
    moves = draw["moves"]
    return moves[number - 1] if 0 < number <= len(moves) else {}
