"""Check each argument of Lightning's Trainer and each of its callbacks, typed as Lightning documents them.

Each is either obeyed as in Lightning or answered by one sentence. The lists come from Lightning itself, so what a new
version adds is tried with its default. All run in one process, which has imported the libraries once.
"""

import inspect
import json
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
from lightning.pytorch import callbacks

pytestmark = pytest.mark.slow

ARGUMENTS = inspect.signature(L.Trainer.__init__).parameters
CALLBACKS = [name for name in callbacks.__all__ if issubclass(getattr(callbacks, name), L.Callback)]

# What Lightning documents, as it is typed; those that are not listed are tried with their default.
VALUES: dict[str, list[str]] = {
    "accelerator": ["auto"],
    "strategy": ["auto", "ddp", "fsdp"],
    "devices": ["auto", "[0]", "1"],
    "precision": ["32", "bf16", "16", "64-true"],
    "logger": ["true", "false"],
    "callbacks": ["null"],
    "fast_dev_run": ["true", "3"],
    "max_time": ["00:12:00:00", "{minutes: 5}"],
    "limit_train_batches": ["1", "0.5"],
    "limit_val_batches": ["1", "0"],
    "limit_test_batches": ["0.5"],
    "overfit_batches": ["1", "0.25"],
    "val_check_interval": ["1", "0.5", "00:00:10:00"],
    "check_val_every_n_epoch": ["2", "null"],
    "num_sanity_val_steps": ["0", "-1"],
    "log_every_n_steps": ["1"],
    "enable_checkpointing": ["true", "false"],
    "enable_progress_bar": ["true", "false"],
    "enable_model_summary": ["false"],
    "gradient_clip_val": ["0.5"],
    "gradient_clip_algorithm": ["value"],
    "deterministic": ["true", "warn"],
    "benchmark": ["true"],
    "inference_mode": ["false"],
    "use_distributed_sampler": ["true"],
    "profiler": ["simple", "advanced", "pytorch", "null"],
    "detect_anomaly": ["true"],
    "barebones": ["true"],
    "sync_batchnorm": ["true"],
    "reload_dataloaders_every_n_epochs": ["1"],
    "default_root_dir": ["/tmp/elsewhere"],
    "accumulate_grad_batches": ["2"],
    "min_steps": ["1"],
    "min_epochs": ["1"],
    "max_epochs": ["1", "-1"],
    "max_steps": ["2"],
}
# What is answered by a sentence, and what it says to type.
SENTENCES = {
    "strategy=auto": "strategy=single, or strategy=ddp",
}
NODES: dict[str, dict[str, Any] | str] = {
    "BackboneFinetuning": {"unfreeze_backbone_at_epoch": 1},
    "EarlyStopping": {"monitor": "val/loss"},
    "GradientAccumulationScheduler": {"scheduling": {0: 2}},
    "StochasticWeightAveraging": {"swa_lrs": 0.01, "swa_epoch_start": 1},
    "Timer": {"duration": "00:12:00:00"},
    "ThroughputMonitor": {"batch_size_fn": {"_target_": "builtins.len", "_partial_": True}},
    "ModelPruning": {"pruning_fn": "l1_unstructured", "amount": 0.5},
}
WORDS = ["trainer.max_epochs=2", "trainer.limit_train_batches=2", "trainer.limit_val_batches=1", "callbacks=null"]
WORDS += ["trainer.limit_test_batches=1", "checkpoint.monitor=null", "trainer.enable_progress_bar=false"]

TRIED = """
import json, os, time, traceback
from pathlib import Path

import lightning as L, torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, TensorDataset

import train
from hpc.config import compose, preflight
from hpc.config.errors import ConfigError
from hpc.launch import placement
from hpc.resume import trainer as trainers
from hpc.run import directory, signals
from hpc.run.program import RankProcess
from hpc.training import starting_point
from my_research import module
from my_research.data import digits

class Line(L.LightningModule):
    def __init__(self, **options):
        super().__init__()
        self.backbone, self.head = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        loss = self.head(self.backbone(batch[0])).square().mean()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.head(self.backbone(batch[0])).square().mean())

    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.head(self.backbone(batch[0])).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.001)

class Data(L.LightningDataModule):
    def __init__(self, **options):
        super().__init__()

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(16.0)[:, None]), batch_size=4)

    val_dataloader = test_dataloader = train_dataloader

module.Classifier, digits.Digits = Line, Data
process = RankProcess([], placement.read_placement(os.environ), signals.install_signal_handlers())
made, make_trainer = [], trainers.make_trainer

def remember(*args, **kwargs):
    made.append(make_trainer(*args, **kwargs))
    return made[-1]

trainers.make_trainer = remember

def tried(words):
    made.clear()
    begun = time.monotonic()
    try:
        cfg = compose.compose_overrides(words)
        preflight.check_config(cfg)
        train.train(cfg, process)
        said = {"trainer": {name: repr(getattr(made[0], name, None)) for name in SHOWN}, "step": made[0].global_step}
        said |= {"epochs": made[0].current_epoch, "callbacks": [type(one).__name__ for one in made[0].callbacks]}
    except ConfigError as error:
        said = {"sentence": str(error)}
    except BaseException:
        said = {"raised": traceback.format_exc()[-3000:]}
    for key in (directory.RUN_DIR_VARIABLE, starting_point.BEGUN_VARIABLE):
        os.environ.pop(key, None)
    return said | {"seconds": time.monotonic() - begun}

cases = json.loads(Path(CASES).read_text())
Path(CASES).write_text(json.dumps({name: tried(words) for name, words in cases.items()}))
os._exit(0)
"""


def words_of_callback(name: str) -> list[str]:
    node = NODES.get(name, {})
    target = f"callbacks.tried={{_target_: lightning.pytorch.callbacks.{name}}}"
    return [target, *(f"callbacks.tried.{key}={json.dumps(value)}" for key, value in node.items())]


def cases() -> dict[str, list[str]]:
    given = {}
    for name, parameter in ARGUMENTS.items():
        for value in VALUES.get(name, ["null" if parameter.default is None else str(parameter.default).lower()]):
            if name != "self":
                given[f"{name}={value}"] = [*WORDS, f"trainer.{name}={value}"]
    return given | {name: [*WORDS, *words_of_callback(name)] for name in CALLBACKS}


@pytest.fixture(scope="module")
def tried(start: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("arguments")
    given = {name: [*words, f"run_dir={folder}/{number}"] for number, (name, words) in enumerate(cases().items())}
    (folder / "cases.json").write_text(json.dumps(given))
    shown = [name for name in ARGUMENTS if name != "self"]
    patch = f"CASES, SHOWN = {str(folder / 'cases.json')!r}, {shown!r}\n{TRIED}"
    said = start(folder / "all", 1, [], patch=patch)
    answers = json.loads((folder / "cases.json").read_text())
    assert answers.keys() == given.keys(), said
    return answers


@pytest.mark.parametrize("case", cases())
def test_it_is_obeyed_or_answered_by_a_sentence(case: str, tried: dict[str, Any]) -> None:
    answer = tried[case]
    print(case, json.dumps(answer)[:1500])
    assert "raised" not in answer, answer["raised"]
