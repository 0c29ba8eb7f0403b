"""A dry run says nothing of its own Trainer, which is not the run's."""

import logging

import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel

from hpc.training.dry_run import DryRunTrainer, attach


def test_trainer_of_a_dry_run_says_nothing_also_after_another():
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch")
    logger.addHandler(handler)
    try:
        L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
        assert records
        records.clear()
        DryRunTrainer()
        assert not records
        L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
        assert records
    finally:
        logger.removeHandler(handler)


class Strict(BoringModel):
    """A module whose `train` has no default, as other people write it."""

    def train(self, mode: bool) -> "Strict":  # type: ignore[override]
        return super().train(mode)


def test_a_module_may_have_its_own_train():
    module = Strict()
    attach(module, DryRunTrainer())
    assert module.training
