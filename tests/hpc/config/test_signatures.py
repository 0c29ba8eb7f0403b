"""Check that signatures read from source or from the cache are those that `inspect` gives."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest
from fork import PACKAGE

from hpc.config import signatures, source_signatures
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


def test_a_base_class_may_come_with_everything_of_another_module(monkeypatch: pytest.MonkeyPatch) -> None:
    import ast

    texts = {
        "one": "from .two import *\nfrom somewhere import *\nclass Own(Base): ...\nclass Other(Unknown): ...",
        "two": "from .three import *",
        "three": "class Base:\n    def __init__(self, size: int): ...",
    }
    monkeypatch.setattr(source_signatures, "_parse_module", lambda module: ast.parse(texts[module.rpartition(".")[2]]))
    assert read_signature(f"{PACKAGE}.one.Own").required == ["size"]
    assert read_signature(f"{PACKAGE}.one.Other").accepts_any


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
    monkeypatch.setattr(source_signatures, "SOURCES", tmp_path)
    (tmp_path / "net.py").write_bytes(text)
    with pytest.raises(ConfigError, match="is not Python"):
        source_signatures._parse_module("net")
