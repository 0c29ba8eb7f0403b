"""Check that what cannot resume exactly is rejected before the first step, in a sentence without traceback."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf, open_dict
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hpc.config import arguments, compose, parse
from hpc.config import build as config_build
from hpc.config.errors import ConfigError
from hpc.resume import resume, saving, unsupported
from hpc.resume import trainer as resume_trainer
from hpc.strategies import parallelize
from hpc.training import lightning_errors


@pytest.mark.parametrize("name", ["OnExceptionCheckpoint", "LearningRateFinder", "BatchSizeFinder", "ModelPruning"])
def test_a_callback_that_would_not_do_here_what_it_is_for(name: str) -> None:
    cfg = compose.compose_overrides([])
    arguments.check_files(parse.parse(cfg))
    with open_dict(cfg):
        cfg.callbacks.mine = {"_target_": f"lightning.pytorch.callbacks.{name}"}
    with pytest.raises(ConfigError, match="must") as rejected:
        arguments.check_files(parse.parse(cfg))
    assert rejected.value.key == "callbacks.mine" and "callbacks.mine=null" in rejected.value.fix


@pytest.mark.parametrize("key", ["logger", "callbacks", "plugins", "enable_checkpointing"])
def test_what_the_trainer_would_be_given_twice(key: str) -> None:
    cfg = compose.compose_overrides([])
    with open_dict(cfg):
        cfg.trainer[key] = False if key == "logger" else [{"_target_": "lightning.Callback"}]
    with pytest.raises(ConfigError, match="must be left out") as rejected:
        arguments.check_files(parse.parse(cfg))
    assert rejected.value.key == f"trainer.{key}"


def test_what_lightning_finds_wrong_with_the_data_is_a_sentence() -> None:
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, val_check_interval=1000, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"rejects this: `val_check_interval`"):  # noqa: SIM117
        with lightning_errors.convert_lightning_errors(SimpleNamespace(has_started_training=False)):  # type: ignore[arg-type]
            trainer.fit(BoringModel())
    with (
        pytest.raises(ValueError, match="mine"),
        lightning_errors.convert_lightning_errors(SimpleNamespace(has_started_training=False)),
    ):  # type: ignore
        raise ValueError("mine")


class Derived(OnExceptionCheckpoint):
    pass


def test_such_a_callback_that_the_module_brings() -> None:
    unsupported.reject_unsupported_callbacks(SimpleNamespace(callbacks=[L.Callback()]))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must not be followed by a save") as rejected:
        unsupported.reject_unsupported_callbacks(SimpleNamespace(callbacks=[L.Callback(), Derived("x")]))  # type: ignore[arg-type]
    assert rejected.value.value == "Derived" and "configure_callbacks" in rejected.value.fix


def test_layers_that_get_their_sizes_from_the_first_batch() -> None:
    module: Any = L.LightningModule()
    module.net = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d(affine=False))
    with pytest.raises(
        ConfigError, match=r"model=net\.0\.weight, net\.0\.bias, net\.1\.running_mean, net\.1\.running_var"
    ):
        parallelize.parallelize(module, None, parallelize.ModuleChanges())


def test_a_run_with_checkpoints_no_longer_needs_the_one_it_began_with(tmp_path: Path) -> None:
    cfg = compose.compose_overrides([f"ckpt={tmp_path}/gone", f"run_dir={tmp_path}/run"])
    with pytest.raises(ConfigError, match="must be an existing file"):
        arguments.check_files(parse.parse(cfg))
    (tmp_path / "run/checkpoints/last.ckpt").mkdir(parents=True)
    arguments.check_files(parse.parse(cfg))
    cfg.task = "test"  # evaluation reads the checkpoint each time
    with pytest.raises(ConfigError, match="must be an existing file"):
        arguments.check_files(parse.parse(cfg))


class Learns(L.LightningModule):
    """A module with one layer, for vectors of four numbers, whose own code may also fail."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.layer, self.fails = torch.nn.Linear(4, 3), fails

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        logits = self.layer(inputs)
        if self.fails:
            return (logits + inputs).sum()
        return torch.nn.functional.cross_entropy(logits, targets)


@pytest.mark.parametrize(
    ("inputs", "targets", "words"),
    [
        (torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), "((2, 5) float32, (2,) int64) does not fit the network"),
        (torch.zeros(2, 4), torch.tensor([0, 3]), "Target 3 is out of bounds"),
        (torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, dtype=torch.int64), "same dtype"),
    ],
)
def test_a_first_batch_that_does_not_fit_is_rejected(inputs: torch.Tensor, targets: torch.Tensor, words: str) -> None:
    def step(has_started: bool, module: L.LightningModule) -> None:
        run = SimpleNamespace(has_started_training=has_started)
        with lightning_errors.convert_lightning_errors(run):  # type: ignore[arg-type]
            module.training_step((inputs, targets), 0)

    with pytest.raises(ConfigError) as caught:
        step(False, Learns())
    assert words in str(caught.value) and f"{__file__}, line " in str(caught.value)
    assert len(str(caught.value).splitlines()) == 2
    assert ("another trainer.precision=" in caught.value.fix) is (words == "same dtype")
    with pytest.raises((RuntimeError, IndexError)):  # later the network has computed a batch before
        step(True, Learns())


def test_an_error_in_the_researchers_own_lines_keeps_its_traceback() -> None:
    run: Any = SimpleNamespace(has_started_training=False)
    with pytest.raises(RuntimeError, match="must match the size"), lightning_errors.convert_lightning_errors(run):
        Learns(fails=True).training_step((torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)), 0)


@pytest.mark.parametrize("hook", ["on_test_batch_end", "on_predict_batch_end"])
def test_an_error_of_a_later_batch_is_the_researchers(hook: str) -> None:
    """Check that it keeps its traceback in task=test and predict, too: the network has computed a batch before."""
    run = SimpleNamespace(has_started_training=False)
    watch = SimpleNamespace(report_progress=lambda *_: None)
    getattr(resume.Resume, hook)(SimpleNamespace(run=run, watch=watch), SimpleNamespace(global_step=0))
    with pytest.raises(RuntimeError), lightning_errors.convert_lightning_errors(run):  # type: ignore[arg-type]
        Learns().training_step((torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64)), 0)


TRAINER = {
    "_target_": "lightning.pytorch.Trainer", "accelerator": "cpu", "enable_checkpointing": False, "logger": False,
}  # fmt: skip


def test_what_lightning_rejects_before_the_first_step() -> None:
    def build(trains: bool) -> None:
        with lightning_errors.convert_lightning_errors(SimpleNamespace(has_started_training=trains)):  # type: ignore[arg-type]
            config_build.build(OmegaConf.create(TRAINER), callbacks=[ModelCheckpoint()])

    with pytest.raises(ConfigError, match="found `ModelCheckpoint` in callbacks list"):
        build(trains=False)
    with pytest.raises(Exception, match="ModelCheckpoint") as failed:  # errors of training stay unchanged
        build(trains=True)
    assert isinstance(failed.value.__cause__, MisconfigurationException)


ADAMW = {"_target_": "torch.optim.AdamW", "_partial_": True}
TAKEN = {
    "a partial object": lambda: config_build.build({**ADAMW, "betas": 7})([torch.zeros(1, requires_grad=True)]),
    "an argument twice": lambda: config_build.build({**ADAMW, "params": [1]})([torch.zeros(1, requires_grad=True)]),
    "options that exclude each other": lambda: config_build.build({**ADAMW, "fused": True, "foreach": True})(
        [torch.zeros(1, requires_grad=True)]
    ),
    "a time": lambda: config_build.build(OmegaConf.create({**TRAINER, "max_time": 0.5})),
    "an object": lambda: config_build.build({"_target_": "torch.nn.Linear", "in_features": "many", "out_features": 1}),
}


@pytest.mark.parametrize("build", TAKEN.values(), ids=TAKEN)
def test_values_that_a_library_does_not_take(build: Callable[[], Any]) -> None:
    run: Any = SimpleNamespace(has_started_training=False)
    with pytest.raises(ConfigError, match="must have values that"), lightning_errors.convert_lightning_errors(run):
        build()


def test_what_data_reject_while_they_are_built() -> None:
    node = {"_target_": "my_research.data.digits.Digits", "num_classes": 3, "global_batch_size": 8}
    with pytest.raises(ConfigError, match="at least 10"):
        config_build.build(node)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["\x7f", "a\tb", "\u202egnp.exe", "\x9b31m"])
def test_a_run_directory_is_named_as_it_can_be_shown(name: str) -> None:
    cfg = compose.compose_overrides([])
    cfg.run_dir = f"runs/{name}"
    with pytest.raises(ConfigError, match="must be a path of one line"):
        parse.parse(cfg)


def test_what_fails_in_the_projects_own_code_keeps_its_traceback() -> None:
    node = {"_target_": "my_research.module.warmup_then_cosine", "step": "x", "warmup_steps": 1}
    with pytest.raises(Exception, match="not supported between") as failed:
        config_build.build({**node, "total_steps": 1})
    assert not isinstance(failed.value, ConfigError)


CONTROL = [
    {"options": ["--x\0"]},
    {"options": ["--x\x1b[2J"]},
    {"options": [[]]},
    {"env": {"A": "x\x07"}},
    {"request": "--gres=gpu:1\ntouch executed"},
    {"request": "\x1b[31m"},
    {"master_addr_suffix": "\nx"},
]


@pytest.mark.slow
@pytest.mark.parametrize("words", CONTROL)
def test_control_characters_do_not_reach_a_job_script(words: dict[str, Any]) -> None:
    cfg = compose.compose_overrides(["cluster=slurm", "trainer=ddp"])
    OmegaConf.update(cfg, "cluster", words, force_add=True)
    with pytest.raises(ConfigError) as rejected:
        parse.parse(cfg, for_job=True)
    assert rejected.value.key.startswith("cluster")


class TwoLoaders(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.slope = torch.nn.Parameter(torch.tensor(0.0))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.slope * batch).mean()

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val/both", batch.mean())
        if dataloader_idx == 0:
            self.log("val/loss", batch.mean(), add_dataloader_idx=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.slope], lr=0.5)


class Look(L.Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[bool, set[str]]] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seen.append(
            (trainer.sanity_checking, saving.validation_metric_names(trainer) | trainer.callback_metrics.keys())
        )


def test_metrics_of_several_validation_loaders_are_known_in_the_sanity_check(tmp_path: Path) -> None:
    """Check that the sanity check, which validates `checkpoint.monitor`, sees the final metric names."""
    look, data = Look(), torch.ones(4)
    trainer = L.Trainer(
        accelerator="cpu", callbacks=[look], max_epochs=1, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, default_root_dir=tmp_path, logger=False,
    )  # fmt: skip
    trainer.fit(TwoLoaders(), data, [data, data])
    expected = {"val/loss", "val/both/dataloader_idx_0", "val/both/dataloader_idx_1"}
    assert look.seen == [(True, expected), (False, expected)]


class Untested(L.LightningModule):
    pass


class Tested(Untested):
    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test/mean", batch.mean())


class WithTest(L.LightningDataModule):
    def test_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(4))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("module", "data", "limit", "words"),
    [
        (Tested, WithTest, 1.0, ""),
        (Tested, WithTest, 0, "there are no batches"),
        (Untested, WithTest, 1.0, "there is no test_step"),
        (Tested, L.LightningDataModule, 1.0, "there is no test_dataloader"),
        (Untested, L.LightningDataModule, 1.0, "there is no test_step and no test_dataloader"),
    ],
)
def test_what_is_trained_is_done_without_a_test(
    module: Any, data: Any, limit: float, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, limit_test_batches=limit,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    assert resume_trainer.test(trainer, module(), data(), is_required=False) == ({} if words else {"test/mean": 1.0})
    assert f"note: nothing is tested: {words}\n" in capsys.readouterr().out if words else True
    if "is no" in words:
        with pytest.raises(MisconfigurationException):
            resume_trainer.test(trainer, module(), data(), is_required=True)


UNTIL_VALIDATED = "A validation must come before"


@pytest.mark.parametrize(
    ("facts", "options", "told"),
    [
        ({"max_steps": 4}, {}, UNTIL_VALIDATED),  # an epoch has 10 batches, two of them make a step
        ({"max_steps": 5}, {}, ""),
        ({"max_steps": 4}, {"strict": False}, ""),
        ({"max_steps": 4}, {"check_on_train_epoch_end": False}, ""),
        ({"max_steps": 4}, {"monitor": "train/loss"}, ""),
        ({"max_steps": 4, "val_check_batch": 8}, {"check_on_train_epoch_end": True}, ""),
        ({"check_val_every_n_epoch": 2}, {"check_on_train_epoch_end": True}, UNTIL_VALIDATED),
        ({"check_val_every_n_epoch": 2}, {}, ""),
        ({"num_training_batches": float("inf"), "val_check_batch": float("inf"), "max_steps": 4}, {}, ""),
    ],
)
def test_early_stopping_needs_a_validation(facts: dict[str, Any], options: dict[str, Any], told: str) -> None:
    usual = {"max_steps": -1, "num_training_batches": 10, "val_check_batch": 10, "accumulate_grad_batches": 2}
    callback = EarlyStopping(**({"monitor": "val/loss"} | options))
    trainer: Any = SimpleNamespace(**(usual | {"check_val_every_n_epoch": 1} | facts), val_check_interval=1.0)
    trainer.callbacks = [callback]
    callback.setup(trainer, None, "fit")  # type: ignore[arg-type]
    unsupported.reject_early_stopping_before_validation(trainer, set())  # without a sanity check, metrics are unknown
    with pytest.raises(ConfigError, match=told) if told else nullcontext():
        unsupported.reject_early_stopping_before_validation(trainer, {"val/loss"})
