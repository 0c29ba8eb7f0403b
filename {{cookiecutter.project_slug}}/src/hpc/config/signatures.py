"""What a `_target_` accepts, known without importing it.

The project's own classes are read with `ast`. Libraries are imported once, when the environment is made
(`python -m hpc.config.signatures`), and remembered per package version; only an unknown target is imported
later.
"""

import importlib
import inspect
import json
import os
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
from hpc.config.errors import ConfigError, suggest_key
from hpc.config.project import CONFIGS, is_project_code
from hpc.config.source_signatures import Signature

CACHE_FILE = Path(sys.prefix) / "share" / "config-signatures.json"


def read_signature(target: str) -> Signature:
    """The signature behind a dotted name.

    Raises:
        ConfigError: there is no such module or name.
    """
    if is_project_code(target):
        return source_signatures.read_source_signature(target, read_signature)
    known = _current_signatures()
    if target not in known:
        known = known | {target: asdict(_import_signature(target))}
        _write_cache(known)
    return Signature(**known[target])


def find_targets(node: Any, prefix: str = "") -> Iterator[tuple[str, dict]]:
    """Every node with a `_target_` below a plain container, as (dotted key, node)."""
    if isinstance(node, dict):
        if isinstance(node.get("_target_"), str):
            yield prefix, node
        for key, value in node.items():
            yield from find_targets(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(node, list):
        for i, value in enumerate(node):
            yield from find_targets(value, f"{prefix}.{i}")


def check_arguments(key: str, node: dict, *, complete: bool = True) -> None:
    """Check the keys of one `_target_` node, and plain values, against its signature; if `complete`, that none lacks.

    Raises:
        ConfigError: unknown or missing arguments, or a value that is plainly of another type.
    """
    found = read_signature(node["_target_"])
    given = {name: value for name, value in node.items() if not (name.startswith("_") and name.endswith("_"))}
    for name, value in given.items():
        if name not in found.parameters and not found.accepts_any:
            known = sorted(found.parameters)
            raise ConfigError(
                f"{key}.{name}", None, f"{node['_target_']} takes {', '.join(known)}", suggest_key(name, known, key)
            )
        if (wanted := found.parameters.get(name, "")) and not is_compatible(value, wanted):
            raise ConfigError(f"{key}.{name}", value, f"is of type {wanted}", f"{key}.{name}=<{wanted}>")
    missing = [name for name in found.required if name not in given]
    if complete and missing and not node.get("_partial_"):
        raise ConfigError(f"{key}.{missing[0]}", None, f"{node['_target_']} needs it", f"{key}.{missing[0]}=...")


def is_compatible(value: object, annotation: str) -> bool:
    """Whether a config value can be what an annotation asks for; True whenever that cannot be told."""
    if re.fullmatch(r"Callable(\[.*\])?|(torch\.)?nn\.Module", annotation):
        return isinstance(value, dict)  # a node
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


def _import_signature(target: str) -> Signature:
    module, _, name = target.rpartition(".")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        parameters = inspect.signature(found).parameters.values()
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            "_target_", target, f"cannot be imported: {error}", "install it or correct the name in configs/"
        ) from None
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return Signature(
        {p.name: _annotation_text(p) for p in named},
        [p.name for p in named if p.default is p.empty],
        any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def _annotation_text(parameter: inspect.Parameter) -> str:
    """An annotation as one would write it today: `int | None`."""
    text = "" if parameter.annotation is parameter.empty else inspect.formatannotation(parameter.annotation)
    text = text.replace("typing.", "")
    text = re.sub(r"^Optional\[(.*)\]$", r"\1 | None", text)
    return re.sub(r"^Union\[(.*?)\]", lambda found: found.group(1).replace(", ", " | "), text)


def _package_versions(known: dict[str, dict]) -> dict[str, str]:
    return {package: _package_version(package) for package in {target.split(".")[0] for target in known}}


@cache
def _package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""  # not a distribution of that name: never trusted from the cache


@cache
def _read_cache() -> dict[str, Any]:
    try:
        return json.loads(CACHE_FILE.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"versions": {}, "signatures": {}}


def _current_signatures() -> dict[str, dict]:
    """Remembered signatures of those packages whose version is still the one that was read."""
    stored = _read_cache()
    current = {package for package, was in stored["versions"].items() if was and _package_version(package) == was}
    return {target: found for target, found in stored["signatures"].items() if target.split(".")[0] in current}


def _write_cache(known: dict[str, dict]) -> None:
    text = json.dumps({"versions": _package_versions(known), "signatures": known}, indent=1)
    try:
        CACHE_FILE.parent.mkdir(parents=True, exist_ok=True)
        aside = CACHE_FILE.with_suffix(f".{os.getpid()}")
        aside.write_text(text, encoding="utf-8")
        aside.replace(CACHE_FILE)
    except OSError:
        return  # an environment shared read-only: the next process imports again
    _read_cache.cache_clear()


def fill_cache() -> None:
    """Read the signatures of all targets that the files of configs/ name, so that a check imports nothing."""
    for file in sorted(CONFIGS.rglob("*.yaml")):
        for _, node in find_targets(OmegaConf.to_container(OmegaConf.load(file), resolve=False)):
            read_signature(node["_target_"])


if __name__ == "__main__":
    fill_cache()
