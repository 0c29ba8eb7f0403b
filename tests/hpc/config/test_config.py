"""Check that every shipped choice composes, and that invalid configs are rejected before torch is imported."""

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import typed_fixes
from fork import ENVIRON, PROJECT
from omegaconf import OmegaConf

from hpc.config import arguments, compose, layout, parse, personal_clusters, project, rules
from hpc.config.errors import ConfigError

TEXT = ["data=stdlib", "model=gpt_tiny"]
TWO = ["trainer.accelerator=cpu", "trainer.devices=2"]
# Further overrides that a choice needs, as the first lines of files in configs/ say.
NEEDS = {
    "data=images": ["model=resnet18", "data.dir={images}", "data.global_batch_size=8"],
    "data=text": ["model=gpt_tiny", "data.files={text}"],
    "data=packed": ["data.file={packed}", "model=resnet18", "data.global_batch_size=8"],
    "data=stdlib": ["model=gpt_tiny"],
    "data=none": ["model=huggingface", "model.folder={pretrained}"],
    "strategy=tensor_parallel": [*TEXT, *TWO],
    "trainer=ddp": ["cluster=slurm"],
    "trainer=fsdp": ["cluster=slurm"],
    "trainer=deepspeed": ["cluster=slurm"],
}
NEEDS |= {f"{trainer}_4node": ["cluster=slurm"] for trainer in ("trainer=ddp", "trainer=fsdp", "trainer=deepspeed")}
NEEDS |= {f"model=resnet{n}": ["data=images", "data.dir={images}", "data.global_batch_size=8"] for n in (18, 50)}
PRETRAINED = ["model.folder={pretrained}", "data.files={text}"]
NEEDS |= {f"model=huggingface{lora}": ["data=huggingface", *PRETRAINED] for lora in ("", "_lora")}
NEEDS |= {"data=huggingface": ["model=huggingface", *PRETRAINED], "experiment=finetune_hf": PRETRAINED}
CHOICES = [f"{group}={choice}" for group, choices in compose.config_groups().items() for choice in choices]


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from PIL import Image

    folder = tmp_path_factory.mktemp("data")
    for i in range(60):
        file = folder / "images" / f"class{i % 2}" / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 7), (i, 0, 0)).save(file)
    (folder / "text.txt").write_text("to be or not to be " * 10_000)
    (folder / "pretrained").mkdir()
    (folder / "pretrained" / "config.json").write_text("{}")
    pack = [sys.executable, str(PROJECT / "tools/pack.py"), f"data.dir={folder}/images", f"out={folder}/images.npy"]
    subprocess.run([*pack, "data.image_size=8"], check=True, env=ENVIRON)
    files = {"images": "images", "text": "text.txt", "packed": "images.npy", "pretrained": "pretrained"}
    return {name: folder / file for name, file in files.items()}


def test_a_composed_config_can_be_resolved_without_a_check() -> None:
    """The files of configs/ refer to resolvers of ours, which must be known wherever a config is composed."""
    code = "from hpc.config import compose; print(compose.compose_overrides(['strategy=fsdp']).strategy.compile)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRON, cwd=PROJECT / "src", check=True)
    assert done.stdout == "False\n"


def accept(*overrides: str) -> None:
    arguments.check_files(parse.parse(compose.compose_overrides(list(overrides))))


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_is_accepted(choice: str, places: dict) -> None:
    accept(choice, *(need.format(**places) for need in NEEDS.get(choice, [])))


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["ddp", "ddp_4node", "fsdp", "fsdp_4node", "deepspeed", "deepspeed_4node"])
@pytest.mark.parametrize(
    "strategy", ["ddp", "fsdp", "tensor_parallel", "deepspeed_zero1", "deepspeed_zero3", "zero3_offload"]
)
def test_strategy_nodes_and_precision_go_on_top_of_any_trainer(trainer: str, strategy: str) -> None:
    more = ["trainer.num_nodes=2", "trainer.precision=bf16-true", "data.global_batch_size=64"]
    cfg = compose.compose_overrides([f"trainer={trainer}", "cluster=slurm", f"strategy={strategy}", *TEXT, *more])
    arguments.check_files(parse.parse(cfg))
    assert (cfg.strategy.name, cfg.trainer.num_nodes, cfg.trainer.devices) == (strategy, 2, 4)
    shares = layout.derive_layout(cfg)
    assert shares.world_size == 8
    assert shares.micro_batch_size == (32 if strategy == "tensor_parallel" else 8)  # by data-parallel size


def test_deepspeed_alone_means_zero_2() -> None:
    assert compose.compose_overrides(["trainer=deepspeed"]).strategy.lightning.stage == 2


# overrides → key, and words that the message must have
REFUSALS = [
    (["trainer=dpp"], "trainer", "trainer=ddp"),
    (["trianer=cpu"], "trianer", "trainer=..."),
    (["trainer.devics=2"], "trainer.devics", "trainer.devices=..."),
    (["+trainer.max_epoch=2"], "trainer.max_epoch", "trainer.max_epochs=..."),
    (["+model.network.dephts=[1]"], "model.network.dephts", "model.network.depths=..."),
    (["experiment=txt"], "experiment", "experiment=text"),
    (["sead=3"], "sead", "seed=..."),
    (["trainer.devices=0"], "trainer.devices", "at least 1"),
    (["trainer.devices=null"], "trainer.devices", "must be given"),
    (["trainer.num_nodes=-2"], "trainer.num_nodes", "at least 1"),
    (["trainer.num_nodes=2"], "trainer.num_nodes", "must be 1 with strategy=single"),
    (["trainer=ddp", "cluster=slurm", "trainer.devices=5"], "trainer.devices", "must be at most 4, the GPUs of a node"),
    (["trainer.devices=two"], "trainer.devices", "int"),
    (["trainer.max_epochs=x"], "trainer.max_epochs", "int | None"),
    (["trainer.log_every_n_steps=0"], "trainer.log_every_n_steps", "at least 1"),
    (["+trainer.check_val_every_n_epoch=0"], "trainer.check_val_every_n_epoch", "at least 1"),
    (["trainer.gradient_clip_val=-1"], "trainer.gradient_clip_val", "at least 0"),
    (["+trainer.gradient_clip_algorithm=none"], "trainer.gradient_clip_algorithm", "norm"),
    (
        ["+trainer.gradient_clip_algorithm=value", "strategy=deepspeed_zero1"],
        "trainer.gradient_clip_algorithm",
        "must be norm with DeepSpeed",
    ),
    (["seed=x"], "seed", "int"),
    (["seed=-2"], "seed", "from 0 to 4294967295"),
    (["logger.tensorboard.version='\u2066x'"], "logger.tensorboard.version", "no control characters"),
    (["model.optimizer.lr=fast"], "model.optimizer.lr", "float"),
    (["model.optimizer.lr=-1"], "model.optimizer.lr", "above 0"),
    (["model.optimizer.lr=0"], "model.optimizer.lr", "above 0"),
    (["model.optimizer.lr=inf"], "model.optimizer.lr", "above 0"),
    (["model.optimizer.lr=nan"], "model.optimizer.lr", "above 0"),
    (["model.network.depths=3"], "model.network.depths", "list[int]"),
    (["data.global_batch_size=many"], "data.global_batch_size", "int"),
    (["data.global_batch_size=0"], "data.global_batch_size", "at least 1"),
    (["strategy=ddp", *TWO, "data.global_batch_size=65"], "data.global_batch_size", "64 or data.global_batch_size=66"),
    (["trainer.accumulate_grad_batches=3"], "data.global_batch_size", "63 or data.global_batch_size=66"),
    (["trainer.precision=bf17"], "trainer.precision", "bf16-mixed"),
    (["trainer.precision=16-mixed"], "trainer.precision", "CPUs"),
    (["trainer.accelerator=tpu"], "trainer.accelerator", "cpu, gpu"),
    (["trainer.devices=2"], "trainer.devices", "strategy=ddp"),
    (["strategy=ddp", "strategy.tensor_parallel_size=2", *TWO], "strategy.tensor_parallel_size", "strategy=fsdp"),
    (
        ["strategy=fsdp", "strategy.tensor_parallel_size=3", *TWO, *TEXT],
        "strategy.tensor_parallel_size",
        "a divisor of the",
    ),
    (["strategy=tensor_parallel", *TWO], "model.network", "tensor_parallel_plan"),
    (
        ["strategy=tensor_parallel", *TWO, *TEXT, "model.network.num_heads=1"],
        "strategy.tensor_parallel_size",
        "number of attention heads (1)",
    ),
    ([*TEXT, "model.network.num_heads=5"], "model.network.num_heads", "num_heads=4"),
    (["strategy=fsdp", *TWO, "trainer.precision=16-mixed"], "trainer.precision", "bf16-mixed"),
    (["strategy=deepspeed_zero3", "strategy.compile=true", *TWO], "strategy.compile", "ZeRO-3"),
    (["strategy.compile=maybe"], "strategy.compile", "bool"),
    (["+strategy.shard=true"], "strategy.shard", "tensor_parallel_size"),
    (
        ["strategy=deepspeed_zero2", "callbacks=finetune"],
        "callbacks.finetune",
        "DeepSpeed trains no parameters that are released later",
    ),
    (["model=gpt_tiny", "data=digits"], "model.network.vocab_size", "do not go together"),
    (["data=images"], "data.dir", "must have a value, as it has no default"),
    (["data=images", "data.dir=/nowhere", "model=resnet18"], "data.dir", "/nowhere"),
    (["data=images", "data.dir=/nowhere"], "model.network.image_size", "must be at least data.image_size (224)"),
    ([*TEXT, "model.network.vocab_size=255"], "model.network.vocab_size", "model.network.vocab_size=256"),
    ([*TEXT, "model.network.block_size=64"], "model.network.block_size", "at least data.block_size (128)"),
    (["model.network.num_classes=9"], "model.network.num_classes", "at least data.num_classes (10)"),
    (["data=text", "data.files=/nowhere", "model=gpt_tiny"], "data.files", "/nowhere"),
    (["ckpt=/nowhere"], "ckpt", "must be an existing file or folder"),
    (["run_dir=s3://b/x"], "run_dir", "must be a directory of a file system"),
    (["run_dir='$HOME/x'"], "run_dir", "must be spelled out"),
    ([*TEXT, "model.network.in_channels=1"], "model.network.in_channels", "which takes block_size, dropout, num_heads"),
    (["task=test"], "task", "ckpt=<checkpoint> task=test"),
    (["task=fit"], "task", "train, test, predict"),
    (["checkpoint.keep=0"], "checkpoint.keep", "checkpoint.keep=1"),
    (["checkpoint.every_minutes=0"], "checkpoint.every_minutes", "above 0"),
    (["checkpoint.every_minutes=inf"], "checkpoint.every_minutes", "above 0"),
    (["checkpoint.every_n_steps=-5"], "checkpoint.every_n_steps", "above 0"),
    (["checkpoint.every_n_steps=0.5"], "checkpoint.every_n_steps", "int | None"),
    (["checkpoint.mode=maximum"], "checkpoint.mode", "checkpoint.mode=max"),
    (["+checkpoint.every_hours=1"], "checkpoint.every_hours", "checkpoint.every_minutes=..."),
    (["cluster.login_host=$(reboot)"], "cluster.login_host", "letters, digits, dots and dashes"),
    (["cluster.login_host=-oProxyCommand=x"], "cluster.login_host", "letters, digits, dots and dashes"),
    (["cluster.login_host=ana@login.site"], "cluster.login_host", "without user@"),
    (["cluster.node_local='$(reboot)'"], "cluster.node_local", "cluster.node_local='$TMPDIR'"),
    (["cluster.node_local='/tmp/`id`'"], "cluster.node_local", "$NAME or ${NAME}"),
    (["cluster.node_local='/a\"; reboot; \"'"], "cluster.node_local", "$NAME or ${NAME}"),
    (["faults.nonfinite=ignore"], "faults.nonfinite", "stop, skip, rollback"),
    (["faults.nonfinite=skip", "model.optimizer.fused=false"], "faults.nonfinite", "unless the optimizer is fused"),
    (["faults.nonfinite=skip", "strategy=deepspeed_zero1"], "faults.nonfinite", "DeepSpeed owns the optimizer step"),
    (["faults.nonfinite=skip", "strategy=zero3_offload"], "faults.nonfinite", "DeepSpeed owns the optimizer step"),
    (["faults.hang_minutes=0"], "faults.hang_minutes", "above 0"),
    (["faults.hang_minutes=null"], "faults.hang_minutes", "float"),
    (["faults.hang_minutes=1e30"], "faults.hang_minutes", "at most 525600"),
    (["callbacks.monitor=3"], "callbacks.monitor", "callbacks.monitor=null"),
    ([*TEXT, "model.network.block_size='no'"], "model.network.block_size", "int"),
    ([*TEXT, "model.network.num_heads=9000000000000000000000"], "model.network.num_heads", "num_heads=64"),
    ([*TEXT, "model.network.dropout=1.5"], "model.network.dropout", "from 0 to 1"),
    (["data.num_classes=-2"], "model.network.num_classes", "at least 1"),
    (["model.network.depths=[1,1]"], "model.network.depths", "model.network.widths, which has 3"),
    (["model.network.depths=[1,1,0]"], "model.network.depths", "above 0"),
    (["model.network.widths=[16,32,100]"], "model.network.widths", "norm=batch"),
    (["model.network.norm=none"], "model.network.norm", "group or batch"),
    (["faults.retries=0"], "faults.retries", "at least 1"),
    (["name=a b;$(x)"], "name", "name=a_b_x"),
    (["model.optimizer.lr=a b;$(x)"], "model.optimizer.lr=a b;$(x)", "'model.optimizer.lr=\"a b;$(x)\"'"),
    (["model.network._target_=os.system"], "model.network._target_", "must be in a trusted package"),
    (["+model={_target_: os.system}"], "model._target_", "must be in a trusted package"),
]
# What is missing, too, once that is typed which an error says.
FURTHER = {"trainer": "trainer.devices", "model.network.image_size": "data.dir"}


@pytest.mark.slow
@pytest.mark.parametrize(("overrides", "key", "words"), REFUSALS, ids=[" ".join(case[0]) for case in REFUSALS])
def test_rejections_name_key_rule_and_fix(overrides: list[str], key: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        accept(*overrides)
    assert caught.value.key == key
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 20
    for typed in typed_fixes.retyped(overrides, caught.value):
        with pytest.raises(ConfigError, match=f"^{further}") if (further := FURTHER.get(key)) else nullcontext():
            accept(*typed)


def test_all_keys_without_a_value_are_named_at_once() -> None:
    words = ["data=images", "model=resnet18", "model.optimizer.lr=???", "name=???"]
    with pytest.raises(ConfigError) as caught:
        parse.parse(compose.compose_overrides(words))
    assert caught.value.key == "name, data.dir, model.optimizer.lr"
    first, last = str(caught.value).splitlines()
    assert first == "name, data.dir, model.optimizer.lr must have values, as they have no default."
    assert last == "  Try: name=<value> data.dir=<value> model.optimizer.lr=<value>"


def test_all_that_a_job_on_this_cluster_cannot_do_without_is_named_at_once() -> None:
    missing = ["cluster.account", "cluster.partition", "cluster.gpus_per_node", "cluster.cores_per_gpu"]
    words = ["cluster=massive_m3", "trainer=ddp", "cluster.account=null"]
    with pytest.raises(ConfigError) as caught:
        parse.parse(compose.compose_overrides(words), for_job=True)
    assert caught.value.key == ", ".join(missing) and caught.value.value is None
    assert str(caught.value).startswith(f"{', '.join(missing)} must have values for a job on cluster=massive_m3.\n")
    assert all(f"{key}=<{key.partition('.')[2]}>" in caught.value.fix for key in missing)
    with pytest.raises(ConfigError) as caught:  # keys without a default are among them
        parse.parse(compose.compose_overrides([*words, "cluster.partition=m3", "data=images"]), for_job=True)
    assert caught.value.key == "cluster.account, cluster.gpus_per_node, cluster.cores_per_gpu, data.dir"
    known = ["cluster.account=a", "cluster.partition=m3", "cluster.gpus_per_node=2", "cluster.cores_per_gpu=8"]
    parse.parse(compose.compose_overrides(["cluster=massive_m3", "trainer=ddp", *known]), for_job=True)
    with pytest.raises(ConfigError, match=r"^cluster\.account must have a value for a job on cluster=massive_m3\."):
        parse.parse(compose.compose_overrides([*words[:2], "cluster.account=''", *known[1:]]), for_job=True)


@pytest.mark.parametrize(
    "bad", ["sead: 3", "trainer: {max_epoch: 3}", "defaults: [{override /data: digit}]", "data: {dri: x}"]
)
def test_a_mistake_in_an_experiment_file_is_rejected(bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    shutil.copytree(project.CONFIGS, tmp_path / "configs")
    (tmp_path / "configs/experiment/mine.yaml").write_text(f"# @package _global_\n{bad}\n")
    monkeypatch.setattr(compose, "CONFIGS", tmp_path / "configs")
    with pytest.raises(ConfigError):
        accept("experiment=mine")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("_target_: [one", "mine.yaml, line 2, is no YAML: expected ',' or ']'"),
        ("target: my_research.module.Classifier", "model must name its class in the key _target_; it has target"),
        ("{}", "model must name its class in the key _target_; it has no keys"),
    ],
)
def test_a_file_that_names_no_class_is_rejected(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    shutil.copytree(project.CONFIGS, tmp_path / "configs")
    (tmp_path / "configs/model/mine.yaml").write_text(f"{text}\n")
    monkeypatch.setattr(compose, "CONFIGS", tmp_path / "configs")
    with pytest.raises(ConfigError, match=re.escape(words)):
        accept("model=mine")


def test_a_module_that_cannot_be_imported_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpc.config import build

    text = "try:\n    import nowhere\nexcept ImportError:\n    raise ImportError('nowhere 2 is needed')\nclass Net: ..."
    (tmp_path / "needy.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    with pytest.raises(ConfigError, match=r"needy\.py, line 4: ImportError: nowhere 2 is needed"):
        build.build({"_target_": "needy.Net"})


def test_an_experiment_file_is_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    shutil.copytree(project.CONFIGS, tmp_path / "configs")
    said = {
        "seed": 7, "name": "mine", "matmul_precision": "highest",
        "checkpoint": {"monitor": "val/accuracy", "mode": "max", "keep": 5}, "faults": {"nonfinite": "rollback"},
        "logger": {"tensorboard": {"name": "other"}}, "trainer": {"max_epochs": 3}, "data": {"num_workers": 1},
        "callbacks": {"progress": {"refresh_rate": 7}}, "cluster": {"account": "abc"},
    }  # fmt: skip
    (tmp_path / "configs/experiment/mine.yaml").write_text(f"# @package _global_\n{json.dumps(said)}\n")
    (tmp_path / "clusters.yaml").write_text("slurm: {account: other, time: '3:00:00'}\n")
    monkeypatch.setattr(compose, "CONFIGS", tmp_path / "configs")
    monkeypatch.setattr(personal_clusters, "PERSONAL_CLUSTERS", tmp_path / "clusters.yaml")
    cfg = compose.compose_overrides(["experiment=mine", "cluster=slurm", "seed=8"])
    assert cfg.seed == 8 and cfg.cluster.time == "3:00:00"
    assert OmegaConf.merge(cfg, {**said, "seed": 8}) == cfg
    (tmp_path / "configs/experiment/child.yaml").write_text("# @package _global_\ndefaults: [mine]\nseed: 9\n")
    for words in (["experiment=child"], ["experiment=mine.yaml"], ["experiment=[mine,child]"]):
        cluster = compose.compose_overrides([*words, "cluster=slurm"]).cluster
        assert (cluster.account, cluster.time) == ("abc", "3:00:00")


def test_an_experiment_file_may_choose_another_logger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    shutil.copytree(project.CONFIGS, tmp_path / "configs")
    table = {"_target_": "lightning.pytorch.loggers.CSVLogger", "save_dir": "${run_dir}", "name": "table"}
    (tmp_path / "configs/logger/table.yaml").write_text(json.dumps(table))
    head = "# @package _global_\ndefaults: [{override /logger: "
    (tmp_path / "configs/experiment/named.yaml").write_text(f"{head}table}}]\n")
    (tmp_path / "configs/experiment/inline.yaml").write_text(f"{head}null}}]\nlogger: {json.dumps(table)}\n")
    monkeypatch.setattr(compose, "CONFIGS", tmp_path / "configs")
    for words in (["experiment=named"], ["experiment=inline"], ["logger=table"]):
        accept(*words)
        assert compose.compose_overrides(words).logger == table
    for words in (["logger=null"], ["experiment=named", "logger=null"]):
        assert compose.compose_overrides(words).logger is None


@pytest.mark.parametrize("words", [["logger=null", "logger=csv"], ["~logger", "logger=csv"]])
def test_of_a_group_without_a_choice_the_later_choice_counts(words: list[str]) -> None:
    """Check it as a run is resumed that had no logger: the words that it was made with come first."""
    assert list(compose.compose_overrides(words).logger) == ["csv"]
    assert compose.compose_overrides([*words, "logger=null"]).logger is None


def test_several_loggers_are_chosen_as_a_list() -> None:
    for choice, names in (("tensorboard", ["tensorboard"]), ("[tensorboard,csv]", ["tensorboard", "csv"])):
        assert list(compose.compose_overrides([f"logger={choice}"]).logger) == names
    accept("logger=[tensorboard,csv]", "logger.csv.name=table", "logger.tensorboard=null")


def test_every_file_of_a_group_overrides_train_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check it for a model file that sets a key of train.yaml, and for an experiment that overrides this one."""
    import shutil

    shutil.copytree(project.CONFIGS, tmp_path / "configs")
    text = "# @package _global_\ndefaults: [resnet_digits@model]\ncheckpoint: {monitor: val/accuracy, mode: max}\n"
    (tmp_path / "configs/model/mine.yaml").write_text(text)
    (tmp_path / "configs/experiment/mine.yaml").write_text("# @package _global_\ncheckpoint: {mode: min}\n")
    monkeypatch.setattr(compose, "CONFIGS", tmp_path / "configs")
    checkpoint = compose.compose_overrides(["model=mine"]).checkpoint
    assert (checkpoint.monitor, checkpoint.mode) == ("val/accuracy", "max")
    assert compose.compose_overrides(["model=mine", "experiment=mine"]).checkpoint.mode == "min"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ([], "digits_resnet"),
        (["model=gpt_tiny"], "stdlib_gpt_tiny"),
        (["data=images", "model=resnet50"], "images_resnet50"),
        (["experiment=text"], "text"),
        (["experiment=text", "name=mine"], "mine"),
        (["name=null"], "digits_resnet"),
        (["name=7"], "7"),
    ],
)
def test_the_default_name_follows_data_and_network(words: list[str], name: str) -> None:
    assert compose.compose_overrides(words).name == name


def test_a_default_name_is_legal_whatever_files_are_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    shutil.copytree(project.CONFIGS, tmp_path / "configs")
    (tmp_path / "configs/data/my sets").mkdir()
    shutil.copy(project.CONFIGS / "data/digits.yaml", tmp_path / "configs/data/my sets/_8 x 8.yaml")
    monkeypatch.setattr(compose, "CONFIGS", tmp_path / "configs")
    assert compose.compose_overrides(["data='my sets/_8 x 8'"]).name == "8_x_resnet_digits"
    assert compose._default_name({}) == "run"


def test_an_unknown_target_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    for target in ("torch.optim.AdamWW", "nowhere.at.all", "my_research.module.Nothing"):
        cfg = compose.compose_overrides([])
        cfg.model.optimizer._target_ = target
        with pytest.raises(ConfigError, match="_target_"):
            arguments.check_files(parse.parse(cfg))


def test_checkpoints_and_faults_as_one_likes() -> None:
    accept("checkpoint.every_minutes=null", "checkpoint.every_n_steps=100", "checkpoint.keep=1", "checkpoint.mode=max")
    accept("checkpoint.every_minutes=0.5", "checkpoint.monitor=null", "faults.hang_minutes=0.1", "faults.retries=1")
    accept("faults.nonfinite=skip")
    accept("faults.nonfinite=rollback", "strategy=deepspeed_zero1")


def test_deepspeed_that_is_not_installed_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install deepspeed"):
        accept("strategy=deepspeed_zero2", *TWO)


def test_resolved_config_has_no_open_reference(places: dict) -> None:
    cfg = compose.compose_overrides(
        ["data=images", f"data.dir={places['images']}", "model=resnet18", "data.global_batch_size=8"]
    )
    arguments.check_files(parse.parse(cfg))
    assert cfg.data.num_classes == cfg.model.network.num_classes == 2  # counted from the data, as it was not given
    OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)


def test_a_callback_may_ask_for_the_run_directory(tmp_path: Path) -> None:
    """Check that `${run_dir}` is accepted as a path, although the directory is chosen after the checks."""
    cfg = compose.compose_overrides([])
    OmegaConf.set_struct(cfg, False)
    cfg.callbacks.mine = {"_target_": "builtins.open", "file": "${run_dir}"}
    cfg.logger.tensorboard.save_dir = "${run_dir}/logs"
    arguments.check_files(parse.parse(cfg))
    assert cfg.run_dir is None
