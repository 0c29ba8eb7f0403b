"""Check that signatures read from source or from the cache are those that `inspect` gives."""

import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
from fork import PACKAGE

from hpc.config import project, signatures, source_signatures
from hpc.config.errors import ConfigError
from hpc.config.signatures import Signature, is_compatible, read_signature

OWN = ["models.resnet.ResNet", "models.gpt.GPT", "module.Classifier"]
OWN += ["data.digits.Digits", "data.images.Images", "data.text.Text", "data.stdlib.StandardLibrary"]


@pytest.mark.parametrize("name", [*OWN, "hpc.config.build.build_data"])
def test_source_says_what_inspect_says(name: str) -> None:
    target = name if name.startswith("hpc.") else f"{PACKAGE}.{name}"
    module, _, attribute = target.rpartition(".")
    real = inspect.signature(getattr(import_module(module), attribute)).parameters
    read = read_signature(target)
    named = {p.name for p in real.values() if p.kind is not p.VAR_KEYWORD}
    assert named <= set(read.parameters)
    required = {p.name for p in real.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    assert required <= set(read.required)


def test_what_is_passed_on_to_a_base_class_is_known() -> None:
    read = read_signature(f"{PACKAGE}.data.digits.Digits")
    assert {"global_batch_size", "seed", "num_workers"} <= set(read.parameters)
    assert not read.accepts_any


def test_what_a_class_gives_its_base_itself_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import ast

    source = """
class Base:
    def __init__(self, files: str, size: int): ...
class Own(Base):
    def __init__(self, **more):
        super().__init__(files="here", **more)
"""
    monkeypatch.setattr(source_signatures, "_parse_module", lambda module: ast.parse(source))
    read = read_signature(f"{PACKAGE}.anything.Own")
    assert set(read.parameters) == {"size"} and read.required == ["size"]


@pytest.fixture
def write_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, str]], None]]:
    """Put files into a folder that takes the place of src/."""

    def write(texts: dict[str, str]) -> None:
        for name, text in texts.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        roots = {Path(name).parts[0].removesuffix(".py") for name in texts}
        for module in (signatures, source_signatures):
            monkeypatch.setattr(module, "is_project_code", lambda name: name.split(".")[0] in roots)

    def forget() -> None:
        for cached in ("_parse_module", "_imported_names", "read_source_signature"):
            getattr(source_signatures, cached).cache_clear()

    monkeypatch.setattr(project, "SOURCES", tmp_path)
    forget()
    yield write
    forget()


def test_a_base_class_may_come_with_everything_of_another_module(write_sources: Callable) -> None:
    write_sources(
        {
            "one.py": "from two import *\nfrom json import *\nclass Own(Base): ...\nclass Other(Unknown): ...",
            "two.py": "from three import *",
            "three.py": "from two import *\nclass Base:\n    def __init__(self, size: int): ...",
        }
    )
    assert read_signature("one.Own").required == ["size"]
    assert read_signature("one.Other").accepts_any


REEXPORTING = {
    "research/__init__.py": "from .net import Net as Network\nfrom torch.optim import SGD\nfrom .loop import Loop",
    "research/net.py": "class Net:\n    def __init__(self, size: int): ...\n"
    "    @classmethod\n    def small(cls, depth: int = 1): ...\n",
    "research/loop.py": "from . import Loop",
    "flat.py": "from research import Network\ntry:\n    class Late: ...\nexcept OSError:\n    Late = None",
}


@pytest.mark.parametrize(
    ("target", "parameters"),
    [
        ("research.Network", {"size"}),
        ("flat.Network", {"size"}),
        ("research.net.Net.small", {"depth"}),
        ("research.Network.small", {"depth"}),
        ("research.SGD", {"params", "lr"}),
        ("flat.Late", set()),
    ],
)
def test_a_target_may_be_named_where_it_is_imported(target: str, parameters: set[str], write_sources: Callable) -> None:
    write_sources(REEXPORTING)
    assert parameters <= set(read_signature(target).parameters)
    for missing in ("research.Net", "research.Loop", "research.Network.large", "flat.Later"):
        with pytest.raises(ConfigError, match=r"must be a class or a function|there is no file"):
            read_signature(missing)


STYLES = """
import dataclasses, torch
from dataclasses import dataclass, field
from typing import ClassVar

def register(kind):
    return kind

class Base:
    def __init__(self, width: int = None, *, depth: int): ...
    @classmethod
    def small(cls, depth: int = None): ...

@register
class Net(Base): ...

@register
class Own(torch.nn.Embedding): ...

@dataclass
class Few:
    a: int
    b: int = 2
    KIND: ClassVar[int] = 3

@dataclasses.dataclass(frozen=True)
class More(Few):
    c: list = field(default_factory=list)
"""
OF_STYLES = {
    "styles.Net": ({"width": "int | None", "depth": "int"}, ["depth"]),
    "styles.Net.small": ({"depth": "int | None"}, []),
    "styles.Few": ({"a": "int", "b": "int"}, ["a"]),
    "styles.More": ({"a": "int", "b": "int", "c": "list"}, ["a"]),
}


@pytest.mark.parametrize("target", OF_STYLES)
def test_decorated_and_inherited_classes(target: str, write_sources: Callable) -> None:
    write_sources({"styles.py": STYLES})
    read, (parameters, required) = read_signature(target), OF_STYLES[target]
    assert (dict(sorted(read.parameters.items())), read.required) == (dict(sorted(parameters.items())), required)
    node = {"_target_": target, **dict.fromkeys(required, 1)}
    signatures.check_arguments("model", node | ({"width": None} if "width" in parameters else {}))


@pytest.mark.parametrize(
    ("target", "given"),
    [
        ("torch.nn.Embedding.from_pretrained", {"embeddings": {"_target_": "torch.ones", "size": [2]}}),
        ("styles.Own.from_pretrained", {"embeddings": {"_target_": "torch.ones"}, "freeze": True}),
        ("types.SimpleNamespace", {"anything": 1}),
        ("builtins.dict", {"anything": 1}),
        ("torch.optim.SGD", {"_args_": [[1]], "lr": {"_target_": "builtins.float", "_args_": ["1"]}}),
    ],
)
def test_what_hydra_can_call_may_be_called(target: str, given: dict, write_sources: Callable) -> None:
    write_sources({"styles.py": STYLES})
    signatures.check_arguments("model", {"_target_": target, **given})


MISSING = "import nowhere_to_be_found.deep as deep\nclass Net: ..."
GUARDED = "try:\n    import nowhere_to_be_found\nexcept ImportError: ...\n"
GUARDED += "import json, torch.nn\nfrom . import x\nclass Net: ..."


def test_a_package_that_is_not_installed_is_found_before_the_queue(write_sources: Callable) -> None:
    write_sources({"net.py": MISSING, "other.py": GUARDED})
    with pytest.raises(ConfigError, match=r"net\.py, line 1, imports nowhere_to_be_found, which is not installed"):
        read_signature("net.Net")
    assert read_signature("other.Net").accepts_any


def test_a_folder_that_an_installed_package_hides_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json").mkdir()
    monkeypatch.setattr(signatures, "SOURCES", tmp_path)
    with pytest.raises(ConfigError, match=r"an empty file .*json/__init__\.py, which makes that folder a package"):
        read_signature("json.net.Net")


def test_a_library_is_imported_once_and_then_remembered(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signatures, "CACHE_FILE", tmp_path / "signatures.json")
    signatures._read_cache.cache_clear()
    imported = []
    real = signatures._import_signature
    monkeypatch.setattr(signatures, "_import_signature", lambda target: imported.append(target) or real(target))
    first = read_signature("torch.optim.AdamW")
    assert read_signature("torch.optim.AdamW") == first and imported == ["torch.optim.AdamW"]
    monkeypatch.setattr(signatures, "_package_version", lambda package: "another version")
    read_signature("torch.optim.AdamW")
    assert len(imported) == 2
    signatures._read_cache.cache_clear()


def test_a_read_only_environment_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from pathlib import Path

    monkeypatch.setattr(signatures, "CACHE_FILE", Path("/proc/signatures.json"))
    signatures._read_cache.cache_clear()
    assert isinstance(read_signature("torch.optim.SGD"), Signature)
    signatures._read_cache.cache_clear()


@pytest.mark.parametrize(
    ("value", "annotation", "answer"),
    [
        ({"_target_": "torch.optim.SGD"}, "Callable[[Any], Optimizer]", True),
        ("x", "Callable[[Any], Optimizer]", False),
        (None, "nn.Module", False),
        (3, "int", True),
        (3.5, "int", False),
        (3, "float", True),
        ("x", "float", False),
        (None, "int | None", True),
        (None, "int", False),
        (True, "int", False),
        (True, "bool", True),
        ([1], "list[int]", True),
        (1, "list[int]", False),
        ("x", "float | torch.Tensor", False),
        ("x", "Literal['auto'] | int", True),
        ("auto", "int | str", True),
        ("x", "", True),
        ("x", "Callable[..., int]", False),
    ],
)
def test_values_are_judged_only_where_it_can_be_told(value: object, annotation: str, answer: bool) -> None:
    assert is_compatible(value, annotation) is answer


@pytest.mark.parametrize("text", [b"class Net(:\n", b"\xff\xfe", b"x = '\x00'"])
def test_a_source_that_is_not_python_is_rejected(text: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(project, "SOURCES", tmp_path)
    (tmp_path / "net.py").write_bytes(text)
    with pytest.raises(ConfigError, match="is not Python"):
        source_signatures._parse_module("net")
