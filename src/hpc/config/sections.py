"""Typed sections of the config, and the layout derived from them.

configs/train.yaml and hpc/configs/cluster/base.yaml explain the keys.
"""

from dataclasses import dataclass, fields
from typing import Any

from omegaconf import DictConfig, OmegaConf


@dataclass
class RunConfig:
    """The top level of the config."""

    name: str
    seed: int
    run_dir: str | None
    ckpt: str | None
    task: str
    profile: bool
    matmul_precision: str
    force: bool
    dirty_tree: str
    resume_allow: list[str]
    checkpoint: Any
    faults: Any
    trainer: Any
    strategy: Any
    cluster: Any
    model: Any
    data: Any
    callbacks: Any
    logger: Any


@dataclass
class CheckpointConfig:
    """Times at which the state of a run is saved, and number of checkpoints to keep. configs/train.yaml explains."""

    every_minutes: float | None
    every_n_steps: int | None
    keep: int
    monitor: str | None
    mode: str


@dataclass
class FaultsConfig:
    """Reactions of a run to failures. configs/train.yaml explains."""

    nonfinite: str
    hang_minutes: float
    retries: int


@dataclass
class ClusterConfig:
    """The machine, and what its scheduler is asked for; null where unknown. hpc/configs/cluster/base.yaml explains."""

    name: str
    scheduler: str | None
    required: list[str]
    account: str | None
    partition: str | None
    qos: str | None
    constraint: str | None
    time: str
    max_time: str | None
    max_nodes: int | None
    login_host: str | None
    exclusive: bool
    memory_gb: int | None
    request: str | None
    options: list[str]
    accelerator: str
    gpus_per_node: int | None
    gpu: str | None
    gpu_link_gbs: float | None
    network_gbs: float | None
    cores_per_gpu: int | None
    launcher: str
    container: str | None
    env: dict[str, str]
    interface: str | None
    master_addr_suffix: str
    node_local: str | None
    cache: str
    stage_env: bool
    chain: int
    rendezvous_seconds: int


@dataclass
class TrainerConfig:
    """The numbers of `trainer` from which others are derived, or which are checked more strictly than by Lightning."""

    accelerator: str
    num_nodes: int
    devices: int | None
    precision: str
    accumulate_grad_batches: int
    gradient_clip_val: float | None
    max_steps: int
    log_every_n_steps: int
    gradient_clip_algorithm: str | None = None
    check_val_every_n_epoch: int | None = 1


# The classes that the Trainer gets, and what rules and plans know of them.
STRATEGY_KINDS = {"Single": "single", "DDP": "ddp", "FSDP": "fsdp", "DeepSpeed": "deepspeed"}


@dataclass
class StrategyConfig:
    """The keys of `strategy`. `lightning` is the node of the object that the Trainer gets; `name` is a text to show."""

    name: str
    tensor_parallel_size: int
    activation_checkpointing: bool
    channels_last: bool
    compile: bool
    lightning: Any
    blocks: Any = None

    @property
    def kind(self) -> str:
        """Return single, ddp, fsdp or deepspeed; of a class of another name, the name of the strategy."""
        return strategy_kind(self)


@dataclass(frozen=True)
class Layout:
    """Sizes of the shared work: derived from trainer, strategy and data, never typed."""

    world_size: int
    data_parallel_size: int
    micro_batch_size: int | None  # samples of a device at a time; None: only the loaders of the data know
    global_batch_size: int | None  # samples of an optimizer step
    device: str  # of a run on one device


def derive_layout(cfg: DictConfig) -> Layout:
    """Return the layout of a config.

    world size = nodes * devices = data-parallel size * tensor-parallel size;
    global batch size = data-parallel size * accumulated batches * micro-batch size.
    """
    world_size = cfg.trainer.num_nodes * cfg.trainer.devices
    data_parallel_size = world_size // cfg.strategy.tensor_parallel_size
    num_micro_batches = data_parallel_size * cfg.trainer.accumulate_grad_batches
    global_size, micro_size = cfg.data.get("global_batch_size"), cfg.data.get("batch_size")
    if global_size is not None:
        micro_size = global_size // num_micro_batches
    elif micro_size is not None:
        global_size = micro_size * num_micro_batches
    return Layout(world_size, data_parallel_size, micro_size, global_size, "cuda:0" if is_on_gpu(cfg) else "cpu")


def strategy_kind(strategy: Any) -> str:
    """Return the kind of the section `strategy`, by its class: its name is free text."""
    class_name = str(strategy.lightning.get("_target_")).rpartition(".")[2]
    return STRATEGY_KINDS.get(class_name) or str(strategy.name)


def is_on_gpu(cfg: DictConfig) -> bool:
    """Return whether the run trains on GPUs."""
    return cfg.trainer.accelerator != "cpu"


STREAM_SPLITS = ("ranks", "workers", "nothing")  # values of data.stream_splits
# Keys whose values are text: an account 0123 or a partition called no stays what was typed.
TEXT_KEYS = {field.name for field in fields(RunConfig) if field.type in (str, str | None)}
TEXT_KEYS |= {f"cluster.{field.name}" for field in fields(ClusterConfig) if field.type in (str, str | None)}
# The files of configs/ say ${layout:world_size} and ${on_gpu:}.
OmegaConf.register_new_resolver("layout", lambda name, *, _root_: getattr(derive_layout(_root_), name), replace=True)
OmegaConf.register_new_resolver("on_gpu", lambda *, _root_: is_on_gpu(_root_), replace=True)
