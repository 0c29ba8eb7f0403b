"""The module of a step that is measured, made again for each step: of tensors without content, or small and real."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from hpc.plan.meter import local_bytes
from hpc.privates.torch import unset_fake_temporarily
from hpc.strategies.blocks import Blocks, find_blocks
from hpc.training.fake_tensors import default_dtype, fake_copy

# Bytes of parameters that are made on a login node: by a constructor that needs values, and for a real step.
MAX_REAL_BYTES = 8_000_000_000
MAX_REAL_STEP_BYTES = 400_000_000


class NotTraceable(Exception):
    """The step cannot run on tensors without content; the message says where and why."""


class ModuleSource:
    """Make a module with fake tensors, again for each step.

    A constructor that needs values of tensors, or reads weights from a file, is called once with real ones.

    Args:
        make_module: returns the LightningModule.
        blocks: paths of its lists of blocks; None: they are found.
    """

    def __init__(self, make_module: Callable[[], L.LightningModule], blocks: Any) -> None:
        self.make_module, self.block_paths = make_module, blocks
        self._real: L.LightningModule | None = None

    def make(self, dtype: torch.dtype) -> L.LightningModule:
        """Return a module whose parameters have this type. To be called within `fake_tensor_mode`."""
        if self._real is None:
            try:
                with default_dtype(dtype):  # a module of fake tensors cannot be converted
                    return self.make_module()
            except Exception:
                with unset_fake_temporarily(), _limited_parameters(MAX_REAL_BYTES):
                    self._real = self.make_module()
        return fake_copy(self._real, lambda tensor: {"dtype": dtype} if tensor.is_floating_point() else {})

    def make_real(self, dtype: torch.dtype) -> L.LightningModule:
        """Return a module whose parameters have values and this type.

        Raises:
            NotTraceable: it is too large.
        """
        with default_dtype(dtype), _limited_parameters(MAX_REAL_STEP_BYTES):
            return self.make_module().to(dtype)

    def find_blocks(self, module: L.LightningModule) -> Blocks | None:
        return find_blocks(module, self.block_paths)


@contextmanager
def _limited_parameters(max_bytes: int) -> Iterator[None]:
    """Raise `NotTraceable` within the block as soon as parameters take more bytes."""
    num_bytes = 0

    def count(_: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal num_bytes
        num_bytes += local_bytes(parameter) if parameter is not None else 0
        if num_bytes > max_bytes:
            size = f"{max_bytes / 1e9:g} GB"
            raise NotTraceable(f"it needs values of tensors, and its parameters take more than {size} of this machine")

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()
