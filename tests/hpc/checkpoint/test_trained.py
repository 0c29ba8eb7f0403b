"""Check the loading of a run's trained network in Python."""

from pathlib import Path

import pytest
import torch

from hpc.checkpoint import trained
from hpc.config import arguments, build, compose, parse
from hpc.config.errors import ConfigError
from hpc.run import frozen_config


def made(run_dir: Path, *words: str) -> torch.nn.Module:
    """Return a run, and the module whose weights it has saved."""
    cfg = compose.compose_overrides([f"run_dir={run_dir}", *words])
    arguments.check_files(parse.parse(cfg))
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


def test_hooks_find_what_they_have_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from my_research.data.digits import Digits
    from my_research.module import Classifier

    saved = made(tmp_path / "run")
    averaged = {name: torch.zeros_like(value) for name, value in saved.state_dict().items()}
    content = {"state_dict": saved.state_dict(), "words": ["a", "b"], "mine": averaged, "Digits": {"offset": 3}}
    torch.save(content, tmp_path / "run" / "checkpoints" / "last.ckpt")

    def on_load_checkpoint(self: torch.nn.Module, checkpoint: dict) -> None:
        self.words, checkpoint["state_dict"] = checkpoint["words"], checkpoint["mine"]

    monkeypatch.setattr(Classifier, "on_load_checkpoint", on_load_checkpoint)
    monkeypatch.setattr(Digits, "load_state_dict", lambda self, state: setattr(self, "offset", state["offset"]))
    module, data = trained.load(tmp_path / "run")
    assert module.words == ["a", "b"] and data.offset == 3  # type: ignore[attr-defined]
    assert all(not value.any() for value in module.state_dict().values())


def test_a_run_without_weights_is_rejected(tmp_path: Path) -> None:
    made(tmp_path / "run")
    with pytest.raises(ConfigError, match="must be an existing"):
        trained.load(tmp_path / "run")
    with pytest.raises(ConfigError, match="must be an existing directory"):
        trained.load(tmp_path / "nowhere")
