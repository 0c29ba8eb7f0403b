"""Keep what torch.compile made for the next start: one archive per code, versions and device, unpacked on each node.

The compiler's own cache is a folder of many small files, which ranks of many nodes would open one by one on a parallel
file system. So it lies on each node, and a tar archive of it where all nodes see it.
`torch.compiler.save_cache_artifacts` of torch 2.13 leaves out the C++ kernels, which would be compiled again.
"""

import hashlib
import inspect
import os
import platform
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn

from hpc.config.errors import ConfigError
from hpc.packed import staging
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

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        device = trainer.strategy.root_device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
        key = cache_key(pl_module, name, precision=str(trainer.precision))
        self.archive = self.folder / f"{key}.tar"
        for folder in self._candidate_folders(trainer.default_root_dir):
            self.cache_dir = folder / f"compiled-{os.getuid()}" / key
            try:  # what lies there is executed: a folder that another user has made is not used
                directory.write_probe_file(private_folder.make(self.cache_dir.parent), MIN_FREE_BYTES)
                unpack_archive(self.archive, self.cache_dir)
                break
            except OSError as error:
                print(f"warning: torch.compile cannot use the folder {folder}: {error}", flush=True)
        self._num_kept_files = self._count_files()
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.cache_dir)

    def _candidate_folders(self, run_dir: str) -> Iterator[Path]:
        """Yield folders to compile in, best first: the node's own storage, if the config names one that exists."""
        with suppress(ConfigError):
            if self.node_local:
                yield Path(staging.node_local_folder(self.node_local))
        with suppress(OSError):  # no folder for temporary files can be written
            yield Path(tempfile.gettempdir())
        yield Path(run_dir)

    def _count_files(self) -> int:
        """Return the number of cached files. Another run on this node may add some meanwhile, and remove its own."""
        return sum(len(files) for _, _, files in os.walk(self.cache_dir))

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._keep_new_files(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._keep_new_files(trainer)

    def _keep_new_files(self, trainer: L.Trainer) -> None:
        num_files = self._count_files()
        if trainer.is_global_zero and num_files > self._num_kept_files:
            self._num_kept_files = num_files
            try:
                pack_archive(self.cache_dir, self.archive)
            except OSError as error:
                print(f"warning: the cache of torch.compile is not kept for the next start: {error}", flush=True)


def cache_key(network: nn.Module, device: str, *, precision: str) -> str:
    """Return a hash of what a compilation depends on: network, code of its parts, versions, device, precision."""
    files = set()
    for module in network.modules():
        with suppress(OSError, TypeError):  # a class that was made at run time has no file
            files.add(inspect.getfile(type(module)))
    words = [repr(network), torch.__version__, platform.python_version(), platform.machine(), device, precision]
    code = [Path(file).read_bytes() for file in sorted(files) if "site-packages" not in file]
    return hashlib.sha256(b"".join(["\n".join(words).encode(), *code])).hexdigest()[:16]


def unpack_archive(archive: Path, cache_dir: Path) -> None:
    """Unpack the cache on this node, empty if nothing was kept. One of the node's ranks does it.

    Raises:
        OSError: there is no room for it.
    """
    if cache_dir.exists():
        return
    with tempfile.TemporaryDirectory(dir=cache_dir.parent) as temporary, suppress(FileNotFoundError):  # nothing is kept
        try:
            with archive.open("rb") as stream, tarfile.open(fileobj=stream) as tar:
                if os.fstat(stream.fileno()).st_uid != os.getuid():
                    raise tarfile.ReadError("it belongs to another user, and what it holds would be executed")
                tar.extractall(f"{temporary}/cache", filter="data")
            with suppress(OSError):  # another rank was faster
                Path(temporary, "cache").rename(cache_dir)
        except (tarfile.TarError, ValueError, LookupError, IsADirectoryError, PermissionError) as error:
            print(f"warning: torch.compile compiles anew: {archive} cannot be used: {error}", flush=True)
    cache_dir.mkdir(exist_ok=True)


def pack_archive(cache_dir: Path, archive: Path) -> None:
    """Write the cache into the archive, whole or not at all. Raises `OSError`."""
    archive.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=archive.parent) as temporary:
        Path(shutil.make_archive(f"{temporary}/cache", "tar", cache_dir)).replace(archive)
