"""Check that training logs each value once, averages over ranks and micro-batches, and never blocks."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpc.logging.curves import Curves, has_point, mean_over_micro_batches, select_scalars, start_reduction
from hpc.logging.loggers import flush, tolerate_failures


class Logger(L.pytorch.loggers.CSVLogger):
    """A logger that records its input: (step of the point, optimizer steps done, numbers)."""

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
        return {"loss": self.slope + batch.mean(), "double": 2 * batch.mean()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.slope], lr=0.5)


def fitted(folder: Path, batches: list[float], module: L.LightningModule | None = None, **options: Any) -> Logger:
    logger = Logger(folder)
    logger.trainer = L.Trainer(
        accelerator="cpu", logger=logger, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, default_root_dir=folder, **{"callbacks": [Curves()], "max_epochs": 1} | options,
    )  # fmt: skip
    logger.trainer.fit(module or Line(), torch.tensor(batches))
    return logger


def test_points_lie_where_they_should_and_hold_what_the_step_returned(tmp_path: Path) -> None:
    seen = fitted(tmp_path, [float(i) for i in range(6)], log_every_n_steps=2).seen
    assert [(step, numbers["step/double"], numbers["step/lr"]) for step, _, numbers in seen] == [
        (0, 0.0, 0.5), (1, 2.0, 0.5), (3, 6.0, 0.5), (5, 10.0, 0.5),
    ]  # fmt: skip
    assert [numbers["step/loss"] for _, _, numbers in seen] == [0.0, 1 - 0.5, 3 - 1.5, 5 - 2.5]


@pytest.mark.parametrize(
    ("interval", "num_steps", "numbers"),
    [
        (50, 30, [1, 2, 5, 10, 20]),
        (50, 100, [1, 2, 5, 10, 20, 50, 100]),
        (7, 21, [1, 2, 5, 7, 14, 21]),
        (1, 3, [1, 2, 3]),
        (1000, 600, [1, 2, 5, 10, 20, 50, 100, 200, 500]),
    ],
)
def test_a_short_run_shows_how_it_began(interval: int, num_steps: int, numbers: list[int]) -> None:
    assert [number for number in range(1, num_steps + 1) if has_point(number, interval)] == numbers


def test_a_point_is_read_when_the_next_one_is_made(tmp_path: Path) -> None:
    seen = fitted(tmp_path, [0.0] * 9, log_every_n_steps=3).seen
    assert [(step, done) for step, done, _ in seen] == [(0, 2), (1, 3), (2, 6), (5, 9), (8, 9)]


def test_micro_batches_are_averaged(tmp_path: Path) -> None:
    seen = fitted(tmp_path, [1.0, 3.0, 5.0, 7.0], log_every_n_steps=1, accumulate_grad_batches=2).seen
    assert [(step, numbers["step/loss"], numbers["step/double"]) for step, _, numbers in seen] == [
        (0, 2.0, 4.0), (1, 6.0 - 0.5, 12.0),
    ]  # fmt: skip
    halves: list[Any] = [{"loss": torch.tensor(0.5)}, {"loss": torch.tensor(1.5)}]  # already divided by Lightning
    assert mean_over_micro_batches(halves, accumulate=2)["step/loss"] == 2.0


def test_the_last_step_of_an_epoch_may_have_fewer_micro_batches(tmp_path: Path) -> None:
    seen = fitted(tmp_path, [1.0, 3.0, 5.0], log_every_n_steps=1, accumulate_grad_batches=2).seen
    assert [(step, numbers["step/loss"], numbers["step/double"]) for step, _, numbers in seen] == [
        (0, 2.0, 4.0), (1, 5.0 - 0.5, 10.0),
    ]  # fmt: skip


class Anything(Line):
    """A module that returns all types that Lightning accepts and that user callbacks may need."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        classes = torch.arange(4)
        more = {"preds": classes, "name": "a", "none": None, "list": [1.0], "net": self, 3: batch, "z": torch.ones(1)}
        numbers = {"half": 0.5, "count": torch.tensor(3), "scalar": (self.slope + 2.0)}
        return {"loss": super().training_step(batch, batch_idx)["loss"], **more, **numbers}


class Skips(Line):
    """A module that skips every second batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch_idx % 2 else None


class Manual(Line):
    """A module that optimizes manually and returns nothing, as in Lightning's GAN example."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.manual_backward(self.slope + batch.mean())
        self.optimizers().step()  # type: ignore[union-attr]


def test_only_scalars_make_curves_and_the_rest_is_left_alone(tmp_path: Path) -> None:
    (_, _, numbers), *_ = fitted(tmp_path, [1.0, 1.0], Anything(), log_every_n_steps=1).seen
    assert numbers == {"step/loss": 1.0, "step/half": 0.5, "step/count": 3.0, "step/scalar": 2.0, "step/lr": 0.5}


def test_a_loss_of_one_number_may_have_any_shape(tmp_path: Path) -> None:
    assert select_scalars({"loss": torch.ones(1, 1)}, torch.device("cpu"))["loss"].shape == ()
    assert (
        select_scalars({"loss": torch.ones(2)}, torch.device("cpu")) == {} == select_scalars(None, torch.device("cpu"))
    )


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_a_step_that_returns_nothing_has_no_point(tmp_path: Path) -> None:
    seen = fitted(tmp_path / "skips", [0.0, 1.0, 2.0, 3.0], Skips(), log_every_n_steps=1).seen
    assert [(step, numbers["step/double"]) for step, _, numbers in seen] == [(1, 2.0), (3, 6.0)]
    seen = fitted(tmp_path / "two", [0.0, 1.0, 2.0, 3.0], Skips(), log_every_n_steps=1, accumulate_grad_batches=2).seen
    assert [numbers["step/double"] for _, _, numbers in seen] == [2.0, 6.0]
    assert fitted(tmp_path / "manual", [0.0, 1.0], Manual(), log_every_n_steps=1).seen == []


class Logs(Line):
    """A module that logs its loss and its learning rate itself, in the hooks where researchers log."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        self.log("loss", 7.0, on_step=False, on_epoch=True)
        self.log("train/loss", 7.0)
        self.log("double", 8.0, on_step=True, on_epoch=True)  # as double_step and double_epoch
        return outputs

    def on_train_batch_end(self, *batch: Any) -> None:
        self.log("lr", 42.0)

    def on_train_epoch_end(self) -> None:
        self.log("half", 9.0)


def test_what_the_module_logs_itself_stands_beside_these_curves(tmp_path: Path) -> None:
    seen = fitted(tmp_path, [1.0, 2.0], Logs(), log_every_n_steps=1).seen
    names = {name for *_, numbers in seen for name in numbers}
    values = {name: [numbers[name] for *_, numbers in seen if name in numbers] for name in names}
    assert values["loss"] == [7.0] and values["train/loss"] == [7.0, 7.0] and values["lr"] == [42.0, 42.0]
    assert values["double_step"] == [8.0, 8.0] and values["half"] == [9.0]
    assert values["step/loss"] == [1.0, 1.5] and values["step/double"] == [2.0, 4.0]
    assert values["step/lr"] == [0.5, 0.5]


def test_a_resumed_run_knows_the_rate_of_the_last_step() -> None:
    """Restore the learning rate: with manual optimization the first batch may make no step."""
    before, after = Curves(), Curves()
    before._lr = 0.3
    after.load_state_dict(before.state_dict())
    assert after._lr == 0.3


@pytest.mark.soak
def test_ranks_are_averaged_by_name(together: Any) -> None:
    """Ranks that return their scalars in another order, or other ones, or none, wait for nobody."""
    assert together(_read, 3) == [[[2.0, 20.0, 7.0, 3.0], ["a", "b", "lonely", "step/loss", "train/other"]]] * 3


def _read(rank: int) -> list[Any]:
    numbers = {"step/loss": torch.tensor(rank + 1.0), "train/other": torch.tensor(10.0 * (rank + 1))}
    if rank == 1:
        numbers = {"lonely": torch.tensor(7.0), **dict(reversed(numbers.items()))}
    read, new = _point(numbers, [])
    assert dist.get_world_size() == 3 and read["lr"] == 0.1
    also_read, newer = _point({"a": torch.tensor(3.0)} if rank else {}, new)
    last, _ = _point({"b": torch.tensor(3.0), "a": torch.tensor(1.0)} if rank == 2 else {}, sorted({*new, *newer}))
    assert also_read["a"] == 3.0 and last == {"a": 1.0, "b": 3.0, "lr": 0.1}
    return [[read["step/loss"], read["train/other"], read["lonely"], last["b"]], sorted({*new, *newer, "b"})]


def _point(numbers: dict[str, Tensor], agreed: list[str]) -> tuple[dict[str, float], list[str]]:
    point = start_reduction(0, numbers, agreed=agreed, one=torch.tensor(1.0), host_values={"lr": 0.1})
    return point.wait_for_means(), point.new_names


class Broken(Logger):
    """A logger whose service has ended."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        raise ConnectionError("the service has ended")

    def save(self) -> None:
        raise OSError("no space left on device")


def test_a_logger_that_fails_is_told_once_and_training_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    broken, other = Broken(tmp_path), Logger(tmp_path / "other")
    tolerate_failures([broken])
    other.trainer = L.Trainer(
        accelerator="cpu", logger=[broken, other], enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, default_root_dir=tmp_path, callbacks=[Curves()], max_steps=3, log_every_n_steps=1,
    )  # fmt: skip
    other.trainer.fit(Logs(), torch.ones(3))
    flush([broken])
    assert other.trainer.global_step == 3 and len(other.seen) > 3
    warning = "warning: Broken cannot write: OSError: no space left on device. Training goes on"
    assert capsys.readouterr().out.count(warning) == 1
