"""The layout of a run over devices, as far as its memory and its time depend on it. Imports no torch."""

from dataclasses import dataclass

from hpc.config.layout import derive_layout, is_on_gpu, strategy_kind
from hpc.config.sections import Config

BYTES = {"64": 8, "32": 4, "16": 2, "bf16": 2}  # of a number, by the first word of trainer.precision


@dataclass(frozen=True)
class ParallelLayout:
    """The layout of a run: world size = nodes * devices = data-parallel * tensor-parallel."""

    nodes: int
    devices: int  # per node
    micro_batch: int  # examples that a rank computes at once; 0: only the loaders of the data know
    accumulate: int = 1  # micro-batches per step
    tensor_parallel: int = 1
    sharding: str = "none"  # fsdp, zero1, zero2, zero3
    precision: str = "32-true"
    checkpointing: bool = False
    compile: bool = False
    offload: bool = False  # of parameters and optimizer to the node's memory
    bucket: int = 0  # numbers in DeepSpeed's buffers for reducing
    overlap: bool = True  # of communication and computation
    accelerated: bool = True  # on GPUs
    single: bool = False  # one device without a process group, hence without buckets for gradients

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices

    @property
    def data_parallel(self) -> int:
        return self.world_size // self.tensor_parallel

    @property
    def global_batch(self) -> int:
        return self.data_parallel * self.micro_batch * self.accumulate

    @property
    def computes_in(self) -> tuple[str, str | None]:
        """Return the precision of parameters in computation, and that of autocast (None: no autocast).

        FSDP2 gathers shards in bf16 (strategies/parallelize.py). DeepSpeed keeps a 16-bit copy, without autocast.
        """
        kind, _, mode = self.precision.partition("-")
        if mode != "mixed":
            return kind, None
        if self.sharding.startswith("zero"):
            return kind, None
        return (kind, kind) if self.sharding == "fsdp" and self.data_parallel > 1 else ("32", kind)


def setup_from_config(cfg: Config) -> ParallelLayout:
    """Return the setup of a checked config."""
    strategy, trainer = cfg.strategy, cfg.trainer
    kind = strategy_kind(strategy)  # all but these two keep everything on every rank
    sharding = {"fsdp": "fsdp", "deepspeed": f"zero{strategy.lightning.get('stage', 2)}"}.get(kind, "none")
    has_overlap = strategy.lightning.get("overlap_comm")
    return ParallelLayout(
        nodes=trainer.num_nodes,
        devices=trainer.devices,
        micro_batch=derive_layout(cfg).micro_batch_size or 0,
        accumulate=trainer.accumulate_grad_batches,
        tensor_parallel=strategy.tensor_parallel_size,
        sharding=sharding,
        precision=str(trainer.precision),
        checkpointing=strategy.activation_checkpointing,
        compile=strategy.compile,
        offload=bool(strategy.lightning.get("offload_optimizer")),
        bucket=strategy.lightning.get("reduce_bucket_size", 0) * (1 + bool(has_overlap)),
        overlap=strategy.lightning.get("overlap_comm", True),
        accelerated=is_on_gpu(cfg),
        single=kind == "single",
    )
