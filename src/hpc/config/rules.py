"""Rules on several sections of the config together: one flat list.

Each rule takes the sections, or keys at the top of the config, that its parameters name, and yields its errors.
`parse.py` calls those whose sections are right by themselves.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hpc.config import batch_size, extras, signatures
from hpc.config.conversion import flatten
from hpc.config.errors import CONTROL_CHARACTERS, ConfigError
from hpc.config.layout import is_known_number
from hpc.config.sections import STREAM_SPLITS, ClusterConfig, FaultsConfig, StrategyConfig, TrainerConfig
from hpc.config.value_rules import at_least, one_of, positive

Problems = Iterator[ConfigError | None]

MAX_SUGGESTED_SIZE = 4096  # more devices work in no tensor-parallel group
SKIPPING_NEEDS_FUSED = (
    "must not be skip unless the optimizer is fused, as only a fused optimizer can skip an update on the GPU"
)
_SAVES = (
    "An error must not be followed by a save: ranks may be at different steps, and would wait for each other",
    "callbacks.{}=null; see checkpoint.every_n_steps=, checkpoint.monitor= and checkpoint.keep=",
)
_SEARCHES = (
    "A run must not search for its own settings: it would find others each time it is resumed",
    "callbacks.{}=null; submit.py --search compares runs with different settings",
)
_RENAMES = (
    "Parameters must keep their names: pruning replaces them, so an interrupted run could not be resumed",
    "callbacks.{}=null; prune the trained network of the run's best checkpoint",
)
# Callbacks of Lightning that do not work here: the name of the class → rule, fix.
UNSUPPORTED_CALLBACKS = {"ModelPruning": _RENAMES, "OnExceptionCheckpoint": _SAVES}
UNSUPPORTED_CALLBACKS |= {"LearningRateFinder": _SEARCHES, "BatchSizeFinder": _SEARCHES}
LOGGER_EXTRAS = ("mlflow", "wandb")  # by a part of the logger's name


def a_task_has_its_weights(task: str, ckpt: str | None) -> Problems:
    if task != "train" and not ckpt:
        rule = "must be train without ckpt=, the checkpoint to use"
        yield ConfigError("task", task, rule, f"ckpt=<checkpoint> task={task}")


def a_model_names_its_class(model: DictConfig) -> Problems:
    if not OmegaConf.select(model, "_target_"):
        yield _no_class_error("model", model)


def data_name_their_class(data: DictConfig) -> Problems:
    is_own_loaders = "_target_" in data and data._target_ is None  # data=none
    if not OmegaConf.select(data, "_target_") and not is_own_loaders:
        yield _no_class_error("data", data)


def _no_class_error(section: str, node: DictConfig) -> ConfigError:
    keys = ", ".join(map(str, node)) or "no keys"
    rule = f"must name its class in the key _target_; it has {keys}"
    return ConfigError(section, None, rule, f"a line _target_: <package.module.Class> in its file of configs/{section}")


def a_node_of_the_cluster_has_the_devices(trainer: TrainerConfig, cluster: ClusterConfig) -> Problems:
    num_gpus = cluster.gpus_per_node
    if trainer.accelerator == "gpu" and num_gpus and (trainer.devices or 0) > num_gpus:
        rule = f"must be at most {num_gpus}, the GPUs of a node of cluster={cluster.name}"
        yield ConfigError("trainer.devices", trainer.devices, rule, f"trainer.devices={num_gpus}")


def a_cpu_computes_in_this_precision(trainer: TrainerConfig) -> Problems:
    if trainer.accelerator == "cpu" and trainer.precision.startswith("16"):
        # Lightning would only warn, and train in bf16 instead.
        rule = "must be 32-true, 64-true, bf16-mixed or bf16-true on CPUs"
        yield ConfigError("trainer.precision", trainer.precision, rule, "trainer.precision=bf16-mixed")


def a_task_has_cores_for_the_workers(cluster: ClusterConfig, data: DictConfig) -> Problems:
    num_workers, num_cores = OmegaConf.select(data, "num_workers"), cluster.cores_per_gpu
    if cluster.scheduler and num_cores and is_known_number(num_workers) and num_workers > num_cores:
        rule = f"must be at most {num_cores}, the cores of a task on cluster={cluster.name} (cluster.cores_per_gpu)"
        yield ConfigError("data.num_workers", num_workers, rule, f"data.num_workers={max(num_cores - 1, 1)}")


def deepspeed_skips_no_update(faults: FaultsConfig, strategy: StrategyConfig) -> Problems:
    if faults.nonfinite == "skip" and strategy.kind == "deepspeed":
        rule = f"must not be skip with strategy={strategy.name}: DeepSpeed owns the optimizer step"
        yield ConfigError("faults.nonfinite", "skip", rule, "faults.nonfinite=stop, or rollback")


def a_fused_optimizer_skips_an_update(faults: FaultsConfig, model: DictConfig) -> Problems:
    """Look at the optimizer of the config. One of a module is checked at the first step."""
    optimizer = OmegaConf.select(model, "optimizer")
    if faults.nonfinite == "skip" and isinstance(optimizer, DictConfig) and not optimizer.get("fused"):
        override = "model.optimizer.fused=true"
        fix = f"{override if 'fused' in optimizer else '+' + override}, or faults.nonfinite=rollback"
        yield ConfigError("faults.nonfinite", "skip", SKIPPING_NEEDS_FUSED, fix)


def callbacks_are_nodes(callbacks: Any) -> Problems:
    if not isinstance(callbacks, DictConfig):
        yield ConfigError("callbacks", callbacks, "must be a mapping from names to callbacks", "callbacks=default")
        return
    for name, node in callbacks.items():
        if node and not (isinstance(node, DictConfig) and "_target_" in node):
            rule = "must be a node with a _target_, or null"
            yield ConfigError(f"callbacks.{name}", node, rule, f"callbacks.{name}=null")
    for key, target in _callback_targets(callbacks):
        class_name = target.rpartition(".")[2]
        if class_name in UNSUPPORTED_CALLBACKS and target.startswith(("lightning.", "pytorch_lightning.")):
            rule, fix = UNSUPPORTED_CALLBACKS[class_name]
            yield ConfigError(key, target, rule, fix.format(key.partition(".")[2]))


def callbacks_change_weights_that_are_whole(callbacks: Any, strategy: StrategyConfig) -> Problems:
    for key, target in _callback_targets(callbacks):
        if target.endswith("Finetuning") and strategy.kind == "deepspeed":
            rule = "must be used without DeepSpeed: DeepSpeed trains no parameters that are released later"
            yield ConfigError(key, None, rule, f"strategy=ddp or fsdp, or {key}=null")
        if target.endswith("WeightAveraging") and strategy.kind not in ("single", "ddp"):
            rule = f"must be used with strategy=single or ddp, not {strategy.name}: it averages whole weights"
            yield ConfigError(key, None, rule, f"strategy=ddp, or {key}=null")


def _callback_targets(callbacks: Any) -> Iterator[tuple[str, str]]:
    if isinstance(callbacks, DictConfig):
        for key, node in signatures.find_targets(OmegaConf.to_container(callbacks), "callbacks"):
            yield key, node["_target_"]


def a_single_device_is_one(strategy: StrategyConfig, trainer: TrainerConfig) -> Problems:
    if strategy.kind == "single" and trainer.num_nodes * (trainer.devices or 1) > 1:
        name, number = ("num_nodes", trainer.num_nodes) if trainer.num_nodes > 1 else ("devices", trainer.devices)
        rule = "must be 1 with strategy=single, which trains on one device"
        yield ConfigError(f"trainer.{name}", number, rule, f"trainer.{name}=1, or strategy=ddp")


def ranks_share_each_layer(strategy: StrategyConfig, trainer: TrainerConfig) -> Problems:
    key, size = "strategy.tensor_parallel_size", strategy.tensor_parallel_size
    world_size = trainer.num_nodes * (trainer.devices or 1)
    if size > 1 and strategy.kind != "fsdp":
        fix = f"{key}=1, or strategy=fsdp with a network that has `tensor_parallel_plan` (see models/gpt.py)"
        yield ConfigError(key, size, f"must be 1 with strategy={strategy.name}", fix)
    elif world_size % size:
        sizes = f"{trainer.num_nodes} nodes * {trainer.devices} devices = {world_size}"
        rule = f"must be a divisor of the world size ({sizes})"
        divisors = (n for n in range(1, min(world_size, MAX_SUGGESTED_SIZE) + 1) if world_size % n == 0)
        yield ConfigError(key, size, rule, f"{key}={min(divisors, key=lambda divisor: abs(divisor - size))}")


def fsdp_has_no_loss_scale(strategy: StrategyConfig, trainer: TrainerConfig) -> Problems:
    if strategy.kind == "fsdp" and trainer.precision == "16-mixed":
        # Shards would have to agree on the loss scale, which Lightning 2.6 does not do for FSDP2.
        rule = f"must be one of 32-true, 64-true, bf16-mixed, bf16-true, 16-true with strategy={strategy.name}"
        yield ConfigError("trainer.precision", trainer.precision, rule, "trainer.precision=bf16-mixed")


def deepspeed_can_train_this(strategy: StrategyConfig, trainer: TrainerConfig) -> Problems:
    if strategy.kind != "deepspeed":
        return
    if find_spec("deepspeed") is None:
        rule = "It needs the package deepspeed, which is not installed"
        yield ConfigError("strategy", strategy.name, rule, "pip install deepspeed -c constraints.txt")
    if trainer.precision == "64-true":
        rule = "must be a precision of 32 or 16 bit with DeepSpeed"
        yield ConfigError("trainer.precision", trainer.precision, rule, "trainer.precision=32-true")
    if trainer.gradient_clip_algorithm == "value" and trainer.gradient_clip_val:
        rule = "must be norm with DeepSpeed, which clips gradients itself"
        fix = "trainer.gradient_clip_algorithm=norm, or strategy=ddp or fsdp"
        yield ConfigError("trainer.gradient_clip_algorithm", "value", rule, fix)
    if strategy.compile and strategy.lightning.stage == 3:
        rule = "must be false with ZeRO-3, which gathers parameters in hooks that a compiled block would not run"
        yield ConfigError("strategy.compile", True, rule, "strategy.compile=false, or strategy=fsdp")


def a_network_is_made_for_the_data(model: DictConfig, data: DictConfig) -> Problems:
    """Compare the sizes that both sections give under the same name."""
    network = OmegaConf.select(model, "network", default=None)
    for key in map(str, network) if isinstance(network, DictConfig) else ():
        size, data_size = (OmegaConf.select(node, key, default=None) for node in (network, data))
        if is_known_number(size) and is_known_number(data_size) and 0 < size < data_size:
            rule = f"must be at least data.{key} ({data_size}), the size of the samples that the network gets"
            fix = f"another model= or data=, or model.network.{key}={data_size}"
            yield ConfigError(f"model.network.{key}", size, rule, fix)


def a_known_word_splits_a_stream(data: DictConfig) -> Problems:
    if (splits := data.get("stream_splits")) is not None:
        yield one_of("data.stream_splits", str(splits), list(STREAM_SPLITS))


def nodes_are_not_sampled_too_often(callbacks: Any) -> Problems:
    key = "monitor.every_seconds"
    seconds = OmegaConf.select(callbacks, key) if isinstance(callbacks, DictConfig) else None
    if isinstance(seconds, int | float):  # another type is rejected with the arguments
        yield positive(f"callbacks.{key}", seconds)
        yield at_least(f"callbacks.{key}", seconds, 1)


def loggers_have_their_packages(logger: Any) -> Problems:
    """Look for the packages, and for control characters: texts of loggers name folders and are shown."""
    if not OmegaConf.is_config(logger):
        return
    for key, value in flatten(logger, "logger").items():
        if isinstance(value, str) and CONTROL_CHARACTERS.search(value):
            fix = f"{key}={CONTROL_CHARACTERS.sub('', value)}"
            yield ConfigError(key, repr(value), "must have no control characters", fix)
    for key, node in signatures.find_targets(OmegaConf.to_container(logger, resolve=True), "logger"):
        for extra in LOGGER_EXTRAS:
            if extra in node["_target_"].lower():
                yield extras.missing(extra, key, node["_target_"])


RULES = [
    a_task_has_its_weights,
    a_model_names_its_class,
    data_name_their_class,
    a_node_of_the_cluster_has_the_devices,
    a_cpu_computes_in_this_precision,
    a_task_has_cores_for_the_workers,
    deepspeed_skips_no_update,
    a_fused_optimizer_skips_an_update,
    callbacks_are_nodes,
    a_single_device_is_one,
    ranks_share_each_layer,
    fsdp_has_no_loss_scale,
    deepspeed_can_train_this,
    callbacks_change_weights_that_are_whole,
    a_network_is_made_for_the_data,
    batch_size.a_batch_can_be_shared,
    a_known_word_splits_a_stream,
    nodes_are_not_sampled_too_often,
    loggers_have_their_packages,
]
