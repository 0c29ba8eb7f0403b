"""May this run start? Rules on the config, told on a login node before the queue."""

import re
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationResolutionError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from hpc.config import section_rules, signatures
from hpc.config.cluster_in_bash import cluster_in_bash
from hpc.config.compose import PERSONAL
from hpc.config.errors import ConfigError
from hpc.config.project import is_ours
from hpc.config.sections import CheckpointConfig, FaultsConfig, RunConfig, StrategyConfig, TrainerConfig
from hpc.config.typed import flat, typed
from hpc.system import home


def check(cfg: DictConfig) -> None:
    """All that can be told on this machine before torch: the rules, then the files.

    Raises:
        ConfigError: the first rule that is broken.
    """
    rules(cfg)
    files(cfg)


def rules(cfg: DictConfig) -> None:
    """What can be decided from the config alone, so every rank decides alike; in order of cost.

    Raises:
        ConfigError: the first rule that is broken.
    """
    _complete(cfg)
    run = typed(RunConfig, cfg, "")
    trainer = typed(TrainerConfig, cfg.trainer, "trainer", only_ours=True)
    strategy = typed(StrategyConfig, cfg.strategy, "strategy")
    cluster = cluster_in_bash(cfg)
    section_rules.run(run)
    section_rules.trainer(trainer, cluster)
    section_rules.built_here(cfg.trainer)
    section_rules.cluster(cluster, cfg)
    section_rules.checkpoint(typed(CheckpointConfig, cfg.checkpoint, "checkpoint"))
    section_rules.faults(typed(FaultsConfig, cfg.faults, "faults"), strategy)
    section_rules.skipping(cfg)
    _strategy_rules(strategy, trainer, cfg)
    _network_rules(strategy, cfg)
    _callback_rules(cfg)
    section_rules.batch(cfg)
    section_rules.monitor(cfg)
    section_rules.loggers(cfg)
    _bind_targets(cfg.data, "data")


def job(cfg: DictConfig) -> None:
    """The rules, and what a job needs beyond a run on this machine: a scheduler, what this cluster cannot do without.

    The scheduler comes first: where there is none, other rules would ask for what another cluster's file says.

    Raises:
        ConfigError: the first rule that is broken, the first thing that is missing, by name.
    """
    if OmegaConf.select(cfg, "cluster.scheduler") is None:
        rule = "has no scheduler to submit to"
        raise ConfigError(
            "cluster", cfg.cluster.name, rule, "cluster=<one of --help>, or python train.py to train here"
        )
    rules(cfg)
    cluster = cluster_in_bash(cfg)
    for key in cluster.required:
        if getattr(cluster, key, None) in (None, ""):
            rule = f"a job on {cluster.name} has to name it; {PERSONAL} is the place to keep it"
            raise ConfigError(f"cluster.{key}", None, rule, f"cluster.{key}=<{key}>")
    if cluster.stage_env and not cluster.node_local:
        rule = "says where on a node the environment is copied to"
        raise ConfigError(
            "cluster.node_local", "null", rule, "cluster.node_local='$TMPDIR', or cluster.stage_env=false"
        )


def _complete(cfg: DictConfig) -> None:
    """Every reference leads somewhere, and no `???` is left."""
    for key, value in flat(cfg).items():
        try:
            OmegaConf.select(cfg, key, throw_on_missing=True)
        except (MissingMandatoryValue, InterpolationToMissingValueError):
            if value == "???":
                raise ConfigError(key, "???", "has no default, this run needs it", f"{key}=<value>") from None
        except InterpolationKeyError:
            rule = "refers to a key that this config does not have: these groups do not go together"
            other = str(value).strip("${}").split(".")[0]
            raise ConfigError(key, value, rule, f"another choice of {key.split('.')[0]}= or of {other}=") from None
        except InterpolationResolutionError as error:
            if unset := re.search(r"Environment variable '(.*?)' not found", str(error)):
                rule = f"the environment variable {unset[1]} must be set"
                raise ConfigError(
                    key, value, rule, f"export {unset[1]}=..., here and where jobs are submitted"
                ) from None
            continue  # as below
        except OmegaConfBaseException:
            continue  # a number derived from others that are wrong: the rules on those will tell


def files(cfg: DictConfig) -> None:
    """What the config points at is there and can be used, seen from here. Fills in what data say of themselves.

    Raises:
        ConfigError: the first thing that is not.
    """
    if cfg.ckpt and not (_goes_on(cfg) or home.expand(cfg.ckpt).exists()):
        raise ConfigError("ckpt", cfg.ckpt, "there is no such file or folder", "ckpt=<checkpoint of a run>")
    for key, node in signatures.targets(OmegaConf.to_container(cfg, resolve=True)):
        signatures.bind(key, {name: value for name, value in node.items() if value is not None}, complete=False)
    _ask_nodes(cfg, cfg)  # which may count on the types of what is there
    whole = cfg.copy()
    whole.run_dir = cfg.run_dir or "runs"  # chosen later, but a path
    _bind_targets(whole)


def _goes_on(cfg: DictConfig) -> bool:
    """Has the run a checkpoint of its own, so that it no longer needs the one it began with?"""
    own = home.expand(cfg.run_dir) / "checkpoints/last.ckpt" if cfg.run_dir else None
    return own is not None and own.exists() and not cfg.test_only


def _strategy_rules(strategy: StrategyConfig, trainer: TrainerConfig, cfg: DictConfig) -> None:
    world = trainer.num_nodes * (trainer.devices or 1)
    tensor = strategy.tensor_parallel_size
    section_rules.at_least("strategy.tensor_parallel_size", tensor, 1)
    if strategy.name == "single" and world > 1:
        raise ConfigError("trainer.devices", trainer.devices, "strategy=single trains on one device", "strategy=ddp")
    if tensor > 1 and strategy.name not in ("fsdp", "tensor_parallel"):
        raise ConfigError(
            "strategy.tensor_parallel_size", tensor, f"is 1 with strategy={strategy.name}", "strategy=fsdp"
        )
    if world % tensor:
        rule = f"divides the world size, {trainer.num_nodes} nodes * {trainer.devices} devices = {world}"
        raise ConfigError(
            "strategy.tensor_parallel_size", tensor, rule, f"strategy.tensor_parallel_size={_divisors(world, tensor)}"
        )
    if strategy.name in ("fsdp", "tensor_parallel") and trainer.precision == "16-mixed":
        # The loss scale would have to be agreed between shards, which Lightning 2.6 does not do for FSDP2.
        rule = f"strategy={strategy.name} trains in 32-true, 64-true, bf16-mixed, bf16-true or 16-true"
        raise ConfigError("trainer.precision", trainer.precision, rule, "trainer.precision=bf16-mixed")
    if strategy.name.startswith(("deepspeed", "zero")):
        _deepspeed_rules(strategy, trainer, cfg)
    _finetuning_rules(strategy, world, cfg)


# Callbacks of Lightning's that would not do here what they are for: class → rule, fix.
_SAVES = (
    "the project itself must write the checkpoints, whole or not at all, as it resumes from them",
    "callbacks.{}=null; see checkpoint.every_n_steps=, checkpoint.monitor= and checkpoint.keep=",
)
_SEARCHES = (
    "a run must not search for its own settings: it would search again, and find others, each time it is resumed",
    "callbacks.{}=null; tools/search.py compares runs with different settings",
)
_RENAMES = (
    "parameters must keep their names while a run lasts: pruning replaces them, so an interrupted run could not go on",
    "callbacks.{}=null; prune a trained network, of the run's best checkpoint",
)
NOT_HERE = {"ModelPruning": _RENAMES, "ModelCheckpoint": _SAVES, "OnExceptionCheckpoint": _SAVES}
NOT_HERE |= {"LearningRateFinder": _SEARCHES, "BatchSizeFinder": _SEARCHES}


def _callback_rules(cfg: DictConfig) -> None:
    if not isinstance(cfg.callbacks, DictConfig):
        raise ConfigError("callbacks", cfg.callbacks, "must be named callbacks", "callbacks=default")
    for name, node in cfg.callbacks.items():
        if node and not (isinstance(node, DictConfig) and "_target_" in node):
            rule = "a callback must be a node with a _target_, or null"
            raise ConfigError(f"callbacks.{name}", node, rule, f"callbacks.{name}=null")
    for key, node in signatures.targets(OmegaConf.to_container(cfg.callbacks), "callbacks"):
        name = node["_target_"].rpartition(".")[2]
        if name in NOT_HERE and node["_target_"].startswith(("lightning.", "pytorch_lightning.")):
            rule, fix = NOT_HERE[name]
            raise ConfigError(key, node["_target_"], rule, fix.format(key.partition(".")[2]))


def _finetuning_rules(strategy: StrategyConfig, world: int, cfg: DictConfig) -> None:
    for key, node in signatures.targets(OmegaConf.to_container(cfg.callbacks), "callbacks"):
        if node["_target_"].endswith("Finetuning") and (world > 1 or strategy.name not in ("single", "ddp")):
            rule = "trains on one device without shards: what is frozen at the start is never averaged or sharded"
            raise ConfigError(key, None, rule, "trainer=gpu (or cpu), or callbacks=default")
        if node["_target_"].endswith("WeightAveraging") and strategy.name not in ("single", "ddp"):
            rule = f"weights are averaged whole: the strategy must be single or ddp, not {strategy.name}"
            raise ConfigError(key, None, rule, f"strategy=ddp, or {key}=null")


def _deepspeed_rules(strategy: StrategyConfig, trainer: TrainerConfig, cfg: DictConfig) -> None:
    if find_spec("deepspeed") is None:
        raise ConfigError(
            "strategy", strategy.name, "needs the package deepspeed", "pip install deepspeed -c constraints.txt"
        )
    if trainer.precision == "64-true":
        raise ConfigError(
            "trainer.precision", trainer.precision, "DeepSpeed trains in 32 or 16 bit", "trainer.precision=32-true"
        )
    if trainer.gradient_clip_algorithm == "value" and trainer.gradient_clip_val:
        rule = "DeepSpeed, which clips gradients itself, must clip them by their norm"
        fix = "trainer.gradient_clip_algorithm=norm, or strategy=ddp or fsdp"
        raise ConfigError("trainer.gradient_clip_algorithm", "value", rule, fix)
    if strategy.compile and cfg.strategy.lightning.stage == 3:
        rule = "ZeRO-3 gathers parameters in hooks that a compiled block would not run"
        raise ConfigError("strategy.compile", True, rule, "strategy.compile=false, or strategy=fsdp")


def _network_rules(strategy: StrategyConfig, cfg: DictConfig) -> None:
    """What the strategy asks of the network class, read from its source."""
    target = OmegaConf.select(cfg, "model.network._target_") or ""
    if not is_ours(target):
        return
    members = signatures.signature(target).members
    wants = {"tensor_parallel_plan": strategy.tensor_parallel_size > 1}
    wants["blocks"] = (
        strategy.name in ("fsdp", "tensor_parallel") or strategy.activation_checkpointing or strategy.compile
    )
    for member, wanted in wants.items():
        if wanted and member not in members:
            rule = f"{target} has no `{member}`, which strategy={strategy.name} works on"
            other = "strategy.compile=false" if strategy.compile and member == "blocks" else "strategy=ddp"
            raise ConfigError(
                "model.network", target, rule, f"give the class `{member}` (see models/gpt.py), or {other}"
            )


def _bind_targets(cfg: DictConfig, prefix: str = "") -> None:
    for key, node in signatures.targets(OmegaConf.to_container(cfg, resolve=True), prefix):
        signatures.bind(key, node)


def _ask_nodes(node: Any, cfg: DictConfig) -> None:
    """Run the `_check_` functions that nodes name; what they return fills keys that are null."""
    for value in list(node.values()) if isinstance(node, DictConfig) else []:
        _ask_nodes(value, cfg)
    if isinstance(node, DictConfig) and (named := node.get("_check_")):
        module, _, function = named.rpartition(".")
        for key, value in (getattr(import_module(module), function)(node, cfg) or {}).items():
            if node[key] is None:
                node[key] = value


def _divisors(number: int, near: int) -> int:
    most = min(number, 4096)  # more are no devices of a node
    return min((d for d in range(1, most + 1) if number % d == 0), key=lambda d: abs(d - near))
