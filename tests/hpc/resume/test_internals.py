"""Check that a torch or Lightning without the internal names that a resume sets is rejected before the first step."""

from typing import Any

import lightning as L
import pytest
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

from hpc.config.errors import ConfigError
from hpc.privates import lightning as privates
from hpc.resume import unsupported


@pytest.fixture
def trainer() -> Any:
    made = L.Trainer(accelerator="cpu", devices=1, barebones=True)
    made.fit_loop._combined_loader = CombinedLoader(DataLoader([1, 2]), "max_size_cycle")  # type: ignore[arg-type]
    iter(made.fit_loop._combined_loader)
    unsupported.reject_missing_internals(made)
    return made


@pytest.mark.parametrize("name", ["_restarting", "_resuming_from_checkpoint"])
def test_a_loop_without_a_name_that_is_set_is_rejected(name: str, trainer: Any) -> None:
    delattr(trainer.fit_loop.epoch_loop, name)
    with pytest.raises(ConfigError, match=f"These lack _TrainingEpochLoop.{name}, by which a resumed run"):
        unsupported.reject_missing_internals(trainer)


@pytest.mark.parametrize("name", ["_idx", "_consumed"])
def test_an_iterator_without_a_name_that_is_set_is_rejected(name: str, trainer: Any) -> None:
    delattr(trainer.fit_loop._combined_loader._iterator, name)
    with pytest.raises(ConfigError, match=f"These lack _MaxSizeCycle.{name}"):
        unsupported.reject_missing_internals(trainer)


def test_a_loader_that_makes_its_iterator_otherwise_is_rejected(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataLoader, "__iter__", lambda self: iter(()))
    monkeypatch.setattr(privates, "IndexBatchSamplerWrapper", lambda batches: [])
    with pytest.raises(ConfigError, match=r"These lack _get_iterator, list_iterator.seen_batch_indices"):
        unsupported.reject_missing_internals(trainer)
