"""Check that a restart reuses the output of torch.compile, and that a cache failure costs only time."""

import errno
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from hpc.strategies import compile_cache
from hpc.strategies.parallelize import ModuleChanges, parallelize
from my_research.models.gpt import GPT

WORDS = [
    "data=stdlib",
    "model=gpt_tiny",
    "data.block_size=16",
    "model.network.num_layers=2",
    "trainer.accelerator=cpu",
    "trainer.max_steps=2",
    "+trainer.limit_val_batches=1",
    "+trainer.limit_test_batches=1",
    "callbacks.progress=null",
    "strategy.compile=true",
]
# Prints the number of graphs that a rank has compiled, and of those that missed the cache.
COUNT = """
from torch._dynamo.utils import counters
from hpc.strategies import compile_cache as compiled
ends = compiled.CompileCache.on_train_end
def on_train_end(self, trainer, module):
    ends(self, trainer, module)
    misses = counters["inductor"]["fxgraph_cache_miss"] + counters["aot_autograd"]["autograd_cache_miss"]
    print(f"graphs {counters['stats']['unique_graphs']} compiled {misses}", flush=True)
compiled.CompileCache.on_train_end = on_train_end
"""


def network(layers: int = 1) -> GPT:
    return GPT(num_layers=layers, num_heads=2, width=16, vocab_size=11, block_size=8)


def test_the_key_names_what_a_compilation_depends_on() -> None:
    same = compile_cache.cache_key(network(), "H100", precision="bf16-mixed")
    assert same == compile_cache.cache_key(network(), "H100", precision="bf16-mixed")
    others = [
        compile_cache.cache_key(network(2), "H100", precision="bf16-mixed"),
        compile_cache.cache_key(network(), "A100", precision="bf16-mixed"),
        compile_cache.cache_key(network(), "H100", precision="32-true"),
    ]
    assert len({same, *others}) == 4


def test_the_key_follows_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.py"
    file.write_text("one")
    monkeypatch.setattr(compile_cache.inspect, "getfile", lambda kind: str(file))
    before = compile_cache.cache_key(nn.Identity(), "", precision="")
    file.write_text("two")
    assert compile_cache.cache_key(nn.Identity(), "", precision="") != before


def test_a_module_of_any_shape_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    module = L.LightningModule()
    module.encoder = nn.Linear(2, 3)  # no attribute called network
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    trainer: Any = SimpleNamespace(strategy=strategy, precision="32-true", default_root_dir=str(tmp_path))
    cache = compile_cache.CompileCache(str(tmp_path / "kept"), enabled=True)
    cache.setup(trainer, module, "fit")
    before = cache.archive
    module.encoder = nn.Linear(3, 3)
    cache.setup(trainer, module, "fit")
    assert cache.archive != before and cache.cache_dir.is_dir()


def test_kept_and_unpacked_on_another_node(tmp_path: Path) -> None:
    (tmp_path / "node1" / "ab").mkdir(parents=True)
    (tmp_path / "node1" / "ab" / "kernel.so").write_text("code")
    archive = tmp_path / "shared" / "key.tar"
    compile_cache.pack_archive(tmp_path / "node1", archive)
    assert [path.name for path in archive.parent.iterdir()] == ["key.tar"]
    place = tmp_path / "node2" / "cache"
    place.parent.mkdir()
    compile_cache.unpack_archive(archive, place)
    compile_cache.unpack_archive(archive, place)  # the next rank of that node
    assert (place / "ab" / "kernel.so").read_text() == "code"
    assert list(place.parent.iterdir()) == [place]


def cache(folder: Path, local: Path, run_dir: Path) -> compile_cache.CompileCache:
    """Set up the cache of a run whose node-local storage is `local`."""
    made = compile_cache.CompileCache(str(folder), enabled=True, node_local=str(local))
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    trainer = SimpleNamespace(strategy=strategy, precision="32-true", default_root_dir=str(run_dir))
    made.setup(trainer, nn.Sequential(nn.Linear(2, 2)), "fit")  # type: ignore[arg-type]
    return made


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Path]:
    """Make the shared cache, the node-local storage, the run directory, and the system's temporary folder."""
    made = tuple(tmp_path / name for name in ("shared", "node", "run", "temporary"))
    for folder in made:
        folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(made[3]))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    return made[:3]  # type: ignore[return-value]


@pytest.mark.parametrize("theirs", ["folder", "link", "all can write"])
def test_a_folder_of_somebody_else_is_neither_used_nor_the_end(
    theirs: str, folders: tuple[Path, ...], capsys: pytest.CaptureFixture
) -> None:
    if theirs == "folder" and os.getuid():
        pytest.skip("only root may give a folder away")
    place = folders[1] / f"compiled-{os.getuid()}"
    if theirs == "link":
        (folders[1] / "elsewhere").mkdir()
        place.symlink_to(folders[1] / "elsewhere")
    else:
        place.mkdir(mode=0o700)
        place.chmod(0o777 if theirs == "all can write" else 0o700)
    if theirs == "folder":
        os.chown(place, os.getuid() + 1, -1)
    found = cache(*folders)
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent.parent == Path(tempfile.gettempdir())
    assert found.cache_dir.is_dir() and not list(place.iterdir())
    assert "must be a folder that this user owns and nobody else can write" in capsys.readouterr().out


def test_a_full_node_is_a_warning(
    folders: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Check an archive that fits neither node-local storage nor the temporary folder.

    It must be written to the run directory.
    """
    written = tarfile.TarFile.makefile

    def makefile(self: tarfile.TarFile, info: tarfile.TarInfo, path: str) -> None:
        if not Path(path).is_relative_to(folders[2]):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        written(self, info, path)

    first = cache(*folders)
    (first.cache_dir / "kernel.so").write_text("code")
    compile_cache.pack_archive(first.cache_dir, first.archive)
    shutil.rmtree(first.cache_dir)
    monkeypatch.setattr(tarfile.TarFile, "makefile", makefile)
    found = cache(*folders)
    assert found.cache_dir.is_relative_to(folders[2]) and (found.cache_dir / "kernel.so").read_text() == "code"
    assert capsys.readouterr().out.count("No space left") == 2
    assert not list(first.cache_dir.parent.iterdir())  # a partial archive would waste space


@pytest.mark.parametrize("kept", ["damaged", "of another user", "a folder"])
def test_what_cannot_be_trusted_or_read_is_no_cache(
    kept: str, folders: tuple[Path, ...], capsys: pytest.CaptureFixture
) -> None:
    if kept == "of another user" and os.getuid():
        pytest.skip("only root may give a file away")
    first = cache(*folders)
    (first.cache_dir / "kernel.so").write_text("code")
    compile_cache.pack_archive(first.cache_dir, first.archive)
    shutil.rmtree(first.cache_dir)
    if kept == "damaged":
        first.archive.write_text("no archive")
    elif kept == "a folder":
        first.archive.unlink()
        first.archive.mkdir()
    else:
        os.chown(first.archive, os.getuid() + 1, -1)
    found = cache(*folders)
    assert found.cache_dir == first.cache_dir and not list(found.cache_dir.iterdir())
    assert "compiles anew" in capsys.readouterr().out


def test_what_another_run_takes_away_meanwhile_is_a_warning(
    folders: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Let files of the cache vanish, as another run of the node may remove them: this must be only a warning."""
    found = cache(*folders)
    (found.cache_dir / "aside").mkdir()
    (found.cache_dir / "aside" / "kernel.so").write_text("code")
    scandir = os.scandir

    def gone(path: str | Path | int) -> object:  # a number is a folder that is open
        if str(path).endswith("/aside") or path == "aside":
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", gone)
    found.on_train_end(SimpleNamespace(is_global_zero=True), None)  # type: ignore[arg-type]
    (found.cache_dir / "other.so").write_text("code")
    monkeypatch.setattr(tarfile.TarFile, "addfile", lambda *_: gone("aside"))
    found.on_train_end(SimpleNamespace(is_global_zero=True), None)  # type: ignore[arg-type]
    assert "is not kept" in capsys.readouterr().out and not list(folders[0].iterdir())


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_compilation_serves_all_equal_blocks(checkpointing: bool) -> None:
    made = []
    tokens = torch.randint(0, 11, (2, 8))
    for layers in (2, 5):
        torch._dynamo.reset()
        counters.clear()
        plain, changed = network(layers), network(layers)
        changed.load_state_dict(plain.state_dict())
        module = L.LightningModule()
        module.network, module.loss = changed, nn.CrossEntropyLoss()
        module._trainer = SimpleNamespace(is_global_zero=True)
        parallelize(module, None, ModuleChanges(compile=True, activation_checkpointing=checkpointing))
        for net in (plain, changed):
            net(tokens).square().mean().backward()
        for expected, found in zip(plain.parameters(), changed.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad)
        assert not counters["graph_break"] and list(changed.state_dict()) == list(plain.state_dict())
        made.append(counters["stats"]["unique_graphs"])
    assert made == [3, 3]  # block, norm, head


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a compile cache that the tests here share, as compiling takes long."""
    return tmp_path_factory.mktemp("kept")


def places(kept: Path, node: Path) -> list[str]:
    node.mkdir()
    return [f"callbacks.compile_cache.folder={kept}", f"callbacks.compile_cache.node_local={node}"]


@pytest.mark.soak
@pytest.mark.slow
def test_a_second_run_compiles_nothing(start: Callable, tmp_path: Path, kept: Path) -> None:
    def missed(name: str) -> int:
        words = [*WORDS, *places(kept, tmp_path / name)]
        said = start(tmp_path / f"run-{name}", 1, words, patch=COUNT)
        return int(said.partition("compiled ")[2].split()[0])

    assert missed("node1") > 0
    assert missed("node2") == 0
    (archive,) = kept.iterdir()
    archive.write_bytes(archive.read_bytes()[:3000])
    assert missed("node3") > 0


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_blocks_are_compiled_under_every_strategy(strategy: str, start: Callable, tmp_path: Path, kept: Path) -> None:
    words = [*WORDS, f"strategy={strategy}", "trainer.devices=2", "strategy.activation_checkpointing=true"]
    words += places(kept, tmp_path / "node")
    said = start(tmp_path / "run", 2, words, patch=COUNT)
    assert [int(count) >= 4 for count in re.findall(r"graphs (\d+)", said)] == [True, True]
