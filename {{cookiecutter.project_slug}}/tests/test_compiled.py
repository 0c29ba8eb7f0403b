"""What torch.compile has made is found by the next start; what cannot be kept or read costs time and nothing else."""

import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from {{ cookiecutter.package_name }}.hpc.training import compiled
from {{ cookiecutter.package_name }}.hpc.training.parallel import parallelize
from {{ cookiecutter.package_name }}.models.gpt import GPT

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
# Prints how many graphs a rank has compiled, and how many of them were in no cache.
COUNT = """
from torch._dynamo.utils import counters
from {{ cookiecutter.package_name }}.hpc.training import compiled
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
    same = compiled.key(network(), "H100", "bf16-mixed")
    assert same == compiled.key(network(), "H100", "bf16-mixed")
    others = [
        compiled.key(network(2), "H100", "bf16-mixed"),
        compiled.key(network(), "A100", "bf16-mixed"),
        compiled.key(network(), "H100", "32-true"),
    ]
    assert len({same, *others}) == 4


def test_the_key_follows_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.py"
    file.write_text("one")
    monkeypatch.setattr(compiled.inspect, "getfile", lambda kind: str(file))
    before = compiled.key(nn.Identity(), "", "")
    file.write_text("two")
    assert compiled.key(nn.Identity(), "", "") != before


def test_kept_and_unpacked_on_another_node(tmp_path: Path) -> None:
    (tmp_path / "node1" / "ab").mkdir(parents=True)
    (tmp_path / "node1" / "ab" / "kernel.so").write_text("code")
    archive = tmp_path / "shared" / "key.tar"
    compiled.pack(tmp_path / "node1", archive)
    assert [path.name for path in archive.parent.iterdir()] == ["key.tar"]
    place = tmp_path / "node2" / "cache"
    compiled.unpack(archive, place)
    compiled.unpack(archive, place)  # the next rank of that node
    assert (place / "ab" / "kernel.so").read_text() == "code"
    assert (place.parent.stat().st_mode & 0o777, list(place.parent.iterdir())) == (0o700, [place])


def test_what_belongs_to_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "key.tar"
    archive.touch()
    monkeypatch.setattr(os, "getuid", lambda: archive.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="another user"):
        compiled.unpack(archive, tmp_path / "node" / "cache")


def test_a_damaged_archive_is_no_cache(tmp_path: Path) -> None:
    archive = tmp_path / "key.tar"
    archive.write_text("no archive")
    with pytest.raises(tarfile.TarError):
        compiled.unpack(archive, tmp_path / "node" / "cache")
    assert list((tmp_path / "node").iterdir()) == [tmp_path / "node" / "cache"]


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
        parallelize(changed, None, loss=nn.CrossEntropyLoss(), compile=True, activation_checkpointing=checkpointing)
        for net in (plain, changed):
            net(tokens).square().mean().backward()
        for expected, found in zip(plain.parameters(), changed.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad)
        assert not counters["graph_break"] and list(changed.state_dict()) == list(plain.state_dict())
        made.append(counters["stats"]["unique_graphs"])
    assert made == [3, 3]  # block, norm, head


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the tests here compile, for all of them: most of what is needed is the same, and takes its time."""
    return tmp_path_factory.mktemp("kept")


def places(kept: Path, node: Path) -> list[str]:
    node.mkdir()
    return [f"callbacks.compile_cache.folder={kept}", f"callbacks.compile_cache.node_local={node}"]


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


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_blocks_are_compiled_under_every_strategy(strategy: str, start: Callable, tmp_path: Path, kept: Path) -> None:
    words = [*WORDS, f"strategy={strategy}", "trainer.devices=2", "strategy.activation_checkpointing=true"]
    words += places(kept, tmp_path / "node")
    said = start(tmp_path / "run", 2, words, patch=COUNT)
    assert [int(count) >= 4 for count in re.findall(r"graphs (\d+)", said)] == [True, True]
