"""Try a module and its data in short runs: do they train, resume with the same bits, get sharded, and can be planned?

The runs are real starts of train.py, in a temporary folder. It is kept if one of them fails, for its logs.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from omegaconf import DictConfig

from hpc.config import preflight
from hpc.config.build import build, build_data
from hpc.config.compose import compose_overrides
from hpc.config.errors import ConfigError, ExitCode
from hpc.config.project import PROJECT, SOURCES
from hpc.plan import run_plan
from hpc.system.tables import one_line

LIMIT_SECONDS = 300  # of a run
SHORT = {
    "trainer.max_epochs": "2", "trainer.max_steps": "-1", "trainer.num_nodes": "1",
    "trainer.limit_train_batches": "8", "trainer.limit_val_batches": "2", "trainer.limit_test_batches": "2",
    "trainer.val_check_interval": "1.0", "trainer.check_val_every_n_epoch": "1",
}  # fmt: skip
# What a run prints of the changes that it makes, and of what it does without.
NOTE = re.compile(r"(note|warning|strategy|batch size|train|val|test|predict): |perf/\w+ is ")
# Of measuring, which says nothing on a CPU.
UNINTERESTING = re.compile(r"perf/mfu is not logged")


class Check:
    """Short runs of one command line.

    Args:
        words: overrides of the config.
        folder: for run directories and logs.
    """

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        self.words, self.folder = words, folder
        self.has_failed = False
        self._noted: set[str] = set()

    def trains(self, title: str, name: str, *, strategy: str, num_processes: int) -> bool:
        """Train some steps. Print and return whether that works."""
        words = [
            *self.words,
            f"strategy={strategy}",
            f"trainer.devices={num_processes}",
            f"run_dir={self.folder / name}",
        ]
        began = time.monotonic()
        code, output = self._start(name, "train.py", *words)
        self._print(title, "" if code == 0 else _last_message(output), name=name, seconds=time.monotonic() - began)
        self._print_notes(output)
        return code == 0

    def resumes(self, title: str, reference: str) -> None:
        """Stop a run in mid-epoch, resume it, and print whether its weights are those of the run `reference`."""
        name, run_dir, began = "stopped", self.folder / "stopped", time.monotonic()
        words = [*self.words, "strategy=single", "trainer.devices=1", f"run_dir={run_dir}"]
        code, output = self._start(name, "-m", "hpc.studies.stopped_start", *words)
        if code == ExitCode.DONE:
            self._print(title, "it cannot be stopped: an epoch has one batch", name=name)
            return
        if code == ExitCode.CONTINUE:
            code, output = self._start(name, "train.py", f"resume={run_dir}")
        said = _last_message(output) if code else self._differences(self.folder / reference, run_dir)
        self._print(title, said, name=name, seconds=time.monotonic() - began)
        self._print_notes(output)

    def is_planned(self, title: str) -> None:
        """Print whether a training step can be planned, without running it."""
        began = time.monotonic()
        words = [*self.words, "strategy=ddp", "trainer.devices=2"]
        try:
            trace = run_plan.plan_run(compose_overrides(words), words, own={}).prediction.trace
        except ConfigError as error:
            self._print(title, str(error), name="plan", seconds=time.monotonic() - began)
            return
        self._print(title, "", name="plan", seconds=time.monotonic() - began)
        for note in filter(None, (trace.by_parameters and trace.by_parameters_note, trace.note)):
            print(f"    {one_line(note)}", flush=True)

    def _start(self, name: str, *arguments: str) -> tuple[int, str]:
        """Run Python with some arguments. Return its exit code, and what it has printed, which is also in a log."""
        log = self.folder / f"{name}.log"
        environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(SOURCES), str(PROJECT)])}
        with log.open("ab") as file:
            start = file.tell()
            process = subprocess.Popen(
                [sys.executable, *arguments], cwd=PROJECT, env=environ, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                file.write(f"Error: it did not end within {LIMIT_SECONDS} s; make the network smaller\n".encode())
                code = 1
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        return code, log.read_bytes()[start:].decode(errors="replace")

    def _differences(self, reference: Path, run_dir: Path) -> str:
        """Return how the last weights of two runs differ; empty if they are the same bits."""
        import torch

        from hpc.checkpoint import weights

        wanted, found = (weights.read(folder / "checkpoints" / "last.ckpt") for folder in (reference, run_dir))
        unlike = [name for name in wanted if name not in found or not torch.equal(wanted[name], found[name])]
        return f"it ends with other weights than without a stop: {', '.join(unlike[:3])}, ..." if unlike else ""

    def _print(self, title: str, error: str, *, name: str, seconds: float = 0.0) -> None:
        self.has_failed |= bool(error)
        print(f"{'no ' if error else 'yes'}  {title} ({seconds:.0f} s)", flush=True)
        if error:
            print(f"    {one_line(error)}\n    its log: {self.folder / name}.log", flush=True)

    def _print_notes(self, output: str) -> None:
        """Print what a run has said of changes, if no run before it has said so."""
        notes = [line for line in output.splitlines() if NOTE.match(line) and not UNINTERESTING.match(line)]
        for note in dict.fromkeys(notes):
            if note not in self._noted:
                print(f"    {one_line(note)}", flush=True)
        self._noted |= set(notes)


def check(words: Sequence[str]) -> bool:
    """Try a command line, and print what works. Return whether all of it does.

    Args:
        words: overrides, as for train.py.

    Raises:
        ConfigError: the config breaks a rule, or its module or data cannot be made.
    """
    _reject_own_words(words)
    accelerator = [] if any("trainer.accelerator=" in word for word in words) else ["trainer.accelerator=cpu"]
    words = [*words, *accelerator, *(f"++{key}={value}" for key, value in SHORT.items())]
    cfg = compose_overrides([*words, "trainer.devices=1"])
    preflight.check_rules(cfg)
    folder = Path(tempfile.mkdtemp(prefix="check-"))
    tried = Check(words, folder)
    try:
        if tried.trains("trains on one process", "single", strategy="single", num_processes=1):
            tried.resumes("is stopped in mid-epoch, and ends with the same bits", "single")
        for strategy in ("ddp", "fsdp"):
            tried.trains(f"trains on two processes with {strategy}", strategy, strategy=strategy, num_processes=2)
        tried.is_planned("is planned")
        print("\n".join(["", "one more method would unlock:", *_unlock_lines(cfg)]))
    finally:
        if not tried.has_failed:
            shutil.rmtree(folder, ignore_errors=True)
    return not tried.has_failed


def _reject_own_words(words: Sequence[str]) -> None:
    for word in words:
        key, _, value = word.partition("=")
        if key in ("strategy", "run_dir", "resume", "task"):
            rule = "must be left out: tools/check.py chooses it for each of its runs"
            raise ConfigError(key, value, rule, f"the command without {word}")


def _unlock_lines(cfg: DictConfig) -> Iterator[str]:
    from hpc.studies.unlocks import unlocks  # it imports lightning

    for method, effect in unlocks(build(cfg.model), build_data(cfg)):
        yield f"  {method}: {effect}"


def _last_message(output: str) -> str:
    """Return the message of a ConfigError, or the last line that names an error."""
    lines = [line for line in output.splitlines() if line.strip()]
    for index in range(len(lines) - 1, -1, -1):
        if lines[index].startswith("ConfigError:"):
            return " ".join(lines[index : index + 2])
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or ["it has printed nothing"])[-1]
