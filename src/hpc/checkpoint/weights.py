"""Plain weights from a checkpoint of any strategy, one tensor in memory at a time. Nothing in it is executed.

Neither DeepSpeed nor a process group is needed to read what many processes wrote.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.tensor import DTensor, distribute_tensor

from hpc.checkpoint import deepspeed_zero, safe_unpickle
from hpc.config.errors import ConfigError

PREFIX = "state_dict."  # of the weights in a folder of torch.distributed.checkpoint; optimizer states lie beside them


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a checkpoint, not read yet."""

    dtype: torch.dtype
    shape: torch.Size
    path: Path  # the checkpoint
    fetch: Callable[[], Tensor]

    def read(self) -> Tensor:
        """Return the tensor, on the CPU; it may be a view of the mapped file.

        Raises:
            ConfigError: it is damaged, or names more than plain data.
        """
        with _config_errors(self.path):
            return self.fetch().detach()


def load(module: nn.Module, path: str | Path) -> None:
    """Copy a checkpoint's weights into `module`, converted to its dtypes and devices.

    It must be called before the module is sharded; every process reads the same checkpoint. Of tied parameters (two
    names, one tensor) the checkpoint may hold either name.

    Raises:
        ConfigError: `path` is no readable checkpoint, or its keys and shapes are not those of `module.state_dict()`.
        ValueError: the module has no memory yet (meta device).
    """
    own = _own_weights(module)
    if any(value.is_meta for value in own.values()):
        raise ValueError("weights cannot be copied into a module on the meta device: materialize it first")
    reject_other_model(module, path, key="ckpt")
    with torch.no_grad():
        for key, saved in saved_tensors(path).items():
            own[key].copy_(_sharded_like(own[key], saved.read()))


def reject_other_model(module: nn.Module, path: str | Path, *, key: str = "resume") -> None:
    """Raise `ConfigError` where a checkpoint lacks the keys and shapes of `module.state_dict()`, sharded or not."""
    if misfits := describe_misfits(saved_tensors(path), module):
        rule = f"must be a checkpoint of this model, whose weights differ: {misfits}"
        raise ConfigError(key, path, rule, "compose the model that the checkpoint was trained with")


def without_compile_prefix(name: str) -> str:
    """Return the name of a weight without the prefix that torch.compile puts before names in a part of a network."""
    return name.replace("_orig_mod.", "")


def storage_address(tensor: Tensor) -> int:
    """Return the address of this rank's part of a tensor; 0 where it has none."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage().data_ptr()


def names_not_in_state_dict(module: nn.Module) -> list[str]:
    """Return the names of parameters and persistent buffers that `module.state_dict()` leaves out."""
    state = module.state_dict(keep_vars=True)
    names = set(map(without_compile_prefix, state))
    addresses = {storage_address(value) for value in state.values() if isinstance(value, Tensor)}
    own: list[tuple[str, Tensor]] = []
    for path, part in module.named_modules():
        buffers = {name: value for name, value in part._buffers.items() if name not in part._non_persistent_buffers_set}
        tensors = {**part._parameters, **buffers}.items()
        own += [(f"{path}.{name}".lstrip("."), value) for name, value in tensors if value is not None]
    return [
        name
        for name, value in own
        if without_compile_prefix(name) not in names and storage_address(value) not in addresses
    ]


def local_sums(module: nn.Module) -> Tensor:
    """Return sums of this rank's part of each parameter and buffer, in pieces: they differ where one has changed."""
    tensors = [*module.parameters(), *module.buffers()]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    pieces = [
        tensor.detach().flatten().split(2**24) for tensor in local
    ]  # a whole one in double precision is too large
    return torch.stack([piece.double().sum().nan_to_num() for tensor in pieces for piece in tensor])


def _own_weights(module: nn.Module) -> dict[str, Tensor]:
    state = module.state_dict(keep_vars=True).items()
    return {without_compile_prefix(key): value for key, value in state if isinstance(value, Tensor)}


def read(path: str | Path) -> dict[str, Tensor]:
    """Return all weights at once, see `saved_tensors`."""
    return {key: saved.read() for key, saved in saved_tensors(path).items()}


def saved_tensors(path: str | Path) -> dict[str, SavedTensor]:
    """Return the weights in a checkpoint, keyed as in `LightningModule.state_dict()`.

    The checkpoint is a `.ckpt` file or a plain state-dict file (memory-mapped), a folder of
    torch.distributed.checkpoint, or a folder of `DeepSpeedStrategy`. Where ZeRO 1, 2 or 3 keeps fp32 masters beside
    bf16 or fp16 weights, the masters are returned; all else has the dtype it was saved in.

    Raises:
        ConfigError: `path` is missing, damaged or incomplete, or a pickle in it names more than plain data.
    """
    path = Path(path)
    with _config_errors(path):
        fetches = _find_tensors(path)
    if not fetches:
        raise ConfigError("ckpt", path, "must hold weights, but it holds none", safe_unpickle.FIX)
    return {key: SavedTensor(dtype, shape, path, fetch) for key, (dtype, shape, fetch) in fetches.items()}


@contextmanager
def _config_errors(path: Path) -> Iterator[None]:
    """Raise any error within as a `ConfigError` that names the checkpoint."""
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except (Exception, CheckpointException) as error:  # a damaged file can fail anywhere
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        raise ConfigError("ckpt", path, safe_unpickle.describe_error(cause), safe_unpickle.FIX) from error


Fetch = tuple[torch.dtype, torch.Size, Callable[[], Tensor]]


def _find_tensors(path: Path) -> dict[str, Fetch]:
    if path.is_file():
        checkpoint = safe_unpickle.load_plain(path)
        state: dict[str, Any] = checkpoint.get("state_dict", checkpoint)
        return {
            key: (value.dtype, value.shape, value.detach) for key, value in state.items() if isinstance(value, Tensor)
        }
    if (path / ".metadata").is_file():
        return _find_saved_tensors(path)
    if file := deepspeed_zero.find_model_file(path):
        return {
            key: (pieces[0].dtype, shape, partial(_join, pieces, shape))
            for key, (pieces, shape) in deepspeed_zero.read_pieces(file).items()
        }
    rule = "must be a .ckpt file or a checkpoint folder" if path.exists() else "must be an existing file or folder"
    raise ConfigError("ckpt", path, rule, safe_unpickle.FIX)


def _join(pieces: list[Tensor], shape: torch.Size) -> Tensor:
    """Put the flat pieces of a tensor together; what they hold beyond its size is padding."""
    flat = pieces[0].flatten() if len(pieces) == 1 else torch.cat([piece.flatten() for piece in pieces])
    return flat[: shape.numel()].view(shape)


def _find_saved_tensors(folder: Path) -> dict[str, Fetch]:
    """Find the tensors whose key begins with PREFIX in a folder of torch.distributed.checkpoint."""
    reader, fetches = safe_unpickle.Reader(folder), {}
    for key, entry in reader.read_metadata().state_dict_metadata.items():
        if key.startswith(PREFIX) and isinstance(entry, TensorStorageMetadata):
            if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():  # torch would not notice
                raise ValueError("chunks do not cover the tensor")
            fetch = partial(_read_alone, reader, key, dtype=entry.properties.dtype, shape=entry.size)
            fetches[key.removeprefix(PREFIX)] = entry.properties.dtype, entry.size, fetch
    return fetches


def _read_alone(reader: safe_unpickle.Reader, key: str, *, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """Read one tensor without the other ranks, each of which reads what it needs."""
    tensor = torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended
        load_tensors({key: tensor}, storage_reader=reader, no_dist=True)
    return tensor


def _sharded_like(reference: Tensor, value: Tensor) -> Tensor:
    """Return a whole tensor, sharded as the reference is; every rank has it whole, so nothing is sent."""
    if not isinstance(reference, DTensor):
        return value
    value = value.to(reference.device)
    return distribute_tensor(value, reference.device_mesh, reference.placements, src_data_rank=None)


def describe_misfits(saved: Mapping[str, SavedTensor] | Mapping[str, Tensor], module: nn.Module) -> str:
    """Return what keeps saved tensors from filling the weights of a module, in one line; "" when they fit."""
    own = _own_weights(module)
    shared = [key for key in own if key in saved]
    filled = {id(own[key]) for key in shared}
    # A parameter that ZeRO-3 has cut shows its whole shape in `ds_shape`.
    own_shapes = {key: tuple(getattr(own[key], "ds_shape", own[key].shape)) for key in shared}
    shapes = {key: (tuple(saved[key].shape), own_shapes[key]) for key in shared}
    names = {
        "missing": [key for key in own if id(own[key]) not in filled],
        "unexpected": [ascii(key) for key in saved if key not in own],
        "wrongly shaped": [
            f"{key} {shape} instead of {expected}" for key, (shape, expected) in shapes.items() if shape != expected
        ],
    }
    return "; ".join(f"{len(keys)} {kind}: {', '.join(keys[:5])}" for kind, keys in names.items() if keys)
