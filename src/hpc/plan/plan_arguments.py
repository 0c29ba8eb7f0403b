"""The words of plan.py that are not overrides of the config. Imports no torch."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from hpc.config.errors import ConfigError
from hpc.config.sections import Config
from hpc.jobs.hardware import Machine
from hpc.plan.setup import ParallelLayout
from hpc.plan.trace_types import Trace

NETWORK_FILE = "network.json"  # of a run of tools/comm.py


@dataclass(frozen=True)
class PlanWords:
    """The words of plan.py."""

    amount: float | None = None  # of training, in `unit`
    unit: str = "samples"  # or "tokens"
    network: Path | None = None  # a run of tools/comm.py, whose bandwidths replace those of the cluster's file


def split_words(words: Sequence[str]) -> tuple[PlanWords, list[str]]:
    """Return plan.py's own words, and the overrides of the config.

    Raises:
        ConfigError: a value is not valid, or two words contradict each other.
    """
    amounts: dict[str, float] = {}
    network, overrides = None, []
    for word in words:
        key, _, value = word.partition("=")
        if key in ("tokens", "samples"):
            amounts[key] = _positive_number(key, value)
        elif key == "network":
            network = Path(value)
        else:
            overrides.append(word)
    if len(amounts) > 1:
        rule = f"cannot be combined with tokens={amounts['tokens']:g}"
        raise ConfigError("samples", f"{amounts['samples']:g}", rule, "one of the two")
    unit, amount = next(iter(amounts.items()), ("samples", None))
    return PlanWords(amount, unit, network), overrides


def num_steps(cfg: Config, trace: Trace, *, setup: ParallelLayout, own: PlanWords) -> int | None:
    """Return the optimizer steps of the run; None if neither the config nor plan.py's own words give them.

    Raises:
        ConfigError: both give them, or tokens are counted of a network whose input has none.
    """
    max_steps = cfg.trainer.max_steps if cfg.trainer.max_steps > 0 else None
    if own.amount is None:
        return max_steps
    if max_steps:
        rule = f"cannot be combined with trainer.max_steps={max_steps}"
        raise ConfigError(own.unit, f"{own.amount:g}", rule, "one of the two")
    if own.unit == "tokens" and trace.unit != "tokens":
        rule = "cannot be counted, because the input of this network is samples"
        raise ConfigError(own.unit, f"{own.amount:g}", rule, "samples=<number of samples>")
    num_samples = own.amount / (trace.tokens_per_example if own.unit == "tokens" else 1)
    return ceil(num_samples / setup.global_batch)


def with_measured_network(nominal: Machine, run_dir: Path) -> Machine:
    """Replace the bandwidths of a machine by those that a run of tools/comm.py has measured.

    A nominal bandwidth is larger than a measured one by the share that can be reached. Across nodes each GPU of a node
    measured a ring of its own, all at once, so that a node sends the sum of them.

    Raises:
        ConfigError: the run has no measurement of NCCL.
    """
    report = _read_network(run_dir)
    within, across = (report["links"].get(scope) for scope in ("within", "across"))
    measured = nominal
    if within:
        measured = replace(measured, gpu=replace(measured.gpu, link_gbs=_gbs(within) / nominal.network.link_share))
    if across:
        per_node = _gbs(across) * report["ranks_per_node"]
        measured = replace(measured, node_gbs=per_node / nominal.network.node_share)
    return measured


def _read_network(run_dir: Path) -> dict[str, Any]:
    """Return the measurement of a run, of which all that is used is there."""
    report: dict[str, Any] = {}
    try:
        report = json.loads((run_dir / NETWORK_FILE).read_text(encoding="utf-8"))
        num_links = len([_gbs(link) for link in report["links"].values() if link])
        problem = "" if num_links else f"must have measured: {NETWORK_FILE} has no link"
        if report["backend"] != "nccl":
            problem = f"must be a run on GPUs: {NETWORK_FILE} has links of {report['backend']}"
        if report["ranks_per_node"] < 1:
            raise ValueError(report["ranks_per_node"])
    except OSError as error:
        problem = f"must be a run of tools/comm.py: cannot read {error.filename}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        problem = f"must be a run of tools/comm.py: {NETWORK_FILE} in it is damaged"
    if problem:
        raise ConfigError("network", run_dir, problem, "the command without network=")
    return report


def _gbs(link: dict[str, Any]) -> float:
    """Return the GB/s of a link. Raise ValueError if they are no number above 0."""
    gbs = float(link["gbs"])
    if not 0 < gbs < math.inf:
        raise ValueError(gbs)
    return gbs


def _positive_number(key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e30:
        raise ConfigError(key, value, "must be a number above 0", f"{key}={'300e9' if key == 'tokens' else '1e8'}")
    return number
