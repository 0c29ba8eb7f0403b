"""Counts what a network does while it runs on tensors without content: operations, and the memory that is alive."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

ATEN = torch.ops.aten
FORMULAS: dict[Any, Callable[..., int]] = flop_registry | {
    ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[ATEN._scaled_dot_product_flash_attention],
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        ATEN._scaled_dot_product_flash_attention_backward
    ],
}
# What CUDA's autocast computes in fp32 and the CPU's does not (docs.pytorch.org/docs/stable/amp.html).
IN_FP32 = {F.layer_norm, F.group_norm, F.softmax, F.log_softmax, F.nll_loss, F.cross_entropy, F.mse_loss, F.l1_loss}
IN_FP32 |= {torch.softmax, torch.log_softmax, torch.exp, torch.log, torch.pow, torch.cumsum, torch.norm, F.softplus}
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")


@dataclass
class Span:
    """What one part did in one direction. Bytes."""

    begin: int = 0  # alive
    end: int = 0
    levels: list[int] = field(default_factory=list)  # alive after each time that some more was, above what was at begin
    work: list[tuple[int, int]] = field(default_factory=list)  # FLOPs and bytes of each operation
    reduced: list[int] = field(default_factory=list)
    needed: int = 0  # of the operations, before backward's last tensor was there


class Meter(TorchDispatchMode):
    """`spans` by part and direction; `last`, the operation that was begun last, in `part`.

    Parameters and buffers count as the part's that reads them first, and not as memory that is alive.
    """

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.states = {_key(state): state for state in (*network.parameters(), *network.buffers())}
        self.owner: dict[int, str] = {}
        self.spans: dict[tuple[str, str], Span] = {}
        self.part, self.last = "before", "the beginning"
        self._span, self.alive = Span(), 0
        self._known = set(self.states)  # memory that is counted
        self._gradients: set[int] = set()  # and is no longer
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._is_state)

    def enter(self, part: str, direction: str) -> None:
        self.leave()
        self.part = part
        self._span = self.spans.setdefault((part, direction), Span(begin=self.alive))

    def leave(self) -> None:
        self._span.end = self.alive

    def saved(self, tensor: Tensor) -> Tensor:
        """A tensor that backward needs: all operations so far are needed for it, as checkpointing sees it."""
        self._span.needed = len(self._span.work)
        return tensor

    def owned(self, part: str) -> list[Tensor]:
        """Parameters and buffers of a part. What nobody read is before all parts."""
        return [state for key, state in self.states.items() if self.owner.get(key, "before") == part]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does to this rank's part comes here by itself
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        self.last = str(func)
        out = func(*args, **(kwargs or {}))
        read = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        written = [t for t in tree_iter(out) if isinstance(t, Tensor)]
        for tensor in read:
            if (key := _key(tensor)) in self.states:
                self.owner.setdefault(key, self.part)
        for tensor in written:
            self._hold(tensor)
        if func.namespace == "_c10d_functional":
            if any(name in str(func) for name in COLLECTIVES):
                self._span.reduced.append(sum(map(nbytes, read)))
        elif not is_view(func):
            formula = FORMULAS.get(func._overloadpacket)
            flops = formula(*args, **(kwargs or {}), out_val=out) if formula else 0
            self._span.work.append((flops, sum(map(nbytes, (*read, *written)))))
        return out

    def _hold(self, tensor: Tensor) -> None:
        """Count memory until it is freed; of tensors that share it, once."""
        storage = local(tensor).untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.alive += size
        self._span.levels.append(self.alive - self._span.begin)
        weakref.finalize(storage, self._free, key, size)

    def _is_state(self, parameter: Tensor) -> None:
        """The gradient of a parameter, now complete, is no longer something that its part keeps."""
        assert parameter.grad is not None
        if (key := _key(parameter.grad)) not in self._gradients:
            self._gradients.add(key)
            self.alive -= local(parameter.grad).untyped_storage().nbytes()

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        if key in self._gradients:
            self._gradients.discard(key)
        else:
            self.alive -= size


class CudaAutocast(TorchFunctionMode):
    """Over the CPU's autocast: what CUDA's leaves in fp32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in IN_FP32 and args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            args = (args[0].float(), *args[1:])
        return func(*args, **(kwargs or {}))


def nbytes(tensor: Tensor) -> int:
    return local(tensor).numel() * tensor.element_size()


def is_view(func: Any) -> bool:
    """Does the operation only look at memory that is there? Such take no time and no memory."""
    if func is ATEN._unsafe_view.default:  # does not say so in its schema
        return True
    returns = func._schema.returns
    alias = returns[0].alias_info if returns else None
    return alias is not None and not alias.is_write


def _key(tensor: Tensor) -> int:
    """The memory behind a tensor."""
    return local(tensor).untyped_storage()._cdata


def local(tensor: Tensor) -> Tensor:
    """This rank's share."""
    return getattr(tensor, "_local_tensor", tensor)
