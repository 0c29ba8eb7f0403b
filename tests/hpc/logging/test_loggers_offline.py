"""Check with the real packages that wandb and MLflow get every row, in one run, however a run was interrupted."""

import csv
import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fork import ENVIRON, scalars
from mlflow import MlflowClient
from omegaconf import DictConfig, OmegaConf, open_dict
from wandb_server import upload

from hpc.config import compose, parse
from hpc.config.build import build
from hpc.config.errors import ConfigError
from hpc.logging import hyperparameters, loggers
from hpc.run import attempt_log

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
# Kill the process two steps after a checkpoint, once that is written and wandb has had time to write its rows.
KILL = f"""
import os, signal, time
from hpc.resume.resume import Resume
os.environ["WANDB_API_KEY"] = "{SECRET}"
before = Resume.on_train_batch_end

def on_train_batch_end(self, trainer, *rest):
    before(self, trainer, *rest)
    if trainer.global_step == 6:
        trainer.strategy.writer.wait()
        limit, run = time.monotonic() + 60, trainer.loggers[2].experiment
        while b"DURABLE" not in open(run.sync_dir + f"/run-{{run.id}}.wandb", "rb").read():
            assert time.monotonic() < limit
            run.log({{"note": "DURABLE"}})
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)

Resume.on_train_batch_end = on_train_batch_end
"""
# A scheduler's SIGTERM for all processes of a job: wandb's service ends, this process saves and stops.
TERM = """
import os, signal, subprocess
from hpc.resume.resume import Resume
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
    return [(int(row["trainer/global_step"]), float(row["step/loss"])) for row in rows if "step/loss" in row]


def mlflow_losses(run_dir: Path, name: str = "step/loss") -> list[tuple[int, float]]:
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
    return scalars(folder / "run", "step/loss")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("patch", "code"),
    [pytest.param(KILL, -signal.SIGKILL, id="killed"), pytest.param(TERM, 85, id="terminated", marks=pytest.mark.soak)],
)
def test_every_row_is_logged_in_one_run(
    patch: str, code: int, start: Callable, reference: list[float], tmp_path: Path
) -> None:
    """Check also that TensorBoard and the CSV table have each row once, and that no file holds a secret."""
    run_dir, is_killed = tmp_path / "run", patch == KILL
    said = start(run_dir, 1, WORDS, patch=patch, code=code)
    assert "WandbLogger cannot be cut back" in said and "MLFlowLogger cannot be cut back" in said
    assert said.count("WandbLogger cannot write") == (not is_killed), "its service has ended, and training went on"
    start(run_dir, 1, [])
    expected = list(enumerate(pytest.approx(loss, rel=1e-6) for loss in reference))
    assert len(expected) == 12
    uploaded = upload(wandb_files(run_dir))
    assert [row["_step"] for row in uploaded] == list(range(len(uploaded)))
    repeated = [expected[4]] if is_killed else []  # the steps after the checkpoint, of which this one was logged
    assert sorted(mlflow_losses(run_dir)) == sorted([*expected, *repeated])
    rows = steps_and_losses(uploaded)
    if is_killed:
        assert sorted(rows) == sorted([*expected, *repeated])
    else:  # rows may be lost from the end of wandb's service until the run stops
        assert {step for step, _ in rows} >= {*range(12)} - {5, 6} and all(row == expected[row[0]] for row in rows)
    assert scalars(run_dir, "step/loss") == reference
    with (run_dir / "csv" / "metrics.csv").open() as stream:
        rows = [row for row in csv.DictReader(stream) if row["step/loss"]]
    assert [(int(row["step"]), float(row["step/loss"])) for row in rows] == expected
    (id,) = {file.stem for file in wandb_files(run_dir)}
    assert [start["logger_ids"]["wandb"] for start in attempt_log.read_starts(run_dir)] == [id.removeprefix("run-")] * 2
    assert len(mlflow_losses(run_dir, "test/loss")) == 1 == len([row for row in uploaded if "test/loss" in row])
    assert not [file for file in run_dir.rglob("*") if file.is_file() and SECRET.encode() in file.read_bytes()]


@pytest.mark.slow
def test_only_one_rank_makes_a_run(start: Callable, tmp_path: Path) -> None:
    said = start(
        tmp_path / "run", 2, [*WORDS[:-2], "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", *WORDS[-2:]]
    )
    assert "Traceback" not in said
    assert len(wandb_files(tmp_path / "run")) == 1
    assert [step for step, _ in mlflow_losses(tmp_path / "run")] == list(range(12))


def configured(folder: Path, *choices: str) -> Any:
    cfg = compose.compose_overrides([f"logger=[{','.join(choices)}]"])
    cfg.run_dir, cfg.name = str(folder), "n"
    return cfg


def built(cfg: Any, starts: Any = (), *, is_writing: bool = True) -> dict[str, Any]:
    return loggers.build_loggers(cfg, None, starts=starts, writer="attempt-1-ab", is_writing=is_writing)


@pytest.mark.slow
def test_a_later_attempt_goes_on_in_the_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import wandb

    cfg, starts = configured(tmp_path, "wandb", "mlflow"), []
    for attempt in (1, 2):
        run_loggers = built(cfg, starts)
        starts.append({"logger_ids": loggers.start_ids(run_loggers)})
        loggers.tolerate_failures([*run_loggers.values()])
        cfg.trainer.max_steps = attempt  # MLflow itself raises for a value that has changed
        hyperparameters.log_config(_trainer(run_loggers), parse.parse(cfg), attempt=attempt)
        for logger in run_loggers.values():
            logger.log_metrics({"step/loss": float(attempt)}, attempt)
            logger.finalize("success")
        settings = run_loggers["wandb"].experiment.settings
        assert (settings.console, settings.x_transaction_log_flush_interval) == ("off", 0.1)
        wandb.finish()
    assert starts[0] == starts[1] and set(starts[0]["logger_ids"]) == {"wandb", "mlflow"}
    assert mlflow_losses(tmp_path) == [(1, 1.0), (2, 2.0)]
    assert steps_and_losses(wandb_rows(tmp_path)) == [(1, 1.0), (2, 2.0)]
    assert {file.stem for file in wandb_files(tmp_path)} == {f"run-{starts[0]['logger_ids']['wandb']}"}
    assert "cannot write" not in capsys.readouterr().out


def _trainer(run_loggers: dict[str, Any]) -> Any:
    return SimpleNamespace(loggers=[*run_loggers.values()])


def test_an_id_of_ones_own_is_kept(tmp_path: Path) -> None:
    cfg = configured(tmp_path, "wandb")
    starts = [{"logger_ids": {"wandb": "earlier"}}]
    assert built(cfg, starts)["wandb"].version == "earlier"
    with open_dict(cfg):
        cfg.logger.wandb.id = "mine"
    assert built(cfg, starts)["wandb"].version == "mine"


def test_other_ranks_open_no_database(tmp_path: Path) -> None:
    (logger,) = built(configured(tmp_path, "mlflow"), is_writing=False).values()
    logger.experiment.log_artifact("x")
    logger.log_metrics({"step/loss": 1.0}, 0)
    assert list(tmp_path.iterdir()) == [] and build(DictConfig({"_target_": "builtins.dict"}), logger=[logger])


def test_a_database_that_a_killed_attempt_has_half_made_is_told(tmp_path: Path, capsys: Any) -> None:
    database = sqlite3.connect(tmp_path / "mlflow.db")
    database.execute("CREATE TABLE experiments (experiment_id INTEGER)")
    database.commit()
    database.close()
    run_loggers = built(configured(tmp_path, "mlflow"))
    run_loggers["mlflow"].log_metrics({"step/loss": 1.0}, 0)
    assert loggers.start_ids(run_loggers) == {}
    assert capsys.readouterr().out.count("MLFlowLogger cannot write: ") == 1


def test_a_run_that_mlflow_no_longer_has_is_told_and_training_goes_on(tmp_path: Path, capsys: Any) -> None:
    run_loggers = built(configured(tmp_path, "mlflow"), [{"logger_ids": {"mlflow": "gone"}}])
    loggers.tolerate_failures([*run_loggers.values()])
    assert loggers.start_ids(run_loggers) == {}
    run_loggers["mlflow"].log_metrics({"step/loss": 1.0}, 0)
    assert capsys.readouterr().out.count("MLFlowLogger cannot write: ") == 1


@pytest.mark.parametrize(("choice", "module"), [("wandb", "wandb"), ("mlflow", "mlflow"), ("mlflow", "alembic")])
def test_a_missing_package_is_told_with_the_line_that_installs_it(
    choice: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = compose.compose_overrides([f"logger=[tensorboard,{choice}]", "run_dir=/runs/x"])
    parse.parse(cfg)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"not installed: {module}") as raised:
        parse.parse(cfg)
    assert f"python -m pip install -c constraints.txt {choice}" in str(raised.value)


@pytest.mark.parametrize(
    ("key", "former", "fix"),
    [
        ("logger.wandb", "training.wandb_logger.OfflineWandbLogger", "WandbLogger and offline: true"),
        ("logger.mlflow", "training.mlflow_logger.LocalMLFlowLogger", "tracking_uri: sqlite:///"),
        ("callbacks.histograms", "training.histograms.Histograms", "bring-your-own.md"),
    ],
)
def test_a_class_of_an_earlier_version_is_answered_by_what_to_write(key: str, former: str, fix: str) -> None:
    cfg = compose.compose_overrides(["logger=[tensorboard,wandb,mlflow]", "run_dir=/runs/x"])
    with open_dict(cfg):
        OmegaConf.update(cfg, f"{key}._target_", f"hpc.{former}")
    with pytest.raises(ConfigError, match="one of earlier versions") as raised:
        parse.parse(cfg)
    assert fix in str(raised.value)


@pytest.mark.slow
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
