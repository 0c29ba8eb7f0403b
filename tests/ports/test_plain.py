"""Each port trains, and tests itself if it can, with a plain Lightning Trainer: none of the template is involved."""

import runpy
from pathlib import Path

import hydra
import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import OmegaConf

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


def make_port(port, folder, monkeypatch):
    """Write the data of `port` under `folder` and return its module and data module."""
    monkeypatch.syspath_prepend(PORTS / port)
    if (PORTS / port / "make_data.py").exists():
        write_data(port, folder)
    data = load_config(port, "data")
    for key, name in PATHS[port].items():
        data[key] = str(folder / name)
    return hydra.utils.instantiate(load_config(port, "model")), hydra.utils.instantiate(data)


@pytest.mark.slow
@pytest.mark.parametrize("port", PATHS)
def test_port_trains(port, tmp_path, monkeypatch):
    L.seed_everything(0)
    model, data = make_port(port, tmp_path, monkeypatch)
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


@pytest.mark.slow
def test_gpt2_from_pretrained(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(PORTS / "gpt2")
    write_data("gpt2", tmp_path)
    config = load_config("gpt2", "model")
    config.model_name_or_path = str(tmp_path / "pretrained")
    model = hydra.utils.instantiate(config)
    assert model.model.config.n_layer == 2
