"""Fingerprints of values of any kind, which tell whether a value has changed.

A fingerprint is a checksum of what pickle would write, which is neither kept nor read. Objects that belong to the run
itself (the Trainer, a loader, a function) count by their identity. An object whose attributes are compared one by one
counts by its name.
"""

import math
import pickle
import threading
import weakref
import zlib
from concurrent.futures import Executor
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Protocol

import lightning as L
import numpy as np
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

UNREADABLE = "unseen"  # the fingerprint of a value without content that could be read, as an iterator
# Of a larger array on the host some rows are looked at; what pickle writes may have four times as many.
MAX_BYTES = 2**28
NUM_ROWS = 4096
RUN_CLASSES = (L.Trainer, L.Callback, L.LightningDataModule, Logger, Strategy, LightningOptimizer, DataLoader, Dataset)
PROCESS_CLASSES = (ProcessGroup, torch.Stream, torch.Event, Executor, threading.Thread, type(threading.Lock()))
BY_IDENTITY = (*RUN_CLASSES, *PROCESS_CLASSES, type(threading.RLock()), weakref.ref)
BY_IDENTITY += (type, ModuleType, FunctionType, BuiltinFunctionType)
# Libraries that distribute the weights or write curves: their objects count by their identity, too.
IDENTITY_MODULES = ("torch.distributed.", "deepspeed.", "torch.utils.tensorboard.", "wandb.", "mlflow.")
PIECE = 2**24  # elements that are looked at together


class NameLookup(Protocol):
    """Names of objects that this run has built."""

    def get(self, value: Any) -> str | None: ...


def fingerprint(value: Any, names: NameLookup | None = None) -> Any:
    """Return a value that is equal for the same content; `UNREADABLE` where the content cannot be read.

    Args:
        names: of objects that count by their names.
    """
    if value is UNREADABLE:
        return UNREADABLE
    # Without a memo, equal contents give equal pickles; but an object that leads to itself needs one.
    for fast in (True, False):
        sink = _ChecksumSink()
        try:
            _Pickler(sink, names, fast=fast).dump(value)
            return sink.num_bytes, sink.checksum
        except Exception:  # of any kind: other people's classes raise it when pickle asks for their content
            continue
    return UNREADABLE


def tensor_checksum(tensor: Tensor) -> int:
    """Return a checksum of a tensor's bits, computed on its device."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    if local.device.type == "cpu":
        rows = local if local.nbytes <= MAX_BYTES else local[:: 1 + len(local) // NUM_ROWS]
        checksum = 0
        for piece in _bits(rows).view(-1).split(PIECE):  # copied: torch cannot resize a storage that numpy has seen
            checksum = zlib.crc32(piece.clone().numpy().data, checksum)
        return checksum
    return zlib.crc32(_row_column_sums(_bits(local).view(-1)).cpu().numpy().data)


def _row_column_sums(bits: Tensor) -> Tensor:
    """Return sums over the rows and columns of a square that the bits fill, and the bits that are left over.

    Rows and columns tell when two values change places. The sums are taken in pieces: torch copies what it adds up to
    64 bits, and a GPU may be full.
    """
    side = math.isqrt(bits.numel())
    square = bits[: side * side].view(side, side)
    pieces = square.split(max(1, PIECE // max(1, side)))
    rows = [piece.sum(1, dtype=torch.int64) for piece in pieces]
    columns = torch.stack([piece.sum(0, dtype=torch.int64) for piece in pieces]).sum(0)
    return torch.cat([*rows, columns, bits[side * side :].long()])


class _ChecksumSink:
    """A file that keeps nothing but the checksum of what is written into it."""

    def __init__(self) -> None:
        self.num_bytes = self.checksum = 0

    def write(self, content: Any) -> None:
        self.num_bytes += memoryview(content).nbytes
        if self.num_bytes > 4 * MAX_BYTES:
            raise ValueError("too long to be read")
        self.checksum = zlib.crc32(content, self.checksum)


class _Pickler(pickle.Pickler):
    def __init__(self, sink: _ChecksumSink, names: NameLookup | None, *, fast: bool) -> None:
        super().__init__(sink, protocol=5)  # type: ignore[arg-type]
        self.names, self.fast = names, fast

    def reducer_override(self, value: Any) -> Any:
        """Replace what is not to be pickled by its content. Not called for numbers, strings and plain containers."""
        if value is _placeholder:
            return NotImplemented
        if self.names and (name := self.names.get(value)) is not None:
            return _placeholder, (name,)
        if isinstance(value, Tensor):
            return _placeholder, (str(value.dtype), tuple(value.shape), tensor_checksum(value))
        if isinstance(value, torch.Generator):
            return _placeholder, (tensor_checksum(value.get_state()),)
        if isinstance(value, np.ndarray) and value.dtype.kind != "O":
            is_file = isinstance(_base_array(value), np.memmap)
            return _placeholder, (value.dtype.str, value.shape, id(value) if is_file else _array_checksum(value))
        kind = type(value)
        if isinstance(value, BY_IDENTITY) or f"{kind.__module__}.".startswith(IDENTITY_MODULES):
            return _placeholder, (kind.__qualname__, id(value))
        return NotImplemented


def _placeholder(*_: Any) -> None:
    """Stand for a replaced object: pickle needs a function to name."""


def _base_array(value: Any) -> Any:
    """Return the array that an array is a view of."""
    while isinstance(value.base, np.ndarray):
        value = value.base
    return value


def _bits(tensor: Tensor) -> Tensor:
    bits = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()]
    return bits.contiguous().view(dtype) if bits.dim() else bits.reshape(1).view(dtype)


def _array_checksum(value: np.ndarray) -> int:
    rows = value if value.nbytes <= MAX_BYTES else value[:: 1 + len(value) // NUM_ROWS]
    return zlib.crc32(np.ascontiguousarray(rows).view(np.uint8).data) if rows.size else 0
