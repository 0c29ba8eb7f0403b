"""Traces of networks: kept in a cache, made by a process of its own where they are not. No torch here."""

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

from hpc.config.build import without_checks
from hpc.config.project import HPC, PROJECT, SOURCES, project_name, researcher_packages
from hpc.plan.setup import Setup
from hpc.plan.trace_types import Trace
from hpc.system import home

CACHE = home.expand(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / project_name() / "traces"
OURS = ("fake_step.py", "meter.py", "tracer.py", "trace_types.py")
ANY = {"lr": 0.001, "weight_decay": 0.1}  # for all: what an optimizer keeps does not depend on them
SECONDS = 600  # a network that takes longer is not traced


class NotTraced(Exception):
    """There is no trace of this network; the message says why."""


def of(cfg: DictConfig, setups: Sequence[Setup]) -> list[Trace]:
    """A trace for each setup, of the network and the optimizer that the config names.

    Raises:
        NotTraced: the network does not run on tensors without content, or there is nothing to run it.
    """
    questions = [_question(cfg, setup) for setup in setups]
    digests = [_digest(question) for question in questions]
    found = {digest: known for digest in set(digests) if (known := _load(digest))}
    missing = {digest: asked for digest, asked in zip(digests, questions, strict=True) if digest not in found}
    if missing:
        found |= dict(zip(missing, _make(list(missing.values())), strict=True))
    for digest in missing:
        _keep(digest, found[digest])
    return [found[digest] for digest in digests]


def _question(cfg: DictConfig, setup: Setup) -> dict[str, Any]:
    parameters, autocast = setup.computes_in
    return {
        "network": without_checks(cfg.model.network),
        "optimizer": {key: ANY.get(key, value) for key, value in without_checks(cfg.model.optimizer).items()},
        "parameters": parameters,
        "autocast": autocast,
        "tensor_parallel": setup.tensor_parallel,
    }


def _digest(question: dict[str, Any]) -> str:
    """Of all that a trace depends on: the question, the sources of the network, the versions of the libraries."""
    hashed = sha256(json.dumps(question, sort_keys=True).encode(errors="surrogateescape"))
    hashed.update(version("torch").encode())
    apart = (
        SOURCES / HPC,
        *(SOURCES / package / "data" for package in researcher_packages()),
    )  # a network knows nothing of them
    theirs = [path for path in SOURCES.rglob("*.py") if not any(path.is_relative_to(folder) for folder in apart)]
    for path in (PROJECT / "constraints.txt", *sorted(theirs), *(Path(__file__).with_name(name) for name in OURS)):
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:32]


def _load(digest: str) -> Trace | None:
    with suppress(OSError, ValueError, KeyError, TypeError):  # not there, or not whole
        return Trace.load((CACHE / f"{digest}.json").read_text(encoding="utf-8"))
    return None


def _keep(digest: str, trace: Trace) -> None:
    aside = CACHE / f".{digest}-{os.getpid()}"
    with suppress(OSError):  # a full or a foreign home: it is made again the next time
        CACHE.mkdir(parents=True, exist_ok=True)
        aside.write_text(trace.dump(), encoding="utf-8")
        aside.replace(CACHE / f"{digest}.json")


def _make(questions: Sequence[dict[str, Any]]) -> list[Trace]:
    kinds = {f"{one['autocast']}-mixed" if one["autocast"] else f"{one['parameters']}-true" for one in questions}
    sys.stderr.write(f"tracing the network, once, in {' and '.join(sorted(kinds))} ...\n")
    command = [sys.executable, "-m", f"{__package__}.tracer"]
    environ = os.environ | {"PYTHONPATH": str(SOURCES)}
    try:
        done = subprocess.run(
            command, input=json.dumps(questions), env=environ, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        raise NotTraced(f"it took more than {SECONDS} s") from None
    except OSError as error:
        raise NotTraced(str(error)) from None
    try:
        answers = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        raise NotTraced((done.stderr.strip().splitlines() or ["it ended without an answer"])[-1]) from None
    for answer in answers:
        if "error" in answer:
            raise NotTraced(answer["error"])
    return [Trace.load(json.dumps(answer)) for answer in answers]
