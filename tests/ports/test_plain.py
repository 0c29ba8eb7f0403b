"""Each port trains, and tests itself if it can, with a plain Lightning Trainer: none of the template is involved.

They train in a process of their own: one whose OpenMP threads have started cannot be forked, and test_drawn_runs.py
forks the process of pytest.
"""

import runpy
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import extra_packages
import hydra
import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import OmegaConf

pytestmark = [pytest.mark.slow, pytest.mark.soak]

PORTS = Path(__file__).parent

# The arguments of each data module that are paths, and what make_data writes there ("" is its folder).
PATHS = {
    "mnist": {"data_dir": ""},
    "unet": {"path": "fields.h5"},
    "gan": {"data_dir": ""},
    "graphs": {"root": ""},
    "gpt2": {"data_dir": ""},
    "segmentation": {"root": ""},
    "contrastive": {"data_dir": ""},
    "diffusion": {},
    "series": {"train_file": "train.pkl", "val_file": "val.pkl", "test_file": "test.pkl"},
}
METRICS = {
    "mnist": {"train_loss", "val_loss", "val_acc"},
    "unet": {"train/mse", "valid/mse"},
    "gan": {"g_loss", "d_loss"},
    "graphs": {"train_loss", "val_loss", "val_mae"},
    "gpt2": {"train_loss", "val_loss", "perplexity"},
    "segmentation": {"train/loss", "val/loss", "val/iou"},
    "contrastive": {"train_loss_ssl", "knn_acc"},
    "diffusion": {"train/loss", "val/loss", "val/sample_mean"},
    "series": {"train_loss", "train_f1", "val_loss", "val_f1"},
}
TESTED = {"mnist", "unet", "segmentation", "series"}


def load_config(port, name):
    return OmegaConf.load(PORTS / port / f"{name}.yaml")


def write_data(port, folder):
    runpy.run_path(str(PORTS / port / "make_data.py"))["make_data"](folder)


@pytest.fixture(scope="module")
def elsewhere():
    """Yield a function that calls another one in that process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def train(port, folder):
    """Write the data of `port` under `folder`, and train and test its module."""
    extra_packages.use()
    sys.path.insert(0, str(PORTS / port))
    if (PORTS / port / "make_data.py").exists():
        write_data(port, folder)
    data = load_config(port, "data")
    data.pop("stream_splits", None)  # which the template reads, and no class takes
    for key, name in PATHS[port].items():
        data[key] = str(folder / name)
    L.seed_everything(0)
    model, data = hydra.utils.instantiate(load_config(port, "model")), hydra.utils.instantiate(data)
    before = {name: value.clone() for name, value in model.named_parameters()}
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        log_every_n_steps=1,
    )
    trainer.fit(model, data)
    assert 10 <= trainer.num_training_batches <= 40 or trainer.num_training_batches == float("inf")
    assert METRICS[port] <= set(trainer.callback_metrics)
    assert all(torch.isfinite(value).all() for value in trainer.callback_metrics.values())
    assert any(not torch.equal(value, before[name]) for name, value in model.named_parameters())
    assert is_overridden("test_step", model) == (port in TESTED)
    if port in TESTED:
        assert trainer.test(model, data)[0]


def num_pretrained_layers(folder):
    """Return the number of layers that the port's module has when it starts from a folder with weights."""
    extra_packages.use()
    sys.path.insert(0, str(PORTS / "gpt2"))
    write_data("gpt2", folder)
    config = load_config("gpt2", "model")
    config.model_name_or_path = str(folder / "pretrained")
    return hydra.utils.instantiate(config).model.config.n_layer


@pytest.mark.parametrize("port", PATHS)
def test_port_trains(elsewhere, port, tmp_path):
    elsewhere(train, port, tmp_path)


def test_gpt2_from_pretrained(elsewhere, tmp_path):
    assert elsewhere(num_pretrained_layers, tmp_path) == 2
