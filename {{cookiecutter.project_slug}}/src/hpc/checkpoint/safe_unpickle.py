"""Nothing in a checkpoint is ever executed: its pickles may name only what describes data.

torch.load keeps to that by itself where `weights_only` is set, and TORCH_FORCE_WEIGHTS_ONLY_LOAD sets it for the calls
in other people's code too. Left are `.metadata`, of which torch.distributed.checkpoint executes whatever it says, and
DeepSpeed's files, which hold instances of a few of its classes.
"""

import os
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from hpc.config.errors import ConfigError
from hpc.system import files

FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
FIX = "ckpt=<a .ckpt file or a checkpoint folder that was written to the end>"
# What torch.distributed.checkpoint pickles into `.metadata`, besides dtypes.
METADATA: dict[str, Callable[..., Any]] = {
    f"{kind.__module__}.{kind.__name__}": kind
    for kind in (
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.TensorStorageMetadata,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.TensorProperties,
        metadata.StorageMeta,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        torch.Size,
        torch.serialization._get_layout,
    )
}
PATHS = re.compile(r"pathlib(\._local)?\.(Pure)?(Posix|Windows)?Path")
# What DeepSpeed pickles, besides what torch.load allows anyway.
DEEPSPEED = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


class Reader(filesystem.FileSystemReader):
    """Reads a folder of torch.distributed.checkpoint: `dcp.load(states, storage_reader=Reader(folder))`.

    Put `rejections` around dcp.load: entries that are no tensors are unpickled there.

    Raises:
        ConfigError: `.metadata` is missing, damaged, or names more than data.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        try:  # here, because dcp.load makes an AssertionError of whatever goes wrong there
            self._described = described(folder)
        except Exception as error:
            raise ConfigError("ckpt", folder, rule(error), FIX) from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        self._described.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return self._described

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with data_only():  # the planner means to execute entries that are no tensors
            return super().read_data(plan, planner)


@contextmanager
def data_only() -> Iterator[None]:
    """Every torch.load keeps to data, even one that is called with `weights_only=False`."""
    before = os.environ.get(FORCE)
    os.environ[FORCE] = "1"
    try:
        yield
    finally:
        os.environ.pop(FORCE) if before is None else os.environ.update({FORCE: before})


def described(folder: Path) -> metadata.Metadata:
    """What `.metadata` says about the entries of a checkpoint folder and where they lie in its files.

    Raises:
        pickle.UnpicklingError: it names more than data, or files outside of the folder.
        Exception: it is damaged, which can fail anywhere.
    """
    with files.opened(folder / ".metadata") as stream:
        found = _Metadata(stream).load()
    if not isinstance(found, metadata.Metadata):
        raise pickle.UnpicklingError("describes no checkpoint")
    if any(Path(place.relative_path).name != place.relative_path for place in found.storage_data.values()):
        raise pickle.UnpicklingError("describes files outside of the folder")
    return found


class _Metadata(pickle.Unpickler):
    """Makes what METADATA admits and rejects all else."""

    def find_class(self, module: str, name: str) -> Any:
        if (path := f"{module}.{name}") == "builtins.getattr":
            return lambda owner, name: _member(owner, name)
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if PATHS.fullmatch(path):
            return lambda *parts: PurePath(*parts)
        if path not in METADATA:
            raise pickle.UnpicklingError(f"GLOBAL {path}")
        return _maker(METADATA[path])


def _maker(real: Callable[..., Any]) -> Callable[..., Any]:
    """Makes instances of `real` and is thrown away after: a pickle may also set attributes of what it names."""
    if not isinstance(real, type):
        return lambda *args: real(*args)
    members = getattr(real, "__members__", {})
    return type(real.__name__, (), {"__new__": lambda _, *args: real.__new__(real, *args), "__members__": members})


def _member(owner: Any, name: str) -> Any:
    """Stands in for `getattr`, with which Python before 3.11.4 pickles the members of an enumeration."""
    return owner.__members__[name]


class _Record:
    """Stands in for DeepSpeed's classes where only tensors are wanted: keeps the state it is given, does nothing."""

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {})


def plain(file: Path) -> Any:
    """What torch.save put into a file, DeepSpeed's too, memory-mapped and without DeepSpeed.

    Raises:
        pickle.UnpicklingError: it names more than data.
        Exception: it is damaged, which can fail anywhere.
    """
    with files.opened(file) as stream:
        mapped = stream.read(2) == b"PK"  # a zip archive; files of old torch versions cannot be mapped
    inert: list[Any] = [(_Record, name) for name in DEEPSPEED]
    with torch.serialization.safe_globals([*inert, (lambda *_: _Record(), "builtins.getattr")]):
        return torch.load(str(file), map_location="cpu", weights_only=True, mmap=mapped)


@contextmanager
def allowing_deepspeed() -> Iterator[None]:
    """Every torch.load keeps to data and the classes that `engine.load_checkpoint` of DeepSpeed needs."""
    real = [(getattr(import_module(path.rpartition(".")[0]), path.rpartition(".")[2]), path) for path in DEEPSPEED]
    with data_only(), torch.serialization.safe_globals([*real, (_member, "builtins.getattr")]):
        yield


@contextmanager
def rejections(path: str | Path, key: str = "ckpt", fix: str = FIX, only_this_rank: bool = False) -> Iterator[None]:
    """Around anything that loads: a checkpoint that names more than data becomes a rejection.

    Every rank reads the same file, unless `only_this_rank`. Other errors pass: a manifest has vouched for the files, so
    they are no mistake of the user.
    """
    try:
        yield
    except CheckpointException as error:  # of dcp.load: what failed, by rank
        for cause, _ in error.failures.values():
            if isinstance(cause, pickle.UnpicklingError):
                raise ConfigError(key, path, rule(cause), fix, only_this_rank) from error
        raise
    except pickle.UnpicklingError as error:
        raise ConfigError(key, path, rule(error), fix, only_this_rank) from error


def rule(error: Exception) -> str:
    """What is wrong with a checkpoint that failed with `error`, in one line."""
    if isinstance(error, FileNotFoundError):
        return f"lacks the file {Path(str(error.filename)).name!r}"
    # Of the message only a dotted name is quoted: the rest may come from the file, escape codes included.
    if isinstance(error, pickle.UnpicklingError) and (named := re.search(r"GLOBAL ([\w.]+)", str(error))):
        return f"names {named[1]}: a checkpoint holds data only, nothing in it is executed"
    return f"is damaged, or of another format ({type(error).__name__})"
