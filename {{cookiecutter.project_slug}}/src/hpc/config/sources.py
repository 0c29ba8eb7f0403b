"""Signatures of the project's own classes and functions, read from their source with `ast`: nothing is imported."""

import ast
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

from hpc.config.errors import ConfigError
from hpc.config.project import SOURCES, is_project_code


@dataclass(frozen=True)
class Signature:
    """Parameters of a callable: name → annotation as text ("" if none)."""

    parameters: dict[str, str]
    required: list[str]
    accepts_any: bool = False  # **kwargs that cannot be followed any further
    members: list[str] = field(default_factory=list)  # methods and self.attributes, for the project's own classes


def read(target: str, library: Callable[[str], Signature]) -> Signature:
    """The signature of one of the project's own classes or functions.

    Args:
        library: gives the signature of a base class that is not the project's own.

    Raises:
        ConfigError: there is no such file or name.
    """
    module, _, name = target.rpartition(".")
    node = _find_definition(module, name)
    if node is None:
        raise ConfigError(
            "_target_", target, f"there is no {name} in {module}", "correct the name in the file of configs/"
        )
    if isinstance(node, ast.FunctionDef):
        return _signature_of_arguments(node.args, skip=0)
    return _signature_of_class(module, node, library)


def _from_class(module: str, node: ast.ClassDef, library: Callable[[str], Signature]) -> Signature:
    """Signature of `__init__`; what it passes on in **kwargs is looked up in the base class."""
    init = next((f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"), None)
    own = _signature_of_arguments(init.args, skip=1) if init else _signature_of_fields(node)
    base = _first_base_signature(module, node, library, follow=own.accepts_any)
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


def _base(module: str, node: ast.ClassDef, library: Callable[[str], Signature], *, follow: bool) -> Signature | None:
    """The signature of the first base class that has one, mixins come before it; of a library's only if `follow`."""
    mixins: Signature | None = None
    for base in map(ast.unparse, node.bases):
        found = _base_signature(base, module, library, follow=follow)
        if found and mixins:
            found = replace(found, members=mixins.members + found.members)
        if found and (found.parameters or not found.accepts_any):
            return found
        mixins = found or mixins
    return mixins


def _base_called(base: str, module: str, library: Callable[[str], Signature], *, follow: bool) -> Signature | None:
    first, *rest = base.split(".")
    if (place := _defining_module(module, first)) is not None:
        return read_source_signature(f"{place}.{base}", library)
    target = ".".join([_imported_names(module).get(first, first), *rest])
    if is_project_code(target):
        return read_source_signature(target, library)
    return library(target) if follow and "." in target else None  # it may cost an import


def _from_arguments(arguments: ast.arguments, skip: int) -> Signature:
    positional = [*arguments.posonlyargs, *arguments.args][skip:]
    defaults = len(arguments.defaults)
    required = [a.arg for a in positional[: len(positional) - defaults]]
    required += [a.arg for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is None]
    every = [*positional, *arguments.kwonlyargs]
    annotations = {a.arg: ast.unparse(a.annotation) if a.annotation else "" for a in every}
    return Signature(annotations, required, arguments.kwarg is not None)


def _members(node: ast.ClassDef) -> list[str]:
    attributes = [
        found.attr
        for found in ast.walk(node)
        if isinstance(found, ast.Attribute) and isinstance(found.value, ast.Name) and found.value.id == "self"
    ]
    return sorted({f.name for f in node.body if isinstance(f, ast.FunctionDef)} | set(attributes))


@cache
def _tree(module: str) -> ast.Module:
    path = SOURCES.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        raise ConfigError("_target_", module, f"there is no file {file}", "correct the name in the file of configs/")
    try:
        return ast.parse(file.read_text(encoding="utf-8"), str(file))
    except (SyntaxError, ValueError) as error:  # ValueError: bytes that are no UTF-8, or zeros
        raise ConfigError("_target_", module, f"{file} is not Python: {error}", "correct that file") from None


def _find(module: str, name: str) -> ast.ClassDef | ast.FunctionDef | None:
    body = _parse_module(module).body
    return next((n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name), None)


def _where(module: str, name: str) -> str | None:
    """The module of ours that defines a name of this one: itself, or one of which it imports everything."""
    if _find_definition(module, name) is not None:
        return module
    for node in _parse_module(module).body:
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            source = _imported_module(module, node)
            if is_project_code(source) and (place := _defining_module(source, name)) is not None:
                return place
    return None


def _source(module: str, node: ast.ImportFrom) -> str:
    package = module.split(".")[: -node.level] if node.level else []
    return ".".join([*package, *([node.module] if node.module else [])])


def _imports(module: str) -> dict[str, str]:
    """Names a module imports, each with the dotted name it stands for."""
    names: dict[str, str] = {}
    for node in _parse_module(module).body:
        if isinstance(node, ast.Import):
            names |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{_imported_module(module, node)}.{a.name}" for a in node.names}
    return names
