"""Check with the real packages that wandb and MLflow get each row once, in one run, however a run was interrupted."""

import csv
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fork import ENVIRON, scalars
from mlflow import MlflowClient
from omegaconf import OmegaConf
from wandb_server import upload

from hpc.config import compose, rules
from hpc.config.errors import ConfigError, raise_problems
from hpc.training import log_positions, loggers
from hpc.training.mlflow_logger import LocalMLFlowLogger
from hpc.training.wandb_file import FilePosition, read_end
from hpc.training.wandb_logger import OfflineWandbLogger

SECRET = "hush4711" * 5
WORDS = [
    "logger=[tensorboard,csv,wandb,mlflow]",
    "trainer=cpu",
    "trainer.log_every_n_steps=1",
    "trainer.max_epochs=2",
    "checkpoint.every_n_steps=4",
    "+trainer.enable_progress_bar=false",
    "+trainer.limit_train_batches=6",
    "+trainer.limit_val_batches=1",
    "+trainer.limit_test_batches=1",
    "callbacks.progress=null",
    "callbacks.monitor=null",
]
# Kill the process two steps after a checkpoint, once that is written and the rows of the first step are on the disk.
KILL = f"""
import os, signal
from hpc.resume.resume import Resume
from hpc.training import loggers
os.environ["WANDB_API_KEY"] = "{SECRET}"
before = Resume.on_train_batch_end

def on_train_batch_end(self, trainer, *rest):
    before(self, trainer, *rest)
    if trainer.global_step == 6:
        trainer.strategy.writer.wait()
        loggers.flush(trainer.loggers)
        os.kill(os.getpid(), signal.SIGKILL)

Resume.on_train_batch_end = on_train_batch_end
"""
# A scheduler's SIGTERM for all processes of a job: wandb's service ends, this process saves and stops.
TERM = """
import os, signal, subprocess
from hpc.resume.resume import Resume
from hpc.training import wandb_logger
wandb_logger.FLUSH_SECONDS = 1.0  # so that the last rows are not on the disk yet
before = Resume.on_train_batch_end

def on_train_batch_end(self, trainer, *rest):
    before(self, trainer, *rest)
    if trainer.global_step == 7:
        for pid in subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, text=True).stdout.split():
            if "wandb-core" in open(f"/proc/{pid}/cmdline").read():
                os.kill(int(pid), signal.SIGTERM)
                os.waitpid(int(pid), 0)
        os.kill(os.getpid(), signal.SIGTERM)

Resume.on_train_batch_end = on_train_batch_end
"""


def wandb_records(file: Path) -> list[dict[str, Any]]:
    """Return the records of a file as wandb itself reads them."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    done = subprocess.run(command, env=ENVIRON, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    return [json.loads(line) for line in done.stdout.splitlines()]


def wandb_files(run_dir: Path) -> list[Path]:
    return sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"))


def wandb_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of all files, in the order of their times."""
    records = [record for file in wandb_files(run_dir) for record in wandb_records(file)]
    return [record["history"]["item"] for record in records if record["type"] == "history"]


def steps_and_losses(rows: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(int(row["trainer/global_step"]), float(row["train/loss"])) for row in rows if "train/loss" in row]


def mlflow_losses(run_dir: Path, name: str = "train/loss") -> list[tuple[int, float]]:
    """Return (step, value) of the one run in the store."""
    client = MlflowClient(f"sqlite:///{run_dir}/mlflow.db")
    runs = [run for experiment in client.search_experiments() for run in client.search_runs([experiment.experiment_id])]
    (run,) = runs
    history = client.get_metric_history(run.info.run_id, name)
    assert run.data.metrics[name] == max(history, key=lambda metric: (metric.step, metric.timestamp)).value
    return [(metric.step, metric.value) for metric in history]


@pytest.fixture(scope="module")
def reference(start: Callable, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("reference")
    start(folder / "run", 1, ["logger=tensorboard", *WORDS[1:]])
    return scalars(folder / "run", "train/loss")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("patch", "code"),
    [pytest.param(KILL, -signal.SIGKILL, id="killed"), pytest.param(TERM, 85, id="terminated", marks=pytest.mark.soak)],
)
def test_each_row_is_logged_once(
    patch: str, code: int, start: Callable, reference: list[float], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    start(run_dir, 1, WORDS, patch=patch, code=code)
    start(run_dir, 1, [])
    expected = list(enumerate(pytest.approx(loss, rel=1e-6) for loss in reference))
    assert len(expected) == 12
    uploaded = upload(wandb_files(run_dir))
    assert steps_and_losses(uploaded) == expected
    assert [row["_step"] for row in uploaded] == list(range(len(uploaded)))
    assert mlflow_losses(run_dir) == expected
    assert scalars(run_dir, "train/loss") == reference
    with (run_dir / "csv" / "metrics.csv").open() as stream:
        rows = [row for row in csv.DictReader(stream) if row["train/loss"]]
    assert [(int(row["step"]), float(row["train/loss"])) for row in rows] == expected
    (id,) = {file.stem for file in wandb_files(run_dir)}
    assert id == f"run-{(run_dir / 'wandb' / 'id').read_text().strip()}"
    for name in ("test/loss", "val/loss"):
        assert len([row for row in uploaded if name in row]) == len(mlflow_losses(run_dir, name))
    assert len(mlflow_losses(run_dir, "test/loss")) == 1
    assert not [file for file in run_dir.rglob("*") if file.is_file() and SECRET.encode() in file.read_bytes()]


@pytest.mark.slow
def test_only_one_rank_makes_a_run(start: Callable, tmp_path: Path) -> None:
    said = start(
        tmp_path / "run", 2, [*WORDS[:-2], "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", *WORDS[-2:]]
    )
    assert "Traceback" not in said
    assert len(wandb_files(tmp_path / "run")) == 1
    assert [step for step, _ in mlflow_losses(tmp_path / "run")] == list(range(12))


@pytest.fixture
def wandb_logger(tmp_path: Path) -> Any:
    import wandb

    made: list[OfflineWandbLogger] = []

    def make(**options: Any) -> OfflineWandbLogger:
        made.append(OfflineWandbLogger(str(tmp_path), project="p", settings={"console": "off"}, **options))
        return made[-1]

    yield make
    wandb.teardown()


def end_wandb_service() -> None:
    """End wandb's service as schedulers do, which send SIGTERM to all processes of a job."""
    pids = subprocess.run(
        ["pgrep", "-P", str(os.getpid()), "wandb-core"], capture_output=True, text=True
    ).stdout.split()
    os.kill(int(pids[-1]), signal.SIGTERM)
    os.waitpid(int(pids[-1]), 0)


@pytest.mark.parametrize("is_written", [False, True])
def test_rows_are_kept_until_they_are_on_the_disk(is_written: bool, wandb_logger: Any, tmp_path: Path) -> None:
    """Check the end of wandb's service while rows are on their way, and the limit of one block of its file."""
    logger = wandb_logger()
    for step in range(200):  # more than a block of 32 KiB
        logger.log_metrics({"train/loss": float(step)}, step)
    logger.flush()
    (file,) = wandb_files(tmp_path)
    assert file.stat().st_size > 2**15
    for step in range(200, 220):
        logger.log_metrics({"train/loss": float(step)}, step)
    while is_written and read_end(file, after=FilePosition()).next_row < 220:
        time.sleep(0.01)
    end_wandb_service()
    for step in range(220, 230):
        logger.log_metrics({"train/loss": float(step)}, step)
    logger.flush()
    assert steps_and_losses(wandb_rows(tmp_path)) == [(step, float(step)) for step in range(230)]


def test_a_value_that_wandb_rejects_is_an_error_and_no_row(wandb_logger: Any, tmp_path: Path) -> None:
    logger = wandb_logger()
    with pytest.raises(Exception, match=r"keys|string|str"):
        logger.log_metrics({1: 2.0}, 0)
    logger.log_metrics({"train/loss": 1.0}, 1)
    logger.flush()
    assert steps_and_losses(wandb_rows(tmp_path)) == [(1, 1.0)]


def test_a_file_is_read_up_to_its_last_whole_record(wandb_logger: Any, tmp_path: Path) -> None:
    logger = wandb_logger()
    for step in range(150):
        logger.log_metrics({"train/loss": float(step)}, step)
    logger.flush()
    (file,) = wandb_files(tmp_path)
    size = file.stat().st_size
    end = read_end(file, after=FilePosition())
    assert end == FilePosition(size, 150) or end.next_row == 150
    cut = tmp_path / "cut.wandb"
    for num_bytes in range(2**15 - 40, min(size, 2**15 + 40)):
        cut.write_bytes(file.read_bytes()[:num_bytes])
        found = read_end(cut, after=FilePosition())
        assert found.num_bytes <= num_bytes
        assert read_end(file, after=found) == end


def test_what_no_checkpoint_covers_is_removed(wandb_logger: Any, tmp_path: Path) -> None:
    names = [f"wandb/offline-run-20260101_00000{number}-abc/run-abc.wandb" for number in range(3)]
    names.append("wandb/offline-run-20260101_000009-other/run-other.wandb")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(bytes(100))
    logger = wandb_logger(id="abc")
    log_positions.truncate_logs(tmp_path, [logger], positions={names[0]: 100, names[1]: 40}, events=[])
    sizes = [(tmp_path / name).stat().st_size if (tmp_path / name).exists() else None for name in names]
    assert sizes == [100, 40, None, 100]
    assert logger.read_positions(tmp_path) == {names[0]: 100, names[1]: 40}


def test_what_was_uploaded_and_is_logged_again_is_told(wandb_logger: Any, tmp_path: Path, capsys: Any) -> None:
    name = "wandb/offline-run-20260101_000000-abc/run-abc.wandb"
    (tmp_path / name).parent.mkdir(parents=True)
    for file in (tmp_path / name, tmp_path / f"{name}.synced"):
        file.write_bytes(bytes(100))
    wandb_logger(id="abc").truncate(tmp_path, {name: 100})
    assert capsys.readouterr().out == ""
    wandb_logger(id="abc").truncate(tmp_path, {name: 50})
    assert "has been uploaded" in capsys.readouterr().out


def test_mlflow_goes_on_after_its_first_rows(tmp_path: Path) -> None:
    first = LocalMLFlowLogger(str(tmp_path))
    assert not first.database.exists() and first.read_positions(tmp_path) == {}
    for step in range(4):
        first.log_metrics({"train/loss": float(step), "a@b": float("nan") if step == 1 else 1.0}, step)
    first.log_hyperparams({"lr": 0.1, "net": {"width": 3}})
    positions = first.read_positions(tmp_path)
    assert positions == {"mlflow.db": 8}
    first.log_metrics({"train/loss": 9.0, "later": 1.0}, 4)
    first.finalize("failed")
    again = LocalMLFlowLogger(str(tmp_path))
    again.truncate(tmp_path, positions)
    assert mlflow_losses(tmp_path) == [(step, float(step)) for step in range(4)]
    assert again.run_id == first.run_id
    assert again.experiment.get_run(again.run_id).info.status == "RUNNING"
    assert "later" not in again.experiment.get_run(again.run_id).data.metrics
    again.log_hyperparams({"lr": 0.2, "new": 1})  # MLflow itself raises for a value that has changed
    assert again.experiment.get_run(again.run_id).data.params == {"lr": "0.1", "net/width": "3", "new": "1"}


def test_an_attempt_that_was_killed_while_it_made_the_tables_leaves_nothing_behind(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "mlflow.db")
    database.execute("CREATE TABLE experiments (experiment_id INTEGER)")
    database.commit()
    database.close()
    logger = LocalMLFlowLogger(str(tmp_path))
    logger.truncate(tmp_path, {})
    logger.log_metrics({"train/loss": 1.0}, 0)
    assert mlflow_losses(tmp_path) == [(0, 1.0)]


@pytest.mark.parametrize("logger_class", [LocalMLFlowLogger, OfflineWandbLogger])
def test_an_attempt_that_woke_up_too_late_logs_nothing(logger_class: Any, tmp_path: Path) -> None:
    logger = logger_class(str(tmp_path))
    loggers.restrict_writing([logger], lambda: False)
    logger.log_metrics({"train/loss": 1.0}, 0)
    assert not wandb_files(tmp_path) and not (tmp_path / "mlflow.db").exists()


@pytest.mark.parametrize(("choice", "module"), [("wandb", "wandb"), ("mlflow", "mlflow"), ("mlflow", "alembic")])
def test_a_missing_package_is_told_with_the_line_that_installs_it(
    choice: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = compose.compose_overrides([f"logger=[tensorboard,{choice}]", "run_dir=/runs/x"])
    raise_problems(rules.loggers_have_their_packages(cfg.logger))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"not installed: {module}") as raised:
        raise_problems(rules.loggers_have_their_packages(cfg.logger))
    assert f"python -m pip install -c constraints.txt {choice}" in str(raised.value)


def test_files_that_are_cut_lie_in_the_run_directory(tmp_path: Path) -> None:
    for target in ("wandb_logger.OfflineWandbLogger", "mlflow_logger.LocalMLFlowLogger"):
        node = {"_target_": f"hpc.training.{target}", "save_dir": str(tmp_path)}
        cfg = OmegaConf.create({"run_dir": str(tmp_path / "run"), "logger": {"one": node}})
        with pytest.raises(ConfigError, match="must lie in the run directory"):
            loggers.build_loggers(cfg, None, starts=[])
    assert list(tmp_path.iterdir()) == []


def test_what_loggers_cannot_do_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger

    loggers.print_limits([])
    loggers.print_limits([TensorBoardLogger(tmp_path), CSVLogger(tmp_path)])
    assert capsys.readouterr().out == ""
    loggers.print_limits([CSVLogger(tmp_path)])
    assert "show no curves" in capsys.readouterr().out
    stock = MLFlowLogger(tracking_uri=f"sqlite:///{tmp_path}/other.db")
    loggers.print_limits([TensorBoardLogger(tmp_path), stock])
    assert "MLFlowLogger cannot be cut back" in capsys.readouterr().out
