"""Check that a run is read whose config names a class by the module that it was in before."""

from pathlib import Path

from omegaconf import OmegaConf, open_dict

from hpc.config import compose
from hpc.config.build import build_group
from hpc.config.freezing import to_frozen_yaml
from hpc.logging.predicted_samples import PredictedSamples
from hpc.run import frozen_config

SAMPLES = {"_target_": "hpc.training.predicted_samples.PredictedSamples", "num": 3}


def earlier(run_dir: Path, key: str, node: object) -> Path:
    cfg = compose.compose_overrides([f"run_dir={run_dir}", "name=n"])
    with open_dict(cfg):
        OmegaConf.update(cfg, key, node)
    (run_dir / "config.yaml").write_text(to_frozen_yaml(cfg))
    return run_dir


def test_a_class_that_has_moved_is_found(tmp_path: Path) -> None:
    cfg = frozen_config.read_compatible(earlier(tmp_path, "callbacks.samples", SAMPLES))
    (samples,) = build_group(OmegaConf.create({"samples": cfg.callbacks.samples}))
    assert type(samples) is PredictedSamples and samples.num == 3
