"""The sections of the config: their keys, types and defaults, what each key means, and what must hold of it alone.

`defaults.py` gives the defaults to Hydra, `parse.py` makes these objects, and `--help KEY` prints the comments here.
"""

import re
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from hpc.config.cluster_section import ClusterConfig
from hpc.config.errors import CONTROL_CHARACTERS, ConfigError, raise_problems
from hpc.config.layout import strategy_kind
from hpc.config.trainer_arguments import PRECISIONS
from hpc.config.value_rules import at_least, at_most, one_of, positive

MAX_HANG_MINUTES = 60 * 24 * 365  # timers take no more than some hundred years
STREAM_SPLITS = ("ranks", "workers", "nothing")  # values of data.stream_splits


@dataclass
class CheckpointConfig:
    """Times at which the state of a run is saved, and number of checkpoints to keep."""

    every_minutes: float | None = 10  # null: no checkpoints by time
    every_n_steps: int | None = None  # in optimizer steps; null: none by steps
    keep: int = 2  # number of latest checkpoints to keep, besides the best
    monitor: str | None = None  # metric of the best checkpoint, e.g. val/loss; null: keep no best one
    mode: str = "min"  # min or max: which value of it is best

    def __post_init__(self) -> None:
        raise_problems(
            [
                positive("checkpoint.every_minutes", self.every_minutes),
                positive("checkpoint.every_n_steps", self.every_n_steps),
                at_least("checkpoint.keep", self.keep, 1),
                one_of("checkpoint.mode", self.mode, ["min", "max"]),
            ]
        )


@dataclass
class FaultsConfig:
    """Reactions of a run to failures."""

    # what to do when a loss or gradient is NaN or infinite. stop: end the run. skip: skip this update (needs a fused
    # optimizer). rollback: return to the last checkpoint and skip these samples
    nonfinite: str = "stop"
    hang_minutes: float = 10  # end the job after so many minutes without a step, and write the stack of every rank
    retries: int = 3  # give up after so many starts in a row without a newer checkpoint

    def __post_init__(self) -> None:
        raise_problems(
            [
                one_of("faults.nonfinite", self.nonfinite, ["stop", "skip", "rollback"]),
                positive("faults.hang_minutes", self.hang_minutes),
                at_most("faults.hang_minutes", self.hang_minutes, MAX_HANG_MINUTES),
                at_least("faults.retries", self.retries, 1),
            ]
        )


@dataclass
class TrainerConfig:
    """The arguments of lightning.pytorch.Trainer; all others that it takes may be given, too."""

    _target_: str = "lightning.pytorch.Trainer"
    default_root_dir: str | None = "${run_dir}"  # the run directory; run_dir= names another one
    accelerator: str = "${cluster.accelerator}"  # gpu or cpu
    num_nodes: int = 1
    devices: int = "${cluster.gpus_per_node}"  # per node  # type: ignore[assignment]
    strategy: Any = "${strategy.lightning}"  # of the group strategy=
    precision: str = "32-true"  # 16-mixed, bf16-mixed, 16-true, bf16-true or 64-true
    max_epochs: int | None = 20
    max_steps: int = -1  # optimizer steps; -1: as many as max_epochs has
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None  # largest norm of the gradient; a model may want one
    log_every_n_steps: int = 10  # of the curves; before the first of these: steps 1, 2, 5, 10, 20, 50, ...
    use_distributed_sampler: bool = False  # hpc distributes the samples, and evaluates none twice
    # measures only the time waiting for data; with another profiler there is no perf/data_seconds
    profiler: Any = field(default_factory=lambda: {"_target_": "hpc.training.step_overhead.DataWaitClock"})
    gradient_clip_algorithm: str | None = None  # norm or value; null: norm
    check_val_every_n_epoch: int | None = 1  # null: not by epochs

    def __post_init__(self) -> None:
        raise_problems(
            [
                one_of("trainer.accelerator", self.accelerator, ["cpu", "gpu"]),
                one_of("trainer.precision", self.precision, PRECISIONS),
                *(
                    at_least(f"trainer.{key}", getattr(self, key), 1)
                    for key in ("num_nodes", "devices", "accumulate_grad_batches", "log_every_n_steps")
                ),
                at_least("trainer.check_val_every_n_epoch", self.check_val_every_n_epoch, 1),
                at_least("trainer.max_steps", self.max_steps, -1),
                at_least("trainer.gradient_clip_val", self.gradient_clip_val, 0),
                one_of("trainer.gradient_clip_algorithm", self.gradient_clip_algorithm, ["norm", "value"]),
            ]
        )


@dataclass
class StrategyConfig:
    """How ranks share the work."""

    name: str = ""  # a text to show
    tensor_parallel_size: int = 1  # ranks that compute each layer together; at most the devices of a node
    # path of the module's list of blocks, e.g. network.layers, or a list of paths; null: its `blocks`, or its longest
    # list of equal parts
    blocks: Any = None
    activation_checkpointing: bool = False  # recompute blocks in backward instead of storing their activations
    channels_last: bool = False  # memory format of convolutions; a model may want it
    compile: bool = False  # torch.compile, block by block; a model may want it
    lightning: Any = None  # the node of the object that the Trainer gets

    def __post_init__(self) -> None:
        raise_problems([at_least("strategy.tensor_parallel_size", self.tensor_parallel_size, 1), self._node_problem()])

    def _node_problem(self) -> ConfigError | None:
        if isinstance(self.lightning, DictConfig) and "_target_" in self.lightning:
            return None
        rule = "must be a node with a _target_, as the files of configs/strategy have it"
        return ConfigError("strategy.lightning", self.lightning, rule, "strategy=ddp, or another one of --help")

    @property
    def kind(self) -> str:
        """Return single, ddp, fsdp or deepspeed; of a class of another name, the name of the strategy."""
        return strategy_kind(self)


@dataclass(kw_only=True)
class Config:
    """A run. `python train.py --help` lists the files of configs/ that set several keys at once.

    `node` is the config as it was composed, with its references: what is saved, and what objects are built from.
    """

    name: str = ""  # of the run directory and the job; null: of data and model, each word once (digits_resnet)
    seed: int = 1
    run_dir: str | None = None  # null: a new directory in runs/
    ckpt: str | None = None  # start with the weights of this checkpoint, of any strategy
    task: str = "train"  # train, and test at the end; test or predict with ckpt=, without training
    profile: bool = False  # true: record some steps with torch.profiler; see callbacks.profile
    matmul_precision: str = "high"  # fp32 matrix products on a GPU: high = TF32, highest = fp32, medium = bf16
    force: bool = False  # true: submit a run even if it is predicted not to fit into the GPUs' memory
    dirty_tree: str = "snapshot"  # snapshot: submit the code as it is; refuse: do not while anything is uncommitted
    # with resume=: keys that may change this time, e.g. [model.optimizer.lr]; [data]: the data's files
    resume_allow: list[str] = field(default_factory=list)
    checkpoint: CheckpointConfig
    faults: FaultsConfig
    trainer: TrainerConfig
    strategy: StrategyConfig
    cluster: ClusterConfig
    model: Any = None  # your LightningModule and its arguments
    # your LightningDataModule and its arguments; and beside them data.global_batch_size (of all devices) or
    # data.batch_size (of a device), and data.stream_splits: who splits the samples of an IterableDataset of your own
    # among several ranks. ranks: it gives each rank (and each worker) samples of its own. workers: it splits them by
    # get_worker_info, which counts the workers of all ranks. nothing: all read the same, and take turns
    data: Any = None
    callbacks: Any = field(default_factory=dict)  # by names of your choice
    logger: Any = None  # null: none; logger=[tensorboard,csv]: several
    node: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        raise_problems(
            [
                _name_problem(self.name),
                _seed_problem(self.seed),
                one_of("dirty_tree", self.dirty_tree, ["snapshot", "refuse"]),
                one_of("matmul_precision", self.matmul_precision, ["highest", "high", "medium"]),
                _run_dir_problem(self.run_dir),
                one_of("task", self.task, ["train", "test", "predict"]),
            ]
        )

    @property
    def run_path(self) -> Path:
        """Return the run directory, once it has been chosen."""
        assert self.run_dir, "it is null until `directory.choose_run_dir` has chosen it"
        return Path(self.run_dir)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a value. `${run_dir}` in the nodes follows the run directory, which is chosen late."""
        super().__setattr__(name, value)
        if name == "run_dir" and self.__dict__.get("node") is not None:
            self.node.run_dir = value


def _name_problem(name: str) -> ConfigError | None:
    """Return the error of a name that schedulers do not take. It names files and the job.

    Lightning does not treat a job called bash or interactive as a job.
    """
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}", name or "-") and name not in ("bash", "interactive"):
        return None
    legal_name = re.sub(r"[^A-Za-z0-9._+-]+", "_", str(name)).strip("._+-")
    rule = "must be up to 100 letters, digits and . _ + -, a letter or digit first, and neither bash nor interactive"
    fix = f"name={legal_name if legal_name not in ('', name) else 'my_run'}"[:100]
    return ConfigError("name", repr(name), rule, fix)


def _seed_problem(seed: int) -> ConfigError | None:
    if seed is None or 0 <= seed < 2**32:
        return None
    rule = "must be from 0 to 4294967295, as numpy's seeds are"
    return ConfigError("seed", seed, rule, f"seed={abs(seed) % 2**32}")


def _run_dir_problem(run_dir: str | None) -> ConfigError | None:
    if not run_dir:
        return None
    if CONTROL_CHARACTERS.search(run_dir) or re.search(r"[\t\n]", run_dir):
        return ConfigError("run_dir", repr(run_dir), "must be a path of one line", "run_dir=<a directory>")
    if "$" in run_dir:
        rule = "must be spelled out: some programs would expand a variable of the shell, and others would not"
        return ConfigError("run_dir", run_dir, rule, "run_dir=${oc.env:NAME}/... in a file of configs/")
    if scheme := re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", run_dir):
        rule = f"must be a directory of a file system, not an address ({scheme[0]})"
        return ConfigError("run_dir", run_dir, rule, "run_dir=<a directory>, copied there after the run")
    return None


SECTIONS: dict[str, type] = {
    "checkpoint": CheckpointConfig,
    "faults": FaultsConfig,
    "trainer": TrainerConfig,
    "strategy": StrategyConfig,
    "cluster": ClusterConfig,
}


def key_fields(schema: type) -> list[Field]:
    """Return the fields that are keys with a value: neither sections, nor the node that the parser adds."""
    return [key for key in fields(schema) if key.name != "node" and key.type not in SECTIONS.values()]


# Keys whose values are text: an account 0123 or a partition called no stays what was typed.
TEXT_KEYS = {key.name for key in key_fields(Config) if key.type in (str, str | None)}
TEXT_KEYS |= {f"cluster.{key.name}" for key in key_fields(ClusterConfig) if key.type in (str, str | None)}
