"""What torch.compile has made, kept for the next start: one file per code, versions and device, unpacked on each node.

The compiler's own cache is a folder of many small files, which ranks of many nodes would open one by one on a parallel
file system. So it lies on the node, and a tar archive of it where all nodes see it.
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

ROOM = 16 * 2**20  # bytes that a folder must have free to compile in


class CompileCache(L.Callback):
    """Sets up the compiler's cache before the network is compiled, and keeps what has been added to it.

    A cache saves time and nothing else: one that cannot be read or written is a warning.

    Args:
        folder: on a file system that all nodes see; for your own programs only: what lies there is executed.
        node_local: where each node unpacks it; None: the system's place for temporary files.
    """

    def __init__(self, folder: str, enabled: bool, node_local: str | None = None) -> None:
        self.folder, self.enabled = home.expand(os.path.expandvars(folder)), enabled
        self.node_local = node_local
        self._known = 0

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        device = trainer.strategy.root_device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
        self.archive = self.folder / f"{key(pl_module.network, name, str(trainer.precision))}.tar"
        self.place = unpacked(self.archive, places(self.node_local, trainer.default_root_dir))
        self._known = self._count()
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.place)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._keep(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._keep(trainer)

    def _keep(self, trainer: L.Trainer) -> None:
        there = self._count()
        if trainer.is_global_zero and there > self._known:
            self._known = there
            try:
                pack(self.place, self.archive)
            except OSError as error:
                print(f"warning: what torch.compile made is not kept: {error}", flush=True)

    def _count(self) -> int:
        """Files at the place. Another run on this node may compile there, too, and take away what it has put aside."""
        return sum(len(files) for _, _, files in os.walk(self.place))


def places(node_local: str | None, run_dir: str) -> Iterator[Path]:
    """Folders to compile in, best first: the node's own storage, if the cluster's file names one that is there."""
    with suppress(ConfigError):
        if node_local:
            yield Path(staging.place(node_local))
    with suppress(OSError):  # there is none that can be written
        yield Path(tempfile.gettempdir())
    yield Path(run_dir)


def key(network: nn.Module, device: str, precision: str) -> str:
    """Names what a compilation depends on: the network, the code of its parts, versions, device, precision."""
    files = set()
    for module in network.modules():
        with suppress(OSError, TypeError):  # made by a program: it has no file
            files.add(inspect.getfile(type(module)))
    code = [Path(file).read_bytes() for file in sorted(files) if "site-packages" not in file]
    words = [repr(network), torch.__version__, platform.python_version(), platform.machine(), device, precision]
    digest = hashlib.sha256("\n".join(words).encode())
    for text in code:
        digest.update(text)
    return digest.hexdigest()[:16]


def unpacked(archive: Path, folders: Iterable[Path]) -> Path:
    """The cache in the first of these folders that is this user's own and has room, so far as it can be read.

    What lies there is executed: where somebody else has made that folder, it is not used.
    """
    place = Path()
    for folder in folders:
        place = folder / f"compiled-{os.getuid()}" / archive.stem
        try:
            directory.write_probe_file(private_folder.make(place.parent), ROOM)
            unpack(archive, place)
            break
        except OSError as error:
            print(f"warning: torch.compile uses another folder than {folder}: {error}", flush=True)
    return place


def unpack(archive: Path, place: Path) -> None:
    """The cache at its place on this node; empty where nothing was kept. One of the node's ranks unpacks.

    Raises:
        OSError: there is no room for it.
    """
    if place.exists():
        return
    aside = Path(tempfile.mkdtemp(dir=place.parent))
    try:
        whole = aside / "whole"
        whole.mkdir()
        try:
            if stream := _opened(archive):
                with stream, tarfile.open(fileobj=stream) as kept:
                    kept.extractall(whole, filter="data")
        except (tarfile.TarError, ValueError, LookupError) as error:  # tarfile's words for what is damaged
            print(f"warning: compiles anew, {archive} cannot be read: {error}", flush=True)
            shutil.rmtree(whole)
            whole.mkdir()
        with suppress(OSError):  # another rank was faster
            whole.rename(place)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _opened(archive: Path) -> BinaryIO | None:
    """The archive, if there is one of this user that can be read."""
    try:
        stream = archive.open("rb")
    except FileNotFoundError:
        return None
    except OSError as error:
        print(f"warning: compiles anew, {archive} cannot be read: {error}", flush=True)
        return None
    if os.fstat(stream.fileno()).st_uid == os.getuid():
        return stream
    stream.close()
    print(f"warning: compiles anew, {archive} belongs to another user, and would be executed", flush=True)
    return None


def pack(place: Path, archive: Path) -> None:
    """Keep the cache, whole or not at all."""
    archive.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = archive.with_suffix(f".{platform.node()}-{os.getpid()}")
    try:
        with tarfile.open(aside, "w") as kept:
            kept.add(place, ".")
        aside.replace(archive)
    finally:
        aside.unlink(missing_ok=True)
