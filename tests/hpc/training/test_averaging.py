"""Check that runs with weight averaging resume exactly, and validate and test the weights that they save."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import lightning as L
import pytest
import torch
import typed_fixes
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from safetensors.torch import load_file
from test_resume import COMMON, TYPED, assert_same
from tiers import soak_all_but

from hpc.checkpoint import export, on_disk, trained, weights
from hpc.config.errors import ConfigError
from hpc.training import weight_averaging

pytestmark = pytest.mark.slow

TINY = [*COMMON, "callbacks.monitor=null", "callbacks.samples=null", "callbacks.throughput=null"]
TINY += ["+trainer.limit_train_batches=4", "+trainer.limit_val_batches=1", "+trainer.limit_test_batches=2"]
TINY += ["trainer.max_epochs=3", "data.global_batch_size=64"]
BATCH_NORM = "model.network.norm=batch"
ONE, TWO = ["trainer=cpu", *TINY], ["trainer=ddp", "trainer.devices=2", *TINY]
CALLBACKS = "lightning.pytorch.callbacks"
EMA = [f"+callbacks.ema._target_={CALLBACKS}.EMAWeightAveraging", "+callbacks.ema.decay=0.6"]
SWA = [f"+callbacks.swa._target_={CALLBACKS}.StochasticWeightAveraging", "+callbacks.swa.swa_lrs=0.05"]
SWA += ["+callbacks.swa.swa_epoch_start=2", "+callbacks.swa.annealing_epochs=3"]
RUNS = {
    "moving": (1, [*ONE, BATCH_NORM, *EMA], [3, 9]),
    "moving, on two ranks": (2, [*TWO, BATCH_NORM, *EMA], [5]),
    "moving, at the end of an epoch": (1, [*ONE, *EMA, "+callbacks.ema.update_starting_at_epoch=0"], [5]),
    "stochastic": (1, [*ONE, *SWA], [3, 6, 10]),
    "stochastic, on two ranks": (2, [*TWO, *SWA], [6]),
    "stochastic, linear": (1, [*ONE, *SWA, "+callbacks.swa.annealing_strategy=linear"], [7, 11]),
}
# A digest of the weights at each validation.
DIGESTS = """
import hashlib, json
from hpc.resume.resume import Resume

before = Resume.on_validation_batch_end

def on_validation_batch_end(self, trainer, *batch, **number):
    before(self, trainer, *batch, **number)
    state = trainer.lightning_module.state_dict()
    digest = hashlib.sha256(b"".join(state[key].numpy().tobytes() for key in sorted(state))).hexdigest()
    with open(f"{self.run.run_dir}/digests", "a") as stream:
        stream.write(json.dumps([trainer.global_step, digest]) + "\\n")

Resume.on_validation_batch_end = on_validation_batch_end
"""


# A digest of the weights after each training step, and at the test.
RAW_AND_TESTED = DIGESTS.replace("validation_batch_end", "train_batch_end").replace("/digests", "/raw")
RAW_AND_TESTED += DIGESTS.replace("validation_batch_end", "test_batch_end").replace("/digests", "/tested")


def results(said: str) -> str:
    return "".join(re.findall(r"test/\S+ \d.*", said))


def digest(path: Path) -> str:
    return digest_of(weights.read(path))


def digest_of(state: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(state[key].numpy().tobytes() for key in sorted(state))).hexdigest()


def validated(run_dir: Path, kind: str = "digests") -> list[str]:
    return [json.loads(line)[1] for line in (run_dir / kind).read_text().splitlines()]


@pytest.fixture(scope="module")
def references(start: Callable, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, str]]:
    """Return uninterrupted runs and their output."""
    folder, done = tmp_path_factory.mktemp("references"), {}

    def reference(name: str) -> tuple[Path, str]:
        if name not in done:
            ranks, words, _ = RUNS[name]
            run_dir = folder / f"run-{len(done)}"
            done[name] = run_dir, start(run_dir, ranks, words, patch=TYPED + DIGESTS)
        return done[name]

    return reference


@pytest.mark.parametrize("name", soak_all_but(RUNS, "moving"))
def test_a_run_that_is_stopped_ends_as_one_that_is_not(
    name: str, references: Callable, start: Callable, tmp_path: Path
) -> None:
    ranks, words, stops = RUNS[name]
    said = ""
    for step in [*stops, None]:
        said = start(tmp_path / "run", ranks, [] if said else words, step, TYPED)
    reference, expected = references(name)
    assert_same(tmp_path / "run", reference)
    assert results(said) == results(expected) != ""


@pytest.mark.parametrize("name", [name for name in RUNS if "two ranks" not in name])
def test_what_was_tested_is_saved(name: str, references: Callable, start: Callable, tmp_path: Path) -> None:
    reference, expected = references(name)
    ranks, words, _ = RUNS[name]
    last = reference / "checkpoints" / "last.ckpt"
    said = start(tmp_path / "test", ranks, [*words, f"ckpt={last}", "task=test"], patch=TYPED)
    assert results(said) == results(expected) != "" and "not in last.ckpt" not in expected
    if "stochastic" in name:  # best.ckpt may hold weights from before averaging, so last.ckpt is loaded
        module, _ = trained.load(reference)
        assert all(torch.equal(module.state_dict()[key], value) for key, value in weights.read(last).items())


@pytest.mark.parametrize("name", ["moving", "moving, on two ranks"])
def test_the_average_is_exported_and_tested(name: str, start: Callable, tmp_path: Path) -> None:
    ranks, words, _ = RUNS[name]
    start(tmp_path / "run", ranks, words, patch=TYPED + RAW_AND_TESTED)
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    start(tmp_path / "test", ranks, [*words, f"ckpt={last}", "task=test"], patch=TYPED + RAW_AND_TESTED)
    export.export(tmp_path / "run", tmp_path / "weights.safetensors")
    exported = digest_of(load_file(tmp_path / "weights.safetensors"))
    tested = validated(tmp_path / "run", "tested") + validated(tmp_path / "test", "tested")
    assert {exported} == set(tested)
    assert exported not in validated(tmp_path / "run", "raw")


def test_two_averages_are_rejected() -> None:
    two = [WeightAveraging(), EMAWeightAveraging()]
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=two)
    with pytest.raises(ConfigError, match="Only one callback may average the weights"):
        weight_averaging.reject_unsupported_averaging(trainer, BoringModel())


@pytest.mark.parametrize(
    ("norm", "is_rejected"),
    [(torch.nn.BatchNorm1d(2), True), (torch.nn.SyncBatchNorm(2), True), (torch.nn.GroupNorm(1, 2), False)],
)
def test_a_stochastic_average_of_a_network_with_batch_norm_is_rejected(
    norm: torch.nn.Module, is_rejected: bool
) -> None:
    """Reject what would need an epoch more for its statistics, which Lightning adds."""
    module = BoringModel()
    module.deep = torch.nn.Sequential(norm)
    for callback in (StochasticWeightAveraging(0.1), EMAWeightAveraging()):
        trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=callback)
        if is_rejected and isinstance(callback, StochasticWeightAveraging):
            with pytest.raises(ConfigError, match=r"(?s)must not be used .* got Stochastic.* Try: .*EMAWeightAver"):
                weight_averaging.reject_unsupported_averaging(trainer, module)
        else:
            weight_averaging.reject_unsupported_averaging(trainer, module)


class Doubles(BoringModel):
    """A callback that records the weights before and after each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def on_train_batch_end(self, *_: object) -> None:
        self.seen.append(self.layer.weight.detach().clone())

    on_train_epoch_end = on_train_batch_end


class Prepares(L.Callback):
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        weight_averaging.convert_to_float64_before_copy(trainer, pl_module)


def test_in_double_precision_a_validation_leaves_the_weights_as_they_are() -> None:
    callbacks = [Prepares(), EMAWeightAveraging()]
    trainer = L.Trainer(
        accelerator="cpu", precision="64-true", max_steps=3, limit_val_batches=1, num_sanity_val_steps=0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=callbacks,
    )  # fmt: skip
    module = Doubles()
    module.train_dataloader = lambda: torch.utils.data.DataLoader(RandomDataset(32, 3))  # type: ignore[method-assign]
    trainer.fit(module)
    before, after = module.seen[-2:]
    assert before.dtype == torch.float64 and torch.equal(before, after)


@pytest.mark.parametrize("name", ["moving", "moving, at the end of an epoch", "stochastic"])
def test_the_best_is_what_was_validated(name: str, references: Callable) -> None:
    reference, _ = references(name)
    assert digest(reference / "checkpoints" / "best.ckpt") in validated(reference)


IN_TEST = """
import os
from my_research.module import Classifier
Classifier.test_step = lambda *_: os.kill(os.getpid(), 9)
"""
DEATHS = {"moving": IN_TEST, "stochastic": IN_TEST}


@pytest.mark.parametrize("name", soak_all_but(DEATHS))
def test_one_that_died_after_its_last_step_tests_the_average(
    name: str, references: Callable, start: Callable, tmp_path: Path
) -> None:
    ranks, words, _ = RUNS[name]
    start(tmp_path / "run", ranks, words, patch=TYPED + DEATHS[name], code=[-9])
    reference, expected = references(name)
    assert results(start(tmp_path / "run", ranks, [])) == results(expected)
    mine, its = (run_dir / "checkpoints" / "last.ckpt" for run_dir in (tmp_path / "run", reference))
    names = (path.resolve().name.replace("-002", "-001") for path in (mine, its))
    assert digest(mine) == digest(its) and next(names) == next(names)


def test_what_is_no_end_is_rejected(references: Callable, start: Callable, tmp_path: Path) -> None:
    """Reject three things: to train averaged weights further, to drop the average, and to average sharded weights."""
    run_dir, _ = references("stochastic")
    assert "so they cannot be trained further" in start(run_dir, 1, ["trainer.max_epochs=5"], patch=TYPED, code=2)
    ranks, words, _ = RUNS["moving"]
    start(tmp_path / "run", ranks, words, 3, TYPED)
    said = start(tmp_path / "run", ranks, ["callbacks.ema=null"], patch=TYPED, code=2)
    assert "must hold the callback that averages the weights" in said
    words = ["trainer=fsdp", "trainer.devices=2", *TINY, *EMA]
    said = start(tmp_path / "sharded", 2, words, patch=TYPED, code=2)
    assert "must be used with strategy=single or ddp, not fsdp" in said and "Traceback" not in said
    for number, typed in enumerate(typed_fixes.retyped(words, typed_fixes.printed(said))):
        start(tmp_path / f"sharded-{number}", 2, typed, patch=TYPED)


def test_of_one_step_the_average_is_the_newer(tmp_path: Path) -> None:
    for averaged in (False, True):
        final = on_disk.checkpoint_path(tmp_path, 7, 1, averaged=averaged)
        on_disk.publish(
            on_disk.make_part_folder(final), final, files={}, details={"step": 7, "attempt": 1, "averaged": averaged}
        )
    assert [found.details["averaged"] for found in on_disk.list_checkpoints(tmp_path)] == [True, False]
    on_disk.prune(final, 1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000007-001-averaged"]
