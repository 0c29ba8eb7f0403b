"""Check that this version of Lightning has what `hpc.privates.lightning` reads, and that it means the same."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

from hpc.privates import lightning as privates
from hpc.training.module import NetworkModule


def trained(**options: Any) -> L.Trainer:
    """Return a Trainer that has done three steps of one batch, or of two as `accumulate_grad_batches` says."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(accelerator="cpu", max_steps=3, limit_val_batches=0, **quiet, **options)
    trainer.fit(Module())
    return trainer


class Module(BoringModel):
    """Notes in each step what Lightning is asked then."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        self.log("loss", loss, prog_bar=True)
        results: Any = privates.results(self.trainer)
        self.seen.append((isinstance(results, privates.ResultCollection), list(results)))
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append((privates.logged_step(self.trainer), privates.is_accumulating(self.trainer)))


def check_steps() -> None:
    module: Any = trained(accumulate_grad_batches=2).lightning_module
    assert module.seen[1::2] == [(0, True), (0, False), (1, True), (1, False), (2, True), (2, False)]


def check_logged_values() -> None:
    trainer = trained()
    module: Any = trainer.lightning_module
    assert module.seen[0] == (True, ["training_step.loss"])
    assert "loss" in privates.progress_bar_metrics(trainer)
    assert type(trainer._logger_connector) is privates.LoggerConnector
    meta = privates.Metadata("training_step", "loss", reduce_fx=max)
    meta.sync = privates.Sync(_should=False)
    result = privates.ResultMetric(meta, is_tensor=True)
    assert result.meta.name == "loss" and not result.update_called
    privates.mark_as_updated(result)
    assert result.update_called


def check_strategies() -> None:
    assert privates.ddp_options(DDPStrategy(static_graph=True)) == {"static_graph": True}
    assert privates.device_mesh(ModelParallelStrategy()) is None is privates.device_mesh(DDPStrategy())
    assert "_device_mesh" in vars(ModelParallelStrategy())


def check_averages() -> None:
    callback, module = EMAWeightAveraging(), BoringModel()
    assert privates.average_of(callback) is None
    callback.setup(L.Trainer(logger=False, accelerator="cpu", barebones=True), module, TrainerFn.FITTING)
    assert isinstance(privates.average_of(callback), BoringModel)
    assert privates.num_averaged(callback) == 0
    assert callback._average_model is not None
    callback._average_model.update_parameters(module)
    assert privates.num_averaged(callback) == 1
    stochastic = StochasticWeightAveraging(0.1)
    assert not privates.has_saved_schedule(stochastic)
    state = {"n_averaged": 1, "latest_update_epoch": 1, "scheduler_state": {}, "average_model_state": None}
    stochastic.load_state_dict(state)
    assert privates.has_saved_schedule(stochastic)


def check_hooks() -> None:
    module = NetworkModule(BoringModel())
    assert privates.CURRENT_HOOK in vars(module)


CHECKS = [check_steps, check_logged_values, check_strategies, check_averages, check_hooks]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_this_version_has_what_is_read(check: Callable[[], None]) -> None:
    try:
        check()
    except (AttributeError, TypeError, AssertionError) as error:
        pytest.fail(f"lightning {L.__version__} differs: {type(error).__name__}: {error}")
