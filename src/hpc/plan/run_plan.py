"""The plan of a run as plan.py prints it: prediction, end, checkpoints, and a change after which it fits. No torch."""

import re
from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from hpc.config import arguments, parse, walltime
from hpc.config.conversion import flatten
from hpc.config.errors import ConfigError
from hpc.config.sections import Config
from hpc.jobs.hardware import Machine
from hpc.plan import fitting_changes, memory_check, plan_arguments, plan_text, trace_cache
from hpc.plan.plan_arguments import PlanWords
from hpc.plan.plan_text import RunPlan
from hpc.plan.prediction import Prediction, predict
from hpc.plan.setup import ParallelLayout, setup_from_config
from hpc.plan.whole_run import predict_checkpoint_cost, predict_finish


def plan_run(node: DictConfig, words: Sequence[str], *, own: PlanWords | None = None) -> RunPlan:
    """Plan the run of a config.

    Args:
        words: the overrides that were typed.
        own: plan.py's own words, from `plan_arguments.split_words`.

    Raises:
        ConfigError: the config breaks a rule, or its module cannot be made.
    """
    own = own or PlanWords()
    cfg = parse.parse(node, needs_data=False)
    notes = _fill_in_data(cfg)
    machine = memory_check.machine_from_config(cfg)
    prediction = _predict(cfg, own, machine)
    steps = plan_arguments.num_steps(cfg, prediction.trace, setup=prediction.setup, own=own)
    finish = None
    if prediction.step and steps:
        limit_seconds = walltime.walltime_seconds("cluster.time", cfg.cluster.time)
        num_gpus = _count_allocated_gpus(cfg, prediction.setup)
        finish = predict_finish(prediction.step.seconds, steps, num_gpus=num_gpus, limit_seconds=limit_seconds)
    notes += plan_text.notes(prediction, cfg.cluster, steps=steps, finish=finish)
    change = None
    if machine and prediction.fits is False:
        trace, setup = prediction.trace, prediction.setup
        change, sentence = fitting_changes.find_fitting_change(cfg, words, trace, setup, machine)
        notes += [] if change else [f"to make it fit: {sentence}"]
    if finish and cfg.trainer.max_steps > 0 and cfg.trainer.max_epochs not in (None, -1):
        notes.append(f"the run ends earlier if trainer.max_epochs={cfg.trainer.max_epochs} makes fewer steps")
    return RunPlan(
        prediction=prediction,
        title=plan_text.title(prediction, strategy=cfg.strategy.name, gpu=cfg.cluster.gpu),
        finish=finish,
        checkpoint=predict_checkpoint_cost(prediction.trace, prediction.setup),
        change=change,
        notes=notes,
    )


def _count_allocated_gpus(cfg: Config, setup: ParallelLayout) -> int:
    """Return the number of GPUs that a job of the run gets, idle ones of whole nodes included."""
    cluster = cfg.cluster
    return setup.nodes * cluster.gpus_per_node if cluster.whole_nodes and cluster.gpus_per_node else setup.world_size


def _predict(cfg: Config, own: PlanWords, machine: Machine | None) -> Prediction:
    setup = setup_from_config(cfg)
    if machine and own.network:
        machine = plan_arguments.with_measured_network(machine, own.network)
    try:
        trace = trace_cache.load_trace(cfg, setup)
    except trace_cache.TracingError as error:
        rule = f"cannot be planned, because it cannot be made here: {error}"
        fix = "change the module, or run python submit.py, which submits it without a plan"
        raise ConfigError("model", None, rule, fix) from None
    return predict(trace, setup, machine)


def _fill_in_data(cfg: Config) -> list[str]:
    """Fill in the sizes that the model takes from the data. They are read only if the config lacks one.

    Returns:
        A note if the config does not say where the data are.

    Raises:
        ConfigError: a size is unknown, and the data cannot be read.
    """
    network = cfg.model.get("network", cfg.model)
    references = re.findall(r"\$\{(data\.[\w.]+)\}", str(list(flatten(network).values())))
    sizes = {key: OmegaConf.select(cfg.node, key, default=None) for key in references}
    unknown, unset = [key for key in sizes if sizes[key] is None], parse.unset_keys(cfg.node)
    if unknown and unset:
        rule, fix = (
            f"must be given for a plan without {', '.join(unset)}",
            " ".join(f"{key}=<number>" for key in unknown),
        )
        raise ConfigError(", ".join(unknown), None, rule, fix)
    arguments.check_files(cfg, reads_data=bool(unknown))
    if not unset:
        return []
    given = ", ".join(f"{key}={value}" for key, value in sizes.items()) or "no size of the data"
    return [f"planned without {', '.join(unset)}; it uses {given}"]
