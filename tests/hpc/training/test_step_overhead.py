"""Check which hooks Lightning calls at each step, and which it skips."""

import lightning as L
import pytest
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.demos.boring_classes import BoringModel

from hpc.training import step_overhead


class Once(L.Callback):
    """A callback whose hook is needed at the first step only."""

    def __init__(self) -> None:
        self.calls = 0

    def on_train_batch_end(self, *_: object) -> None:
        self.calls += 1
        step_overhead.disable_hook(self, "on_train_batch_end")


class Always(Once):
    def on_train_batch_end(self, *_: object) -> None:
        self.calls += 1


class Inherits(Always):
    pass


class Starts(L.Callback):
    def on_train_batch_start(self, *_: object) -> None:
        pass


def test_only_a_callbacks_own_functions_are_left() -> None:
    starts, inherits = Starts(), Inherits()
    step_overhead.disable_noop_hooks([starts, inherits])
    assert callable(starts.on_train_batch_start) and callable(inherits.on_train_batch_end)
    assert [name for name in step_overhead.STEP_HOOKS if getattr(starts, name) is None] == list(
        step_overhead.STEP_HOOKS[1:]
    )
    assert inherits.on_train_batch_start is None and callable(inherits.on_validation_end)


def test_functions_that_a_callback_was_given_are_left() -> None:
    def noted(*_: object) -> None: ...

    callback = LambdaCallback(on_train_batch_end=noted, on_before_zero_grad=noted)
    step_overhead.disable_noop_hooks([callback])
    assert [name for name in step_overhead.STEP_HOOKS if getattr(callback, name) is noted] == [
        "on_train_batch_end",
        "on_before_zero_grad",
    ]


@pytest.mark.filterwarnings("ignore")
def test_lightning_calls_what_is_left_and_passes_over_the_rest() -> None:
    callbacks = [Once(), Inherits(), Starts()]
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "barebones": False}
    step_overhead.disable_noop_hooks(callbacks)
    trainer = L.Trainer(max_steps=3, limit_val_batches=0, accelerator="cpu", callbacks=callbacks, **options)
    trainer.fit(BoringModel())
    assert trainer.global_step == 3 and [one.calls for one in callbacks[:2]] == [1, 3]
