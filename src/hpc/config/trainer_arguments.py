"""The arguments of Lightning's Trainer: read as Lightning reads them; those that this project sets elsewhere."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from hpc.config.errors import ConfigError

PRECISIONS = ["32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "64-true"]
# Other names of these in Lightning.
PRECISION_ALIASES = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true", "None": "32-true"}
ALL_DEVICES = ("auto", "-1", -1)
# Keys from which `read_as_lightning` sets arguments.
READ_KEYS = {"trainer.precision", "trainer.accelerator", "trainer.devices"}
READ_KEYS |= {"cluster.accelerator", "cluster.gpus_per_node", "cluster.scheduler"}
# Arguments that train.py builds, and where the config sets them.
BUILT_BY_TRAIN = {
    "logger": "logger=csv, or logger=null for none",
    "callbacks": "callbacks.NAME._target_=<a class>, or a node in a file of configs/callbacks/",
    "plugins": "trainer.precision=<precision> and strategy=<strategy>, for which it builds them",
    "enable_checkpointing": "checkpoint.every_minutes=60 to save less often: a run that is to resume must save",
}
# Lightning's strategies by a part of their name, and the choice that does the same here.
STRATEGIES = {
    "offload": "zero3_offload", "stage_1": "deepspeed_zero1", "stage_3": "deepspeed_zero3",
    "deepspeed": "deepspeed_zero2", "fsdp": "fsdp", "modelparallel": "fsdp", "ddp": "ddp",
}  # fmt: skip


def read_as_lightning(cfg: DictConfig) -> None:
    """Set arguments that Lightning takes in several forms to the one form that the rest of the project knows.

    `auto` and -1 devices are those of a node of the cluster. Where the cluster does not say how many these are, they
    stay `auto`: only a process that trains may look (launch/node_checks.py). Modifies cfg.
    """
    trainer, cluster = cfg.trainer, cfg.cluster
    values: dict[str, Any] = {}
    for key in ("precision", "accelerator", "devices"):
        with suppress(OmegaConfBaseException):  # a rule reports what cannot be resolved
            values |= {key: trainer[key]} if key in trainer else {}
    read: dict[str, Any] = {}
    if "precision" in values and str(values["precision"]) in PRECISION_ALIASES:
        read["precision"] = PRECISION_ALIASES[str(values["precision"])]
    accelerator = values.get("accelerator")
    if accelerator == "cuda" or (accelerator == "auto" and cluster.get("scheduler")):
        read["accelerator"] = accelerator = "gpu" if accelerator == "cuda" else cluster.accelerator
    devices = values.get("devices")
    if devices in ALL_DEVICES:
        is_known = accelerator == cluster.get("accelerator") and cluster.get("gpus_per_node")
        read["devices"] = 1 if accelerator == "cpu" else cluster.gpus_per_node if is_known else "auto"
    elif isinstance(devices, str) and devices.isdecimal():
        read["devices"] = int(devices)
    with open_dict(trainer):
        trainer.update(read)


def argument_problems(cfg: DictConfig) -> Iterator[ConfigError]:
    """Yield the errors of arguments that have no effect here, or another one than in Lightning."""
    trainer = cfg.trainer
    for key, fix in BUILT_BY_TRAIN.items():
        if key in trainer:
            rule = "must be left out, as train.py builds it from another part of the config"
            yield ConfigError(f"trainer.{key}", ascii(trainer[key]), rule, fix)
    if str(trainer.get("default_root_dir")) not in ("None", str(cfg.run_dir)):
        rule = "must be the run directory, which run_dir= names"
        folder = trainer.default_root_dir
        fix = f"run_dir={folder if isinstance(folder, str) else '<a directory>'}"
        yield ConfigError("trainer.default_root_dir", folder, rule, fix)
    if trainer.get("barebones"):
        rule = "must be false: a run cannot be saved and resumed without callbacks"
        fix = "callbacks=null logger=null, which leaves out all others; trainer.fast_dev_run=true tries a few batches"
        yield ConfigError("trainer.barebones", True, rule, fix)
    if trainer.get("use_distributed_sampler"):
        rule = "must be false, as the samples are shared out among the ranks already"
        yield ConfigError("trainer.use_distributed_sampler", True, rule, "trainer.use_distributed_sampler=false")
    yield from _device_problems(trainer.get("devices"), accelerator=trainer.get("accelerator"))
    yield from _strategy_problems(trainer.get("strategy"), key=_strategy_key(cfg))


def _device_problems(devices: Any, *, accelerator: Any) -> Iterator[ConfigError]:
    if isinstance(devices, ListConfig) or (isinstance(devices, str) and "," in devices):
        indices = [index.strip(" '\"") for index in str(devices).strip("[]").split(",") if index.strip()]
        rule = "must be the number of devices of a node, not a list of them"
        fix = f"CUDA_VISIBLE_DEVICES={','.join(indices)} python train.py ... trainer.devices={max(len(indices), 1)}"
        yield ConfigError("trainer.devices", str(devices), rule, fix)
    if devices == "auto":
        rule = "must be a number here, as the cluster's file does not say how many a node has (train.py itself counts)"
        fix = "trainer.devices=<devices per node>" + ("; trainer=cpu trains without" if accelerator == "gpu" else "")
        yield ConfigError("trainer.devices", devices, rule, fix)


def _strategy_key(cfg: DictConfig) -> str:
    """Return where the strategy of the Trainer is written: usually in the file of strategy=."""
    text = str((OmegaConf.to_container(cfg.trainer, resolve=False) or {}).get("strategy"))  # type: ignore[union-attr]
    return "strategy.lightning" if "strategy.lightning" in text else "trainer.strategy"


def _strategy_problems(strategy: Any, *, key: str) -> Iterator[ConfigError]:
    """Yield the error of a strategy that is none of this project: only these save and resume a run."""
    target = strategy.get("_target_") if isinstance(strategy, DictConfig) else strategy
    if isinstance(strategy, DictConfig) and not str(target).startswith(("lightning.", "pytorch_lightning.")):
        return
    name = str(target).rpartition(".")[2].lower()
    choices = [choice for part, choice in STRATEGIES.items() if part in name]
    rule = "must be left to strategy=, whose strategies save and resume a run"
    fix = f"strategy={choices[0] if choices else 'single, or strategy=ddp on several devices'}"
    yield ConfigError(key, str(target), rule, fix)
