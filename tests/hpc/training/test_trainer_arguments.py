"""Check each argument of Lightning's Trainer and each of its callbacks, given as Lightning documents them.

Each is obeyed as in Lightning, or answered by one sentence that says what to type. The names come from Lightning: what
a new version adds is tried with its default. All train in one process, some together.
"""

import inspect
import json
import re
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
from lightning.pytorch import callbacks
from omegaconf import OmegaConf

from hpc.config import compose, parse
from hpc.config.errors import ConfigError

pytestmark = pytest.mark.slow

ARGUMENTS = {name: part.default for name, part in inspect.signature(L.Trainer).parameters.items()}
BASES = ("BaseFinetuning", "BasePredictionWriter", "Checkpoint")  # of classes that a researcher writes
CALLBACKS = [name for name in callbacks.__all__ if name not in BASES]

# Arguments that are answered, and what the sentence says to type.
ANSWERED = {
    "strategy=auto": "strategy=single, or strategy=ddp",
    "devices=[0]": "trainer.devices=1",
    "precision=16": "trainer.precision=bf16-mixed",  # on a CPU
    "logger=true": "logger=csv, or logger=null",
    "callbacks=null": "callbacks.NAME._target_=",
    "plugins=null": "trainer.precision=<precision> and strategy=<strategy>",
    "enable_checkpointing=true": "checkpoint.every_minutes=60",
    "barebones=true": "callbacks=null logger=null",
    "default_root_dir=/tmp/elsewhere": "run_dir=/tmp/elsewhere",
    "max_steps=null": "trainer.max_steps=<int>",
    "use_distributed_sampler=true": "trainer.use_distributed_sampler=false",
}
# Arguments that are obeyed. What stands in one line is given together, in YAML as on a command line.
OBEYED = {
    "ones": """accelerator=auto devices=auto num_nodes=1 precision=bf16 max_time=00:12:00:00 limit_train_batches=0.5
        limit_val_batches=1 limit_test_batches=0.5 limit_predict_batches=1 val_check_interval=0.5 num_sanity_val_steps=0
        log_every_n_steps=1 gradient_clip_val=0.5 gradient_clip_algorithm=value deterministic=warn benchmark=true
        inference_mode=false detect_anomaly=true sync_batchnorm=true profiler=simple min_steps=1 min_epochs=1
        max_epochs=2 enable_model_summary=false enable_progress_bar=false reload_dataloaders_every_n_epochs=1""",
    "others": """precision=64-true max_time={minutes:5} limit_val_batches=0.5 check_val_every_n_epoch=2 max_steps=5
        num_sanity_val_steps=-1 accumulate_grad_batches=2 profiler=advanced deterministic=false benchmark=false
        enable_progress_bar=true devices=1 accelerator=cpu max_epochs=-1""",
    "none": "limit_val_batches=0 profiler=null check_val_every_n_epoch=null val_check_interval=2 max_epochs=1",
    "a trial": "fast_dev_run=true",
    "a longer trial": "fast_dev_run=3",
    "overfitting": "overfit_batches=1 max_epochs=2",
    "a share": "overfit_batches=0.5 max_epochs=2",
}
GIVEN = {word.partition("=")[0] for words in [*OBEYED.values(), *ANSWERED] for word in words.split()}
OBEYED |= {f"new: {name}": f"{name}={json.dumps(ARGUMENTS[name])}" for name in sorted(ARGUMENTS.keys() - GIVEN)}

REJECTED = {
    "BatchSizeFinder": "callbacks.tried=null",
    "LearningRateFinder": "callbacks.tried=null",
    "ModelPruning": "callbacks.tried=null",
    "OnExceptionCheckpoint": "callbacks.tried=null",
}
NODES: dict[str, dict[str, Any]] = {
    "BackboneFinetuning": {"unfreeze_backbone_at_epoch": 1},
    "EarlyStopping": {"monitor": "val/loss"},
    "GradientAccumulationScheduler": {"scheduling": {0: 2}},
    "LambdaCallback": {"on_fit_start": {"_target_": "lightning.pytorch.callbacks.LambdaCallback", "_partial_": True}},
    "ModelPruning": {"pruning_fn": "l1_unstructured", "amount": 0.5},
    "OnExceptionCheckpoint": {"dirpath": "here"},
    "SpikeDetection": {"warmup": 100},  # else it ends the run, as this loss jumps
    "StochasticWeightAveraging": {"swa_lrs": 0.01, "swa_epoch_start": 1},
    "ThroughputMonitor": {"batch_size_fn": {"_target_": "builtins.len", "_partial_": True}},
    "Timer": {"duration": "00:12:00:00"},
}
ALONE = ["TQDMProgressBar", "ProgressBar", "StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging"]
ALONE += ["ModelSummary", "ModelCheckpoint", "BackboneFinetuning"]

TRIED = """
import json, os, shutil, traceback
from collections import Counter
from pathlib import Path

import lightning as L, torch
from omegaconf import OmegaConf
from torch.utils.data import DataLoader, TensorDataset

import train
from hpc.config import compose, project, signatures
from hpc.config.errors import ConfigError
from hpc.launch import placement
from hpc.resume import trainer as trainers
from hpc.run import directory, signals
from hpc.run.program import RankProcess
from hpc.training import starting_point
from my_research import module
from my_research.data import digits

CALLS = Counter()
signatures.is_training = True  # as `rank_process` does

class Line(L.LightningModule):
    def __init__(self, **options):
        super().__init__()
        self.backbone, self.head = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

    def step(self, batch, name):
        CALLS[name] += 1
        loss = self.head(self.backbone(batch[0])).square().mean()
        self.log(f"{name}/loss", loss)
        return loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val")

    def test_step(self, batch, batch_idx):
        self.step(batch, "test")

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

def shown(trainer):
    CALLS.pop("test", None)
    values = {name: repr(getattr(trainer, name, None)) for name in SHOWN} | {"steps": trainer.global_step}
    return values | {"epochs": trainer.current_epoch, "calls": dict(CALLS)}

def tried(words, number):
    made.clear()
    CALLS.clear()
    try:
        cfg = compose.compose_overrides([*words, f"run_dir={FOLDER}/{number}"])
        train.train(cfg, process)
        said = shown(made[0]) | {"callbacks": [type(callback).__name__ for callback in made[0].callbacks]}
    except ConfigError as error:
        said = {"sentence": str(error)}
    except BaseException:
        said = {"raised": traceback.format_exc()[-3000:]}
    for key in (directory.RUN_DIR_VARIABLE, starting_point.BEGUN_VARIABLE, "MASTER_PORT"):  # the next takes another
        os.environ.pop(key, None)
    return said

def in_lightning(arguments):
    torch.manual_seed(1)
    CALLS.clear()
    trainer = L.Trainer(**{"accelerator": "cpu", "devices": 1, **arguments}, logger=False, enable_checkpointing=False)
    trainer.fit(Line(), Data())
    return shown(trainer)

FOLDER = Path(FOLDER)
shutil.copytree(project.CONFIGS, FOLDER / "configs")
compose.CONFIGS = FOLDER / "configs"
cases = json.loads((FOLDER / "cases.json").read_text())
for name, nodes in cases["callbacks"].items():
    (FOLDER / "configs/callbacks" / f"{name}.yaml").write_text(nodes)
answers = {name: tried(words, number) for number, (name, words) in enumerate(cases["words"].items())}
plain = {name: in_lightning(arguments) for name, arguments in cases["plain"].items()}
(FOLDER / "answers.json").write_text(json.dumps([answers, plain]))
os._exit(0)
"""
WORDS = ["checkpoint.monitor=null", "checkpoint.every_minutes=null", "model=resnet_digits", "trainer.max_epochs=2"]


def python_values(words: str) -> dict[str, Any]:
    """Return arguments as a person would write them in Python, of whom Lightning is the judge."""
    lines = [re.sub(r"=([0-9:]+:[0-9:]+)$", r'="\1"', word).replace("=", ": ", 1) for word in words.split()]
    values = OmegaConf.to_container(OmegaConf.create("\n".join(lines).replace(":5}", ": 5}")))
    assert isinstance(values, dict)
    return {"max_epochs": 2, "enable_progress_bar": False} | values  # type: ignore[dict-item]


def callback_rounds() -> dict[str, dict[str, Any]]:
    node = {name: {"_target_": f"lightning.pytorch.callbacks.{name}", **NODES.get(name, {})} for name in CALLBACKS}
    together = [name for name in CALLBACKS if name not in (*ALONE, *REJECTED)]
    rounds = {name: {"tried": node[name]} for name in CALLBACKS if name in (*ALONE, *REJECTED)}
    return rounds | {"together": {name.lower(): node[name] for name in together}}


def answers_to(
    cases: dict[str, Any], start: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """Return what became of each case here, and of the same arguments in a plain Trainer."""
    folder = tmp_path_factory.mktemp("arguments")
    (folder / "cases.json").write_text(json.dumps({"callbacks": {}, "plain": {}, **cases}))
    said = start(folder / "all", 1, [], patch=f"FOLDER, SHOWN = {str(folder)!r}, {sorted(ARGUMENTS)!r}\n{TRIED}")
    assert (folder / "answers.json").exists(), said
    return json.loads((folder / "answers.json").read_text())


@pytest.fixture(scope="module")
def arguments(start: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    words = {name: [*WORDS, "callbacks=null", *typed(given)] for name, given in OBEYED.items()}
    plain = {name: python_values(given) for name, given in OBEYED.items()}
    return answers_to({"words": words, "plain": plain}, start, tmp_path_factory)


@pytest.fixture(scope="module")
def trained(start: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    few = ["trainer.limit_train_batches=2", "trainer.limit_val_batches=1", "trainer.enable_model_summary=true"]
    words = {name: [*WORDS, *few, f"callbacks={name}"] for name in callback_rounds()}
    files = {name: OmegaConf.to_yaml(OmegaConf.create(nodes)) for name, nodes in callback_rounds().items()}
    return answers_to({"words": words, "callbacks": files}, start, tmp_path_factory)[0]


def typed(given: str) -> list[str]:
    """Return the words as they are typed: every other one with a plus."""
    return [f"{'+' * (number % 2)}trainer.{word}" for number, word in enumerate(given.split())]


@pytest.mark.parametrize("name", OBEYED)
def test_an_argument_is_obeyed_as_in_lightning(name: str, arguments: list[dict[str, Any]]) -> None:
    here, plain = arguments[0][name], arguments[1][name]
    assert "steps" in here, here.get("raised") or here.get("sentence")
    given = {word.partition("=")[0] for word in OBEYED[name].split()}
    keys = (given | {"steps", "epochs", "calls"}) - {"accelerator", "enable_progress_bar", "profiler"}  # are objects
    assert {key: here[key] for key in keys} == {key: plain[key] for key in keys}


@pytest.mark.parametrize("word", ANSWERED)
def test_an_argument_that_is_set_elsewhere_is_answered(word: str) -> None:
    for form in ("", "+"):
        with pytest.raises(ConfigError) as caught:
            parse.parse(compose.compose_overrides([f"{form}trainer.{word}"]))
        assert caught.value.key == f"trainer.{word.partition('=')[0]}" and ANSWERED[word] in caught.value.fix


@pytest.mark.parametrize("name", callback_rounds())
def test_a_callback_of_lightning_trains_or_is_answered(name: str, trained: dict[str, Any]) -> None:
    here = trained[name]
    if name in REJECTED:
        assert REJECTED[name] in here["sentence"]
        return
    if name == "ModelCheckpoint" and "sentence" in here:
        assert "callbacks.tried=null" in here["sentence"]
        return
    assert "steps" in here, here.get("raised") or here.get("sentence")
    named = [node["_target_"].rpartition(".")[2] for node in callback_rounds()[name].values()]
    assert set(named) - {"ProgressBar"} <= set(here["callbacks"]) and here["epochs"] == 2


def test_callbacks_may_be_typed_as_well() -> None:
    nodes = callback_rounds()["together"]
    nodes.pop("throughputmonitor")  # a function must be named in a file
    words = [
        f"callbacks.{name}={{{','.join(f'{key}:{value}' for key, value in node.items())}}}".replace(" ", "").replace(
            "'", ""
        )
        for name, node in nodes.items()
        if name != "lambdacallback"
    ]
    cfg = compose.compose_overrides(words)
    parse.parse(cfg)
    assert {cfg.callbacks[name]["_target_"] for name in nodes if name != "lambdacallback"}
