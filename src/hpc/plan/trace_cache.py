"""A cache of traces. A process of its own makes a trace that is missing. Imports no torch."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import ListConfig

from hpc.config.batch_size import with_class_batch_size
from hpc.config.build import strip_check_keys
from hpc.config.conversion import flatten
from hpc.config.library import library_version
from hpc.config.project import LIBRARY, PROJECT, SOURCES, child_environment, project_name
from hpc.config.sections import Config
from hpc.plan.setup import ParallelLayout
from hpc.plan.trace_types import Trace
from hpc.system import home

LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
CACHE = home.expand(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / project_name() / "traces"
# The same for all runs, because a trace does not depend on them.
OPTIMIZER_VALUES = {"lr": 0.001, "weight_decay": 0.1}
DATA_KEYS = ("batch_size", "global_batch_size", "num_workers", "seed", "stage", "node_local")
TIMEOUT_SECONDS = 600  # a step that takes longer is not traced


class TracingError(Exception):
    """The module cannot be made, or the tracer cannot be started; the message says why."""


def load_trace(cfg: Config, setup: ParallelLayout) -> Trace:
    """Return the trace of a training step of the config's module, in the arithmetic of a setup.

    A step that does not run on tensors without content is traced by its parameters alone (`Trace.by_parameters`).

    Raises:
        TracingError
    """
    request = _trace_request(cfg, setup)
    digest = _digest(request)
    if trace := _read(digest):
        return trace
    trace = _run_tracer(request)
    if trace.is_lasting:
        _write(digest, trace)
    return trace


def _trace_request(cfg: Config, setup: ParallelLayout) -> dict[str, Any]:
    """Return the question for the tracer as plain data."""
    parameters, autocast = setup.computes_in
    model, blocks = strip_check_keys(cfg.model), cfg.strategy.blocks
    if isinstance(optimizer := model.get("optimizer"), dict):
        model["optimizer"] = {key: OPTIMIZER_VALUES.get(key, value) for key, value in optimizer.items()}
    data, data_error = _data_request(cfg)
    return {
        "model": model,
        "data": data,
        "data_error": data_error,
        "parameters": parameters,
        "autocast": autocast,
        "tensor_parallel": setup.tensor_parallel,
        "checkpointing": setup.checkpointing,
        "blocks": list(blocks) if isinstance(blocks, ListConfig) else blocks,
    }


def _data_request(cfg: Config) -> tuple[dict[str, Any] | None, str]:
    """Return the node of the data with which the module is traced, or None and why there is none."""
    if unset := [key for key, value in flatten(cfg.data, "data").items() if value == "???"]:
        return None, f"{', '.join(unset)} has no value"
    if cfg.data.get("_target_") is None:
        return None, "the module brings its own loaders (data=none)"
    node = with_class_batch_size(strip_check_keys(cfg.data), cfg)
    return node, ""


def _digest(request: dict[str, Any]) -> str:
    """Return a digest of all that a trace depends on: the request, the researcher's sources, versions of libraries.

    The sources count in place of the version where this library is changed: in a clone, or in the project's src/.
    """
    data = {key: value for key, value in (request.get("data") or {}).items() if key not in DATA_KEYS}
    hashed = sha256(json.dumps(request | {"data": data}, sort_keys=True).encode(errors="surrogateescape"))
    own = library_version()
    hashed.update(f"{version('torch')} {own}".encode())
    changed = sorted(LIBRARY.rglob("*.py")) if own.endswith((".dirty", "+unknown")) else []
    for path in (PROJECT / "constraints.txt", *sorted(SOURCES.rglob("*.py")), *changed, *_sources_beside(request)):
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:32]


def _sources_beside(request: dict[str, Any]) -> list[Path]:
    """Return the sources of targets that lie neither in the project nor among the installed packages."""
    names = sorted(set(re.findall(r'"_target_": "(\w+)', json.dumps(request))))
    origins = [Path(spec.origin) for name in names if (spec := find_spec(name)) and spec.origin]
    known = (*LIBRARIES, str(SOURCES))
    beside = [path for path in origins if path.suffix == ".py" and not str(path).startswith(known)]
    packages = [sorted(path.parent.rglob("*.py")) if path.stem == "__init__" else [path] for path in beside]
    return [file for files in packages for file in files]


def _read(digest: str) -> Trace | None:
    with suppress(OSError, ValueError, KeyError, TypeError):  # missing or damaged
        return Trace.from_json((CACHE / f"{digest}.json").read_text(encoding="utf-8"))
    return None


def _write(digest: str, trace: Trace) -> None:
    temporary = CACHE / f".{digest}-{os.getpid()}"
    with suppress(OSError):  # the home is full or cannot be written: the next call traces again
        CACHE.mkdir(parents=True, exist_ok=True)
        temporary.write_text(trace.to_json(), encoding="utf-8")
        temporary.replace(CACHE / f"{digest}.json")


def _run_tracer(request: dict[str, Any]) -> Trace:
    sys.stderr.write(f"tracing a training step, once, in {_precision(request)} ...\n")
    command = [sys.executable, "-m", f"{__package__}.tracer"]
    environ = child_environment(os.environ)
    try:
        process = subprocess.run(
            command, input=json.dumps(request), env=environ, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise TracingError(f"it took more than {TIMEOUT_SECONDS} s") from None
    except OSError as error:
        raise TracingError(str(error)) from None
    try:
        answer = json.loads(process.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last_line = (process.stderr.strip().splitlines() or ["the tracer ended without an answer"])[-1]
        raise TracingError(last_line) from None
    if "error" in answer:
        raise TracingError(answer["error"])
    return Trace.from_json(json.dumps(answer))


def _precision(request: dict[str, Any]) -> str:
    return f"{request['autocast']}-mixed" if request["autocast"] else f"{request['parameters']}-true"
