"""Try a module and its data in short runs: do they train, resume where they stopped, get sharded, and can be planned?

The runs are real starts of train.py, in a temporary folder. It is kept if one of them fails, for its logs.
"""

import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc.config import arguments
from hpc.config.build import build, build_data
from hpc.config.compose import compose_overrides
from hpc.config.errors import ConfigError, ExitCode
from hpc.config.parse import parse
from hpc.config.sections import Config
from hpc.plan import run_plan
from hpc.run import history
from hpc.studies.forked_starts import ForkedStarts
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
UNINTERESTING = re.compile(r"perf/mfu is not logged|train: epoch ")  # on CPUs; progress
STOPPED_START = "hpc.studies.stopped_start"
DOUBLE, SAME = "64-true", 1e-9  # a difference of less, relative to a tensor's largest value, is rounding
FEW = [f"++trainer.precision={DOUBLE}", *(f"++trainer.limit_{task}_batches=2" for task in ("train", "val", "test"))]
ITS_OWN = "Each rank draws noise and dropout, and takes BatchNorm's statistics, by itself: then this is expected"


class Check:
    """Short runs of one command line.

    Args:
        words: overrides of the config.
        folder: for run directories and logs.
    """

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        self.words, self.folder = words, folder
        self.has_failed = False
        self._starts = ForkedStarts(LIMIT_SECONDS)
        self._printed_notes: set[str] = set()

    def train(self, title: str, name: str, *, strategy: str, num_processes: int) -> bool:
        """Train some steps. Print and return whether that works."""
        began = time.monotonic()
        error, output = self._train(name, *self.words, strategy=strategy, num_processes=num_processes)
        self._print(title, error, name=name, seconds=time.monotonic() - began)
        self._print_notes(output)
        return not error

    def resume(self, title: str, reference: str) -> None:
        """Stop a run in mid-epoch, resume it, and print whether its weights are those of the run `reference`."""
        name, run_dir, began = "stopped", self.folder / "stopped", time.monotonic()
        words = [*self.words, "strategy=single", "trainer.devices=1", f"run_dir={run_dir}"]
        code, output = self._start(name, STOPPED_START, *words)
        if code == ExitCode.DONE:
            print(f"-      {title}: not tried, as the run has ended before it could be stopped", flush=True)
            return
        if code == ExitCode.CONTINUE:
            code, output = self._start(name, "train.py", f"resume={run_dir}")
        error = _why(run_dir, output) if code else ""
        if not error and (names := _differing(self._weights(reference), self._weights(name), tolerance=0.0)):
            error = f"it ends with other weights than without a stop: {_first(names)}"
        self._print(title, error, name=name, seconds=time.monotonic() - began)
        self._print_notes(output)

    def compare(self, title: str, batch_words: Sequence[str] | None) -> None:
        """Train in double precision with ddp and with fsdp, and print whether they end with the same weights.

        One process is a third, but what it ends with is only a note: a module may rightly do something on each rank.

        Args:
            batch_words: overrides that give one process and two the same samples in a step; None if there are none.
        """
        began = time.monotonic()
        for strategy, num_processes in (("ddp", 2), ("fsdp", 2), ("single", 1)):
            words = [*self.words, *FEW, *(batch_words or [])]
            name = f"{strategy}-{DOUBLE}"
            if strategy == "single" and batch_words is None:
                continue
            if error := self._train(name, *words, strategy=strategy, num_processes=num_processes)[0]:
                print(f"-      {title}: not compared, as precision {DOUBLE} fails: {one_line(error)}", flush=True)
                return
        ddp = self._weights(f"ddp-{DOUBLE}")
        differing = _differing(ddp, self._weights(f"fsdp-{DOUBLE}"), tolerance=SAME)
        error = f"fsdp ends with other weights than ddp: {_first(differing)}" if differing else ""
        self._print(title, error, name=f"fsdp-{DOUBLE}", seconds=time.monotonic() - began)
        if batch_words is None:
            print("       one process is not compared: its batch size is not among the arguments of the data's class")
        elif alone := _differing(ddp, self._weights(f"single-{DOUBLE}"), tolerance=SAME):
            print(f"       one process ends with other weights: {_first(alone)}. {ITS_OWN}", flush=True)
        else:
            print("       one process ends with the same weights", flush=True)

    def plan(self, title: str) -> None:
        """Print whether a training step can be planned, without running it."""
        began, error, notes = time.monotonic(), "", []
        words = [*self.words, "strategy=ddp", "trainer.devices=2"]
        try:
            trace = run_plan.plan_run(compose_overrides(words), words).prediction.trace
            notes = [trace.by_parameters_note if trace.by_parameters else "", trace.note]
        except ConfigError as raised:
            error = str(raised)
        self._print(title, error, name="plan", seconds=time.monotonic() - began)
        for note in filter(None, notes):
            print(f"       {one_line(note)}", flush=True)

    def _train(self, name: str, *words: str, strategy: str, num_processes: int) -> tuple[str, str]:
        """Run train.py. Return why it has failed, empty if it has not, and what it has printed."""
        run_dir = self.folder / name
        words = (*words, f"strategy={strategy}", f"trainer.devices={num_processes}", f"run_dir={run_dir}")
        code, output = self._start(name, "train.py", *words, num_ranks=num_processes)
        return _why(run_dir, output) if code else "", output

    def _start(self, name: str, program: str, *words: str, num_ranks: int = 1) -> tuple[int, str]:
        """Run a program. Return its exit code, and what it has printed, which is also in a log."""
        log = self.folder / f"{name}.log"
        begin = log.stat().st_size if log.exists() else 0
        code = self._starts.run(program, words, num_ranks=num_ranks, log=log)
        return code, log.read_bytes()[begin:].decode(errors="replace")

    def _weights(self, name: str) -> dict[str, Any]:
        """Return the last weights of a run."""
        from hpc.checkpoint import weights

        return weights.read(self.folder / name / "checkpoints" / "last.ckpt")

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
    cfg = arguments.check_files(parse(compose_overrides([*words, "strategy=single", "trainer.devices=1"])))
    size = f"{NUM_EPOCHS} epochs of at most {NUM_BATCHES} batches"
    print(f"each run has {size}, on accelerator {cfg.trainer.accelerator}", flush=True)
    checked = Check(words, Path(tempfile.mkdtemp(prefix="check-")))
    try:
        trains = checked.train("training on one process", "single", strategy="single", num_processes=1)
        if trains:
            checked.resume("a stop in mid-epoch, and a resume that ends with the same weights", "single")
        sharded = [
            checked.train(f"{strategy} on two processes", strategy, strategy=strategy, num_processes=2)
            for strategy in ("ddp", "fsdp")
        ]
        if all(sharded):
            checked.compare("the same weights with ddp and fsdp", _batch_words(cfg))
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


def _batch_words(cfg: Config) -> list[str] | None:
    """Return overrides with which a step has the same samples on one process and on two; None if there are none."""
    if cfg.data.get("global_batch_size") is not None:
        return []
    size = cfg.data.get("batch_size")
    return ["++data.batch_size=null", f"++data.global_batch_size={2 * size}"] if isinstance(size, int) else None


def _differing(expected: Mapping[str, Any], other: Mapping[str, Any], *, tolerance: float) -> dict[str, float]:
    """Return names of tensors that differ, the most differing first, by how much of the largest value in the tensor."""
    import torch

    differing: dict[str, float] = {}
    for name, value in expected.items():
        if not torch.equal(value, other[name]):
            distance = (value.double() - other[name].double()).abs().max() / value.double().abs().max()
            if not distance <= tolerance:  # also if it is no number
                differing[name] = float(distance)
    return dict(sorted(differing.items(), key=lambda item: -item[1]))


def _first(differing: Mapping[str, float]) -> str:
    name, distance = next(iter(differing.items()))
    num_others = len(differing) - 1
    others = f" and {num_others} other{'s' if num_others > 1 else ''}" if num_others else ""
    return f"{name}{others}, by {distance:.1g} of its largest value"


def _unlock_lines(cfg: Config) -> Iterator[str]:
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
