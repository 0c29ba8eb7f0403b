"""Unpickle checkpoints without executing anything: their pickles may name only classes that describe data.

torch.load ensures that by itself where `weights_only` is set. This module is for what other people's code reads while
it loads a checkpoint: TORCH_FORCE_WEIGHTS_ONLY_LOAD sets it there, and only meanwhile, as a researcher's own files may
hold anything. Two cases are left: `.metadata`, from which torch.distributed.checkpoint would execute anything, and
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

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from hpc.config.errors import ConfigError
from hpc.system import files

FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
FIX = "ckpt=<a .ckpt file or a checkpoint folder that was written to the end>"
# Classes that torch.distributed.checkpoint pickles into `.metadata`, besides dtypes.
METADATA_CLASSES: dict[str, Callable[..., Any]] = {
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
# Classes that DeepSpeed pickles, besides those that torch.load allows anyway.
DEEPSPEED_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


# numpy's numbers and arrays, except arrays of Python's objects: what makes them, and their types.
_NUMBERS = [np.dtype(code).type(0) for code in "?bhilqBHILQefdFD"]
NUMPY: list[Any] = [
    np.ndarray,
    np.dtype,
    np.ones(1).__reduce__()[0],
    np.float64(1).__reduce__()[0],
    *{type(number.dtype) for number in _NUMBERS},
    *(type(np.dtype(code)) for code in ("U", "S", "M", "m")),
]


class _RegularFiles(filesystem.FileSystem):
    """A file system that rejects pipes in place of files, as reading a pipe may never end."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with files.open_regular_file(Path(path)) as stream:
            yield stream


class Reader(filesystem.FileSystemReader):
    """A reader for a folder of torch.distributed.checkpoint: `dcp.load(states, storage_reader=Reader(folder))`.

    Put `convert_unpickling_errors` around dcp.load: entries that are no tensors are unpickled there.

    Raises:
        ConfigError: `.metadata` is missing, damaged, or names more than data.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _RegularFiles()
        try:  # here, because dcp.load makes an AssertionError of whatever goes wrong there
            self._metadata = read_metadata(folder)
        except Exception as error:
            raise ConfigError("ckpt", folder, describe_error(error), FIX) from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        self._metadata.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with allow_only_data():  # the planner would execute entries that are no tensors
            return super().read_data(plan, planner)


@contextmanager
def allow_only_data() -> Iterator[None]:
    """Let every torch.load read data only, even one that is called with `weights_only=False`."""
    before = os.environ.get(FORCE)
    os.environ[FORCE] = "1"
    try:
        yield
    finally:
        os.environ.pop(FORCE) if before is None else os.environ.update({FORCE: before})


def read_metadata(folder: Path) -> metadata.Metadata:
    """Return the description of a checkpoint folder's entries and of their places in its files, from `.metadata`.

    Raises:
        pickle.UnpicklingError: it names more than data, or files outside of the folder.
        Exception: it is damaged, which can fail anywhere.
    """
    with files.open_regular_file(folder / ".metadata") as stream:
        content = _MetadataUnpickler(stream).load()
    if not isinstance(content, metadata.Metadata):
        raise pickle.UnpicklingError("describes no checkpoint")
    if any(Path(place.relative_path).name != place.relative_path for place in content.storage_data.values()):
        raise pickle.UnpicklingError("describes files outside of the folder")
    return content


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that makes instances of METADATA_CLASSES and rejects all else."""

    def find_class(self, module: str, name: str) -> Any:
        if (path := f"{module}.{name}") == "builtins.getattr":
            return lambda owner, name: _enum_member(owner, name)
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if PATHS.fullmatch(path):
            return lambda *parts: PurePath(*parts)
        if path not in METADATA_CLASSES:
            raise pickle.UnpicklingError(f"GLOBAL {path}")
        return _make_restricted_class(METADATA_CLASSES[path])


def _make_restricted_class(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a class that makes instances of `real`: a pickle may set attributes of a class, so it gets no real one."""
    if not isinstance(real, type):
        return lambda *args: real(*args)
    members = getattr(real, "__members__", {})
    return type(real.__name__, (), {"__new__": lambda _, *args: real.__new__(real, *args), "__members__": members})


def _enum_member(owner: Any, name: str) -> Any:
    """Return a member of an enumeration; in place of `getattr`, with which Python before 3.11.4 pickles members."""
    return owner.__members__[name]


class _InertObject:
    """A replacement for DeepSpeed's classes where only tensors are wanted: it keeps its state and does nothing."""

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {})


def load_saved(file: Any) -> Any:
    """Return the plain data of a file that `plain_data.to_bytes` has made. Raises as `load_plain` does."""
    with torch.serialization.safe_globals(NUMPY):
        return torch.load(file, weights_only=True, map_location="cpu")


def load_plain(file: Path) -> Any:
    """Return the content of a file of torch.save, memory-mapped; also of DeepSpeed's files, without DeepSpeed.

    Raises:
        pickle.UnpicklingError: it names more than data.
        Exception: it is damaged, which can fail anywhere.
    """
    with files.open_regular_file(file) as stream:
        can_be_mapped = stream.read(2) == b"PK"  # a zip archive; files of old torch versions cannot be mapped
    records: list[Any] = [*NUMPY, *((_InertObject, name) for name in DEEPSPEED_CLASSES)]
    with torch.serialization.safe_globals([*records, (lambda *_: _InertObject(), "builtins.getattr")]):
        return torch.load(str(file), map_location="cpu", weights_only=True, mmap=can_be_mapped)


@contextmanager
def allow_deepspeed_classes() -> Iterator[None]:
    """Let every torch.load read only data and the classes that `engine.load_checkpoint` of DeepSpeed needs."""
    names = {path: path.rpartition(".") for path in DEEPSPEED_CLASSES}
    classes = [(getattr(import_module(module), name), path) for path, (module, _, name) in names.items()]
    with allow_only_data(), torch.serialization.safe_globals([*classes, (_enum_member, "builtins.getattr")]):
        yield


@contextmanager
def convert_unpickling_errors(
    path: str | Path, key: str = "ckpt", *, fix: str = FIX, only_this_rank: bool = False
) -> Iterator[None]:
    """Raise `ConfigError` in place of `pickle.UnpicklingError`: what is loaded within names more than data.

    Other errors pass: the manifest has vouched for the files, so such errors are no mistake of the user.

    Args:
        path: the checkpoint.
        key: of the config, that named it.
        only_this_rank: the other ranks do not read that file.
    """
    try:
        yield
    except CheckpointException as error:  # of dcp.load: what failed, by rank
        for cause, _ in error.failures.values():
            if isinstance(cause, pickle.UnpicklingError):
                raise ConfigError(key, path, describe_error(cause), fix, only_this_rank=only_this_rank) from error
        raise
    except pickle.UnpicklingError as error:
        raise ConfigError(key, path, describe_error(error), fix, only_this_rank=only_this_rank) from error


def describe_error(error: BaseException) -> str:
    """Return in one line what is wrong with a checkpoint that failed with `error`, as the rule of a `ConfigError`."""
    if isinstance(error, FileNotFoundError):
        return f"must be complete, but the file {Path(str(error.filename)).name!r} is missing"
    # Of the message only a dotted name is quoted: the rest may come from the file, escape codes included.
    if isinstance(error, pickle.UnpicklingError) and (name := re.search(r"GLOBAL ([\w.]+)", str(error))):
        return f"must hold data only, as nothing in it is executed, but it names {name[1]}"
    return f"must be a checkpoint that is not damaged; reading it failed with {type(error).__name__}"
