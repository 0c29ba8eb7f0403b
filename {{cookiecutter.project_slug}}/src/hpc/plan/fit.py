"""Does a run fit on the GPUs that its config asks for? Between a config and the plan's pure functions. No torch."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from omegaconf import DictConfig

from hpc.config.compose import compose_overrides
from hpc.config.errors import ConfigError
from hpc.config.preflight import check_rules
from hpc.jobs.hardware import Machine, machine
from hpc.launch import measured_links
from hpc.plan import smaller, trace_cache
from hpc.plan.plan import Plan, plan
from hpc.plan.plan import fits as enough
from hpc.plan.setup import Setup, of
from hpc.plan.trace_types import Trace

SHOWN = 3  # ways out
NO_WAY = "a smaller network or global batch: no strategy, number of nodes or precision makes this one fit"


def machine_of(cfg: DictConfig) -> Machine | None:
    """What the run runs on; None where the cluster's file does not say, or the run takes no GPU.

    Of links between GPUs, what tools/comm.py has measured counts for more than what the cluster's file says.

    Raises:
        ConfigError: a GPU that hpc/jobs/hardware.yaml does not have.
    """
    cluster = cfg.cluster
    if not of(cfg).accelerated or not cluster.gpu:
        return None
    nominal = machine(cluster.gpu, cluster.network_gbs, cluster.gpu_link_gbs, tf32=cfg.matmul_precision != "highest")
    return with_measured(nominal, measured_links.load(cluster.name), cluster.gpus_per_node)


def with_measured(nominal: Machine, measured: measured_links.MeasuredLinks | None, devices: int | None) -> Machine:
    """The machine with the bandwidths that were measured, which already are the share that can be reached.

    Across nodes each GPU of a node had a ring of its own, all at once: together they are what the node sends.
    """
    within = measured.within if measured else None
    across = measured.across if measured else None
    known = nominal
    if within:
        known = replace(known, gpu=replace(known.gpu, link_gbs=within.gbs / nominal.network.link_share))
    if across and devices:
        known = replace(known, node_gbs=across.gbs * devices / nominal.network.share)
    return known


def reject_too_big(cfg: DictConfig, words: Sequence[str]) -> None:
    """Before the queue: what cannot fit is rejected, but for `force=true`. What cannot be traced passes with a warning.

    Raises:
        ConfigError: with the smallest changes that would make it fit.
    """
    where = machine_of(cfg)
    if where is None or cfg.force or cfg.test_only:
        return
    try:
        planned = plan(trace_cache.of(cfg, [of(cfg)])[0], of(cfg), where)
    except trace_cache.NotTraced as error:
        sys.stderr.write(f"not planned, so nobody knows whether it fits: the network cannot be traced: {error}\n")
        return
    if planned.fits is False:
        needed, room = planned.memory.total / 1e9, where.gpu.memory_gb
        rule = f"{cfg.cluster.gpu} has {room:.1f} GB for torch, and at its peak a step needs {needed:.1f} GB of each"
        found = ways_out(cfg, words, planned)
        fix = "; or ".join([*(found or [NO_WAY]), "force=true if you know better"])
        raise ConfigError("memory", f"{needed:.1f} GB", f"{rule} (python plan.py shows what for)", fix)


def ways_out(cfg: DictConfig, words: Sequence[str], planned: Plan) -> list[str]:
    """Overrides on top of these words, each of which makes a plan that does not fit one that does."""
    setup, where = planned.setup, machine_of(cfg)
    assert where is not None
    blocks = bool(planned.trace.blocks)
    candidates = list(smaller.candidates(setup, blocks, cfg.cluster.max_nodes, cfg.cluster.gpus_per_node))
    known = _traces(cfg, [candidate.setup for candidate in candidates])

    def fits(candidate: smaller.Changed) -> bool:
        trace = known.get(_kind(candidate.setup))
        if trace is None or not enough(trace, candidate.setup, where):
            return False
        meant = _meant([*words, *candidate.words])  # with all that follows from these words, buffers for example
        return meant is not None and _kind(meant) in known and enough(known[_kind(meant)], meant, where)

    return [" ".join(found.words) for found in smaller.smallest(candidates, fits, SHOWN)]


def _traces(cfg: DictConfig, setups: Sequence[Setup]) -> dict[tuple[object, ...], Trace]:
    """A trace for each kind of arithmetic among these setups."""
    kinds = {_kind(setup): setup for setup in setups}
    try:
        return dict(zip(kinds, trace_cache.of(cfg, list(kinds.values())), strict=True))
    except trace_cache.NotTraced:
        return {}


def _kind(setup: Setup) -> tuple[object, ...]:
    return (*setup.computes_in, setup.tensor_parallel)


def _meant(words: Sequence[str]) -> Setup | None:
    """The setup of a command line; None where it breaks a rule."""
    try:
        cfg = compose_overrides(words)
        check_rules(cfg)
    except ConfigError:
        return None
    return of(cfg)
