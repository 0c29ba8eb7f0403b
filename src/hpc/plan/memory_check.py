"""The check whether a run fits on the GPUs of its config, before it is queued. Imports no torch."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from hpc.config.errors import ConfigError
from hpc.config.sections import Config
from hpc.jobs.hardware import Machine, machine_from_cluster
from hpc.plan import trace_cache
from hpc.plan.fitting_changes import find_fitting_change
from hpc.plan.prediction import predict
from hpc.plan.setup import setup_from_config


def machine_from_config(cfg: Config) -> Machine | None:
    """Return the machine of a run; None if the cluster's file does not name its GPU, or if the run uses no GPU.

    Raises:
        ConfigError: a GPU that hpc/jobs/hardware.yaml does not have.
    """
    cluster = cfg.cluster
    if not setup_from_config(cfg).accelerated or not cluster.gpu:
        return None
    tf32 = cfg.matmul_precision != "highest"
    machine = machine_from_cluster(cluster.gpu, cluster.network_gbs, link_gbs=cluster.gpu_link_gbs, tf32=tf32)
    return replace(machine, node_memory_gb=cluster.memory_gb or None)


def reject_too_big(cfg: Config, words: Sequence[str]) -> None:
    """Reject a run that cannot fit, before it waits in the queue. `force=true` disables this check.

    A module that cannot be made here passes with a warning. Of one that cannot be traced, parameters, gradients and
    optimizer states must fit.

    Args:
        words: the command line of the config, to which the error suggests overrides.

    Raises:
        ConfigError: with a change after which the run fits.
    """
    machine = machine_from_config(cfg)
    if machine is None or cfg.force or cfg.task != "train":
        return
    setup = setup_from_config(cfg)
    try:
        trace = trace_cache.load_trace(cfg, setup)
    except trace_cache.TracingError as error:
        sys.stderr.write(f"warning: cannot check whether the run fits: the module cannot be made here: {error}\n")
        return
    try:
        prediction = predict(trace, setup, machine)
    except ConfigError as error:  # only a plan needs a batch size that neither the config nor the loader says
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
        change, sentence = find_fitting_change(cfg, words, trace, prediction.setup, machine)
        fix = f"{change or sentence}; or force=true if you know better"
        raise ConfigError("The memory of this run", None, rule, fix)
