"""A meter of a training step: its operations, and the memory that is alive at each moment."""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc.data.batch_contents import iterate_tensors
from hpc.monitor.flops import operation_flops
from hpc.privates import torch as privates
from hpc.privates.torch_sharding import local_shard

ATEN = torch.ops.aten
# What a collective costs as a share of an all-reduce of the whole tensor, which is a reduce-scatter and an all-gather.
COLLECTIVES = {"all_reduce": 1.0, "reduce_scatter": 0.5, "all_gather": 0.5}


class Operation(NamedTuple):
    """An operation of torch, or a collective, whose bytes are those of an all-reduce that costs the same."""

    name: str
    flops: int
    bytes: int


class Level(NamedTuple):
    """The memory after an allocation. See `trace_types.MemoryLevel`."""

    bytes: int
    gradients: float
    is_head: bool


class Meter(privates.TorchDispatchMode):
    """Measure a step of a module, once `begin` is called.

    Parameters, buffers and complete gradients do not count as bytes that are alive: strategies shard them.

    Attributes:
        forward, backward, reduced: operations in their order; `reduced` are collectives.
        levels: of the memory, in their order.
        alive: bytes now, in all.
        operation: the newest one.
        is_recording: whether operations and levels are recorded.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.forward: list[Operation] = []
        self.backward: list[Operation] = []
        self.reduced: list[Operation] = []
        self.levels: list[Level] = []
        self.alive, self.operation = 0, ""
        self.is_recording = False
        self._begin, self._is_head = 0, False
        self._counted = {storage_key(state) for state in (*module.parameters(), *module.buffers())}  # storages
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._num_trained = sum(local_shard(parameter).numel() for parameter in trained)
        self._gradients: dict[int, int] = {}  # numbers in each complete gradient, by storage
        self._num_complete = 0  # numbers in all of them
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._discount_gradient)

    def begin(self) -> None:
        """Begin the step: what is alive now is not its memory."""
        self._begin, self.is_recording = self.alive, True

    def leave_out(self, optimizer: torch.optim.Optimizer) -> None:
        """Record nothing while an optimizer makes a step, as manual optimization does within the module's."""
        optimizer.register_step_pre_hook(lambda *_: setattr(self, "is_recording", False))
        optimizer.register_step_post_hook(lambda *_: setattr(self, "is_recording", True))

    def enter_head(self, _: Any, args: Any, output: Any) -> None:
        """Begin the head of the network: a hook of the last block."""
        self._is_head = True
        for tensor in iterate_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._leave_head)

    def _leave_head(self, _: Tensor) -> None:
        self._is_head = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operations on this rank's shard arrive here one by one
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        self.operation = str(func)
        out = func(*args, **(kwargs or {}))
        read = [t for t in privates.tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        written = [t for t in privates.tree_iter(out) if isinstance(t, Tensor)]
        if self.is_recording:
            self._record(func, (args, kwargs or {}, out), read, written)
        for tensor in written:
            self.count(tensor)
        return out

    def _record(self, func: Any, call: Any, read: list[Tensor], written: list[Tensor]) -> None:
        name = str(func)
        if func.namespace == "_c10d_functional":
            for share in (share for kind, share in COLLECTIVES.items() if kind in name):
                whole = max(sum(map(local_bytes, tensors)) for tensors in (read, written))
                self.reduced.append(Operation(name, 0, int(share * whole)))
        elif not is_view(func):
            args, kwargs, out = call
            flops = operation_flops(func, args, kwargs, out=out)
            is_backward = privates.is_in_backward()
            works = self.backward if is_backward else self.forward
            works.append(Operation(name, flops, sum(map(local_bytes, (*read, *written)))))

    def count(self, tensor: Tensor) -> None:
        """Count the storage of a tensor once, until it is freed."""
        storage = local_shard(tensor).untyped_storage()
        key, size = privates.storage_key(storage), storage.nbytes()
        if key in self._counted:
            return
        self._counted.add(key)
        self.alive += size
        weakref.finalize(storage, self._free, key, size)
        if self.is_recording:
            # Gradients of the step before stay until backward begins.
            share = self._num_complete / self._num_trained if self.backward and self._num_trained else 1.0
            self.levels.append(Level(self.alive - self._begin, share, self._is_head))

    def _discount_gradient(self, parameter: Tensor) -> None:
        """Stop counting a complete gradient; memory.py adds gradients itself."""
        assert parameter.grad is not None
        if (key := storage_key(parameter.grad)) not in self._gradients:
            gradient = local_shard(parameter.grad)
            self._gradients[key] = gradient.numel()
            self._num_complete += gradient.numel()
            self.alive -= gradient.untyped_storage().nbytes()

    def _free(self, key: int, size: int) -> None:
        self._counted.discard(key)
        num_complete = self._gradients.pop(key, None)
        if num_complete is None:
            self.alive -= size
        else:
            self._num_complete -= num_complete


def local_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor on this rank."""
    return local_shard(tensor).numel() * tensor.element_size()


def is_view(func: Any) -> bool:
    """Return whether an operation only makes a view, which takes no time and no memory."""
    if func is ATEN._unsafe_view.default:  # its schema does not say so
        return True
    returns = privates.operation_schema(func).returns
    alias = returns[0].alias_info if returns else None
    return alias is not None and not alias.is_write


def storage_key(tensor: Tensor) -> int:
    """Return a key of the storage behind a tensor."""
    return privates.storage_key(local_shard(tensor).untyped_storage())
