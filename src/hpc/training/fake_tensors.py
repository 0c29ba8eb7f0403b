"""Tensors without content: they need no memory and no device, so that a step of any size can be tried anywhere.

These are torch's fake tensors. They lie on the CPU as far as kernels are chosen: on the meta device, attention would
keep its whole matrix of weights.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hpc.privates.torch import CLONE, FakeTensorMode


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make new floating-point tensors of this type within the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def fake_tensor_mode(mode: FakeTensorMode | None = None) -> Iterator[FakeTensorMode]:
    """Make all new tensors fake within the block. Real ones, such as a constant of a file, can be used with them.

    Args:
        mode: of an earlier block, whose tensors are used again.
    """
    with real_tensor_mode(), mode or FakeTensorMode(allow_non_fake_inputs=True) as mode, _FakeDeepcopy():
        yield mode


@contextmanager
def real_tensor_mode() -> Iterator[None]:
    """Compute within the block by operations that can be counted: mkldnn's LSTM hides its matrix products."""
    flags = torch.backends.mkldnn.set_flags(False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(flags[0])


def fake_copy(
    value: Any, change: Callable[[Tensor], dict[str, Any]] = lambda tensor: {}, *, copies: list[Tensor] | None = None
) -> Any:
    """Return a deep copy of a module, a batch, or any object, whose tensors are fake and lie on the CPU.

    To be called within `fake_tensor_mode`. Nothing of the original is changed, and no random number is drawn.

    Args:
        change: returns the `size` and the `dtype` that the copy of a tensor gets, if not its own.
        copies: to which the copies are appended.
    """
    with _FakeCopy(change, copies if copies is not None else []):
        return deepcopy(value)


class _FakeDeepcopy(TorchFunctionMode):
    """Replace what `deepcopy` calls of each tensor, which fails for fake ones. Metrics copy their first states."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = self.copy(tensor)
        return memo[id(tensor)]

    def copy(self, tensor: Tensor, size: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a fake tensor on the CPU, of the shape and type of this one unless others are given."""
        is_as_it_was = tensor.layout is torch.strided and size in (None, tuple(tensor.shape))
        strides = tensor.stride() if is_as_it_was else torch.empty(size or tensor.shape, device="meta").stride()
        return torch.empty_strided(
            size or tuple(tensor.shape), strides, dtype=dtype or tensor.dtype, device="cpu",
            requires_grad=tensor.requires_grad,
        )  # fmt: skip


class _FakeCopy(_FakeDeepcopy):
    """Replace parameters, too. (Torch's own FakeCopyMode keeps devices and shapes.)"""

    def __init__(self, change: Callable[[Tensor], dict[str, Any]], copies: list[Tensor]) -> None:
        super().__init__()
        self.change, self.copies = change, copies

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is CLONE:  # of the content, which Parameter.__deepcopy__ makes a Parameter again
            return self.copy(args[0])
        return super().__torch_function__(func, types, args, kwargs)

    def copy(self, tensor: Tensor) -> Tensor:  # type: ignore[override]
        fake = super().copy(tensor, **self.change(tensor))
        self.copies.append(fake)
        return fake
