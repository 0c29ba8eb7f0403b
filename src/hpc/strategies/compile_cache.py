"""Keep what torch.compile made for the next start, by torch's own archive of it (torch.compiler.save_cache_artifacts).

The archive lies where all nodes see it; the compiler's cache, a folder of many small files, on each node. C++ kernels
are not in the archive: without a GPU they are compiled again on a node that has not done so before.
"""

import hashlib
import os
import platform
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
from hpc.system.files import complete_file

MIN_FREE_BYTES = 16 * 2**20  # that a folder must have to compile in it


class CompileCache(L.Callback):
    """Sets up the compiler's cache before the network is compiled, and keeps what has been added to it.

    A cache saves time and nothing else: if it cannot be read or written, this warns. A rank reads and writes the
    archive of its place on a node, as what is compiled names the GPU.

    Args:
        folder: on a file system that all nodes see; for your own programs only, as what lies there is executed.
        node_local: the folder where each node compiles; None: the system's folder for temporary files.
    """

    def __init__(self, folder: str, *, enabled: bool, node_local: str | None = None) -> None:
        self.folder, self.enabled = home.expand(os.path.expandvars(folder)), enabled
        self.node_local = node_local
        self.archive: Path | None = None
        self._keys_before: set[str] = set()
        self._is_kept = False

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        device = trainer.strategy.root_device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
        key = cache_key(pl_module, name, precision=str(trainer.precision))
        self.archive = self.folder / f"{key}-{trainer.local_rank}.bin"
        for folder in self._candidate_folders(trainer.default_root_dir):
            try:  # what lies there is executed: a folder that another user has made is not used
                cache_dir = private_folder.make(folder / f"compiled-{os.getuid()}")
                directory.write_probe_file(cache_dir, MIN_FREE_BYTES)
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_dir)
                self._keys_before = load_archive(self.archive)
                break
            except OSError as error:
                print(f"warning: torch.compile cannot use the folder {folder}: {error}", flush=True)

    def _candidate_folders(self, run_dir: str) -> Iterator[Path]:
        """Yield folders to compile in, best first: the node's own storage, if the config names one that exists."""
        with suppress(ConfigError):
            if self.node_local:
                yield Path(staging.node_local_folder(self.node_local))
        with suppress(OSError):  # no folder for temporary files can be written
            yield Path(tempfile.gettempdir())
        yield Path(run_dir)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._keep_new_artifacts(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._keep_new_artifacts(trainer)  # a run that stops to be continued ends so, too

    def _keep_new_artifacts(self, trainer: L.Trainer) -> None:
        """Write the archive anew, on the first node, if this run has compiled what it does not hold.

        Only once: of a second archive of one process, torch loads only what was compiled since the first.
        """
        if self.archive is None or self._is_kept or trainer.node_rank:
            return
        self._is_kept = True
        made = torch.compiler.save_cache_artifacts()
        if made is None or artifact_keys(made[1]) <= self._keys_before:
            return
        try:
            write_archive(self.archive, made[0])
        except OSError as error:
            print(f"warning: the cache of torch.compile is not kept for the next start: {error}", flush=True)


def cache_key(network: nn.Module, device: str, *, precision: str) -> str:
    """Return a hash that tells archives apart. What is in one is found by its content, also when the code changes."""
    words = [repr(network), torch.__version__, platform.python_version(), platform.machine(), device, precision]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def artifact_keys(info: Any) -> set[str]:
    """Return the keys in torch's list of artifacts by kind."""
    return {key for keys in info.artifacts.values() for key in keys}


def load_archive(archive: Path) -> set[str]:
    """Put what an archive holds into the compiler's cache on this node, and return its keys.

    Raises:
        OSError: there is no room for it.
    """
    try:
        with archive.open("rb") as stream:
            if os.fstat(stream.fileno()).st_uid != os.getuid():
                raise PermissionError("it belongs to another user, and what it holds would be executed")
            content = stream.read()
    except FileNotFoundError:  # nothing is kept
        return set()
    except OSError as error:
        _warn(archive, error)
        return set()
    try:
        info = torch.compiler.load_cache_artifacts(content)  # None if it is damaged
    except OSError:
        raise
    except Exception as error:  # of any kind: it is damaged, too
        _warn(archive, error)
        return set()
    if info is None:
        _warn(archive, "it is damaged")
    return artifact_keys(info) if info else set()


def _warn(archive: Path, reason: object) -> None:
    print(f"warning: torch.compile compiles anew: {archive} cannot be used: {reason}", flush=True)


def write_archive(archive: Path, content: bytes) -> None:
    """Write an archive, whole or not at all; several runs may do so at once. Raises `OSError`."""
    archive.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with complete_file(archive) as temporary:
        temporary.write_bytes(content)
