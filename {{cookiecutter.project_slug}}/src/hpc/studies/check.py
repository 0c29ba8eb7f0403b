"""Try a module and its data in short runs: do they train, resume where they stopped, get sharded, and can be planned?

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
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig

from hpc.config import preflight
from hpc.config.build import build, build_data
from hpc.config.compose import compose_overrides
from hpc.config.errors import ConfigError, ExitCode
from hpc.config.project import PROJECT, SOURCES
from hpc.launch import placement
from hpc.plan import run_plan
from hpc.run import history
from hpc.system.tables import one_line

LIMIT_SECONDS = 300  # of a run
OWN_KEYS = ("strategy", "run_dir", "resume", "task")  # that are chosen for each run
NUM_EPOCHS, NUM_BATCHES = 2, 8
SHORT = {
    "trainer.max_epochs": NUM_EPOCHS, "trainer.max_steps": -1, "trainer.num_nodes": 1,
    "trainer.limit_train_batches": NUM_BATCHES, "trainer.limit_val_batches": 2, "trainer.limit_test_batches": 2,
    "trainer.val_check_interval": 1.0, "trainer.check_val_every_n_epoch": 1, "faults.hang_minutes": 1,
}  # fmt: skip
# What a run prints of the changes that it makes, and of what it does without.
NOTE = re.compile(r"(note|warning|strategy|batch size|train|val|test|predict): |perf/\w+ is ")
UNINTERESTING = re.compile(r"perf/mfu is not logged")  # on CPUs
# Variables that make a process one of the ranks of a launch. This shell may be a task of srun.
LAUNCHER_VARIABLES = {name for names in placement.LAUNCHERS.values() for name in names}


class Check:
    """Short runs of one command line.

    Args:
        words: overrides of the config.
        folder: for run directories and logs.
    """

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        self.words, self.folder = words, folder
        self.has_failed = False
        self._printed_notes: set[str] = set()

    def train(self, title: str, name: str, *, strategy: str, num_processes: int) -> bool:
        """Train some steps. Print and return whether that works."""
        began, run_dir = time.monotonic(), self.folder / name
        words = [*self.words, f"strategy={strategy}", f"trainer.devices={num_processes}", f"run_dir={run_dir}"]
        code, output = self._start(name, "train.py", *words)
        error = _why(run_dir, output) if code else ""
        self._print(title, error, name=name, seconds=time.monotonic() - began)
        self._print_notes(output)
        return not error

    def resume(self, title: str, reference: str) -> None:
        """Stop a run in mid-epoch, resume it, and print whether its weights are those of the run `reference`."""
        name, run_dir, began = "stopped", self.folder / "stopped", time.monotonic()
        words = [*self.words, "strategy=single", "trainer.devices=1", f"run_dir={run_dir}"]
        code, output = self._start(name, "-m", "hpc.studies.stopped_start", *words)
        if code == ExitCode.DONE:
            print(f"-      {title}: not tried, as the run has ended before it could be stopped", flush=True)
            return
        if code == ExitCode.CONTINUE:
            code, output = self._start(name, "train.py", f"resume={run_dir}")
        error = _why(run_dir, output) if code else self._describe_difference(self.folder / reference, run_dir)
        self._print(title, error, name=name, seconds=time.monotonic() - began)
        self._print_notes(output)

    def plan(self, title: str) -> None:
        """Print whether a training step can be planned, without running it."""
        began, error, notes = time.monotonic(), "", []
        words = [*self.words, "strategy=ddp", "trainer.devices=2"]
        try:
            trace = run_plan.plan_run(compose_overrides(words), words, own={}).prediction.trace
            notes = [trace.by_parameters_note if trace.by_parameters else "", trace.note]
        except ConfigError as raised:
            error = str(raised)
        self._print(title, error, name="plan", seconds=time.monotonic() - began)
        for note in filter(None, notes):
            print(f"       {one_line(note)}", flush=True)

    def _start(self, name: str, *arguments: str) -> tuple[int, str]:
        """Run Python with some arguments. Return its exit code, and what it has printed, which is also in a log."""
        log = self.folder / f"{name}.log"
        path = os.pathsep.join(filter(None, [str(SOURCES), str(PROJECT), os.environ.get("PYTHONPATH")]))
        own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_STEP")}
        environ = {name: value for name, value in own.items() if name not in LAUNCHER_VARIABLES}
        with log.open("ab") as file:
            begin = file.tell()
            process = subprocess.Popen(
                [sys.executable, *arguments], cwd=PROJECT, env=environ | {"PYTHONPATH": path},
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                file.write(
                    f"\nError: it did not end within {LIMIT_SECONDS} s. A smaller network ends sooner\n".encode()
                )
                code = 1
            finally:
                with suppress(ProcessLookupError):  # ranks and workers may outlive the process that started them
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return code, log.read_bytes()[begin:].decode(errors="replace")

    def _describe_difference(self, reference: Path, run_dir: Path) -> str:
        """Return how the last weights of two runs differ; empty if all bits are the same."""
        import torch

        from hpc.checkpoint import weights

        expected, resumed = (weights.read(folder / "checkpoints" / "last.ckpt") for folder in (reference, run_dir))
        names = [name for name, value in expected.items() if not torch.equal(value, resumed[name])]
        others = f" and {len(names) - 1} others" if len(names) > 1 else ""
        return f"it ends with other weights than without a stop: {names[0]}{others}" if names else ""

    def _print(self, title: str, error: str, *, name: str, seconds: float) -> None:
        self.has_failed |= bool(error)
        print(f"{'fails' if error else 'works'}  {title} ({seconds:.0f} s)", flush=True)
        if error:
            log = self.folder / f"{name}.log"
            print(f"       {one_line(error)}", *[f"       its log: {log}"] * log.exists(), sep="\n", flush=True)

    def _print_notes(self, output: str) -> None:
        """Print what a run has told of changes, if no run before it has printed the same."""
        notes = [line for line in output.splitlines() if NOTE.match(line) and not UNINTERESTING.match(line)]
        for note in dict.fromkeys(notes):
            if note not in self._printed_notes:
                print(f"       {one_line(note)}", flush=True)
        self._printed_notes |= set(notes)


def check(words: Sequence[str]) -> bool:
    """Try a command line, and print what works. Return whether all of it does.

    Args:
        words: overrides, as for train.py.

    Raises:
        ConfigError: the config breaks a rule.
    """
    accelerator = [] if any("trainer.accelerator=" in word for word in words) else ["trainer.accelerator=cpu"]
    words = [*words, *accelerator, *(f"++{key}={value}" for key, value in SHORT.items())]
    cfg = compose_overrides([*words, "strategy=single", "trainer.devices=1"])
    preflight.check_config(cfg)
    size = f"{NUM_EPOCHS} epochs of at most {NUM_BATCHES} batches"
    print(f"each run has {size}, on accelerator {cfg.trainer.accelerator}", flush=True)
    checked = Check(words, Path(tempfile.mkdtemp(prefix="check-")))
    try:
        trains = checked.train("training on one process", "single", strategy="single", num_processes=1)
        if trains:
            checked.resume("a stop in mid-epoch, and a resume that ends with the same weights", "single")
        for strategy in ("ddp", "fsdp"):
            checked.train(f"{strategy} on two processes", strategy, strategy=strategy, num_processes=2)
        checked.plan("a plan of the step")
        if trains:
            print("\n".join(["", "one more method would unlock", *_unlock_lines(cfg)]))
    finally:
        if not checked.has_failed:
            shutil.rmtree(checked.folder, ignore_errors=True)
    return not checked.has_failed


def reject_own_words(words: Sequence[str]) -> None:
    """Raise `ConfigError` for an override of what is chosen for each run."""
    for word in words:
        key, _, value = word.lstrip("+~").partition("=")
        if key in OWN_KEYS:
            rule = "must be left out: tools/check.py chooses it for each of its runs"
            raise ConfigError(key, value, rule, f"the command without {word}")


def _unlock_lines(cfg: DictConfig) -> Iterator[str]:
    from hpc.studies.unlocks import unlocks  # it imports lightning

    for method, effect in unlocks(build(cfg.model), build_data(cfg)):
        yield f"  {method}: {effect}"


def _why(run_dir: Path, output: str) -> str:
    """Return why a run has failed: as it was recorded, or else the last message that it has printed."""
    record = history.read_run(run_dir, run_dir.name) if run_dir.exists() else None
    if record and record.verdict == "failed":
        return record.why
    lines = [line for line in output.splitlines() if line.strip()]
    if hangs := [line for line in lines if ": Hang: " in line]:  # of each rank, with the line where it stands
        return "; ".join(hangs)
    for index in range(len(lines) - 1, -1, -1):
        if lines[index].startswith("ConfigError:"):
            return " ".join(lines[index : index + 2])
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or ["it has printed nothing"])[-1]
