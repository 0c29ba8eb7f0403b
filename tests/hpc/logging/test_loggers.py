"""Check that a resumed run keeps its logs with each step once, and changes no file that it has not written."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fork import scalars
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from omegaconf import OmegaConf
from torch.utils.tensorboard import SummaryWriter

from hpc.checkpoint.on_disk import Checkpoint
from hpc.config import compose, parse
from hpc.config.errors import ConfigError
from hpc.logging import hyperparameters, loggers, positions
from hpc.run import skipped_samples

WORDS = [
    "trainer=cpu",
    "trainer.log_every_n_steps=1",
    "trainer.max_epochs=2",
    "+trainer.enable_progress_bar=false",
    "+trainer.limit_train_batches=4",
    "+trainer.limit_val_batches=1",
    "+trainer.limit_test_batches=1",
    "callbacks.progress=null",
    "callbacks.monitor=null",
]
# A `_target_` of one's own cannot be typed; here it is trusted like one in a file of configs/.
TYPED = """
import re
from hpc.config import trust, typed_words

typed_words.CODE_KEYS = re.compile("(?!)")
trust.TRUSTED_IF_NAMED = ()
"""
BOARD = "{_target_:lightning.pytorch.loggers.TensorBoardLogger,save_dir:${run_dir},name:tensorboard,version:''}"
TABLE = "{_target_:lightning.pytorch.loggers.CSVLogger,save_dir:${run_dir},name:table,flush_logs_every_n_steps:3}"


def tables(run_dir: Path) -> list[list[tuple[str, ...]]]:
    """Return the rows of each metrics.csv, without columns that depend on time and hardware."""
    found = []
    for file in sorted(run_dir.glob("table/*/metrics.csv")):
        rows = list(csv.DictReader(file.open()))
        kept = [{key: value for key, value in row.items() if value and not key.startswith("perf/")} for row in rows]
        found.append(sorted(tuple(f"{k}={v}" for k, v in sorted(row.items())) for row in kept if len(row) > 1))
    return found


class Elsewhere(Logger):
    """A logger as Lightning's for W&B, MLflow, Comet and Neptune are: a subclass of its base class."""

    name, version, params = "elsewhere", "1", None

    def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.params = params


def test_any_logger_gets_the_config() -> None:
    logger, cfg = Elsewhere(), parse.parse(compose.compose_overrides(["seed=7"]))
    hyperparameters.log_config(SimpleNamespace(loggers=[logger]), cfg, attempt=2)  # type: ignore[arg-type]
    assert logger.params and (logger.params["seed"], logger.params["trainer"]["precision"]) == (7, "32-true")


@pytest.mark.soak
def test_a_table_beside_tensorboard_holds_the_rows_of_the_uninterrupted_run(start: Callable, tmp_path: Path) -> None:
    words = [*WORDS, "logger=null", f"+logger.board={BOARD}", f"+logger.table={TABLE}"]
    start(tmp_path / "reference", 1, words, patch=TYPED)
    start(tmp_path / "run", 1, words, 2, TYPED)  # no validation yet: the table has fewer columns
    start(tmp_path / "run", 1, [], 5, TYPED)
    start(tmp_path / "run", 1, [], patch=TYPED)
    (expected,) = tables(tmp_path / "reference")
    assert tables(tmp_path / "run") == [expected] and len([row for row in expected if "step/loss" in str(row)]) == 8
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))


@pytest.mark.slow
def test_a_run_above_another_touches_nothing_of_it(start: Callable, tmp_path: Path) -> None:
    above, below = tmp_path / "exp", tmp_path / "exp" / "runA"
    above.mkdir()
    words = [*WORDS, "trainer.max_epochs=1", "+trainer.num_sanity_val_steps=0"]
    start(below, 1, words)
    others = [above / "events.out.tfevents.1.host", above / "tensorboard" / "events.out.tfevents.2.host"]
    for file in others:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"precious")
    before = {file: file.read_bytes() for file in (*below.rglob("*"), *others) if file.is_file()}
    start(above, 1, words, patch="import os; os.environ['HPC_JOB_END'] = '1'", code=85)  # nothing is saved yet
    start(above, 1, [], 2)
    start(above, 1, [])
    assert {file: file.read_bytes() for file in before if file.exists()} == before
    assert len(list((above / "tensorboard").glob("events.*"))) > 1


def placed(folder: Path, name: str, size: int = 100) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(bytes(size))
    return file


EVENTS = "events.out.tfevents"
# Two attempts of a run, the second of which was killed.
ATTEMPTS = [
    {"event": "start", "attempt": 1, "writer": "attempt-1-ab"},
    {"event": "end", "attempt": 1},
    {"event": "start", "attempt": 2, "writer": "attempt-2-cd"},
]
WRITERS = positions.writers(ATTEMPTS)


def test_going_on_cuts_the_curves_of_training_not_those_of_nodes(tmp_path: Path) -> None:
    names = f"{EVENTS}.100.n1.7.0.attempt-1-ab", f"{EVENTS}.999.n2.7.1.attempt-2-cd"
    names = *names, f"loss_train/{EVENTS}.150.n1.7.1.attempt-1-ab"
    first, since, scalars = (placed(tmp_path / "tensorboard", name) for name in names)
    node = placed(tmp_path / "tensorboard" / "node-n1", f"{EVENTS}.150.n1.7")
    board = TensorBoardLogger(tmp_path, "tensorboard", "")
    reached = {f"tensorboard/{names[0]}": 40, f"tensorboard/{names[2]}": 30}
    positions.truncate_logs(tmp_path, [board], positions=reached, writers=WRITERS)
    assert (first.stat().st_size, since.exists(), scalars.stat().st_size, node.stat().st_size) == (40, False, 30, 100)
    assert positions.read_positions(tmp_path, [board], writers=WRITERS) == reached


def test_what_no_attempt_has_written_stays_as_it_is(tmp_path: Path) -> None:
    """Keep other curves, such as a later evaluation's, or those of another run that somebody has copied there."""
    names = [f"{EVENTS}.{ending}" for ending in ("150.n1.8.0", "150.n1.7.0.v2", "400.n1.7.0.attempt-1-ef", "1")]
    files = [placed(tmp_path / "tensorboard", name) for name in names]
    board = TensorBoardLogger(tmp_path, "tensorboard", "")
    reached = {f"tensorboard/{names[0]}": 40, f"tensorboard/{names[2]}": 40}  # existed when the checkpoint was saved
    for events in (ATTEMPTS, [{"event": "start", "attempt": [], "time": "x", "writer": None}, {"event": "start"}]):
        positions.truncate_logs(tmp_path, [board], positions=reached, writers=positions.writers(events))
        assert [file.stat().st_size for file in files] == [100] * len(files)


def test_what_an_attempt_writes_that_woke_up_too_late_is_taken_away(tmp_path: Path) -> None:
    names = [f"{EVENTS}.{ending}" for ending in ("1.n1.7.0.attempt-1-ab", "3.n2.7.0.attempt-2-cd", "1.n1.8.0")]
    hung, own, added = (placed(tmp_path / "tensorboard", name) for name in names)
    reached = {f"tensorboard/{hung.name}": 60, f"tensorboard/{added.name}": 50}
    attempts = [*ATTEMPTS[:2], {**ATTEMPTS[2], "reached": reached}]
    positions.truncate_late_writes(tmp_path, [TensorBoardLogger(tmp_path, "tensorboard", "")], events=attempts)
    assert [file.stat().st_size for file in (hung, own, added)] == [60, 100, 100]


@pytest.mark.slow
def test_curves_that_were_added_to_a_run_stay_when_it_goes_on(start: Callable, tmp_path: Path) -> None:
    words = [*WORDS, "trainer.max_epochs=1", "+trainer.num_sanity_val_steps=0", "+trainer.limit_test_batches=1"]
    start(tmp_path / "run", 1, list(dict.fromkeys(words)), 2)
    folder = tmp_path / "run" / "tensorboard"
    before = set(folder.iterdir())
    with SummaryWriter(folder) as board:
        board.add_scalar("eval/robustness", 0.5, 2)
    (added,) = set(folder.iterdir()) - before
    content = added.read_bytes()
    start(tmp_path / "run", 1, [])
    assert added.exists() and added.read_bytes() == content
    assert len(scalars(tmp_path / "run", "step/loss")) == 4


@pytest.mark.parametrize("rows", [0, 1, 2])
@pytest.mark.parametrize("killed", [False, True])
def test_a_table_goes_on_after_its_first_rows(rows: int, killed: bool, tmp_path: Path) -> None:
    """Check also a start that was killed after the old table was removed and before the new one was written."""
    first = CSVLogger(tmp_path, "table", "")
    for step in range(2):
        first.log_metrics({"loss": 1.5 * step}, step)
    first.save()
    file = tmp_path / "table" / "metrics.csv"
    if killed:
        kept = "".join(file.read_text().splitlines(keepends=True)[: rows + 1])
        file.with_name(".metrics.csv.part").write_text(kept)
        file.unlink()
    again = CSVLogger(tmp_path, "table", "")
    positions.truncate_logs(tmp_path, [again], positions={"table/metrics.csv": rows}, writers=())
    again.log_metrics({"loss": 7.0, "other": 1.0}, 9)
    again.save()
    steps = [row["step"] for row in csv.DictReader(file.open())]
    assert steps == [*map(str, range(rows)), "9"] and not file.with_name(".metrics.csv.part").exists()


def test_an_attempt_that_woke_up_too_late_writes_no_rows(tmp_path: Path) -> None:
    hung = CSVLogger(tmp_path, "table", "", flush_logs_every_n_steps=1)
    owners = [True]
    loggers.restrict_writing([hung], lambda: owners[-1])
    hung.log_metrics({"loss": 1.0}, 0)
    later = CSVLogger(tmp_path, "table", "")
    positions.truncate_logs(tmp_path, [later], positions={"table/metrics.csv": 1}, writers=())
    owners.append(False)  # the later attempt has claimed the run
    hung.log_metrics({"loss": 2.0}, 1)
    hung.log_metrics({"other": 3.0}, 2)  # without the check this logger would rewrite the whole file
    hung.finalize("success")
    later.log_metrics({"loss": 4.0}, 1)
    later.save()
    table = tmp_path / "table" / "metrics.csv"
    assert [(row["step"], row["loss"]) for row in csv.DictReader(table.open())] == [("0", "1.0"), ("1", "4.0")]


def configured(run_dir: Path, logger: Any) -> Any:
    return OmegaConf.create({"run_dir": str(run_dir), "logger": logger})


def built(cfg: Any, checkpoint: Any = None, *, starts: Any = (), is_writing: bool = True) -> list[Any]:
    made = loggers.build_loggers(cfg, checkpoint, starts=starts, writer="attempt-3-ef", is_writing=is_writing)
    return list(made.values())


def test_a_logger_without_a_version_keeps_its_folder(tmp_path: Path) -> None:
    node = {"_target_": "lightning.pytorch.loggers.CSVLogger", "save_dir": str(tmp_path), "name": "table"}
    cfg = configured(tmp_path, {"table": node, "off": None})
    placed(tmp_path, "table/version_0/metrics.csv")  # another program's
    (logger,) = built(cfg)
    assert loggers.curve_folders(tmp_path, [logger]) == ["table/version_1"]
    (tmp_path / "table" / "version_1").mkdir()
    (again,) = built(cfg, starts=[{"log_dirs": ["table/version_1"]}])
    assert again.log_dir == logger.log_dir


def test_a_resumed_run_hides_no_point_from_before(tmp_path: Path) -> None:
    """Check manual optimization, where a checkpoint counts other steps than the curves."""
    node = {"_target_": "lightning.pytorch.loggers.TensorBoardLogger", "save_dir": str(tmp_path), "name": "tensorboard"}
    cfg = configured(tmp_path, {**node, "version": ""})
    saved = Checkpoint(tmp_path, step=6, attempt=1, files={}, details={"stepped": 12})
    for found, steps in ((None, range(12)), (saved, range(12, 14))):
        (logger,) = built(cfg, found)
        for step in steps:
            logger.log_metrics({"loss": float(step)}, step)
        logger.finalize("success")
    assert scalars(tmp_path, "loss") == list(range(14))
    assert {file.suffix for file in (tmp_path / "tensorboard").glob("events.*")} == {".attempt-3-ef"}


@pytest.mark.parametrize("logger", [3, "tensorboard", [{"save_dir": "x"}]])
def test_what_is_no_logger_is_rejected(logger: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="_target_"):
        built(configured(tmp_path, logger))
    assert built(configured(tmp_path, None)) == []


def test_a_table_outside_of_the_run_directory_is_rejected(tmp_path: Path) -> None:
    """Reject it, as a resumed run truncates its table and could remove rows of another run."""
    node = {
        "_target_": "lightning.pytorch.loggers.CSVLogger",
        "save_dir": str(tmp_path),
        "name": "table",
        "version": "",
    }
    with pytest.raises(ConfigError, match="must lie in the run directory"):
        built(configured(tmp_path / "run", [node]))
    assert list(tmp_path.iterdir()) == []


def test_a_line_of_skipped_samples_that_a_crash_cut_short_is_left_out(tmp_path: Path) -> None:
    skipped_samples.record_skip(tmp_path, 12, attempt=1)
    with (tmp_path / "skipped.jsonl").open("a") as stream:
        stream.write(json.dumps({"step": 20, "attempt": 2})[:-7])
    assert skipped_samples.num_skipped_batches(tmp_path, 10, attempt=1) == 2
    skipped_samples.record_skip(tmp_path, 14, attempt=2)
    assert skipped_samples.num_skipped_batches(tmp_path, 10, attempt=1) == 6


def test_a_clock_that_is_behind_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    board = TensorBoardLogger(tmp_path, name="tensorboard", version="")
    positions.warn_of_late_clock([board], 1000.0)
    placed(tmp_path, "tensorboard/events.out.tfevents.1060.host.1.0")
    positions.warn_of_late_clock([board], 1061.0)
    assert capsys.readouterr().out == ""
    positions.warn_of_late_clock([board], 1000.0)
    assert "clock is at least 60 s behind" in capsys.readouterr().out


def test_nothing_outside_of_a_run_is_cut(tmp_path: Path) -> None:
    """Check a checkpoint with a path outside of the folder, and a logger with a folder outside of the run."""
    others = tmp_path / "others"
    others.mkdir()
    names = [f"{EVENTS}.{number}.n2.7.0.attempt-2-cd" for number in (300, 301)]
    for name in names:
        (others / name).write_bytes(b"precious")
    (tmp_path / "run/tensorboard").mkdir(parents=True)
    within = TensorBoardLogger(tmp_path / "run", name="tensorboard", version="")
    elsewhere = TensorBoardLogger(tmp_path, name="others", version="")
    for logger, above in ((within, "tensorboard/../.."), (elsewhere, "..")):
        reached = {f"{above}/others/{names[0]}": 3}
        positions.truncate_logs(tmp_path / "run", [logger], positions=reached, writers=WRITERS)
        late = [{**ATTEMPTS[2], "reached": reached}]
        positions.truncate_late_writes(tmp_path / "run", [logger], events=late)
    assert [file.read_bytes() for file in others.iterdir()] == [b"precious"] * 2
