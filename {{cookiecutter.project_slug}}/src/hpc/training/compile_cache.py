"""Keep what torch.compile made for the next start: one archive per code, versions and device, unpacked on each node.

The compiler's own cache is a folder of many small files, which ranks of many nodes would open one by one on a parallel
file system. So it lies on each node, and a tar archive of it where all nodes see it.
"""

import hashlib
import inspect
import os
import platform
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import lightning as L
import torch
from torch import nn

from hpc.config.errors import ConfigError
from hpc.data import staging
from hpc.run import directory
from hpc.system import home, private_folder

MIN_FREE_BYTES = 16 * 2**20  # that a folder must have to compile in it


class CompileCache(L.Callback):
    """Sets up the compiler's cache before the network is compiled, and keeps what has been added to it.

    A cache saves time and nothing else: if it cannot be read or written, this warns.

    Args:
        folder: on a file system that all nodes see; for your own programs only, as what lies there is executed.
        node_local: the folder where each node unpacks the archive; None: the system's folder for temporary files.
    """

    def __init__(self, folder: str, *, enabled: bool, node_local: str | None = None) -> None:
        self.folder, self.enabled = home.expand(os.path.expandvars(folder)), enabled
        self.node_local = node_local
        self._num_saved_files = 0

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        device = trainer.strategy.root_device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
        key = cache_key(pl_module.network, name, precision=str(trainer.precision))
        self.archive = self.folder / f"{key}.tar"
        self.cache_dir = unpack_into_first(
            self.archive, candidate_cache_folders(self.node_local, trainer.default_root_dir)
        )
        self._num_saved_files = self._count_files()
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.cache_dir)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._save_new_files(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save_new_files(trainer)

    def _save_new_files(self, trainer: L.Trainer) -> None:
        num_files = self._count_files()
        if trainer.is_global_zero and num_files > self._num_saved_files:
            self._num_saved_files = num_files
            try:
                pack_archive(self.cache_dir, self.archive)
            except OSError as error:
                print(f"warning: the cache of torch.compile is not kept for the next start: {error}", flush=True)

    def _count_files(self) -> int:
        """Return the number of cached files. Another run on this node may add some meanwhile, and remove its own."""
        return sum(len(files) for _, _, files in os.walk(self.cache_dir))


def candidate_cache_folders(node_local: str | None, run_dir: str) -> Iterator[Path]:
    """Yield folders to compile in, best first: the node's own storage, if the config names one that exists."""
    with suppress(ConfigError):
        if node_local:
            yield Path(staging.node_local_folder(node_local))
    with suppress(OSError):  # no folder for temporary files can be written
        yield Path(tempfile.gettempdir())
    yield Path(run_dir)


def cache_key(network: nn.Module, device: str, *, precision: str) -> str:
    """Return a hash of what a compilation depends on: network, code of its parts, versions, device, precision."""
    files = set()
    for module in network.modules():
        with suppress(OSError, TypeError):  # a class that was made at run time has no file
            files.add(inspect.getfile(type(module)))
    code = [Path(file).read_bytes() for file in sorted(files) if "site-packages" not in file]
    words = [repr(network), torch.__version__, platform.python_version(), platform.machine(), device, precision]
    digest = hashlib.sha256("\n".join(words).encode())
    for text in code:
        digest.update(text)
    return digest.hexdigest()[:16]


def unpack_into_first(archive: Path, folders: Iterable[Path]) -> Path:
    """Unpack the archive into the first folder that belongs to this user and has room; return the cache's path.

    What lies there is executed: a folder that another user has made is not used.
    """
    cache_dir = Path()
    for folder in folders:
        cache_dir = folder / f"compiled-{os.getuid()}" / archive.stem
        try:
            directory.write_probe_file(private_folder.make(cache_dir.parent), MIN_FREE_BYTES)
            unpack_archive(archive, cache_dir)
            break
        except OSError as error:
            print(f"warning: torch.compile cannot use the folder {folder}: {error}", flush=True)
    return cache_dir


def unpack_archive(archive: Path, cache_dir: Path) -> None:
    """Unpack the cache on this node, empty if nothing was kept. One of the node's ranks does it.

    Raises:
        OSError: there is no room for it.
    """
    if cache_dir.exists():
        return
    temporary = Path(tempfile.mkdtemp(dir=cache_dir.parent))
    try:
        unpacked = temporary / "whole"
        unpacked.mkdir()
        try:
            if stream := _open_own_archive(archive):
                with stream, tarfile.open(fileobj=stream) as tar:
                    tar.extractall(unpacked, filter="data")
        except (tarfile.TarError, ValueError, LookupError) as error:  # what tarfile raises for a damaged archive
            _warn_of_archive(f"{archive} cannot be read: {error}")
            shutil.rmtree(unpacked)
            unpacked.mkdir()
        with suppress(OSError):  # another rank was faster
            unpacked.rename(cache_dir)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _open_own_archive(archive: Path) -> BinaryIO | None:
    """Open the archive; None if there is none, it cannot be read, or it belongs to another user."""
    try:
        stream = archive.open("rb")
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn_of_archive(f"{archive} cannot be read: {error}")
        return None
    if os.fstat(stream.fileno()).st_uid == os.getuid():
        return stream
    stream.close()
    _warn_of_archive(f"{archive} belongs to another user, and what it holds would be executed")
    return None


def _warn_of_archive(reason: str) -> None:
    print(f"warning: torch.compile compiles anew: {reason}", flush=True)


def pack_archive(cache_dir: Path, archive: Path) -> None:
    """Write the cache into the archive, whole or not at all. Raises `OSError`."""
    archive.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = archive.with_suffix(f".{platform.node()}-{os.getpid()}")
    try:
        with tarfile.open(temporary, "w") as tar:
            tar.add(cache_dir, ".")
        temporary.replace(archive)
    finally:
        temporary.unlink(missing_ok=True)
