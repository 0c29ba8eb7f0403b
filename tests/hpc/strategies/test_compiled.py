"""Check that a restart reuses the output of torch.compile, and that a cache failure costs only time."""

import errno
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.compiler._cache import CacheArtifactManager

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


def trainer_in(run_dir: Path, local_rank: int = 0) -> Any:
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    named = {"precision": "32-true", "default_root_dir": str(run_dir), "local_rank": local_rank, "node_rank": 0}
    return SimpleNamespace(strategy=strategy, **named)


def cache(folder: Path, local: Path, run_dir: Path, local_rank: int = 0) -> compile_cache.CompileCache:
    """Set up the cache of a run whose node-local storage is `local`."""
    made = compile_cache.CompileCache(str(folder), enabled=True, node_local=str(local))
    made.setup(trainer_in(run_dir, local_rank), nn.Sequential(nn.Linear(2, 2)), "fit")
    return made


def test_a_module_of_any_shape_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    module = L.LightningModule()
    module.encoder = nn.Linear(2, 3)  # no attribute called network
    made = compile_cache.CompileCache(str(tmp_path / "kept"), enabled=True)
    made.setup(trainer_in(tmp_path), module, "fit")
    before = made.archive
    module.encoder = nn.Linear(3, 3)
    made.setup(trainer_in(tmp_path), module, "fit")
    assert made.archive != before and Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).is_dir()


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Path]:
    """Make the shared cache, the node-local storage, the run directory, and the system's temporary folder."""
    made = tuple(tmp_path / name for name in ("shared", "node", "run", "temporary"))
    for folder in made:
        folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(made[3]))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    return made[:3]  # type: ignore[return-value]


@pytest.fixture
def artifacts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Let torch's list of artifacts be empty; return a function that adds one, as a compilation does."""
    CacheArtifactManager._ensure_cache_artifacts_registered()
    with CacheArtifactManager.with_fresh_cache():
        yield lambda key: CacheArtifactManager.record_artifact("aot_autograd", key, f"code of {key}".encode())


def compiled_files(local: Path) -> set[str]:
    return {path.read_text() for path in local.glob("compiled-*/**/*") if path.is_file()}


def test_what_was_compiled_is_there_on_another_node(
    folders: tuple[Path, ...], artifacts: Callable[[str], None], tmp_path: Path
) -> None:
    """Check that a rank's archive is read on another node by the rank of the same place."""
    first = cache(*folders)
    artifacts("block")
    artifacts("head")
    first.on_exception(trainer_in(folders[2]), None, KeyboardInterrupt())  # type: ignore[arg-type]
    assert [path.name for path in folders[0].iterdir()] == [first.archive.name]  # type: ignore[union-attr]
    for name, rank, expected in [("node2", 0, {"code of block", "code of head"}), ("node3", 1, set())]:
        (tmp_path / name).mkdir()
        cache(folders[0], tmp_path / name, folders[2], rank)
        assert compiled_files(tmp_path / name) == expected


def test_an_error_after_training_leaves_the_archive_whole(
    folders: tuple[Path, ...], artifacts: Callable[[str], None], tmp_path: Path
) -> None:
    """Let a test compile and fail after training: torch would load only what the test has compiled."""
    first = cache(*folders)
    artifacts("block")
    first.on_train_end(trainer_in(folders[2]), None)  # type: ignore[arg-type]
    artifacts("test")
    first.on_exception(trainer_in(folders[2]), None, ValueError())  # type: ignore[arg-type]
    (tmp_path / "node2").mkdir()
    cache(folders[0], tmp_path / "node2", folders[2])
    assert compiled_files(tmp_path / "node2") == {"code of block"}


def test_an_error_before_the_setup_is_that_error(folders: tuple[Path, ...]) -> None:
    made = compile_cache.CompileCache(str(folders[0]), enabled=True)
    made.on_exception(trainer_in(folders[2]), None, ValueError())  # type: ignore[arg-type]


def test_the_archive_is_not_replaced_by_one_that_has_nothing_new(
    folders: tuple[Path, ...], artifacts: Callable[[str], None]
) -> None:
    first = cache(*folders)
    artifacts("block")
    artifacts("head")
    first.on_train_end(trainer_in(folders[2]), None)  # type: ignore[arg-type]
    with CacheArtifactManager.with_fresh_cache():
        again = cache(*folders)
        artifacts("block")  # a run that has come no further
        again.on_train_end(trainer_in(folders[2]), None)  # type: ignore[arg-type]
    assert first.archive and b"code of head" in first.archive.read_bytes()


def test_other_nodes_write_no_archive(folders: tuple[Path, ...], artifacts: Callable[[str], None]) -> None:
    first, trainer = cache(*folders), trainer_in(folders[2])
    artifacts("block")
    trainer.node_rank = 1
    first.on_train_end(trainer, None)  # type: ignore[arg-type]
    assert not list(folders[0].iterdir())


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
    cache(*folders)
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent == Path(tempfile.gettempdir())
    assert not list(place.iterdir())
    assert "must be a folder that this user owns and nobody else can write" in capsys.readouterr().out


def test_a_full_node_is_a_warning(
    folders: tuple[Path, ...],
    artifacts: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """Check an archive that fits neither node-local storage nor the temporary folder: the run directory is used."""
    first = cache(*folders)
    artifacts("block")
    first.on_train_end(trainer_in(folders[2]), None)  # type: ignore[arg-type]
    load = torch.compiler.load_cache_artifacts

    def load_where_there_is_room(content: bytes) -> Any:
        if not Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(folders[2]):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return load(content)

    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", load_where_there_is_room)
    cache(*folders)
    assert compiled_files(folders[2]) == {"code of block"}
    assert capsys.readouterr().out.count("No space left") == 2


@pytest.mark.parametrize("kept", ["damaged", "of another user", "a folder"])
def test_what_cannot_be_trusted_or_read_is_no_cache(
    kept: str, folders: tuple[Path, ...], artifacts: Callable[[str], None], capsys: pytest.CaptureFixture
) -> None:
    if kept == "of another user" and os.getuid():
        pytest.skip("only root may give a file away")
    first = cache(*folders)
    artifacts("block")
    first.on_train_end(trainer_in(folders[2]), None)  # type: ignore[arg-type]
    assert first.archive
    if kept == "damaged":
        first.archive.write_bytes(first.archive.read_bytes()[:-3])
    elif kept == "a folder":
        first.archive.unlink()
        first.archive.mkdir()
    else:
        os.chown(first.archive, os.getuid() + 1, -1)
    cache(*folders)
    assert not compiled_files(folders[1])
    assert "compiles anew" in capsys.readouterr().out


def test_an_archive_that_cannot_be_written_is_a_warning(
    folders: tuple[Path, ...], artifacts: Callable[[str], None], capsys: pytest.CaptureFixture
) -> None:
    first = cache(*folders)
    artifacts("block")
    folders[0].rmdir()
    folders[0].write_text("a file where the folder was")
    first.on_train_end(trainer_in(folders[2]), None)  # type: ignore[arg-type]
    assert "is not kept" in capsys.readouterr().out


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
