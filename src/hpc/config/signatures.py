"""The arguments that a `_target_` accepts, known without importing it.

The project's own classes are read from their source. Libraries are imported once, when the environment is made
(`python -m hpc.config.signatures`), and their signatures are cached per package version. Only a target that is not in
the cache is imported later.
"""

import inspect
import json
import os
import pkgutil
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hpc.config import source_signatures
from hpc.config.errors import ConfigError, first_line, join_key, make_printable, suggest_key
from hpc.config.project import SOURCES, config_files, is_project_code
from hpc.config.source_signatures import Signature
from hpc.config.yaml_files import YAML_ERRORS, load_yaml

CACHE_FILE = Path(sys.prefix) / "share" / "config-signatures.json"


def read_signature(target: str) -> Signature:
    """Return the signature of the class or function with this dotted name.

    Raises:
        ConfigError: there is no such module or name.
    """
    if is_project_code(target):
        return source_signatures.read_source_signature(target, read_signature)
    signatures = _current_signatures()
    if target not in signatures:
        signatures = signatures | {target: asdict(_import_signature(target))}
        _write_cache(signatures)
    return Signature(**signatures[target])


def find_targets(node: Any, prefix: str = "") -> Iterator[tuple[str, dict]]:
    """Yield every node with a `_target_` that Hydra builds below a plain container, as (dotted key, node)."""
    if isinstance(node, dict):
        if isinstance(node.get("_target_"), str):
            yield prefix, node
        for key, value in node.items() if node.get("_recursive_") is not False else ():
            yield from find_targets(value, join_key(prefix, str(key)))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from find_targets(value, f"{prefix}.{index}")


def check_arguments(key: str, node: dict, *, complete: bool = True) -> None:
    """Check the keys and the plain values of one `_target_` node against the signature of its target.

    Args:
        complete: whether required arguments must be there.

    Raises:
        ConfigError: unknown or missing arguments, or a value that is plainly of another type.
    """
    target = node["_target_"]
    signature = read_signature(target)
    given = {name: value for name, value in node.items() if not (name.startswith("_") and name.endswith("_"))}
    for name, value in given.items():
        if name not in signature.parameters and not signature.accepts_any:
            raise unknown_argument_error(key, name, target=target, signature=signature)
        if (annotation := signature.parameters.get(name, "")) and not is_compatible(value, annotation):
            rule, fix = f"must be of type {annotation}", f"{key}.{name}=<{annotation}>"
            if isinstance(value, str) and re.fullmatch(r"[\d.e+-]+|true|false|null", value):
                value = repr(value)
                fix += f'; of an environment variable {key}.{name}="$NAME", so that the shell fills it in'
            raise ConfigError(f"{key}.{name}", value, rule, fix)
    missing = [f"{key}.{name}" for name in signature.required if name not in given]
    if complete and missing and not node.get("_partial_") and not node.get("_args_"):
        rule = f"must be given, as {target} requires {'it' if len(missing) == 1 else 'them'}"
        raise ConfigError(", ".join(missing), None, rule, " ".join(f"{name}=..." for name in missing))


def unknown_argument_error(key: str, name: str, *, target: str, signature: Signature) -> ConfigError:
    """Return the error of an argument `name` that the target of the node `key` does not take."""
    names = sorted(signature.parameters)
    rule = f"must be an argument of {target}, which takes {', '.join(names)}"
    return ConfigError(f"{key}.{name}", None, rule, suggest_key(name, names, key))


def is_compatible(value: object, annotation: str) -> bool:
    """Return whether a config value can be of the type that an annotation names; True if that cannot be decided."""
    if isinstance(value, dict) and "_target_" in value:
        return True  # Hydra puts the object in its place
    if re.fullmatch(r"Callable(\[.*\])?|(torch\.)?nn\.Module", annotation):
        return isinstance(value, dict)  # a node
    annotation = re.sub(r"list\[\w+\]", "list", annotation)
    if not annotation or "[" in annotation:
        return True
    kinds = set(re.findall(r"[\w.]+", annotation))
    plain = {"int": int, "float": (int, float), "bool": bool, "str": str, "list": list, "None": type(None)}
    if not kinds <= set(plain):
        has_number = bool(kinds & {"int", "float"})
        has_text = any(re.search("str|Any|Literal|Path", kind) for kind in kinds)
        return not (isinstance(value, str) and has_number and not has_text)
    if isinstance(value, bool):
        return "bool" in kinds
    return any(isinstance(value, plain[kind]) for kind in kinds - {"bool"})  # type: ignore[arg-type]


def fill_cache() -> None:
    """Read the signatures of all targets that the files of configs/ name, so that later checks import nothing.

    A file that is no YAML, or names what cannot be found, concerns only a run that uses it.
    """
    for file in config_files():
        try:
            for _, node in find_targets(OmegaConf.to_container(load_yaml(file), resolve=False)):
                read_signature(node["_target_"])
        except (ConfigError, *YAML_ERRORS) as error:
            text = f"note: a run that uses {file} will be rejected: {first_line(error)}"
            print(make_printable(text), file=sys.stderr)


def _import_signature(target: str) -> Signature:
    """Import a class or function of a library, and return its signature."""
    try:
        target_object = pkgutil.resolve_name(target)  # also a method of a class
    except Exception as error:  # other people's code may raise any as it is imported
        fix = "install it or correct the name in configs/"
        if (folder := SOURCES / target.partition(".")[0]).is_dir():  # hidden by an installed package of its name
            fix = f"an empty file {folder / '__init__.py'}, which makes that folder a package of the project"
        raise ConfigError("_target_", target, f"The class cannot be imported: {first_line(error)}", fix) from None
    try:
        parameters = inspect.signature(target_object).parameters.values()
    except (ValueError, TypeError):  # written in C, or no callable, as building it will say
        return Signature({}, [], accepts_any=True)
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return Signature(
        {p.name: _annotation_text(p) for p in named},
        [p.name for p in named if p.default is p.empty],
        any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def _annotation_text(parameter: inspect.Parameter) -> str:
    """Return an annotation as it is written today, `int | None`, also where only the default is None."""
    text = "" if parameter.annotation is parameter.empty else inspect.formatannotation(parameter.annotation)
    text = text.replace("typing.", "")
    text = re.sub(r"^Optional\[(.*)\]$", r"\1 | None", text)
    text = re.sub(r"^Union\[(.*?)\]", lambda match: match.group(1).replace(", ", " | "), text)
    return source_signatures.with_none(text) if parameter.default is None else text


def _package_versions(signatures: dict[str, dict]) -> dict[str, str]:
    return {package: _package_version(package) for package in {target.split(".")[0] for target in signatures}}


@cache
def _package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""  # no distribution has that name: its signatures are never taken from the cache


@cache
def _read_cache() -> dict[str, Any]:
    try:
        return json.loads(CACHE_FILE.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"versions": {}, "signatures": {}}


def _current_signatures() -> dict[str, dict]:
    """Return the cached signatures of packages that are still installed in the version that was read."""
    stored = _read_cache()
    current = {package for package, was in stored["versions"].items() if was and _package_version(package) == was}
    return {target: parts for target, parts in stored["signatures"].items() if target.split(".")[0] in current}


def _write_cache(signatures: dict[str, dict]) -> None:
    text = json.dumps({"versions": _package_versions(signatures), "signatures": signatures}, indent=1)
    try:
        CACHE_FILE.parent.mkdir(parents=True, exist_ok=True)
        temporary = CACHE_FILE.with_suffix(f".{os.getpid()}")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(CACHE_FILE)
    except OSError:
        return  # an environment shared read-only: the next process imports again
    _read_cache.cache_clear()


if __name__ == "__main__":
    fill_cache()
