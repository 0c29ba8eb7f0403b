"""Check that what people type first, as they know it from Lightning and Hydra, is obeyed or answered by a sentence."""

import re
import shlex
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from hpc.config import arguments, compose, parse, run_checkpoint
from hpc.config.errors import ConfigError
from hpc.plan.setup import setup_from_config

TWO = ["trainer.accelerator=cpu", "trainer.devices=2"]


def checked(*words: str) -> DictConfig:
    cfg = compose.compose_overrides(list(words))
    arguments.check_files(parse.parse(cfg))
    return cfg


PLUSES = [
    "trainer.val_check_interval=0.25",  # no file of configs/ has it
    "trainer.max_time={days: 1}",
    "trainer.log_every_n_steps=1",  # which the library sets
    "model.optimizer.amsgrad=true",
    "model.network.dropout=0.1",
    "callbacks.throughput.every_n_steps=5",
    "seed=3",
    "data=stdlib",
    "experiment=text",
]


@pytest.mark.slow
@pytest.mark.parametrize("word", PLUSES)
def test_a_plus_says_nothing(word: str) -> None:
    others = ["model=gpt_tiny", "data=stdlib"] if "dropout" in word else []
    if "every_n_steps=5" in word:
        with pytest.raises(ConfigError, match=r"callbacks\.throughput\.every_n_steps must be an argument of hpc"):
            checked(word)
        with pytest.raises(ConfigError, match=r"callbacks\.throughput\.every_n_steps must be an argument of hpc"):
            checked(f"+{word}")
        return
    key, _, value = word.partition("=")
    typed = [compose.compose_overrides([*others, form + word]) for form in ("", "+")]
    assert typed[0] == typed[1]
    if "." in key:
        assert str(OmegaConf.select(typed[0], key)).lower() == str(OmegaConf.create(f"x: {value}").x).lower()


@pytest.mark.slow
def test_several_words_may_lack_their_plus_or_have_one_too_many() -> None:
    limits = [f"trainer.limit_{kind}_batches={number}" for number, kind in enumerate(("train", "val", "test"), 3)]
    cfg = checked(*limits, "+trainer.max_epochs=2", "trainer.max_epochs=4", "+seed=5", "+experiment=text")
    assert [cfg.trainer[f"limit_{kind}_batches"] for kind in ("train", "val", "test")] == [3, 4, 5]
    assert (cfg.trainer.max_epochs, cfg.seed, cfg.model._target_) == (4, 5, checked("experiment=text").model._target_)


@pytest.mark.slow
def test_a_wrong_name_is_no_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for word in ("trainer.limit_vall_batches=1", "+trainer.limit_vall_batches=1"):
        with pytest.raises(ConfigError, match=r"Try: trainer\.limit_val_batches=\.\.\."):
            checked(word)
    with pytest.raises(ConfigError, match=re.escape("must have a plus, as torch.nn.Bilinear takes any")) as caught:
        _with_any_arguments(monkeypatch)
        checked("model.network._target_=torch.nn.Bilinear", "model.network.drpout=1")
    assert caught.value.fix == "+model.network.drpout=1"


def _with_any_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from hpc.config import signatures

    read = signatures.read_signature
    any_arguments = signatures.Signature({}, [], True)
    monkeypatch.setattr(
        signatures, "read_signature", lambda target: any_arguments if target == "torch.nn.Bilinear" else read(target)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "read"),
    [("16", "16-mixed"), ("bf16", "bf16-mixed"), ("32", "32-true"), ("64", "64-true"), ("null", None)],
)
def test_a_precision_is_read_as_lightning_reads_it(given: str, read: str | None) -> None:
    from lightning.fabric.connector import _convert_precision_to_unified_args

    cfg = compose.compose_overrides([f"trainer.precision={given}"])
    value = None if given == "null" else int(given) if given.isdecimal() else given
    assert cfg.trainer.precision == (read or "32-true")
    assert _convert_precision_to_unified_args(value) == read  # type: ignore[arg-type]


DEVICES: dict[str, tuple[list[str], str, object]] = {
    "those of a node": (["trainer=ddp", "cluster=slurm", "trainer.devices=auto"], "gpu", 4),
    "all": (["trainer=ddp", "cluster=slurm", "trainer.devices=-1", "trainer.accelerator=cuda"], "gpu", 4),
    "the cluster's": (["trainer=ddp", "cluster=slurm", "trainer.accelerator=auto", "trainer.devices=2"], "gpu", 2),
    "one CPU": (["trainer.devices=auto"], "cpu", 1),
    "a text": (["strategy=ddp", "trainer.devices='2'"], "cpu", 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", DEVICES)
def test_devices_are_read_as_lightning_reads_them(what: str) -> None:
    words, accelerator, devices = DEVICES[what]
    trainer = checked(*words).trainer
    assert (trainer.accelerator, trainer.devices) == (accelerator, devices)


def test_only_a_process_that_trains_counts_the_devices_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from hpc.launch import node_checks

    cfg = compose.compose_overrides(["trainer=gpu", "trainer.accelerator=auto", "trainer.devices=-1"])
    with pytest.raises(ConfigError, match=r"trainer\.devices must be a number here") as caught:
        arguments.check_files(parse.parse(cfg))
    assert caught.value.fix.startswith("trainer.devices=<devices per node>")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    node_checks.count_auto_devices(cfg)
    assert (cfg.trainer.accelerator, cfg.trainer.devices) == ("gpu", 3)


SENTENCES = {
    "trainer.devices=[0,1]": "CUDA_VISIBLE_DEVICES=0,1 python train.py ... trainer.devices=2",
    "trainer.devices='1,3'": "CUDA_VISIBLE_DEVICES=1,3 python train.py ... trainer.devices=2",
    "trainer.strategy=ddp": "strategy=ddp",
    "trainer.strategy=ddp_find_unused_parameters_true": "strategy=ddp",
    "trainer.strategy=fsdp": "strategy=fsdp",
    "trainer.strategy=deepspeed_stage_3_offload": "strategy=zero3_offload",
    "trainer.strategy=auto": "strategy=single, or strategy=ddp on several devices",
    "trainer.strategy._target_=lightning.pytorch.strategies.DDPStrategy": "strategy=ddp",
    "trainer.default_root_dir=/tmp/x": "run_dir=/tmp/x",
    "trainer.barebones=true": "callbacks=null logger=null",
    "trainer.callbacks=[]": "callbacks.NAME._target_=<a class>",
    "trainer.accelerator=tpu": "trainer.accelerator=gpu",
    "model.optimizer._target_=os.system": "a file below",
    "+model={_target_: os.system}": "a file below",
    "callbacks.x._target_=lightning.pytorch.cli.LightningCLI": "a file below",
    "model.network='${oc.create:{_target_: os.system}}'": "a file below",
    "model.network._target_=torch.nn.init.normal_": "a file below",
}


@pytest.mark.slow
@pytest.mark.parametrize("word", SENTENCES)
def test_the_sentence_says_what_to_type(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked(word)
    assert caught.value.key == word.lstrip("+").partition("=")[0].removesuffix("._target_") + (
        "._target_" if caught.value.key.endswith("_target_") else ""
    )
    assert SENTENCES[word] in caught.value.fix


@pytest.mark.slow
def test_what_is_trusted_may_be_typed() -> None:
    lr = "callbacks.lr._target_=lightning.pytorch.callbacks.LearningRateMonitor"
    words = [
        "model.optimizer={_target_: torch.optim.SGD, _partial_: true, lr: 0.1}",
        lr,
        "callbacks.lr.log_momentum=true",
    ]
    assert checked(*words).model.optimizer._target_ == "torch.optim.SGD"
    assert checked(*words).callbacks.lr == {
        "_target_": "lightning.pytorch.callbacks.LearningRateMonitor",
        "log_momentum": True,
    }


@pytest.mark.parametrize("word", ["callbacks=null", "~callbacks", "+callbacks=null"])
def test_there_may_be_no_callbacks(word: str) -> None:
    assert checked(word).callbacks == {}


@pytest.mark.slow
def test_a_number_of_the_environment_is_text_and_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", "3")
    monkeypatch.setenv("NODES", "1")
    for word in ("trainer.max_steps=${oc.env:STEPS,2}", "trainer.num_nodes=${oc.env:NODES}", "seed=${oc.env:SEED,2}"):
        with pytest.raises(ConfigError) as caught:
            checked(word)
        key, name = re.split(r"=.*:|,|}", word)[:2]
        fix, _, _ = caught.value.fix.partition(", ")
        assert caught.value.key == key and fix == f'{key}="${name}"'
        assert checked(shlex.split(fix.replace(f"${name}", "1"))[0])  # as a shell types it
    with pytest.raises(ConfigError, match=r"data\.num_workers=<.*>; of an environment variable data"):
        checked("data.num_workers=${oc.env:STEPS}")


def test_a_value_of_another_type_is_told_not_raised() -> None:
    job = ["cluster=slurm", "trainer=ddp", "data.num_workers=abc"]
    with pytest.raises(ConfigError, match=r"data\.num_workers must be of type int \| None; got abc"):
        checked(*job)
    with pytest.raises(ConfigError, match=r"model\.optimizer must be of type"):
        checked("model.optimizer=adam", "faults.nonfinite=skip")


RENAMED = {"deepspeed_zero3": ("zero3", "deepspeed"), "fsdp": ("fsdp", "fsdp"), "ddp": ("none", "ddp")}


@pytest.mark.slow
@pytest.mark.parametrize("base", RENAMED)
def test_a_strategy_is_what_its_class_is_not_what_it_is_called(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    shutil.copytree(compose.CONFIGS, tmp_path / "configs")
    (tmp_path / "configs/strategy/mine.yaml").write_text(f"defaults: [{base}]\nname: mine\n")
    monkeypatch.setattr(compose, "CONFIGS", tmp_path / "configs")
    words = ["strategy=mine", *TWO]
    assert setup_from_config(checked(*words)).sharding == RENAMED[base][0]
    assert setup_from_config(checked(*words)) == setup_from_config(checked(f"strategy={base}", *TWO))
    if base == "deepspeed_zero3":
        with pytest.raises(ConfigError, match="DeepSpeed owns the optimizer step"):
            checked(*words, "faults.nonfinite=skip")
        with pytest.raises(ConfigError, match="with ZeRO-3"):
            checked(*words, "strategy.compile=true")
        with pytest.raises(ConfigError, match="DeepSpeed trains no parameters that are released later"):
            checked(*words, "callbacks=finetune")
    if base != "ddp":
        with pytest.raises(ConfigError, match="averages whole weights"):
            checked(*words, "+callbacks.average._target_=lightning.pytorch.callbacks.EMAWeightAveraging")


@pytest.mark.slow
@pytest.mark.parametrize(("names", "taken"), [(["last"], "last"), (["last", "best"], "best"), ([], None)])
def test_the_checkpoint_of_a_run_is_its_best_or_its_last(names: list[str], taken: str | None, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / "run" / "checkpoints" / f"{name}.ckpt").mkdir(parents=True)
    (tmp_path / "run").mkdir(exist_ok=True)
    expected = f"{tmp_path}/run/checkpoints/{taken}.ckpt" if taken else f"{tmp_path}/run/"
    assert run_checkpoint.find_checkpoint(f"{tmp_path}/run/") == expected
    assert run_checkpoint.find_checkpoint(expected) == expected
    assert compose.compose_overrides([f"ckpt={tmp_path}/run"]).ckpt == f"{tmp_path}/run"  # looked up at each start
