"""What training logs: every number once, means over ranks and micro-batches, and nobody waits for it."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor

from {{ cookiecutter.package_name }}.hpc.monitoring.curves import Curves, mean, sent


class Logger(L.pytorch.loggers.CSVLogger):
    """Remembers what it was given, and when: (step of the point, optimizer steps done, numbers)."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seen: list[tuple[int, int, dict[str, float]]] = []
        self.trainer: Any = None

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.seen.append((step or 0, self.trainer.global_step, dict(metrics)))


class Line(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.slope = torch.nn.Parameter(torch.tensor(0.0))

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        return {"loss": self.slope + batch.mean(), "train/double": 2 * batch.mean()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.slope], lr=0.5)


def fitted(folder: Path, batches: list[float], **options: Any) -> Logger:
    logger = Logger(folder)
    logger.trainer = L.Trainer(
        accelerator="cpu", logger=logger, callbacks=[Curves()], max_epochs=1, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, default_root_dir=folder, **options,
    )  # fmt: skip
    logger.trainer.fit(Line(), torch.tensor(batches))
    return logger


def test_points_lie_where_they_should_and_hold_what_the_step_returned(tmp_path: Path) -> None:
    seen = fitted(tmp_path, [float(i) for i in range(6)], log_every_n_steps=2).seen
    assert [(step, numbers["train/double"], numbers["lr"]) for step, _, numbers in seen] == [
        (1, 2.0, 0.5), (3, 6.0, 0.5), (5, 10.0, 0.5),
    ]  # fmt: skip
    assert [numbers["train/loss"] for _, _, numbers in seen] == [1 - 0.5, 3 - 1.5, 5 - 2.5]


def test_a_point_is_read_when_the_next_one_is_made(tmp_path: Path) -> None:
    seen = fitted(tmp_path, [0.0] * 9, log_every_n_steps=3).seen
    assert [(step, done) for step, done, _ in seen] == [(2, 6), (5, 9), (8, 9)]


def test_micro_batches_are_averaged(tmp_path: Path) -> None:
    seen = fitted(tmp_path, [1.0, 3.0, 5.0, 7.0], log_every_n_steps=1, accumulate_grad_batches=2).seen
    assert [(step, numbers["train/loss"], numbers["train/double"]) for step, _, numbers in seen] == [
        (0, 2.0, 4.0), (1, 6.0 - 0.5, 12.0),
    ]  # fmt: skip
    halves: list[Any] = [{"loss": torch.tensor(0.5)}, {"loss": torch.tensor(1.5)}]  # Lightning has divided them
    assert mean(halves, 2)["train/loss"] == 2.0


def test_the_last_step_of_an_epoch_may_have_fewer_micro_batches(tmp_path: Path) -> None:
    seen = fitted(tmp_path, [1.0, 3.0, 5.0], log_every_n_steps=1, accumulate_grad_batches=2).seen
    assert [(step, numbers["train/loss"], numbers["train/double"]) for step, _, numbers in seen] == [
        (0, 2.0, 4.0), (1, 5.0 - 0.5, 10.0),
    ]  # fmt: skip


def test_a_resumed_run_knows_the_rate_of_the_last_step() -> None:
    """With manual optimization its first batch may make none."""
    before, after = Curves(), Curves()
    before._lr = 0.3
    after.load_state_dict(before.state_dict())
    assert after._lr == 0.3


def test_ranks_are_averaged(together: Any) -> None:
    assert together(_read, 3) == [[2.0, 20.0]] * 3


def _read(rank: int) -> list[float]:
    numbers = {"train/loss": torch.tensor(rank + 1.0), "train/other": torch.tensor(10.0 * (rank + 1))}
    read = sent(0, numbers, {"lr": 0.1}).read()
    assert dist.get_world_size() == 3 and read["lr"] == 0.1
    return [read["train/loss"], read["train/other"]]
