"""Rules on sections of the config, each by itself. preflight.py calls them in order.

Each raises `ConfigError` for the first value that breaks it.
"""

import re

from omegaconf import DictConfig, OmegaConf

from hpc.config import extras, signatures
from hpc.config.conversion import flatten
from hpc.config.errors import (
    CONTROL_CHARACTERS,
    ConfigError,
    require_at_least,
    require_at_most,
    require_one_of,
    require_positive,
)
from hpc.config.sections import (
    STREAM_SPLITS,
    CheckpointConfig,
    ClusterConfig,
    FaultsConfig,
    RunConfig,
    StrategyConfig,
    TrainerConfig,
)
from hpc.config.trainer_arguments import PRECISIONS

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
MAX_HANG_MINUTES = 60 * 24 * 365  # timers take no more than some hundred years


def check_run(run: RunConfig) -> None:
    """Check the keys at the top of the config."""
    _check_name(run.name)
    if not 0 <= run.seed < 2**32:
        rule = "must be from 0 to 4294967295, as numpy's seeds are"
        raise ConfigError("seed", run.seed, rule, f"seed={abs(run.seed) % 2**32}")
    require_one_of("dirty_tree", run.dirty_tree, choices=["snapshot", "refuse"])
    require_one_of("matmul_precision", run.matmul_precision, choices=["highest", "high", "medium"])
    if run.run_dir:
        _check_run_dir(run.run_dir)
    require_one_of("task", run.task, choices=["train", "test", "predict"])
    if run.task != "train" and not run.ckpt:
        rule = "must be train without ckpt=, the checkpoint to use"
        raise ConfigError("task", run.task, rule, f"ckpt=<checkpoint> task={run.task}")


def _check_name(name: str) -> None:
    """Check the name of the run. It names files and the job; schedulers take no other characters.

    Lightning does not treat a job called bash or interactive as a job.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}", name) or name in ("bash", "interactive"):
        legal_name = re.sub(r"[^A-Za-z0-9._+-]+", "_", name).strip("._+-")
        rule = (
            "must be up to 100 letters, digits and . _ + -, a letter or digit first, and neither bash nor interactive"
        )
        fix = f"name={legal_name if legal_name not in ('', name) else 'my_run'}"[:100]
        raise ConfigError("name", repr(name), rule, fix)


def _check_run_dir(run_dir: str) -> None:
    if CONTROL_CHARACTERS.search(run_dir) or re.search(r"[\t\n]", run_dir):
        raise ConfigError("run_dir", repr(run_dir), "must be a path of one line", "run_dir=<a directory>")
    if "$" in run_dir:
        rule = "must be spelled out: some programs would expand a variable of the shell, and others would not"
        raise ConfigError("run_dir", run_dir, rule, "run_dir=${oc.env:NAME}/... in a file of configs/")
    if scheme := re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", run_dir):
        rule = f"must be a directory of a file system, not an address ({scheme[0]})"
        raise ConfigError("run_dir", run_dir, rule, "run_dir=<a directory>, copied there after the run")


def check_checkpoint(checkpoint: CheckpointConfig) -> None:
    """Check when the state is saved, and how many checkpoints are kept."""
    for key in ("every_minutes", "every_n_steps"):
        if (value := getattr(checkpoint, key)) is not None:
            require_positive(f"checkpoint.{key}", value)
    require_at_least("checkpoint.keep", checkpoint.keep, minimum=1)
    require_one_of("checkpoint.mode", checkpoint.mode, choices=["min", "max"])


def check_faults(faults: FaultsConfig, strategy: StrategyConfig) -> None:
    """Check how the run reacts to failures."""
    require_one_of("faults.nonfinite", faults.nonfinite, choices=["stop", "skip", "rollback"])
    if faults.nonfinite == "skip" and strategy.kind == "deepspeed":
        rule = f"must not be skip with strategy={strategy.name}: DeepSpeed owns the optimizer step"
        raise ConfigError("faults.nonfinite", "skip", rule, "faults.nonfinite=stop, or rollback")
    require_positive("faults.hang_minutes", faults.hang_minutes)
    require_at_most("faults.hang_minutes", faults.hang_minutes, maximum=MAX_HANG_MINUTES)
    require_at_least("faults.retries", faults.retries, minimum=1)


def check_nonfinite_skip(cfg: DictConfig) -> None:
    """Check that the optimizer of the config can skip an update. One of a module is checked at the first step."""
    optimizer = OmegaConf.select(cfg, "model.optimizer")
    if cfg.faults.nonfinite == "skip" and isinstance(optimizer, DictConfig) and not optimizer.get("fused"):
        override = "model.optimizer.fused=true"
        fix = f"{override if 'fused' in optimizer else '+' + override}, or faults.nonfinite=rollback"
        raise ConfigError("faults.nonfinite", "skip", SKIPPING_NEEDS_FUSED, fix)


def check_trainer(trainer: TrainerConfig, cluster: ClusterConfig) -> None:
    """Check that the cluster has the nodes and devices, and that the devices can compute in this precision."""
    require_one_of("trainer.accelerator", trainer.accelerator, choices=["cpu", "gpu"])
    require_one_of("trainer.precision", trainer.precision, choices=PRECISIONS)
    if trainer.devices is None:
        rule = f"must be given, as cluster={cluster.name} does not say how many GPUs a node has"
        raise ConfigError("trainer.devices", "null", rule, "trainer.devices=<devices per node>")
    for key in ("num_nodes", "devices", "accumulate_grad_batches", "log_every_n_steps"):
        require_at_least(f"trainer.{key}", getattr(trainer, key), minimum=1)
    if trainer.check_val_every_n_epoch is not None:
        require_at_least("trainer.check_val_every_n_epoch", trainer.check_val_every_n_epoch, minimum=1)
    require_at_least("trainer.max_steps", trainer.max_steps, minimum=-1)
    require_at_least("trainer.gradient_clip_val", trainer.gradient_clip_val or 0, minimum=0)
    clip_algorithm = trainer.gradient_clip_algorithm or "norm"
    require_one_of("trainer.gradient_clip_algorithm", clip_algorithm, choices=["norm", "value"])
    if cluster.max_nodes and trainer.num_nodes > cluster.max_nodes:
        rule = f"must be at most {cluster.max_nodes}, the nodes of a job on cluster={cluster.name}"
        fix = f"trainer.num_nodes={cluster.max_nodes} or another cluster="
        raise ConfigError("trainer.num_nodes", trainer.num_nodes, rule, fix)
    num_gpus = cluster.gpus_per_node
    if trainer.accelerator == "gpu" and num_gpus and trainer.devices > num_gpus:
        rule = f"must be at most {num_gpus}, the GPUs of a node of cluster={cluster.name}"
        raise ConfigError("trainer.devices", trainer.devices, rule, f"trainer.devices={num_gpus}")
    if trainer.accelerator == "cpu" and trainer.precision.startswith("16"):
        # Lightning would only warn, and train in bf16 instead.
        rule = "must be 32-true, 64-true, bf16-mixed or bf16-true on CPUs"
        raise ConfigError("trainer.precision", trainer.precision, rule, "trainer.precision=bf16-mixed")


def check_class_named(cfg: DictConfig, section: str) -> None:
    """Check that the section of the model or of the data names its class."""
    is_own_loaders = section == "data" and "_target_" in cfg.data and cfg.data._target_ is None  # data=none
    if not OmegaConf.select(cfg, f"{section}._target_") and not is_own_loaders:
        keys = ", ".join(str(key) for key in cfg[section]) or "no keys"
        rule = f"must name its class in the key _target_; it has {keys}"
        fix = f"a line _target_: <package.module.Class> in its file of configs/{section}"
        raise ConfigError(section, None, rule, fix)


def check_stream_splits(cfg: DictConfig) -> None:
    """Check the word that says who splits a home-made stream."""
    if (splits := cfg.data.get("stream_splits")) is not None:
        require_one_of("data.stream_splits", str(splits), choices=list(STREAM_SPLITS))


def check_callbacks(cfg: DictConfig) -> None:
    """Check that callbacks are named nodes, and none of those that do not work here."""
    if not isinstance(cfg.callbacks, DictConfig):
        raise ConfigError("callbacks", cfg.callbacks, "must be a mapping from names to callbacks", "callbacks=default")
    for name, node in cfg.callbacks.items():
        if node and not (isinstance(node, DictConfig) and "_target_" in node):
            rule = "must be a node with a _target_, or null"
            raise ConfigError(f"callbacks.{name}", node, rule, f"callbacks.{name}=null")
    for key, node in signatures.find_targets(OmegaConf.to_container(cfg.callbacks), "callbacks"):
        class_name = node["_target_"].rpartition(".")[2]
        if class_name in UNSUPPORTED_CALLBACKS and node["_target_"].startswith(("lightning.", "pytorch_lightning.")):
            rule, fix = UNSUPPORTED_CALLBACKS[class_name]
            raise ConfigError(key, node["_target_"], rule, fix.format(key.partition(".")[2]))


def check_monitor(cfg: DictConfig) -> None:
    """Check how often the nodes are sampled."""
    key = "callbacks.monitor.every_seconds"
    if isinstance(seconds := OmegaConf.select(cfg, key), int | float):  # another type is rejected with the arguments
        require_positive(key, seconds)
        require_at_least(key, seconds, minimum=1)


def check_loggers(cfg: DictConfig) -> None:
    """Check that loggers have their packages, and no control characters: their texts name folders and are shown."""
    for key, value in flatten(cfg).items():
        if key.startswith("logger") and isinstance(value, str) and CONTROL_CHARACTERS.search(value):
            fix = f"{key}={CONTROL_CHARACTERS.sub('', value)}"
            raise ConfigError(key, repr(value), "must have no control characters", fix)
    nodes = OmegaConf.to_container(cfg.logger, resolve=True) if OmegaConf.is_config(cfg.logger) else None
    for key, node in signatures.find_targets(nodes, "logger"):
        for extra in LOGGER_EXTRAS:
            if extra in node["_target_"].lower():
                extras.require(extra, key, node["_target_"])


def check_network_sizes(cfg: DictConfig) -> None:
    """Check that the network is made for the sizes of the data: those that both sections give under the same name."""
    network = OmegaConf.select(cfg, "model.network", default=None)
    for key in network if isinstance(network, DictConfig) else ():
        size, data_size = (
            OmegaConf.select(cfg, f"{section}.{key}", default=None) for section in ("model.network", "data")
        )
        is_known = all(isinstance(number, int) and not isinstance(number, bool) for number in (size, data_size))
        if is_known and 0 < size < data_size:
            rule = f"must be at least data.{key} ({data_size}), the size of the samples that the network gets"
            fix = f"another model= or data=, or model.network.{key}={data_size}"
            raise ConfigError(f"model.network.{key}", size, rule, fix)
