"""What a `_target_` accepts, known without importing it.

The project's own classes are read with `ast`. Libraries are imported once, when the environment is made
(`python -m <package>.hpc.signatures`), and remembered per package version; only an unknown target is imported later.
"""

import ast
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from .config import CONFIGS, PACKAGE, Refused, meant

CACHE = Path(sys.prefix) / "share" / "config-signatures.json"
SOURCES = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Signature:
    """Parameters of a callable: name → annotation as text ("" if none)."""

    parameters: dict[str, str]
    required: list[str]
    accepts_any: bool = False  # **kwargs that cannot be followed any further
    members: list[str] = field(default_factory=list)  # methods and self.attributes, for the project's own classes


def signature(target: str) -> Signature:
    """The signature behind a dotted name.

    Raises:
        Refused: there is no such module or name.
    """
    if target.split(".")[0] == PACKAGE:
        return _own(target)
    known = _cached()
    if target not in known:
        known = known | {target: asdict(_imported(target))}
        _remember(known)
    return Signature(**known[target])


def targets(node: Any, prefix: str = "") -> Iterator[tuple[str, dict]]:
    """Every node with a `_target_` below a plain container, as (dotted key, node)."""
    if isinstance(node, dict):
        if isinstance(node.get("_target_"), str):
            yield prefix, node
        for key, value in node.items():
            yield from targets(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(node, list):
        for i, value in enumerate(node):
            yield from targets(value, f"{prefix}.{i}")


def bind(key: str, node: dict, also: tuple[str, ...] = ()) -> None:
    """Check the keys of one `_target_` node, and plain values, against its signature. `also`: given by the code.

    Raises:
        Refused: unknown or missing arguments, or a value that is plainly of another type.
    """
    found = signature(node["_target_"])
    given = {name: value for name, value in node.items() if not (name.startswith("_") and name.endswith("_"))}
    for name, value in given.items():
        if name not in found.parameters and not found.accepts_any:
            known = sorted(found.parameters)
            raise Refused(
                f"{key}.{name}", None, f"{node['_target_']} takes {', '.join(known)}", meant(name, known, key)
            )
        if (wanted := found.parameters.get(name, "")) and not fits(value, wanted):
            raise Refused(f"{key}.{name}", value, f"is of type {wanted}", f"{key}.{name}=<{wanted}>")
    missing = [name for name in found.required if name not in given and name not in also]
    if missing and not node.get("_partial_"):
        raise Refused(f"{key}.{missing[0]}", None, f"{node['_target_']} needs it", f"{key}.{missing[0]}=...")


def fits(value: object, annotation: str) -> bool:
    """Whether a config value can be what an annotation asks for; True whenever that cannot be told."""
    annotation = re.sub(r"list\[\w+\]", "list", annotation)
    if not annotation or "[" in annotation:
        return True
    kinds = set(re.findall(r"[\w.]+", annotation))
    plain = {"int": int, "float": (int, float), "bool": bool, "str": str, "list": list, "None": type(None)}
    if not kinds <= set(plain):
        numeric, textual = kinds & {"int", "float"}, [kind for kind in kinds if re.search("str|Any|Literal|Path", kind)]
        return not (isinstance(value, str) and numeric and not textual)
    if isinstance(value, bool):
        return "bool" in kinds
    return any(isinstance(value, plain[kind]) for kind in kinds - {"bool"})  # type: ignore[arg-type]


def _own(target: str) -> Signature:
    module, _, name = target.rpartition(".")
    node = _find(module, name)
    if node is None:
        raise Refused("_target_", target, f"there is no {name} in {module}", "correct the name in the file of configs/")
    if isinstance(node, ast.FunctionDef):
        return _from_arguments(node.args, skip=0)
    return _from_class(module, node)


def _from_class(module: str, node: ast.ClassDef) -> Signature:
    """Signature of `__init__`; what it passes on in **kwargs is looked up in the base class."""
    init = next((f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"), None)
    own = _from_arguments(init.args, skip=1) if init else _from_fields(node)
    base = _base(module, node, libraries=own.accepts_any)
    members = _members(node) + (base.members if base else [])
    if not (own.accepts_any and base):
        return replace(own, members=members)
    left = {name: wanted for name, wanted in base.parameters.items() if name not in _passed_on(init)}
    required = own.required + [name for name in base.required if name in left and name not in own.parameters]
    return Signature(left | own.parameters, required, base.accepts_any, members)


def _passed_on(init: ast.FunctionDef | None) -> set[str]:
    """Arguments that a class itself gives in `super().__init__(name=...)`."""
    calls = [node for node in ast.walk(init) if isinstance(node, ast.Call)] if init else []
    return {k.arg for call in calls if ast.unparse(call.func) == "super().__init__" for k in call.keywords if k.arg}


def _from_fields(node: ast.ClassDef) -> Signature:
    """A class without `__init__`: the fields of a dataclass, or whatever its base takes."""
    if not node.decorator_list:
        return Signature({}, [], accepts_any=True)
    fields = [f for f in node.body if isinstance(f, ast.AnnAssign)]
    annotated = {ast.unparse(f.target): ast.unparse(f.annotation) for f in fields}
    return Signature(annotated, [ast.unparse(f.target) for f in fields if f.value is None])


def _base(module: str, node: ast.ClassDef, libraries: bool) -> Signature | None:
    """The signature of the first base class; of a library's only if `libraries`, as that may cost an import."""
    for base in map(ast.unparse, node.bases):
        first, *rest = base.split(".")
        if _find(module, first) is not None:
            return _own(f"{module}.{base}")
        target = ".".join([_imports(module).get(first, first), *rest])
        if libraries or target.split(".")[0] == PACKAGE:
            return signature(target)
    return None


def _from_arguments(arguments: ast.arguments, skip: int) -> Signature:
    positional = [*arguments.posonlyargs, *arguments.args][skip:]
    defaults = len(arguments.defaults)
    required = [a.arg for a in positional[: len(positional) - defaults]]
    required += [a.arg for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is None]
    every = [*positional, *arguments.kwonlyargs]
    annotations = {a.arg: ast.unparse(a.annotation) if a.annotation else "" for a in every}
    return Signature(annotations, required, arguments.kwarg is not None)


def _members(node: ast.ClassDef) -> list[str]:
    attributes = [n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self"]
    return sorted({f.name for f in node.body if isinstance(f, ast.FunctionDef)} | set(attributes))


@cache
def _tree(module: str) -> ast.Module:
    path = SOURCES.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        raise Refused("_target_", module, f"there is no file {file}", "correct the name in the file of configs/")
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def _find(module: str, name: str) -> ast.ClassDef | ast.FunctionDef | None:
    body = _tree(module).body
    return next((n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name), None)


def _imports(module: str) -> dict[str, str]:
    """Names a module imports, each with the dotted name it stands for."""
    names: dict[str, str] = {}
    for node in _tree(module).body:
        if isinstance(node, ast.Import):
            names |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level] if node.level else []
            source = ".".join([*package, *([node.module] if node.module else [])])
            names |= {a.asname or a.name: f"{source}.{a.name}" for a in node.names}
    return names


def _imported(target: str) -> Signature:
    module, _, name = target.rpartition(".")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        parameters = inspect.signature(found).parameters.values()
    except (ImportError, AttributeError, ValueError) as error:
        raise Refused(
            "_target_", target, f"cannot be imported: {error}", "install it or correct the name in configs/"
        ) from None
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return Signature(
        {p.name: _as_text(p) for p in named},
        [p.name for p in named if p.default is p.empty],
        any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def _as_text(parameter: inspect.Parameter) -> str:
    """An annotation as one would write it today: `int | None`."""
    text = "" if parameter.annotation is parameter.empty else inspect.formatannotation(parameter.annotation)
    text = text.replace("typing.", "")
    text = re.sub(r"^Optional\[(.*)\]$", r"\1 | None", text)
    return re.sub(r"^Union\[(.*?)\]", lambda found: found.group(1).replace(", ", " | "), text)


def _versions(known: dict[str, dict]) -> dict[str, str]:
    return {package: _version(package) for package in {target.split(".")[0] for target in known}}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""  # not a distribution of that name: never trusted from the cache


@cache
def _stored() -> dict[str, Any]:
    try:
        return json.loads(CACHE.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"versions": {}, "signatures": {}}


def _cached() -> dict[str, dict]:
    """Remembered signatures of those packages whose version is still the one that was read."""
    stored = _stored()
    current = {package for package, was in stored["versions"].items() if was and _version(package) == was}
    return {target: found for target, found in stored["signatures"].items() if target.split(".")[0] in current}


def _remember(known: dict[str, dict]) -> None:
    text = json.dumps({"versions": _versions(known), "signatures": known}, indent=1)
    try:
        CACHE.parent.mkdir(parents=True, exist_ok=True)
        aside = CACHE.with_suffix(f".{os.getpid()}")
        aside.write_text(text, encoding="utf-8")
        aside.replace(CACHE)
    except OSError:
        return  # an environment shared read-only: the next process imports again
    _stored.cache_clear()


def warm() -> None:
    """Read the signatures of all targets that the files of configs/ name, so that a check imports nothing."""
    for file in sorted(CONFIGS.rglob("*.yaml")):
        for _, node in targets(OmegaConf.to_container(OmegaConf.load(file), resolve=False)):
            signature(node["_target_"])


if __name__ == "__main__":
    warm()
