"""The check whether a run fits on the GPUs of its config, and the changes after which it fits. Imports no torch."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from hpc.config.batch_size import GLOBAL, PER_DEVICE
from hpc.config.compose import compose_overrides
from hpc.config.errors import ConfigError
from hpc.config.parse import parse
from hpc.config.sections import Config
from hpc.jobs.hardware import Machine, machine_from_cluster
from hpc.launch import measured_links
from hpc.plan import trace_cache
from hpc.plan.fitting_changes import Candidate, list_candidates, smallest_fitting
from hpc.plan.prediction import Prediction, fits_in_memory, predict, with_loader_batch
from hpc.plan.setup import ParallelLayout, setup_from_config
from hpc.plan.trace_types import Trace

MAX_CHANGES = 3  # that are listed
NO_CHANGE_FITS = "a smaller network or global batch: no strategy, number of nodes or precision makes this one fit"
NO_CHANGE_WITH_LOADER_FITS = (
    "a smaller network, or a smaller batch of your loader: with its present batch no strategy or precision makes this "
    "run fit (more nodes or accumulated batches would enlarge the global batch)"
)

Arithmetic = tuple[object, ...]  # precisions and tensor parallelism, which determine a trace


def machine_from_config(cfg: Config) -> Machine | None:
    """Return the machine of a run; None if the cluster's file does not name its GPU, or if the run uses no GPU.

    The bandwidths that tools/comm.py measured replace those of the cluster's file.

    Raises:
        ConfigError: a GPU that hpc/jobs/hardware.yaml does not have.
    """
    cluster = cfg.cluster
    if not setup_from_config(cfg).accelerated or not cluster.gpu:
        return None
    tf32 = cfg.matmul_precision != "highest"
    nominal = machine_from_cluster(cluster.gpu, cluster.network_gbs, link_gbs=cluster.gpu_link_gbs, tf32=tf32)
    nominal = replace(nominal, node_memory_gb=cluster.memory_gb or None)
    return with_measured_links(nominal, measured_links.load(cluster.name), devices=cluster.gpus_per_node)


def with_measured_links(
    nominal: Machine, links: measured_links.MeasuredLinks | None, *, devices: int | None
) -> Machine:
    """Replace the bandwidths of a machine by measured ones.

    A nominal bandwidth is larger than a measured one by the share that can be reached. Across nodes each GPU of a node
    measured a ring of its own, all at once, so that a node sends the sum of them.

    Args:
        devices: per node.
    """
    within = links.within if links else None
    across = links.across if links else None
    measured = nominal
    if within:
        measured = replace(measured, gpu=replace(measured.gpu, link_gbs=within.gbs / nominal.network.link_share))
    if across and devices:
        measured = replace(measured, node_gbs=across.gbs * devices / nominal.network.node_share)
    return measured


def reject_too_big(cfg: Config, words: Sequence[str]) -> None:
    """Reject a run that cannot fit, before it waits in the queue. `force=true` disables this check.

    A module that cannot be made here passes with a warning. Of one that cannot be traced, parameters, gradients and
    optimizer states must fit.

    Args:
        words: the command line of the config, to which the error suggests overrides.

    Raises:
        ConfigError: with the smallest changes after which the run fits.
    """
    machine = machine_from_config(cfg)
    if machine is None or cfg.force or cfg.task != "train":
        return
    setup = setup_from_config(cfg)
    try:
        (trace,) = trace_cache.load_traces(cfg, [setup])
    except trace_cache.TracingError as error:
        sys.stderr.write(f"warning: cannot check whether the run fits: the module cannot be made here: {error}\n")
        return
    try:
        prediction = predict(trace, setup, machine)
    except ConfigError as error:  # of the plan alone
        sys.stderr.write(f"warning: cannot check whether the run fits: {error}\n")
        return
    if trace.by_parameters:
        sys.stderr.write(f"note: {trace.by_parameters_note}\n")
    if prediction.fits is False:
        needed_gb, capacity_gb = prediction.memory.total / 1e9, machine.gpu.memory_gb
        more = ", without activations" if trace.by_parameters else ""
        rule = (
            f"must fit on a GPU: {cfg.cluster.gpu} has {capacity_gb:.1f} GB for torch, "
            f"and a step needs {needed_gb:.1f} GB at its peak{more} (python plan.py shows for what)"
        )
        changes, sentence = find_fitting_changes(cfg, words, prediction)
        fix = "; or ".join([*(changes or [sentence]), "force=true if you know better"])
        raise ConfigError("The memory of this run", None, rule, fix)


def find_fitting_changes(cfg: Config, words: Sequence[str], prediction: Prediction) -> tuple[list[str], str]:
    """Return overrides for a run that does not fit, with each of which, on top of `words`, it fits.

    Returns:
        The overrides, and the sentence to print if there are none.
    """
    # Without a batch size the parameters alone are planned: any size will do.
    setup = replace(prediction.setup, micro_batch=prediction.setup.micro_batch or 1)
    machine = machine_from_config(cfg)
    assert machine is not None
    limits = {"max_nodes": cfg.cluster.max_nodes, "devices": cfg.cluster.gpus_per_node}
    has_blocks = bool(prediction.trace.blocks)
    candidates = list(list_candidates(setup, has_blocks=has_blocks, batch_key=_batch_key(cfg), **limits))
    try:
        traces = _traces(cfg, [candidate.setup for candidate in candidates])
    except trace_cache.TracingError as error:
        return [], f"a smaller network or batch, because the changed step cannot be planned here: {error}"

    def fits(candidate: Candidate) -> bool:
        trace = traces.get(_arithmetic(candidate.setup))
        if trace is None or not fits_in_memory(trace, candidate.setup, machine):
            return False
        # The composed config may change more than the candidate's fields, buffers for example.
        composed = _compose_setup([*words, *candidate.overrides])
        if composed is None or _arithmetic(composed) not in traces:
            return False
        trace = traces[_arithmetic(composed)]
        return fits_in_memory(trace, with_loader_batch(composed, trace), machine)

    smallest = smallest_fitting(candidates, fits, max_count=MAX_CHANGES)
    sentence = NO_CHANGE_FITS if _batch_key(cfg) else NO_CHANGE_WITH_LOADER_FITS
    return [" ".join(candidate.overrides) for candidate in smallest], sentence


def _batch_key(cfg: Config) -> str | None:
    """Return the key that gives the batch size; None if the loaders of the data decide."""
    return next((f"data.{key}" for key in (GLOBAL, PER_DEVICE) if cfg.data.get(key) is not None), None)


def _traces(cfg: Config, setups: Sequence[ParallelLayout]) -> dict[Arithmetic, Trace]:
    """Return a trace for each arithmetic of these setups. Raise `TracingError` if the module cannot be made."""
    distinct = {_arithmetic(setup): setup for setup in setups}
    return dict(zip(distinct, trace_cache.load_traces(cfg, list(distinct.values())), strict=True))


def _arithmetic(setup: ParallelLayout) -> Arithmetic:
    return (*setup.computes_in, setup.tensor_parallel)


def _compose_setup(words: Sequence[str]) -> ParallelLayout | None:
    """Return the setup of a command line; None if its config breaks a rule."""
    try:
        cfg = parse(compose_overrides(words))
    except ConfigError:
        return None
    return setup_from_config(cfg)
