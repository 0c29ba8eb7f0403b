"""Check that a run of an earlier version is read or answered, whose config names classes that moved or are gone."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf, open_dict

from hpc.config import compose
from hpc.config.build import build_group
from hpc.config.errors import ConfigError
from hpc.config.freezing import to_frozen_yaml
from hpc.logging.predicted_samples import PredictedSamples
from hpc.run import frozen_config

HISTOGRAMS = {"_target_": "hpc.training.histograms.Histograms", "every_n_steps": None}
SAMPLES = {"_target_": "hpc.training.predicted_samples.PredictedSamples", "num": 3}
WANDB = {"_target_": "hpc.training.wandb_logger.OfflineWandbLogger", "save_dir": "${run_dir}"}


def earlier(run_dir: Path, key: str, node: object) -> Path:
    cfg = compose.compose_overrides([f"run_dir={run_dir}", "name=n"])
    with open_dict(cfg):
        OmegaConf.update(cfg, key, node)
        cfg.callbacks.histograms = HISTOGRAMS
    (run_dir / "config.yaml").write_text(to_frozen_yaml(cfg))
    return run_dir


def test_a_class_that_has_moved_is_found(tmp_path: Path) -> None:
    cfg = frozen_config.read_compatible(earlier(tmp_path, "callbacks.samples", SAMPLES))
    assert "histograms" not in cfg.callbacks
    (samples,) = build_group(OmegaConf.create({"samples": cfg.callbacks.samples}))
    assert type(samples) is PredictedSamples and samples.num == 3


def test_a_class_that_is_gone_is_answered_by_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one of earlier versions") as raised:
        frozen_config.read_compatible(earlier(tmp_path, "logger.wandb", WANDB))
    assert "WandbLogger and offline: true" in str(raised.value) and "config.yaml" in str(raised.value)
