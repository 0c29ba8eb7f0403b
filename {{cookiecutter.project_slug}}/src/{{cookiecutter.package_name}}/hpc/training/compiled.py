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
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn

from ..config import Refused
from ..storage import staging


class CompileCache(L.Callback):
    """Sets up the compiler's cache before the network is compiled, and keeps what has been added to it.

    A cache saves time and nothing else: one that cannot be read or written is a warning.

    Args:
        folder: on a file system that all nodes see; for your own programs only: what lies there is executed.
        node_local: where each node unpacks it; None: the system's place for temporary files.
    """

    def __init__(self, folder: str, enabled: bool, node_local: str | None = None) -> None:
        self.folder, self.enabled = Path(os.path.expandvars(folder)).expanduser(), enabled
        self.node_local = node_local
        self._known = 0

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        device = trainer.strategy.root_device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
        self.archive = self.folder / f"{key(pl_module.network, name, str(trainer.precision))}.tar"
        self.place = node_folder(self.node_local) / f"compiled-{os.getuid()}" / self.archive.stem
        try:
            unpack(self.archive, self.place)
        except tarfile.TarError as error:
            print(f"warning: compiles anew, {self.archive} cannot be read: {error}", flush=True)
        self._known = sum(1 for _ in self.place.rglob("*"))
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.place)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._keep(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._keep(trainer)

    def _keep(self, trainer: L.Trainer) -> None:
        there = sum(1 for _ in self.place.rglob("*"))
        if trainer.is_global_zero and there > self._known:
            self._known = there
            try:
                pack(self.place, self.archive)
            except OSError as error:
                print(f"warning: what torch.compile made is not kept: {error}", flush=True)


def node_folder(node_local: str | None) -> Path:
    """The node's own storage, if the cluster's file names one that is there."""
    with suppress(Refused):
        return Path(staging.place(node_local) if node_local else tempfile.gettempdir())
    return Path(tempfile.gettempdir())


def key(network: nn.Module, device: str, precision: str) -> str:
    """Names what a compilation depends on: the network, the code of its parts, versions, device, precision."""
    files = {inspect.getfile(type(module)) for module in network.modules()}
    code = [Path(file).read_bytes() for file in sorted(files) if "site-packages" not in file]
    words = [repr(network), torch.__version__, platform.python_version(), platform.machine(), device, precision]
    digest = hashlib.sha256("\n".join(words).encode())
    for text in code:
        digest.update(text)
    return digest.hexdigest()[:16]


def unpack(archive: Path, place: Path) -> None:
    """The cache at its place on this node; empty where nothing was kept. One of the node's ranks unpacks.

    Raises:
        PermissionError: the place, or the archive, belongs to somebody else: it would be executed.
        tarfile.TarError: the archive is damaged; the place is there, and empty.
    """
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in (place.parent, archive):
        if path.exists() and path.stat().st_uid != os.getuid():
            raise PermissionError(f"{path} belongs to another user; what torch.compile made is executed")
    if place.exists():
        return
    aside = Path(tempfile.mkdtemp(dir=place.parent))
    whole, damage = aside / "whole", None
    try:
        with suppress(FileNotFoundError), tarfile.open(archive) as kept:
            kept.extractall(whole, filter="data")
    except tarfile.TarError as error:
        damage = error
        shutil.rmtree(whole, ignore_errors=True)
    whole.mkdir(exist_ok=True)
    with suppress(OSError):  # another rank was faster
        whole.rename(place)
    shutil.rmtree(aside)
    if damage:
        raise damage


def pack(place: Path, archive: Path) -> None:
    """Keep the cache, whole or not at all."""
    archive.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = archive.with_suffix(f".{platform.node()}-{os.getpid()}")
    with tarfile.open(aside, "w") as kept:
        kept.add(place, ".")
    aside.replace(archive)
