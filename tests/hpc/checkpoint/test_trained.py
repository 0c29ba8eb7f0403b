"""Check the loading of a run's trained network in Python."""

from pathlib import Path

import pytest
import torch

from hpc.checkpoint import trained
from hpc.config import build, compose, preflight
from hpc.config.errors import ConfigError
from hpc.run import frozen_config


def made(run_dir: Path, *words: str) -> torch.nn.Module:
    """Return a run, and the module whose weights it has saved."""
    cfg = compose.compose_overrides([f"run_dir={run_dir}", *words])
    preflight.check_config(cfg)
    (run_dir / "checkpoints").mkdir(parents=True)
    frozen_config.create_or_replace(run_dir, cfg, words=words)
    return build.build(cfg.model)


@pytest.mark.parametrize("words", [[], ["experiment=text"]], ids=["images", "text"])
def test_it_predicts_as_the_network_that_was_saved(words: list[str], tmp_path: Path) -> None:
    saved = made(tmp_path / "run", *words)
    torch.save({"state_dict": saved.state_dict()}, tmp_path / "run" / "checkpoints" / "last.ckpt")
    module, data = trained.load(tmp_path / "run")
    sample, _ = data.dataset("test")[0]
    inputs = data.prepare_inputs(sample[None])
    predicted = module(inputs)
    assert torch.equal(predicted, saved.eval()(inputs))
    assert not module.training and not predicted.requires_grad


def test_the_best_is_meant_where_there_is_one(tmp_path: Path) -> None:
    last, best = (made(tmp_path / name) for name in ("run", "other"))
    for name, saved in (("last", last), ("best", best)):
        torch.save({"state_dict": saved.state_dict()}, tmp_path / "run" / "checkpoints" / f"{name}.ckpt")
    module, _ = trained.load(tmp_path / "run")
    assert all(torch.equal(value, best.state_dict()[key]) for key, value in module.state_dict().items())


def test_a_run_without_weights_is_rejected(tmp_path: Path) -> None:
    made(tmp_path / "run")
    with pytest.raises(ConfigError, match="must be an existing"):
        trained.load(tmp_path / "run")
    with pytest.raises(ConfigError, match="must be an existing directory"):
        trained.load(tmp_path / "nowhere")
