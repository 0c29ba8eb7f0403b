"""Check that a value which is reduced as it is logged is logged by all ranks, or that it is told in that step."""

from collections.abc import Callable
from pathlib import Path

import pytest

LOGS = """
from my_research.module import Classifier
train, validate = Classifier.training_step, Classifier.validation_step

def training_step(self, batch, batch_idx):
    loss = train(self, batch, batch_idx)
    self.log("common", loss, sync_dist=True)
    self.log("largest", float(self.global_rank), sync_dist=True, on_epoch=True, reduce_fx="max")
    {in_training}
    return loss

def validation_step(self, batch, batch_idx):
    validate(self, batch, batch_idx)
    self.log("each", 1.0, sync_dist=True, on_step=True)
    {in_validation}

def on_train_batch_end(self, *args):
    assert self.trainer.callback_metrics["largest_step"] == self.trainer.world_size - 1

Classifier.training_step, Classifier.validation_step = training_step, validation_step
Classifier.on_train_batch_end = on_train_batch_end
"""
CASES = {
    "all": ("", ""),
    "some": ("if self.global_rank == 1 and self.global_step == 5: self.log('some', loss, sync_dist=True)", ""),
    "the last step": ("if self.global_rank == 0 and self.global_step == 7: self.log('some', loss, sync_dist=True)", ""),
    "others": ("if self.global_step == 5: self.log(f'some{self.global_rank}', loss, sync_dist=True)", ""),
    "validation": ("", "if self.global_rank == batch_idx: self.log('some', 1.0, sync_dist=True, on_step=True)"),
}
WORDS = [
    "trainer.accelerator=cpu",
    "trainer.devices=2",
    "trainer.max_epochs=2",
    "+trainer.limit_train_batches=4",
    "+trainer.limit_val_batches=2",
    "+trainer.limit_test_batches=1",
    "trainer.num_sanity_val_steps=0",
    "callbacks.progress=null",
    "callbacks.samples=null",
    "callbacks.monitor=null",
    "callbacks.throughput=null",
]


@pytest.mark.parametrize(
    ("strategy", "case"),
    [
        pytest.param(strategy, case, marks=[] if (strategy, case) == ("ddp", "some") else pytest.mark.soak)
        for strategy in ("ddp", "fsdp")
        for case in CASES
    ],
)
def test_what_is_reduced_at_once_is_logged_by_all_ranks_or_told(
    strategy: str, case: str, start: Callable[..., str], tmp_path: Path
) -> None:
    in_training, in_validation = CASES[case]
    patch = LOGS.format(in_training=in_training, in_validation=in_validation)
    is_told = any(CASES[case])
    code = {"some": [86, 2], "others": [2, 2]}.get(case, [2, 86])
    said = start(tmp_path / "run", 2, [*WORDS, f"strategy={strategy}"], patch=patch, code=code if is_told else 0)
    if is_told:
        assert "ConfigError: self.log('some" in said and "all ranks must log a name in the same step" in said
        assert "on_step=False, on_epoch=True" in said
