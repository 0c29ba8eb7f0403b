"""Tell whether a value has changed: a checksum of its content, of whatever kind it is.

The content is what pickle would write; nothing of it is kept or ever read. What belongs to the run itself (the Trainer,
a loader, a function) stands there by its identity, and an object whose attributes are looked at one by one by its name.
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

UNSEEN = "unseen"  # of what has no content that could be read, as an iterator
MOST_BYTES = 2**28  # of a larger array on the host some rows are looked at; what is written may have four times as many
SOME_ROWS = 4096
THE_RUNS = (L.Trainer, L.Callback, L.LightningDataModule, Logger, Strategy, LightningOptimizer, DataLoader, Dataset)
THE_PROCESSES = (ProcessGroup, torch.Stream, torch.Event, Executor, threading.Thread, type(threading.Lock()))
BY_IDENTITY = (*THE_RUNS, *THE_PROCESSES, type(threading.RLock()), weakref.ref)
BY_IDENTITY += (type, ModuleType, FunctionType, BuiltinFunctionType)
# What shares the weights out, and what writes curves.
OTHERS = ("torch.distributed.", "deepspeed.", "torch.utils.tensorboard.", "wandb.", "mlflow.")
PIECE = 2**24  # elements


class Names(Protocol):
    """Of objects that this run has built."""

    def get(self, value: Any) -> str | None: ...


def mark(value: Any, names: Names | None = None) -> Any:
    """Equal for the same content; `UNSEEN` where that cannot be told.

    Args:
        names: what stands for an object.
    """
    if value is UNSEEN:
        return UNSEEN
    for fast in (True, False):  # without a memory the same content is the same; but what leads to itself needs one
        written = _Written()
        try:
            _Pickler(written, names, fast=fast).dump(value)
            return written.length, written.checksum
        except Exception:  # whatever a class of somebody else's raises when it is asked for its content
            continue
    return UNSEEN


def of_tensor(tensor: Tensor) -> int:
    """A checksum of its bits, taken on its device."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    if local.device.type == "cpu":
        some = local if local.nbytes <= MOST_BYTES else local[:: 1 + len(local) // SOME_ROWS]
        checksum = 0
        for piece in _bits(some).view(-1).split(PIECE):  # copies: a storage that numpy has seen is of fixed size
            checksum = zlib.crc32(piece.clone().numpy().data, checksum)
        return checksum
    return zlib.crc32(_sums(_bits(local).view(-1)).cpu().numpy().data)


def _sums(bits: Tensor) -> Tensor:
    """Of the rows and of the columns of a square that it fills, which tell the places, too; and what is over.

    In pieces: torch makes a copy in 64 bits of what it adds up, and a GPU may be full.
    """
    side = math.isqrt(bits.numel())
    square = bits[: side * side].view(side, side)
    pieces = square.split(max(1, PIECE // max(1, side)))
    rows = [piece.sum(1, dtype=torch.int64) for piece in pieces]
    columns = torch.stack([piece.sum(0, dtype=torch.int64) for piece in pieces]).sum(0)
    return torch.cat([*rows, columns, bits[side * side :].long()])


class _Written:
    """In the place of a file."""

    def __init__(self) -> None:
        self.length = self.checksum = 0

    def write(self, content: Any) -> None:
        self.length += memoryview(content).nbytes
        if self.length > 4 * MOST_BYTES:
            raise ValueError("too long to be looked at")
        self.checksum = zlib.crc32(content, self.checksum)


class _Pickler(pickle.Pickler):
    def __init__(self, written: _Written, names: Names | None, *, fast: bool) -> None:
        super().__init__(written, protocol=5)  # type: ignore[arg-type]
        self.names, self.fast = names, fast

    def reducer_override(self, value: Any) -> Any:
        """Not called for numbers, words and the plain containers of them, which is why it is quick."""
        if value is _stands_for:
            return NotImplemented
        if self.names and (name := self.names.get(value)) is not None:
            return _stands_for, (name,)
        if isinstance(value, Tensor):
            return _stands_for, (str(value.dtype), tuple(value.shape), of_tensor(value))
        if isinstance(value, torch.Generator):
            return _stands_for, (of_tensor(value.get_state()),)
        if isinstance(value, np.ndarray) and value.dtype.kind != "O":
            is_file = isinstance(_ground(value), np.memmap)
            return _stands_for, (value.dtype.str, value.shape, id(value) if is_file else _of_array(value))
        kind = type(value)
        if isinstance(value, BY_IDENTITY) or f"{kind.__module__}.".startswith(OTHERS):
            return _stands_for, (kind.__qualname__, id(value))
        return NotImplemented


def _stands_for(*_: Any) -> None:
    """What pickle would call for a name."""


def _ground(value: Any) -> Any:
    """The array that an array is a view of."""
    while isinstance(value.base, np.ndarray):
        value = value.base
    return value


def _bits(tensor: Tensor) -> Tensor:
    bits = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()]
    return bits.contiguous().view(size) if bits.dim() else bits.reshape(1).view(size)


def _of_array(value: np.ndarray) -> int:
    some = value if value.nbytes <= MOST_BYTES else value[:: 1 + len(value) // SOME_ROWS]
    return zlib.crc32(np.ascontiguousarray(some).view(np.uint8).data) if some.size else 0
