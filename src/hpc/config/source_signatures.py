"""Signatures of the project's own classes and functions, read from their source with `ast`: nothing is imported."""

import ast
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from hpc.config.errors import ConfigError
from hpc.config.project import folder_of_sources, is_project_code


@dataclass(frozen=True)
class Signature:
    """The parameters of a callable."""

    parameters: dict[str, str]  # name → annotation as text, "" if there is none
    required: list[str]
    accepts_any: bool = False  # **kwargs that cannot be followed any further
    members: list[str] = field(default_factory=list)  # methods and self.attributes, for the project's own classes


@cache  # several checks ask for the same target, and several classes have the same base
def read_source_signature(target: str, library: Callable[[str], Signature]) -> Signature:
    """Return the signature of one of the project's own classes, functions, or alternative constructors of a class.

    A module may have imported the name from elsewhere, as the `__init__.py` of a package does.

    Args:
        library: returns the signature of a class that is not the project's own.

    Raises:
        ConfigError: there is no such file or name.
    """
    module, _, name = target.rpartition(".")
    if not _source_file(module).is_file() and (method := _method_signature(module, name, library)):
        return method
    origin = _origin(module, name) or target
    if not is_project_code(origin):
        return library(origin)
    module, _, name = origin.rpartition(".")
    _reject_missing_imports(module)
    definition = _find_definition(module, name)
    if isinstance(definition, ast.FunctionDef):
        return _signature_of_arguments(definition.args, skip=0)
    if definition is not None:
        return _signature_of_class(module, definition, library)
    if _is_set(module, name):
        return Signature({}, [], accepts_any=True)
    rule = f"must be a class or a function, and {module} has no {name}"
    raise ConfigError("_target_", target, rule, "correct the name in the file of configs/")


def _signature_of_class(module: str, node: ast.ClassDef, library: Callable[[str], Signature]) -> Signature:
    """Return the signature of `__init__`, with the parameters of the base class that it passes on in **kwargs."""
    init = next((f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"), None)
    own = _signature_of_arguments(init.args, skip=1) if init else _signature_of_fields(node)
    base = _first_base_signature(module, node, library, follow=own.accepts_any)
    members = _members(node) + (base.members if base else [])
    if not (own.accepts_any and base):
        return replace(own, members=members)
    filled = _filled_in_super(init)
    inherited = {name: annotation for name, annotation in base.parameters.items() if name not in filled}
    required = own.required + [name for name in base.required if name in inherited and name not in own.parameters]
    return Signature(inherited | own.parameters, required, base.accepts_any, members)


def _filled_in_super(init: ast.FunctionDef | None) -> set[str]:
    """Return the names of the arguments that a class itself gives in `super().__init__(name=...)`."""
    calls = [node for node in ast.walk(init) if isinstance(node, ast.Call)] if init else []
    return {k.arg for call in calls if ast.unparse(call.func) == "super().__init__" for k in call.keywords if k.arg}


def _signature_of_fields(node: ast.ClassDef) -> Signature:
    """Return the signature of a class without `__init__`: the fields of a dataclass, or whatever its base accepts.

    Other decorators, as those of registries, leave the arguments of a class as they are.
    """
    decorators = [ast.unparse(d).partition("(")[0].rpartition(".")[2] for d in node.decorator_list]
    if "dataclass" not in decorators:
        return Signature({}, [], accepts_any=True)
    fields = [f for f in node.body if isinstance(f, ast.AnnAssign) and "ClassVar" not in ast.unparse(f.annotation)]
    annotated = {ast.unparse(f.target): ast.unparse(f.annotation) for f in fields}
    required = [ast.unparse(f.target) for f in fields if f.value is None]
    return Signature(annotated, required, accepts_any=bool(node.bases))  # it has the fields of its bases, too


def _first_base_signature(
    module: str, node: ast.ClassDef, library: Callable[[str], Signature], *, follow: bool
) -> Signature | None:
    """Return the signature of the first base class that has parameters, with the members of mixins before it.

    Args:
        follow: whether to look up the base classes of libraries, which may cost an import.
    """
    mixins: Signature | None = None
    for base in map(ast.unparse, node.bases):
        signature = _base_signature(base, module, library, follow=follow)
        if signature and mixins:
            signature = replace(signature, members=mixins.members + signature.members)
        if signature and (signature.parameters or not signature.accepts_any):
            return signature
        mixins = signature or mixins
    return mixins


def _base_signature(base: str, module: str, library: Callable[[str], Signature], *, follow: bool) -> Signature | None:
    """Return the signature of the base class that a module calls `base`; None if it cannot be looked up."""
    target = _base_target(base, module)
    if is_project_code(target):
        return read_source_signature(target, library)
    return library(target) if follow and "." in target else None


def _base_target(base: str, module: str) -> str:
    """Return the dotted name of the class that a module calls `base`."""
    first, *rest = base.split(".")
    return ".".join([_origin(module, first) or first, *rest])


def _signature_of_arguments(arguments: ast.arguments, skip: int) -> Signature:
    """Return the signature of a function without its first `skip` parameters."""
    positional = [*arguments.posonlyargs, *arguments.args][skip:]
    num_defaults = len(arguments.defaults)
    required = [a.arg for a in positional[: len(positional) - num_defaults]]
    required += [a.arg for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is None]
    named = [*positional, *arguments.kwonlyargs]
    annotations = {a.arg: ast.unparse(a.annotation) if a.annotation else "" for a in named}
    defaults = zip(reversed(named), reversed([*arguments.defaults, *arguments.kw_defaults]), strict=False)
    is_none = {a.arg for a, default in defaults if isinstance(default, ast.Constant) and default.value is None}
    annotations |= {name: with_none(annotations[name]) for name in is_none}
    return Signature(annotations, required, arguments.kwarg is not None)


def with_none(annotation: str) -> str:
    """Return the annotation of a parameter whose default is None, as in `width: int = None`: None is accepted, too."""
    return f"{annotation} | None" if annotation and "None" not in annotation else annotation


def _members(node: ast.ClassDef) -> list[str]:
    """Return the names of a class's methods and of its attributes that are used as `self.name`."""
    attributes = [
        child.attr
        for child in ast.walk(node)
        if isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name) and child.value.id == "self"
    ]
    return sorted({f.name for f in node.body if isinstance(f, ast.FunctionDef)} | set(attributes))


def _source_file(module: str) -> Path:
    """Return the file of one of the project's own modules, whether there is one or not."""
    path = folder_of_sources(module).joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def _parse_module(module: str) -> ast.Module:
    """Parse the source of one of the project's own modules."""
    if not (file := _source_file(module)).is_file():
        rule = f"must be in a module of the project, and there is no file {file}"
        raise ConfigError("_target_", module, rule, "correct the name in the file of configs/")
    try:
        return ast.parse(file.read_text(encoding="utf-8"), str(file))
    except (SyntaxError, ValueError) as error:  # ValueError: bytes that are not UTF-8, or zeros
        rule = f"must be in a module of Python, and {file} is not Python: {error}"
        raise ConfigError("_target_", module, rule, "correct that file") from None


def _find_definition(module: str, name: str) -> ast.ClassDef | ast.FunctionDef | None:
    """Return the class or function that a module defines under a name; None if it defines none."""
    body = _parse_module(module).body
    return next((n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name), None)


def _reject_missing_imports(module: str) -> None:
    """Raise `ConfigError` if a module imports a package that is not installed: its job would fail after the queue.

    Imports under a condition, or in a try block, may fail on purpose.
    """
    for node in _parse_module(module).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
        for package in {name.partition(".")[0] for name in names} - sys.stdlib_module_names:
            if not is_project_code(package) and not _is_installed(package):
                rule = f"The module {module} must find what it imports; {_source_file(module)}, line {node.lineno}, "
                rule += f"imports {package}, which is not installed"
                raise ConfigError("_target_", None, rule, "install the package that provides it, or correct that line")


@cache
def _is_installed(package: str) -> bool:
    return find_spec(package) is not None


def _method_signature(class_path: str, name: str, library: Callable[[str], Signature]) -> Signature | None:
    """Return the signature of a method of one of the project's own classes, or of its bases; None if there is none."""
    module, _, class_name = class_path.rpartition(".")
    if not module or not _source_file(module).is_file():
        return None
    origin = _origin(module, class_name) or ""
    if not is_project_code(origin):
        return library(f"{origin}.{name}") if origin else None
    definition = _find_definition(*origin.rsplit(".", 1))
    for node in getattr(definition, "body", ()):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            return _signature_of_arguments(node.args, skip=0 if "staticmethod" in decorators else 1)
    for base in getattr(definition, "bases", ()):
        target = _base_target(ast.unparse(base), origin.rpartition(".")[0])
        method = _method_signature(target, name, library) if is_project_code(target) else library(f"{target}.{name}")
        if method:
            return method
    return None


def _is_set(module: str, name: str) -> bool:
    """Return whether a module sets a name in any other way: by an assignment, or under a condition."""
    nodes = [node for node in ast.walk(_parse_module(module)) if isinstance(getattr(node, "ctx", None), ast.Store)]
    defined = [node for node in ast.walk(_parse_module(module)) if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return name in {getattr(node, "id", None) for node in nodes} | {node.name for node in defined}


def _origin(module: str, name: str, *seen: str) -> str | None:
    """Return the dotted name of what a module calls `name`: its own definition, or what it imports.

    None if it has no such name.

    Args:
        seen: modules that have imported it from this one: no import leads back to them.
    """
    if _find_definition(module, name) is not None:
        return f"{module}.{name}"
    if (imported := _imported_names(module).get(name)) is not None:
        source, _, original = imported.rpartition(".")
        is_followed = is_project_code(imported) and source not in (module, *seen) and _source_file(source).is_file()
        return (_origin(source, original, module, *seen) if is_followed else None) or imported
    for node in _parse_module(module).body:
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            source = _imported_module(module, node)
            is_followed = is_project_code(source) and source not in (module, *seen)
            if is_followed and (origin := _origin(source, name, module, *seen)) is not None:
                return origin
    return None


def _imported_module(module: str, node: ast.ImportFrom) -> str:
    """Return the dotted name of the module from which `module` imports, also of a relative import."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    is_package = folder_of_sources(module).joinpath(*parts).is_dir()  # the module is its __init__.py
    package = parts[: len(parts) - node.level + is_package]
    return ".".join([*package, *([node.module] if node.module else [])])


@cache
def _imported_names(module: str) -> dict[str, str]:
    """Map each name that a module imports to the dotted name that it stands for."""
    names: dict[str, str] = {}
    for node in _parse_module(module).body:
        if isinstance(node, ast.Import):
            names |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{_imported_module(module, node)}.{a.name}" for a in node.names}
    return names
