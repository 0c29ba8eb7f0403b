"""A training step whose operations and memory are measured, on tensors without content: of any size, on any machine.

A step that reads values of tensors runs on real ones, if it is small.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from hpc.data.batch_contents import BatchSize, measure_batch
from hpc.plan.cuda_emulation import emulate_cuda
from hpc.plan.example_batches import ExampleBatch, ExampleBatches, UnreadableData
from hpc.plan.meter import Meter, local_bytes, storage_key
from hpc.plan.module_source import ModuleSource, NotTraceable
from hpc.plan.trace_types import ParameterGroup
from hpc.privates.torch import make_fake_store
from hpc.privates.torch_sharding import local_shard
from hpc.strategies.blocks import Blocks
from hpc.strategies.parallelize import planned_part
from hpc.training import dry_run
from hpc.training.fake_tensors import default_dtype, fake_tensor_mode, real_tensor_mode

OUTSIDE = "outside the blocks"  # the name of the group of parameters beside them
DTYPES = {"64": torch.float64, "32": torch.float32, "16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step; without a batch, the parameters alone."""

    groups: tuple[ParameterGroup, ...]
    meter: Meter
    optimizer_states: float | None  # numbers that the optimizers keep per parameter
    batch_size: BatchSize | None = None
    numbers_per_example: int = 0  # in the input


@dataclass(frozen=True)
class Precision:
    """The precision of a step.

    Attributes:
        parameters: in computation: 64, 32, 16 or bf16.
        autocast: of CUDA's autocast; None: no autocast.
    """

    parameters: str
    autocast: str | None = None

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.parameters]

    @contextmanager
    def step_context(self) -> Iterator[None]:
        """Compute in this precision within the block."""
        with torch.autocast("cpu", DTYPES[self.autocast]) if self.autocast else default_dtype(self.dtype):
            yield


def run_step(
    source: ModuleSource,
    batches: ExampleBatches,
    *,
    num_examples: int,
    precision: Precision,
    num_ranks: int,
    is_checkpointed: bool,
    is_real: bool,
) -> MeasuredStep:
    """Run a training step, and a step of the optimizers.

    Args:
        num_ranks: that share each layer, as the network's `tensor_parallel_plan` says.
        is_checkpointed: whether the activations inside the blocks are dropped, and computed again in backward.
        is_real: whether tensors have values.

    Raises:
        NotTraceable
        UnreadableData
    """
    with _tensor_parallel_mesh(num_ranks) as mesh, ExitStack() as stack:
        stack.enter_context(real_tensor_mode() if is_real else fake_tensor_mode())
        meter = None
        try:
            make_module = source.make_real if is_real else source.make
            module, trainer = make_module(precision.dtype), dry_run.DryRunTrainer()
            is_converted = precision.parameters != "32"
            dtype = precision.dtype if is_converted else None
            batch = batches.make(module, num_examples, dtype=dtype, is_real=is_real)
            trainer.datamodule = batches.trainer.datamodule
            dry_run.attach(module, trainer)
            _parallelize(module, mesh)
            with suppress(*[Exception] * module.automatic_optimization):  # its optimizers are not needed for the step
                dry_run.make_optimizers(module)
            dry_run.begin_training(module)
            blocks = source.find_blocks(module)
            for block in blocks.modules if blocks and is_checkpointed else ():  # as parallelize.py does
                block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
            meter = stack.enter_context(Meter(module))
            states = _optimizer_states(trainer, meter)
            _measure(module, blocks, meter=meter, batch=batch, precision=precision)
        except (NotTraceable, UnreadableData):
            raise
        except Exception as error:
            raise NotTraceable(dry_run.explain(error, meter.operation if meter else None)) from error
    first = batch.tensors[0] if batch.tensors else None
    numbers = first.numel() // num_examples if first is not None else 0
    return MeasuredStep(_list_groups(module, blocks), meter, states, measure_batch(batch.batch), numbers)


def measure_parameters(source: ModuleSource, *, precision: Precision, num_ranks: int) -> MeasuredStep:
    """Measure the parameters of a module, and the states of its optimizers if they can be made, but no step.

    Raises:
        NotTraceable: the module cannot be made.
    """
    with _tensor_parallel_mesh(num_ranks) as mesh, fake_tensor_mode():
        try:
            module, states = source.make(precision.dtype), None
        except Exception as error:
            raise NotTraceable(dry_run.explain(error)) from error
        trainer = dry_run.DryRunTrainer()
        with suppress(Exception):  # the reason is told already
            dry_run.attach(module, trainer)
        _parallelize(module, mesh)
        with Meter(module) as meter, suppress(Exception):
            dry_run.make_optimizers(module)
            states = _optimizer_states(trainer, meter)
        return MeasuredStep(_list_groups(module, source.find_blocks(module)), meter, states)


def _measure(
    module: L.LightningModule, blocks: Blocks | None, *, meter: Meter, batch: ExampleBatch, precision: Precision
) -> None:
    """Run forward and backward. A module that optimizes by itself has done all of it when its step returns."""
    if blocks:
        blocks.modules[-1].register_forward_hook(meter.enter_head)
    for optimizer in module.trainer.optimizers:
        meter.leave_out(optimizer)
    meter.begin()
    for tensor in batch.tensors:
        meter.count(tensor)
    with emulate_cuda():
        with precision.step_context():
            loss = dry_run.training_step(module, dry_run.transfer(module, batch.batch))
        if loss is not None:
            module.backward(loss)


def _parallelize(module: L.LightningModule, mesh: DeviceMesh | None) -> None:
    if mesh is not None:
        network = planned_part(module)
        parallelize_module(network, mesh, network.tensor_parallel_plan())


def _list_groups(module: nn.Module, blocks: Blocks | None) -> tuple[ParameterGroup, ...]:
    """Return the groups of a module. A parameter that several blocks share belongs to the first one."""
    names = [f"block {number}" for number in range(len(blocks.modules) if blocks else 0)]
    tensors: dict[str, list[Tensor]] = {name: [] for name in (OUTSIDE, *names)}
    seen: set[int] = set()
    for name, part in (*zip(names, blocks.modules if blocks else (), strict=True), (OUTSIDE, module)):
        for tensor in (*part.parameters(), *part.buffers()):
            if (key := storage_key(tensor)) not in seen:
                seen.add(key)
                tensors[name].append(tensor)
    return tuple(_group(name, states) for name, states in tensors.items())


def _group(name: str, states: list[Tensor]) -> ParameterGroup:
    parameters = [state for state in states if isinstance(state, nn.Parameter)]
    return ParameterGroup(
        name=name,
        num_parameters=sum(local_shard(parameter).numel() for parameter in parameters),
        num_trained_per_rank=sum(local_shard(parameter).numel() for parameter in parameters if parameter.requires_grad),
        num_parameters_all_ranks=sum(parameter.numel() for parameter in parameters),
        num_tensors=len(parameters),
        buffer_bytes=sum(local_bytes(state) for state in states if not isinstance(state, nn.Parameter)),
    )


def _optimizer_states(trainer: L.Trainer, meter: Meter) -> float | None:
    """Return how many numbers the optimizers keep per parameter (AdamW: 2); None if they cannot be tried."""
    before, num_bytes = meter.alive, 0
    try:
        for optimizer in trainer.optimizers:
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            # Kernels for many tensors at once reject a mixture of DTensors and plain tensors.
            parameters = [p for p in parameters if isinstance(p, DTensor)] or parameters
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            num_bytes += sum(map(local_bytes, parameters))
    except Exception:  # one needs a closure, or real numbers
        return None
    finally:
        trainer.lightning_module.zero_grad()
    return (meter.alive - before) / num_bytes if num_bytes else None


@contextmanager
def _tensor_parallel_mesh(num_ranks: int) -> Iterator[DeviceMesh | None]:
    """Open a process group whose other ranks do not exist: a collective acts as if all had sent the same."""
    if num_ranks == 1:
        yield None
        return
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=make_fake_store())
    try:
        yield init_device_mesh("cpu", (num_ranks,))
    finally:
        dist.destroy_process_group()
