"""Import classes, and read their signatures: python -m hpc.config.signature_reader, with a list of names on stdin."""

import ast
import inspect
import json
import re
import sys
import textwrap
from dataclasses import asdict, replace
from importlib import import_module
from traceback import walk_tb
from typing import Any

from hpc.config.errors import ConfigError, first_line
from hpc.config.project import SOURCES, is_project_code
from hpc.config.signatures import Signature, stamp

PLAN = "tensor_parallel_plan"


def read(targets: list[str]) -> dict[str, dict[str, Any]]:
    """Return for each dotted name its signature and what it was read from, or the parts of a `ConfigError`.

    `read_from` is None if it cannot be told later whether that is still the same.
    """
    answers: dict[str, dict[str, Any]] = {}
    for target in targets:
        try:
            found = _import(target)
            answers[target] = {"signature": asdict(_signature(found)), "read_from": _stamps(target, found)}
        except ConfigError as error:
            answers[target] = {"error": error.parts()}
    return answers


def _import(target: str) -> Any:
    """Return the class or function with a dotted name, or a method of a class."""
    try:
        return _resolve(target)
    except Exception as error:  # other people's code may raise any as it is imported
        fix = "install it or correct the name in configs/"
        calls = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
        own = [f"{file}, line {line}: " for file, line in calls if file.startswith(f"{SOURCES}/")]
        if (folder := SOURCES / target.partition(".")[0]).is_dir() and not is_project_code(target):
            # hidden by an installed package of its name
            fix = f"an empty file {folder / '__init__.py'}, which makes that folder a package of the project"
        elif own:
            fix = "install what it names, or correct that line"
        kind = (
            "" if isinstance(error, AttributeError | ModuleNotFoundError) and not own else f"{type(error).__name__}: "
        )
        rule = f"The class cannot be imported: {own[-1] if own else ''}{kind}{first_line(error)}"
        raise ConfigError("_target_", target, rule, fix) from None


def _resolve(target: str) -> Any:
    """Return what a dotted name stands for. An error of a module that is imported for it is raised as it is."""
    parts = target.split(".")
    found: Any = import_module(parts[0])
    for number, part in enumerate(parts[1:], start=2):
        if not hasattr(found, part) and inspect.ismodule(found):
            name = ".".join(parts[:number])
            try:
                import_module(name)
            except ModuleNotFoundError as error:
                if error.name != name:
                    raise
        found = getattr(found, part)
    return found


def _signature(found: Any) -> Signature:
    try:
        signature = _of_parameters(inspect.signature(found))
    except (ValueError, TypeError):  # written in C, or no callable, as building it will say
        return Signature({}, [], accepts_any=True)
    if isinstance(found, type):
        inits = [kind for kind in found.__mro__ if "__init__" in vars(kind)]
        if (
            signature.accepts_any
            and "__signature__" not in vars(found)
            and inspect.isfunction(vars(inits[0])["__init__"])
        ):
            signature = _of_inits(inits)
        signature = replace(signature, has_tensor_parallel_plan=_has_plan(found))
    return signature


def _of_inits(kinds: list[type]) -> Signature:
    """Return the signature of the first class, with the parameters of the bases to which it passes on **kwargs.

    Only the project's own classes are known to pass them on.
    """
    init = vars(kinds[0])["__init__"]
    if not inspect.isfunction(init):  # of object, or written in C
        return Signature({}, [], accepts_any=kinds[0] is not object)
    own = _of_parameters(inspect.signature(init), skip=1)
    if not own.accepts_any or not is_project_code(kinds[0].__module__) or len(kinds) == 1:
        return own
    if (filled := _filled_in_base(init)) is None:
        return own
    base = _of_inits(kinds[1:])
    inherited = {name: annotation for name, annotation in base.parameters.items() if name not in filled}
    required = own.required + [name for name in base.required if name in inherited and name not in own.parameters]
    return Signature(inherited | own.parameters, required, base.accepts_any)


def _filled_in_base(init: Any) -> set[str] | None:
    """Return the arguments that a class itself gives in `super().__init__(name=..., **more)`; None without such a call.

    A function that was put in the place of the class's own passes its arguments on to that one, which nobody can find.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(init))))
    except (OSError, SyntaxError, TypeError):  # made by code
        return None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    of_base = [call for call in calls if ast.unparse(call.func).endswith(".__init__")]
    passed_on = [call for call in of_base if any(keyword.arg is None for keyword in call.keywords)]
    return {keyword.arg for call in of_base for keyword in call.keywords if keyword.arg} if passed_on else None


def _of_parameters(signature: inspect.Signature, skip: int = 0) -> Signature:
    parameters = list(signature.parameters.values())[skip:]
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return Signature(
        {p.name: _annotation_text(p) for p in named},
        [p.name for p in named if p.default is p.empty],
        any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def _annotation_text(parameter: inspect.Parameter) -> str:
    """Return an annotation as it is written today, `int | None`, also where only the default is None."""
    text = "" if parameter.annotation is parameter.empty else inspect.formatannotation(parameter.annotation)
    text = re.sub(r"\btyping\.|\bcollections\.abc\.", "", text).strip("'\"")
    text = re.sub(r"^Optional\[(.*)\]$", r"\1 | None", text)
    text = re.sub(r"^Union\[(.*?)\]", lambda match: match.group(1).replace(", ", " | "), text)
    return f"{text} | None" if parameter.default is None and text and "None" not in text else text


def _has_plan(kind: type) -> bool:
    """Return whether a class has a tensor-parallel plan, or sets one in a method of its own."""
    methods = [value for base in kind.__mro__ for value in vars(base).values() if inspect.isfunction(value)]
    return hasattr(kind, PLAN) or any(PLAN in method.__code__.co_names for method in methods)


def _stamps(target: str, found: Any) -> dict[str, str] | None:
    """Return by what to recognize that all modules of a target are as they were; None if one cannot be recognized."""
    owner = found if isinstance(found, type) else getattr(found, "__self__", found)
    kinds = owner.__mro__ if isinstance(owner, type) else (owner,)
    modules = {str(getattr(kind, "__module__", "")) for kind in kinds}
    name = target
    while (name := name.rpartition(".")[0]) and name not in sys.modules:
        pass
    modules |= {name}
    stamps = [stamp(module) for module in modules if module and module.partition(".")[0] not in sys.stdlib_module_names]
    return None if None in stamps else dict(sorted(filter(None, stamps)))


if __name__ == "__main__":
    print("\n" + json.dumps(read(json.load(sys.stdin))))
