"""Plain weights from a checkpoint of any strategy, one tensor in memory at a time. Nothing in it is executed.

Neither DeepSpeed nor a process group is needed to read what many processes wrote.
"""

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor

from hpc.checkpoint import deepspeed_zero, safe_unpickle
from hpc.config.errors import ConfigError
from hpc.system import files

PREFIX = "state_dict."  # of the weights in a folder of torch.distributed.checkpoint; optimizer states lie beside them


@dataclass(frozen=True)
class Saved:
    """A tensor that lies in a checkpoint."""

    dtype: torch.dtype
    shape: torch.Size
    path: Path  # the checkpoint
    fetch: Callable[[], Tensor]

    def read(self) -> Tensor:
        """The tensor, on the CPU; it may be a view of the mapped file.

        Raises:
            ConfigError: it is damaged, or names more than plain data.
        """
        with _telling(self.path):
            return self.fetch().detach()


def load(module: nn.Module, path: str | Path) -> None:
    """Copy a checkpoint's weights into `module`, converted to its dtypes and devices.

    Call it before the module is sharded; every process reads the same checkpoint. Of tied parameters (two names, one
    tensor) either name will do.

    Raises:
        ConfigError: `path` is no readable checkpoint, or its keys and shapes are not those of `module.state_dict()`.
        ValueError: the module has no memory yet (meta device).
    """
    wanted = _wanted(module)
    if any(value.is_meta for value in wanted.values()):
        raise ValueError("weights cannot be copied into a module on the meta device: materialize it first")
    reject_other_model(module, path, "ckpt")
    with torch.no_grad():
        for key, saved in tensors(path).items():
            wanted[key].copy_(_cut(saved.read(), wanted[key]))


def reject_other_model(module: nn.Module, path: str | Path, key: str = "resume") -> None:
    """Raise `ConfigError` where a checkpoint has not the keys and shapes of `module.state_dict()`, sharded or not."""
    if said := misfits(tensors(path), module):
        raise ConfigError(key, path, said, "compose the model that the checkpoint was trained with")


def bare(name: str) -> str:
    """Of a weight, without what torch.compile puts before the names in a part of a network."""
    return name.replace("_orig_mod.", "")


def storage(tensor: Tensor) -> int:
    """Where this rank's part of a tensor lies in memory; 0 where it has none."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage().data_ptr()


def left_out(module: nn.Module) -> list[str]:
    """Names of parameters and persistent buffers that `module.state_dict()` does not give."""
    state = module.state_dict(keep_vars=True)
    places, names = {storage(one) for one in state.values() if isinstance(one, Tensor)}, set(map(bare, state))
    own: list[tuple[str, Tensor]] = []
    for path, part in module.named_modules():
        buffers = {name: one for name, one in part._buffers.items() if name not in part._non_persistent_buffers_set}
        both = {**part._parameters, **buffers}.items()
        own += [(f"{path}.{name}".lstrip("."), one) for name, one in both if one is not None]
    return [name for name, one in own if bare(name) not in names and storage(one) not in places]


def sums(module: nn.Module) -> Tensor:
    """The sum of each parameter and buffer, or of this rank's part of it: another one where it was changed."""
    parts = [*module.parameters(), *module.buffers()]
    local = [one.to_local() if isinstance(one, DTensor) else one for one in parts]
    pieces = [one.detach().flatten().split(2**24) for one in local]  # a whole one in double precision is too large
    return torch.stack([piece.double().sum().nan_to_num() for some in pieces for piece in some])


def _wanted(module: nn.Module) -> dict[str, Tensor]:
    state = module.state_dict(keep_vars=True).items()
    return {bare(key): value for key, value in state if isinstance(value, Tensor)}


def read(path: str | Path) -> dict[str, Tensor]:
    """All weights at once, see `tensors`."""
    return {key: saved.read() for key, saved in tensors(path).items()}


def tensors(path: str | Path) -> dict[str, Saved]:
    """The weights that lie in a checkpoint, keyed as in `LightningModule.state_dict()`.

    Finds its way in a `.ckpt` file or a plain state-dict file (memory-mapped), a folder of
    torch.distributed.checkpoint, and a folder of `DeepSpeedStrategy`. Where ZeRO 1, 2 or 3 keeps fp32 masters beside
    bf16 or fp16 weights, the masters are meant; all else has the dtype it was saved in.

    Raises:
        ConfigError: `path` is missing, damaged or incomplete, or a pickle in it names more than plain data.
    """
    path = Path(path)
    with _telling(path):
        fetches = _found(path)
    if not fetches:
        raise ConfigError("ckpt", path, "holds no weights", safe_unpickle.FIX)
    return {key: Saved(dtype, shape, path, fetch) for key, (dtype, shape, fetch) in fetches.items()}


@contextmanager
def _telling(path: Path) -> Iterator[None]:
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # a damaged file can fail anywhere
        raise ConfigError("ckpt", path, safe_unpickle.rule(error), safe_unpickle.FIX) from error


Fetch = tuple[torch.dtype, torch.Size, Callable[[], Tensor]]


def _found(path: Path) -> dict[str, Fetch]:
    if path.is_file():
        checkpoint = safe_unpickle.plain(path)
        state: dict[str, Any] = checkpoint.get("state_dict", checkpoint)
        return {
            key: (value.dtype, value.shape, partial(_itself, value))
            for key, value in state.items()
            if isinstance(value, Tensor)
        }
    if (path / ".metadata").is_file():
        return _sharded(path)
    if file := deepspeed_zero.model_file(path):
        return {
            key: (pieces[0].dtype, shape, partial(_joined, pieces, shape))
            for key, (pieces, shape) in deepspeed_zero.pieces(file).items()
        }
    rule = "is neither a .ckpt file nor a checkpoint folder" if path.exists() else "does not exist"
    raise ConfigError("ckpt", path, rule, safe_unpickle.FIX)


def _itself(value: Tensor) -> Tensor:
    return value


def _joined(pieces: list[Tensor], shape: torch.Size) -> Tensor:
    """Put the flat pieces of a tensor together; what they hold beyond its size is padding."""
    flat = pieces[0].flatten() if len(pieces) == 1 else torch.cat([piece.flatten() for piece in pieces])
    return flat[: shape.numel()].view(shape)


def _sharded(folder: Path) -> dict[str, Fetch]:
    """Where the chunks of each tensor below PREFIX lie."""
    metadata = safe_unpickle.described(folder)
    fetches: dict[str, Fetch] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if not key.startswith(PREFIX) or not isinstance(entry, TensorStorageMetadata):
            continue
        chunks = {
            tuple(chunk.offsets): metadata.storage_data[MetadataIndex(key, chunk.offsets)] for chunk in entry.chunks
        }
        fetch = partial(_assembled, folder, entry.properties.dtype, entry.size, chunks)
        fetches[key.removeprefix(PREFIX)] = entry.properties.dtype, entry.size, fetch
    return fetches


def _assembled(
    folder: Path, dtype: torch.dtype, shape: torch.Size, chunks: Mapping[tuple[int, ...], _StorageInfo]
) -> Tensor:
    """One tensor from its chunks, keyed by the place of their first element in it."""
    whole, filled = torch.empty(shape, dtype=dtype), 0
    for corner, place in chunks.items():
        with files.open_regular_file(folder / place.relative_path) as stream:
            stream.seek(place.offset)
            part = torch.load(io.BytesIO(stream.read(place.length)), map_location="cpu", weights_only=True)
        whole[tuple(slice(start, start + length) for start, length in zip(corner, part.shape, strict=True))] = part
        filled += part.numel()
    if filled != whole.numel():
        raise ValueError("chunks do not cover the tensor")
    return whole


def _cut(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor sharded as another one is; every rank has it whole, so nothing is sent."""
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def misfits(found: Mapping[str, Saved] | Mapping[str, Tensor], module: nn.Module) -> str:
    """What keeps `found` from filling the weights of a module, in one sentence; empty when it fits."""
    wanted = _wanted(module)
    both = [key for key in wanted if key in found]
    filled = {id(wanted[key]) for key in both}
    # A parameter that ZeRO-3 has cut shows its whole shape in `ds_shape`.
    whole = {key: tuple(getattr(wanted[key], "ds_shape", wanted[key].shape)) for key in both}
    shapes = {key: (tuple(found[key].shape), whole[key]) for key in both}
    kinds = {
        "missing": [key for key in wanted if id(wanted[key]) not in filled],
        "unexpected": [ascii(key) for key in found if key not in wanted],
        "wrongly shaped": [f"{key} {saved} instead of {own}" for key, (saved, own) in shapes.items() if saved != own],
    }
    return "; ".join(f"{len(keys)} {kind}: {', '.join(keys[:5])}" for kind, keys in kinds.items() if keys)
