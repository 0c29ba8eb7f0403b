"""A meter of a module that runs on tensors without content: its operations, and the memory that is alive."""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hpc.monitor.flops import operation_flops

ATEN = torch.ops.aten
# What a collective costs as a share of an all-reduce of the whole tensor, which is a reduce-scatter and an all-gather.
COLLECTIVES = {"all_reduce": 1.0, "reduce_scatter": 0.5, "all_gather": 0.5}


@dataclass
class PartRun:
    """One part in one direction. Sizes are bytes."""

    begin: int = 0  # alive when it began
    end: int = 0  # alive when it ended
    levels: list[int] = field(default_factory=list)  # alive after each allocation, beyond `begin`
    work: list[tuple[int, int]] = field(default_factory=list)  # FLOPs and bytes of each operation
    reduced: list[int] = field(default_factory=list)  # of the all-reduce that costs what a collective does
    num_needed: int = 0  # operations until the last tensor that backward needs


class Meter(TorchDispatchMode):
    """Measure a module: `runs` by part and direction; `operation` is the newest one, in `part`.

    Parameters and buffers belong to the part that reads them first, and do not count as memory that is alive.

    Args:
        owners: parts by their names, if those that own parameters are known before.

    Attributes:
        is_one_part: forward and backward passes follow each other in any order; memory is that of the whole step.
    """

    def __init__(self, module: torch.nn.Module, owners: Mapping[str, torch.nn.Module] | None = None) -> None:
        super().__init__()
        self.states = {_key(state): state for state in (*module.parameters(), *module.buffers())}
        self.owner: dict[int, str] = {}
        for name, part in (owners or {}).items():
            for state in (*part.parameters(), *part.buffers()):
                self.owner.setdefault(_key(state), name)
        self.is_one_part = False
        self.runs: dict[tuple[str, str], PartRun] = {}
        self.part, self.direction, self.operation = "before", "forward", ""
        self._run, self.alive = PartRun(), 0
        self._counted = set(self.states)  # storages
        self._gradients: set[int] = set()  # storages of complete gradients, which are not counted any more
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._discount_gradient)

    def enter(self, part: str, direction: str) -> None:
        """End the present part, and begin another one."""
        self.leave()
        self.part, self.direction = part, direction
        self._run = self.runs.setdefault((part, direction), PartRun(begin=self.alive))

    def leave(self) -> None:
        """End the present part."""
        self._run.end = self._run.begin if self.is_one_part else self.alive

    def mark_recompute_end(self, tensor: Tensor) -> Tensor:
        """Record that backward needs a tensor: checkpointing would repeat all operations so far. Return the tensor."""
        self._run.num_needed = len(self._run.work)
        return tensor

    def owned_tensors(self, part: str) -> list[Tensor]:
        """Return parameters and buffers of a part. Those that no part read belong to the part "before"."""
        return [state for key, state in self.states.items() if self.owner.get(key, "before") == part]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operations on this rank's shard arrive here one by one
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        self.operation = str(func)
        out = func(*args, **(kwargs or {}))
        read = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        written = [t for t in tree_iter(out) if isinstance(t, Tensor)]
        for tensor in read:
            if self.direction != "step" and (key := _key(tensor)) in self.states:
                self.owner.setdefault(key, self.part)
        for tensor in written:
            self.count(tensor)
        run = self._run
        if self.is_one_part and torch._C._current_graph_task_id() != -1:  # within a backward pass
            run = self.runs.setdefault((self.part, "backward"), PartRun())
        if func.namespace == "_c10d_functional":
            for share in (share for name, share in COLLECTIVES.items() if name in str(func)):
                whole = max(sum(map(local_bytes, tensors)) for tensors in (read, written))
                run.reduced.append(int(share * whole))
        elif not is_view(func):
            flops = operation_flops(func, args, kwargs, out=out)
            run.work.append((flops, sum(map(local_bytes, (*read, *written)))))
        return out

    def count(self, tensor: Tensor) -> None:
        """Count the storage of a tensor once, until it is freed."""
        storage = local_shard(tensor).untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._counted:
            return
        self._counted.add(key)
        self.alive += size
        self._run.levels.append(self.alive - self._run.begin)
        weakref.finalize(storage, self._free, key, size)

    def _discount_gradient(self, parameter: Tensor) -> None:
        """Stop counting a complete gradient; memory.py adds gradients itself."""
        assert parameter.grad is not None
        if (key := _key(parameter.grad)) not in self._gradients:
            self._gradients.add(key)
            self.alive -= local_shard(parameter.grad).untyped_storage().nbytes()

    def _free(self, key: int, size: int) -> None:
        self._counted.discard(key)
        if key in self._gradients:
            self._gradients.discard(key)
        else:
            self.alive -= size


def local_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor on this rank."""
    return local_shard(tensor).numel() * tensor.element_size()


def is_view(func: Any) -> bool:
    """Return whether an operation only makes a view, which takes no time and no memory."""
    if func is ATEN._unsafe_view.default:  # its schema does not say so
        return True
    returns = func._schema.returns
    alias = returns[0].alias_info if returns else None
    return alias is not None and not alias.is_write


def _key(tensor: Tensor) -> int:
    """Return a key of the storage behind a tensor."""
    return local_shard(tensor).untyped_storage()._cdata


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor."""
    return getattr(tensor, "_local_tensor", tensor)
