"""Check that signatures, read or remembered, are those that `inspect` gives, with what is passed on to bases."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
from fork import PACKAGE

from hpc.config import arguments, project, signature_reader, signatures
from hpc.config.errors import ConfigError
from hpc.config.signatures import Signature, is_compatible, read_signature

OWN = ["models.resnet.ResNet", "models.gpt.GPT", "module.Classifier"]
OWN += ["data.digits.Digits", "data.images.Images", "data.text.Text", "data.stdlib.StandardLibrary"]


@pytest.mark.parametrize("name", [*OWN, "hpc.config.build.build_data"])
def test_it_says_what_inspect_says(name: str) -> None:
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


@pytest.fixture
def write_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, str]], None]]:
    """Put files into a folder that takes the place of src/."""
    written: list[str] = []

    def write(texts: dict[str, str | bytes]) -> None:
        for name, text in texts.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        written.extend(Path(name).parts[0].removesuffix(".py") for name in texts)
        importlib.invalidate_caches()
        forget()

    def forget() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] in written]:
            del sys.modules[name]
        signatures._known.clear()
        signatures._digest.cache_clear()

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(project, "SOURCES", tmp_path)
    monkeypatch.setattr(signature_reader, "SOURCES", tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for module in (signatures, signature_reader):
        monkeypatch.setattr(module, "is_project_code", lambda name: name.split(".")[0] in (*written, "hpc"))
    yield write
    forget()


def test_what_a_class_gives_its_base_itself_is_not_asked_for(write_sources: Callable) -> None:
    source = """
class Base:
    def __init__(self, files: str, size: int): ...
class Own(Base):
    def __init__(self, **more):
        super().__init__(files="here", **more)
"""
    write_sources({"anything.py": source})
    read = read_signature("anything.Own")
    assert set(read.parameters) == {"size"} and read.required == ["size"]


def test_a_base_class_may_come_with_everything_of_another_module(write_sources: Callable) -> None:
    write_sources(
        {
            "one.py": "from two import *\nfrom json import *\nclass Own(Base): ...",
            "two.py": "from three import *",
            "three.py": "from two import *\nclass Base:\n    def __init__(self, size: int): ...",
        }
    )
    assert read_signature("one.Own").required == ["size"]


REEXPORTING = {
    "research/__init__.py": "from .net import Net as Network\nfrom torch.optim import SGD",
    "research/net.py": "class Net:\n    def __init__(self, size: int): ...\n"
    "    @classmethod\n    def small(cls, depth: int = 1): ...\n",
    "research/loop.py": "from . import Loop",
    "research/late.py": "import nowhere_at_all",
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
    for missing in ("research.Net", "research.loop.Loop", "research.Network.large", "flat.Later", "research.late.Net"):
        with pytest.raises(ConfigError, match=r"cannot be imported: .*(has no attribute|cannot import|No mod)"):
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

@dataclasses.dataclass(eq=False)
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
    node |= {"width": None} if "width" in parameters else {}
    assert list(arguments.node_problems("model", node)) == []


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
    assert list(arguments.node_problems("model", {"_target_": target, **given})) == []


MISSING = "import nowhere_to_be_found.deep as deep\nclass Net: ..."
GUARDED = "try:\n    import nowhere_to_be_found\nexcept ImportError: ...\n"
GUARDED += "import json, torch.nn\nclass Net: ..."


def test_a_package_that_is_not_installed_is_found_before_the_queue(write_sources: Callable) -> None:
    write_sources({"net.py": MISSING, "other.py": GUARDED})
    with pytest.raises(ConfigError, match=r"net\.py, line 1: ModuleNotFoundError: No .*nowhere_to_be_found"):
        read_signature("net.Net")
    assert read_signature("other.Net").parameters == {}


PLANS = """
class Base:
    def tensor_parallel_plan(self): ...
class Child(Base): ...
class Sets:
    def __init__(self):
        self.tensor_parallel_plan = None
class None_: ...
"""


def test_a_class_with_a_tensor_parallel_plan_is_known(write_sources: Callable) -> None:
    write_sources({"plans.py": PLANS})
    has_plan = {name: read_signature(f"plans.{name}").has_tensor_parallel_plan for name in ("Child", "Sets", "None_")}
    assert has_plan == {"Child": True, "Sets": True, "None_": False}


def test_a_folder_that_an_installed_package_hides_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json").mkdir()
    monkeypatch.setattr(signature_reader, "SOURCES", tmp_path)
    monkeypatch.setattr(signatures, "_known", {})
    with pytest.raises(ConfigError, match=r"an empty file .*json/__init__\.py, which makes that folder a package"):
        read_signature("json.net.Net")


@pytest.fixture
def imported(write_sources: Callable, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names that are imported because they are not remembered, here in place of another process."""
    names: list[str] = []
    real = signature_reader._import
    monkeypatch.setattr(signature_reader, "_import", lambda target: names.append(target) or real(target))
    monkeypatch.setattr(signatures, "is_training", False)
    monkeypatch.setattr(signatures, "_ask_reader", signature_reader.read)
    return names


def test_a_library_is_imported_once_for_each_version(imported: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        signatures._known.clear()
        assert "lr" in read_signature("torch.optim.AdamW").parameters and imported == ["torch.optim.AdamW"]
    monkeypatch.setattr(signatures, "_package_version", lambda package: "another version")
    signatures._known.clear()
    read_signature("torch.optim.AdamW")
    assert len(imported) == 2


def test_own_classes_are_remembered_until_their_files_or_those_of_their_bases_change(
    imported: list[str], write_sources: Callable
) -> None:
    base = "class Base:\n    def __init__(self, size: int): ..."
    child = "from base import Base\nclass Own(Base):\n    def __init__(self, **more):\n        super().__init__(**more)"
    texts = {"base.py": base, "own.py": child, "other.py": "x = 1"}
    for number, changed in enumerate(({}, {"other.py": "x = 2"}, {"base.py": base.replace("size", "width")}, {})):
        write_sources(texts | changed)
        assert read_signature("own.Own").required == (["width"] if "base.py" in changed else ["size"])
        assert len(imported) == [1, 1, 2, 2][number]  # the former version is still known
    write_sources(texts | {"own.py": child.replace("**more", "depth, **more", 1)})
    assert read_signature("own.Own").required == ["depth", "size"]


def test_other_programs_than_train_let_another_process_import(
    write_sources: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signatures, "is_training", False)
    monkeypatch.setattr(signature_reader, "_import", lambda target: pytest.fail(f"{target} is imported here"))
    assert {"numerator", "denominator"} <= set(read_signature("fractions.Fraction").parameters)
    with pytest.raises(ConfigError, match=r"The class cannot be imported: .*has no attribute"):
        read_signature("fractions.Nothing")


def test_a_class_whose_init_was_replaced_takes_what_the_former_one_took(write_sources: Callable) -> None:
    base = "class Base:\n    def __init__(self, size): ...\n"
    patch = "made = Own.__init__\ndef init(self, *args, **more):\n    made(self, *args, **more)\nOwn.__init__ = init"
    write_sources({"own.py": f"{base}class Own(Base):\n    def __init__(self, width): ...\n{patch}"})
    assert read_signature("own.Own") == Signature({}, [], accepts_any=True)


def test_what_a_training_process_has_patched_is_remembered_by_none(
    imported: list[str], write_sources: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sources({"own.py": "class Own:\n    def __init__(self, size: int): ..."})
    with monkeypatch.context() as training:
        training.setattr(signatures, "is_training", True)
        training.setattr(importlib.import_module("own").Own, "__init__", lambda self, width: None)
        assert read_signature("own.Own").required == ["width"]
    signatures._known.clear()
    assert read_signature("own.Own").required == ["size"]


def test_a_process_that_cannot_import_is_told(write_sources: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signatures, "is_training", False)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match="These classes cannot be imported: the import ended with exit code 1"):
        read_signature("fractions.Fraction")


def test_a_home_that_cannot_be_written_is_no_error(write_sources: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    assert isinstance(read_signature("torch.optim.SGD"), Signature)


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
def test_a_source_that_is_not_python_is_rejected(text: bytes, write_sources: Callable) -> None:
    write_sources({"broken.py": text})
    with pytest.raises(ConfigError, match=r"The class cannot be imported: "):
        read_signature("broken.Net")
