"""The plan of a run as plan.py prints it: prediction, end, checkpoints, and changes after which it fits. No torch."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hpc.config import arguments, parse, walltime
from hpc.config.conversion import flatten
from hpc.config.errors import ConfigError
from hpc.config.sections import Config
from hpc.plan import memory_check, plan_arguments, plan_text, trace_cache
from hpc.plan.prediction import Prediction, predict
from hpc.plan.setup import setup_from_config
from hpc.plan.whole_run import CheckpointCost, Finish, predict_checkpoint_cost, predict_finish


@dataclass(frozen=True)
class RunPlan:
    """A prediction, and what follows from it for the whole run."""

    prediction: Prediction
    title: str
    finish: Finish | None  # None: unknown
    checkpoint: CheckpointCost | None
    changes: list[str]  # overrides, with each of which a run fits that does not
    notes: list[str]

    @property
    def render_kwargs(self) -> dict[str, Any]:
        """The arguments of `plan_text` beside prediction and title."""
        return {name: value for name, value in vars(self).items() if name not in ("prediction", "title")}


def plan_run(node: DictConfig, words: Sequence[str], *, own: dict[str, Any]) -> RunPlan:
    """Plan the run of a config.

    Args:
        words: the overrides that were typed.
        own: plan.py's own words, from `plan_arguments.split_words`.

    Raises:
        ConfigError: the config breaks a rule, or its module cannot be made.
    """
    cfg = parse.parse(node, needs_data=False)
    notes = _fill_in_data(cfg)
    prediction = _predict(cfg, own)
    steps = plan_arguments.num_steps(cfg, prediction.trace, setup=prediction.setup, own=own)
    finish = None
    if prediction.step and steps:
        limit_seconds = walltime.walltime_seconds("cluster.time", cfg.cluster.time)
        finish = predict_finish(prediction.step.seconds, steps, setup=prediction.setup, limit_seconds=limit_seconds)
    has_layout_words = bool(own.keys() & plan_arguments.LAYOUT_WORDS)
    changes, sentence = [], "leave out pipeline=, interleaved= and micro_batch= to see changes after which it fits"
    if prediction.fits is False and not has_layout_words:
        changes, sentence = memory_check.find_fitting_changes(cfg, words, prediction)
    notes += plan_text.notes(prediction, cfg.cluster, steps=steps, finish=finish)
    if prediction.fits is False and not changes:
        notes.append(f"to make it fit: {sentence}")
    if finish and cfg.trainer.max_steps > 0 and cfg.trainer.max_epochs not in (None, -1):
        notes.append(f"the run ends earlier if trainer.max_epochs={cfg.trainer.max_epochs} makes fewer steps")
    return RunPlan(
        prediction=prediction,
        title=plan_text.title(prediction, strategy=cfg.strategy.name, gpu=cfg.cluster.gpu),
        finish=finish,
        checkpoint=predict_checkpoint_cost(prediction.trace, prediction.setup),
        changes=changes,
        notes=notes,
    )


def as_text(plan: RunPlan) -> str:
    """Return the plan as one screen of text."""
    return "\n".join(plan_text.lines(plan.prediction, plan.title, **plan.render_kwargs))


def as_json(plan: RunPlan) -> str:
    """Return the plan as JSON."""
    return json.dumps(plan_text.as_dict(plan.prediction, **plan.render_kwargs), indent=1)


def _predict(cfg: Config, own: dict[str, Any]) -> Prediction:
    setup = plan_arguments.with_layout_words(setup_from_config(cfg), own)
    machine = memory_check.machine_from_config(cfg)
    try:
        (trace,) = trace_cache.load_traces(cfg, [setup])
    except trace_cache.TracingError as error:
        rule = f"cannot be planned, because it cannot be made here: {error}"
        fix = "change the module, or run python submit.py, which submits it without a plan"
        raise ConfigError("model", None, rule, fix) from None
    plan_arguments.reject_uneven_stages(trace, setup)
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
