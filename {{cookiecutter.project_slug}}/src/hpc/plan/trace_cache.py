"""A cache of traces. A process of its own makes a trace that is missing. Imports no torch."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from hpc.config.build import strip_check_keys
from hpc.config.project import HPC, PROJECT, SOURCES, project_name, researcher_packages
from hpc.plan.setup import ParallelLayout
from hpc.plan.trace_types import Trace
from hpc.system import home

CACHE = home.expand(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / project_name() / "traces"
TRACER_FILES = ("fake_step.py", "meter.py", "tracer.py", "trace_types.py")
# The same for all runs, because the states of an optimizer do not depend on them.
OPTIMIZER_VALUES = {"lr": 0.001, "weight_decay": 0.1}
TIMEOUT_SECONDS = 600  # a network that takes longer is not traced


class TracingError(Exception):
    """The network cannot be traced; the message says why."""


def load_traces(cfg: DictConfig, setups: Sequence[ParallelLayout]) -> list[Trace]:
    """Return a trace for each setup, of the network and the optimizer of the config.

    Raises:
        TracingError: the network does not run on tensors without content, or the tracer cannot be started.
    """
    requests = [_trace_request(cfg, setup) for setup in setups]
    digests = [_digest(request) for request in requests]
    traces = {digest: trace for digest in set(digests) if (trace := _read(digest))}
    missing = {digest: request for digest, request in zip(digests, requests, strict=True) if digest not in traces}
    if missing:
        traces |= dict(zip(missing, _run_tracer(list(missing.values())), strict=True))
    for digest in missing:
        _write(digest, traces[digest])
    return [traces[digest] for digest in digests]


def _trace_request(cfg: DictConfig, setup: ParallelLayout) -> dict[str, Any]:
    """Return the arguments of a trace as plain data."""
    parameters, autocast = setup.computes_in
    optimizer = strip_check_keys(cfg.model.optimizer)
    return {
        "network": strip_check_keys(cfg.model.network),
        "optimizer": {key: OPTIMIZER_VALUES.get(key, value) for key, value in optimizer.items()},
        "parameters": parameters,
        "autocast": autocast,
        "tensor_parallel": setup.tensor_parallel,
    }


def _digest(request: dict[str, Any]) -> str:
    """Return a digest of all that a trace depends on: the request, the network's sources, the libraries' versions."""
    hashed = sha256(json.dumps(request, sort_keys=True).encode(errors="surrogateescape"))
    hashed.update(version("torch").encode())
    # A network does not import hpc, nor the packages' data folders.
    unused = (SOURCES / HPC, *(SOURCES / package / "data" for package in researcher_packages()))
    sources = [path for path in SOURCES.rglob("*.py") if not any(path.is_relative_to(folder) for folder in unused)]
    tracer_files = (Path(__file__).with_name(name) for name in TRACER_FILES)
    for path in (PROJECT / "constraints.txt", *sorted(sources), *tracer_files):
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:32]


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


def _run_tracer(requests: Sequence[dict[str, Any]]) -> list[Trace]:
    sys.stderr.write(f"tracing the network, once, in {' and '.join(sorted(set(map(_precision, requests))))} ...\n")
    command = [sys.executable, "-m", f"{__package__}.tracer"]
    environ = os.environ | {"PYTHONPATH": str(SOURCES)}
    try:
        process = subprocess.run(
            command, input=json.dumps(requests), env=environ, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise TracingError(f"it took more than {TIMEOUT_SECONDS} s") from None
    except OSError as error:
        raise TracingError(str(error)) from None
    try:
        answers = json.loads(process.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last_line = (process.stderr.strip().splitlines() or ["the tracer ended without an answer"])[-1]
        raise TracingError(last_line) from None
    for answer in answers:
        if "error" in answer:
            raise TracingError(answer["error"])
    return [Trace.from_json(json.dumps(answer)) for answer in answers]


def _precision(request: dict[str, Any]) -> str:
    return f"{request['autocast']}-mixed" if request["autocast"] else f"{request['parameters']}-true"
