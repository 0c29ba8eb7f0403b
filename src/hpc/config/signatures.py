"""The arguments that a `_target_` accepts: read by importing it once, then remembered by content.

train.py imports the classes in its own process, as it needs them anyway. Other programs let a process of its own do so
(`python -m hpc.config.signatures`), which stays away from their memory and output. What is remembered of a library
holds for its version, and of other code for the files of the class and its bases, as they were.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hpc.config.defaults import all_defaults
from hpc.config.errors import ConfigError, first_line, join_key, make_printable, suggest_key
from hpc.config.project import PROJECT, child_environment, config_files, is_project_code, project_name, source_file
from hpc.config.yaml_files import YAML_ERRORS, load_yaml
from hpc.system import home
from hpc.system.files import write_atomically

MAX_VERSIONS = 4  # of a target that are remembered: projects of the same name, or two branches in turn
# Whether this process imports the classes anyway. It remembers none: it may have patched them, which files do not show.
is_training = False
_known: dict[str, "Signature | ConfigError"] = {}  # in this process


@dataclass(frozen=True)
class Signature:
    """The parameters of a callable."""

    parameters: dict[str, str]  # name → annotation as text, "" if there is none
    required: list[str]
    accepts_any: bool = False  # **kwargs that cannot be followed any further
    has_tensor_parallel_plan: bool = False  # of a class


def read_signature(target: str) -> Signature:
    """Return the signature of the class or function with this dotted name.

    Raises:
        ConfigError: there is no such module or name.
    """
    learn([target])
    signature = _known.get(target, Signature({}, [], accepts_any=True))  # the latter: see `learn`
    if isinstance(signature, ConfigError):
        raise signature
    return signature


def learn(targets: Iterable[str]) -> None:
    """Find out the signatures of all these targets, with one import of what is not remembered.

    Nothing is imported, and nothing known of them, where torch or lightning is not supported.
    """
    unknown = [target for target in dict.fromkeys(targets) if target not in _known]
    if not unknown:
        return
    memory = _read_memory()
    for target in unknown:
        fresh = (entry for entry in memory.get(target, ()) if _is_current(entry["read_from"]))
        if entry := next(fresh, None):
            _known[target] = Signature(**entry["signature"])
    if not (missing := [target for target in unknown if target not in _known]):
        return
    from hpc.config import signature_reader, versions  # only here: what is remembered needs neither

    if versions.unsupported_packages():  # their import may fail; all ranks, or submit.py, reject them by a sentence
        return
    answers = signature_reader.read(missing) if is_training else _ask_reader(missing)
    for target, answer in answers.items():
        if "error" in answer:
            _known[target] = ConfigError(*answer["error"])
            continue
        _known[target] = Signature(**answer["signature"])
        if answer["read_from"] is not None:
            memory[target] = [answer, *memory.get(target, ())][:MAX_VERSIONS]
    if not is_training:
        _write_memory(memory)


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


def unknown_argument_error(key: str, name: str, *, target: str, signature: Signature) -> ConfigError:
    """Return the error of an argument `name` that the target of the node `key` does not take."""
    names = sorted(signature.parameters)
    rule = f"must be an argument of {target}, which takes {', '.join(names)}"
    return ConfigError(f"{key}.{name}", None, rule, suggest_key(name, names, key))


def is_compatible(value: object, annotation: str) -> bool:
    """Return whether a config value can be of the type that an annotation names; True if that cannot be decided."""
    if isinstance(value, dict) and "_target_" in value:
        return True  # Hydra puts the object in its place
    if re.fullmatch(r"Callable(\[.*\])?|(torch\.)?nn\.Module|torch\.nn\.modules\.module\.Module", annotation):
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


def remember_all() -> None:
    """Read the signatures of all targets that configs/ and the defaults name, so that later checks import nothing.

    A file that is no YAML, or names what cannot be found, concerns only a run that uses it.
    """
    targets_by_file: dict[Path, list[str]] = {}
    for file in config_files():
        try:
            nodes = find_targets(OmegaConf.to_container(load_yaml(file), resolve=False))
            targets_by_file[file] = [node["_target_"] for _, node in nodes]
        except YAML_ERRORS as error:
            _note_rejection(file, error)
    of_defaults = [node["_target_"] for _, node in find_targets(all_defaults())]
    learn(chain(of_defaults, *targets_by_file.values()))
    for file, targets in targets_by_file.items():
        if error := next((known for known in map(_known.get, targets) if isinstance(known, ConfigError)), None):
            _note_rejection(file, error)


def _note_rejection(file: Path, error: Exception) -> None:
    print(make_printable(f"note: a run that uses {file} will be rejected: {first_line(error)}"), file=sys.stderr)


def stamp(module: str) -> tuple[str, str] | None:
    """Return by what to recognize that a module is as it was: its package and version, or its name and a digest.

    None if it can be neither.
    """
    package = module.partition(".")[0]
    if is_project_code(module):
        return module, _digest(source_file(module))
    if package_version := _package_version(package):
        return package, package_version
    file = getattr(sys.modules.get(module), "__file__", None)
    return (file, _digest(Path(file))) if file else None


def _is_current(read_from: dict[str, str]) -> bool:
    """Return whether all that a signature was read from is as it was: see `stamp`."""
    for name, was in read_from.items():
        if os.path.isabs(name):
            now = _digest(Path(name))
        else:
            now = _digest(source_file(name)) if is_project_code(name) else _package_version(name)
        if now != was:
            return False
    return True


@cache
def _package_version(package: str) -> str:
    with suppress(PackageNotFoundError):
        return version(package)
    return ""


@cache
def _digest(file: Path) -> str:
    with suppress(OSError):
        return sha256(file.read_bytes()).hexdigest()[:32]
    return ""


def _ask_reader(targets: list[str]) -> dict[str, dict[str, Any]]:
    """Return the answers of a process that imports these targets."""
    command = [sys.executable, "-m", "hpc.config.signature_reader"]
    done = subprocess.run(
        command,
        input=json.dumps(targets),
        env=child_environment(os.environ),
        cwd=PROJECT,
        capture_output=True,
        text=True,
    )
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last_line = (done.stderr.strip().splitlines() or [f"the import ended with exit code {done.returncode}"])[-1]
        error = ["_target_", ", ".join(targets), f"These classes cannot be imported: {last_line}", "correct them"]
        return {target: {"error": error} for target in targets}


def _memory_file() -> Path | None:
    try:
        return home.expand(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / project_name() / "signatures.json"
    except (OSError, ValueError, KeyError):  # a project without a name
        return None


def _read_memory() -> dict[str, list[dict[str, Any]]]:
    with suppress(OSError, ValueError):
        memory = json.loads(file.read_text(encoding="utf-8")) if (file := _memory_file()) else {}
        return memory if isinstance(memory, dict) else {}
    return {}


def _write_memory(memory: dict[str, list[dict[str, Any]]]) -> None:
    with suppress(OSError):  # a home that is full or read-only: the next process imports again
        if file := _memory_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps(memory, indent=1))


if __name__ == "__main__":
    remember_all()
