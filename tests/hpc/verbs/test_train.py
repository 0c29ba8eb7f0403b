"""Check train.py as a user types it: the learning, the records, and later uses of a checkpoint."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import lightning as L
import pytest
import torch
from fork import ENVIRON, PROJECT, QUIET, free_port, scalars
from omegaconf import OmegaConf

from hpc.checkpoint import on_disk, safe_unpickle, weights
from hpc.checkpoint.trained import load
from hpc.config.errors import ConfigError
from hpc.predict import prediction_writer

pytestmark = pytest.mark.slow

SHORT = ["trainer.max_epochs=2", QUIET]


@pytest.fixture(scope="module")
def trained(call: Callable, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the directory and the output of a short run."""
    run_dir = tmp_path_factory.mktemp("run") / "digits"
    done = call(*SHORT, f"run_dir={run_dir}", cwd=run_dir.parent)
    assert done.returncode == 0, done.stderr
    return run_dir, done.stdout


def last_line(output: str) -> tuple[str, float]:
    name, value = output.strip().splitlines()[-1].split()
    return name, float(value)


def test_prints_the_test_accuracy_last(trained: tuple[Path, str]) -> None:
    name, value = last_line(trained[1])
    assert name == "test/accuracy" and 0.3 < value <= 1


def test_tensorboard_holds_what_the_readme_promises(trained: tuple[Path, str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trained[0] / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    wanted = {"step/loss", "val/loss", "val/accuracy", "test/loss", "test/accuracy", "step/lr", "step/grad_norm"}
    assert wanted <= set(tags["scalars"])
    assert "val/samples" in tags["images"]
    assert "config/text_summary" in tags["tensors"]
    session = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"model.optimizer.lr" in session
    experiment = events.SummaryMetadata("_hparams_/experiment").plugin_data.content
    assert b"test/accuracy" in experiment and b"val/loss" in experiment


def test_each_curve_has_one_point_per_step(trained: tuple[Path, str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trained[0] / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    for tag in set(events.Tags()["scalars"]) - {"epoch"}:  # Lightning writes the epoch beside every metric
        steps = [event.step for event in events.Scalars(tag)]
        assert len(steps) == len(set(steps)), tag


def test_the_resolved_config_says_all(trained: tuple[Path, str]) -> None:
    cfg = OmegaConf.load(trained[0] / "config.yaml")
    assert cfg.model.network.num_classes == 10
    assert cfg.run_dir == str(trained[0])
    assert "${" not in (trained[0] / "config.yaml").read_text()


@pytest.mark.parametrize("name", ["last.ckpt", "best.ckpt"])
def test_checkpoints_are_whole_and_hold_nothing_but_plain_data(name: str, trained: tuple[Path, str]) -> None:
    link = trained[0] / "checkpoints" / name
    assert link.is_symlink() and link.resolve().parent == link.parent.resolve()
    found = on_disk.read_manifest(link)
    assert found and on_disk.find_flaw(found) == "" and set(on_disk.file_names(link)) == set(found.files)
    for file in found.files:
        if file.endswith(".pt"):
            torch.load(link / file, weights_only=True)
    assert safe_unpickle.read_metadata(link).state_dict_metadata  # readable by the project's own restricted unpickler


def test_a_checkpoint_is_evaluated_to_the_same_number(
    trained: tuple[Path, str], call: Callable, tmp_path: Path
) -> None:
    ckpt = trained[0] / "checkpoints" / "last.ckpt"
    done = call(f"ckpt={ckpt}", "task=test", f"run_dir={tmp_path / 'again'}", QUIET)
    assert last_line(done.stdout) == last_line(trained[1]), done.stderr
    done = call(f"ckpt={trained[0]}", "task=test", f"run_dir={tmp_path / 'best'}", QUIET)
    assert f"the run begins with the weights of {trained[0]}/checkpoints/best.ckpt\n" in done.stdout, done.stderr


@pytest.mark.soak
def test_predictions_hold_every_sample_once_whatever_ranks_made_them(
    trained: tuple[Path, str], call: Callable, tmp_path: Path
) -> None:
    module, data = load(trained[0])
    images = torch.stack([data.dataset("test")[i][0] for i in range(len(data.dataset("test")))])
    weights.load(module, trained[0] / "checkpoints" / "last.ckpt")
    expected = module(data.prepare_inputs(images)).argmax(-1).tolist()
    for name, words in {"one": [], "two": ["strategy=ddp", "trainer.devices=2"]}.items():
        ckpt, run_dir = trained[0] / "checkpoints" / "last.ckpt", tmp_path / name
        done = call(f"ckpt={ckpt}", "task=predict", *words, f"run_dir={run_dir}", QUIET)
        assert done.returncode == 0 and f"predictions in {run_dir}" in done.stdout, done.stderr
        predicted = torch.load(run_dir / "predictions.pt", weights_only=True)
        assert predicted["indices"].tolist() == list(range(len(expected)))
        assert predicted["outputs"].tolist() == expected


def test_what_a_prediction_lacks_is_named() -> None:
    class Own(L.LightningDataModule):
        def train_dataloader(self) -> None: ...

    with pytest.raises(ConfigError) as caught:
        prediction_writer.require_predict_hooks(L.LightningModule(), Own())
    assert "without LightningModule.predict_step and Own.predict_dataloader" in str(caught.value)
    assert "add def predict_step(self, batch, batch_idx) and def predict_dataloader(self)" in str(caught.value)


def test_training_starts_from_the_weights_of_a_checkpoint(
    trained: tuple[Path, str], call: Callable, tmp_path: Path
) -> None:
    ckpt = trained[0] / "checkpoints" / "last.ckpt"
    common = ["trainer.max_steps=3", "trainer.log_every_n_steps=1", QUIET]
    assert call(f"ckpt={ckpt}", *common, f"run_dir={tmp_path / 'from'}").returncode == 0
    fresh, started = scalars(trained[0], "step/loss")[0], scalars(tmp_path / "from", "step/loss")[0]
    assert started < fresh - 0.2


def test_a_checkpoint_that_does_not_fit_is_rejected(trained: tuple[Path, str], call: Callable, tmp_path: Path) -> None:
    ckpt = trained[0] / "checkpoints" / "last.ckpt"
    done = call(f"ckpt={ckpt}", "model.network.widths=[16,32,48]", f"run_dir={tmp_path / 'never'}")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "network.blocks.2.norm2.weight (64,) instead of (48,)" in done.stderr
    assert not (tmp_path / "never" / "config.yaml").exists()  # no run was made: the directory can still be used


@pytest.mark.soak
def test_fine_tuning_freezes_the_backbone_then_releases_it(
    trained: tuple[Path, str], call: Callable, tmp_path: Path
) -> None:
    ckpt = trained[0] / "checkpoints" / "last.ckpt"
    before = weights.read(ckpt)
    for epochs, moved in ((1, False), (3, True)):
        run_dir = tmp_path / f"{epochs}"
        done = call(f"ckpt={ckpt}", "callbacks=finetune", f"trainer.max_epochs={epochs}", QUIET, f"run_dir={run_dir}")
        assert done.returncode == 0, done.stderr
        after = weights.read(run_dir / "checkpoints" / "last.ckpt")
        assert torch.equal(before["network.stem.0.weight"], after["network.stem.0.weight"]) is not moved
        assert not torch.equal(before["network.head.weight"], after["network.head.weight"])


@pytest.mark.soak
def test_runs_repeat_themselves_and_seeds_differ(run_cases: Callable, tmp_path: Path) -> None:
    common = ["trainer.max_steps=20", "trainer.log_every_n_steps=1", QUIET]
    cases = {
        name: [*common, f"seed={seed}", f"run_dir={tmp_path / name}"] for name, seed in {"a": 1, "b": 1, "c": 2}.items()
    }
    run_cases(cases, num_ranks=1)
    losses = {name: scalars(tmp_path / name, "step/loss") for name in cases}
    assert losses["a"] == losses["b"] != losses["c"]


@pytest.mark.soak
def test_the_global_batch_does_not_depend_on_accumulation(run_cases: Callable, tmp_path: Path) -> None:
    common = ["trainer.max_steps=20", "callbacks.samples=null", QUIET]
    cases = {f"{n}": [*common, f"trainer.accumulate_grad_batches={n}", f"run_dir={tmp_path / f'{n}'}"] for n in (1, 4)}
    metrics = run_cases(cases, num_ranks=1)
    assert metrics["4"] == pytest.approx(metrics["1"], abs=1e-4)


def test_the_default_experiment_learns_digits(call: Callable, tmp_path: Path) -> None:
    done = call(f"run_dir={tmp_path / 'digits'}", QUIET)
    name, value = last_line(done.stdout)
    assert name == "test/accuracy" and value >= 0.96


@pytest.mark.soak
def test_the_text_experiment_learns(call: Callable, tmp_path: Path) -> None:
    """Train a small part of the experiment; the whole reaches 2.1."""
    done = call("experiment=text", "trainer.max_steps=300", "data.max_eval_windows=200", f"run_dir={tmp_path / 'text'}")
    name, value = last_line(done.stdout)
    assert name == "test/bits_per_byte" and value < 3.4  # byte frequencies alone reach 4.5


def test_a_run_directory_is_fresh_unless_it_is_asked_for() -> None:
    from datetime import datetime

    from hpc.run import directory

    now = datetime(2030, 1, 2, 3, 4, 5)
    assert directory.choose_run_dir("here", "x", now=now, environ={}) == Path.cwd() / "here"
    assert directory.choose_run_dir(None, "x", now=now, environ={directory.RUN_DIR_VARIABLE: "/chosen"}) == Path(
        "/chosen"
    )
    job = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "3"}
    assert (
        directory.choose_run_dir(None, "x", now=now, environ=job) == PROJECT / "runs" / "x_77"
    )  # the same on every rank
    assert (
        directory.choose_run_dir(None, "x", now=now, environ=job, step="2") == PROJECT / "runs" / "x_77.2"
    )  # another srun in that job
    array = job | {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "7"}
    assert directory.choose_run_dir(None, "x", now=now, environ=array) == PROJECT / "runs" / "x_70_7"
    batch = {"PBS_JOBID": "77.server", "PBS_ENVIRONMENT": "PBS_BATCH"}
    assert directory.choose_run_dir(None, "x", now=now, environ=batch) == PROJECT / "runs" / "x_77"
    fresh = directory.choose_run_dir(None, "x", now=now, environ={})
    assert fresh.parent == PROJECT / "runs" and fresh.name.startswith("2030-01-02_03-04-05_x")


def test_ctrl_c_stops_all_ranks_between_two_steps_and_says_how_to_go_on(tmp_path: Path) -> None:
    """Let Lightning start the second rank, at a free port, whatever variables the shell has set."""
    run_dir = tmp_path / "a run"
    words = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.precision=32-true", QUIET]
    words += ["trainer.max_epochs=10000", "checkpoint.every_n_steps=5", f"run_dir='{run_dir}'"]
    with socket.create_server(("", free_port())) as taken, (tmp_path / "out").open("wb") as out:
        left = {"MASTER_ADDR": "10.255.255.1", "MASTER_PORT": str(taken.getsockname()[1]), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(PROJECT / "train.py"), *words]
        train = subprocess.Popen(command, env=ENVIRON | left, stdout=out, stderr=out, start_new_session=True)
        try:
            limit = time.monotonic() + 120
            while not (run_dir / "checkpoints" / "last.ckpt").exists() and train.poll() is None:
                assert time.monotonic() < limit, (tmp_path / "out").read_text()
                time.sleep(0.1)
            assert train.poll() is None, (tmp_path / "out").read_text()
            os.killpg(train.pid, signal.SIGINT)  # as a terminal does
            code = train.wait(60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(train.pid, signal.SIGKILL)
    said = (tmp_path / "out").read_text()
    assert code == -signal.SIGINT and "Traceback" not in said, said
    assert said.count("Ctrl-C: the run stops after this step and saves.") == 1
    step = int(said.split("stopped at step ")[1].split(":")[0])
    assert said.endswith(f"run directory {run_dir}\nto continue: python train.py resume='{run_dir}'\n")
    assert (run_dir / "checkpoints" / "last.ckpt").resolve().name == f"step-{step:09}-001"
    assert (run_dir / "verdict").read_text() == f"attempt 1\nstep {step}\noutcome continue\nwhy Ctrl-C\n"


def test_several_nodes_without_a_job_are_rejected(call: Callable) -> None:
    done = call("trainer=ddp_4node", "cluster=slurm", "trainer.accelerator=cpu")
    assert done.returncode == 2 and "python submit.py" in done.stderr


@pytest.mark.soak
def test_predicted_text_is_shown_beside_the_truth(call: Callable, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    brief = ["trainer.max_steps=2", "trainer.val_check_interval=1", "data.max_eval_windows=8"]
    assert call("experiment=text", *brief, f"run_dir={tmp_path / 'text'}").returncode == 0
    events = EventAccumulator(str(tmp_path / "text" / "tensorboard"))
    events.Reload()
    (text, *_) = events.Tensors("val/samples/text_summary")
    assert b"truth" in text.tensor_proto.string_val[0]
    assert len(events.Scalars("val/bits_per_byte")) == 2


def test_a_run_directory_that_cannot_be_written_is_rejected(call: Callable, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = call(f"run_dir={tmp_path / 'file' / 'run'}")
    assert done.returncode == 2 and "run_dir" in done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("trainer", ["gpu", "ddp", "fsdp", "deepspeed"])
def test_trains_on_a_gpu(trainer: str, call: Callable, tmp_path: Path) -> None:
    done = call(
        f"trainer={trainer}", "trainer.devices=1", "trainer.max_epochs=5", QUIET, f"run_dir={tmp_path / trainer}"
    )
    assert done.returncode == 0, done.stderr
    assert last_line(done.stdout)[1] > 0.8


@pytest.mark.gpu
@pytest.mark.parametrize("trainer", ["gpu"])
def test_more_gpus_than_there_are_is_rejected(trainer: str, call: Callable) -> None:
    done = call("trainer=ddp", "trainer.devices=64", "data.global_batch_size=64")
    assert done.returncode == 2 and "devices are visible" in done.stderr


@pytest.mark.soak
def test_a_run_imports_nothing_of_plans_jobs_searches_and_reports(tmp_path: Path) -> None:
    code = "import runpy, sys; runpy.run_path('train.py', run_name='__main__'); print('MODULES', *sys.modules)"
    command = [sys.executable, "-c", code, "trainer.max_steps=2", QUIET, f"run_dir={tmp_path}/run"]
    done = subprocess.run(command, cwd=PROJECT, env=ENVIRON, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    modules = done.stdout.partition("MODULES ")[2].split()
    rooms = {module.split(".")[1] for module in modules if module.startswith("hpc.")}
    assert "resume" in rooms and not rooms & {"charts", "plan", "submit", "studies", "report"}
