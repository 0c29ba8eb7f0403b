"""The plan of a run as plan.py prints it: with its end, its checkpoints, and what would make it fit. No torch here."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from hpc.charts import chart
from hpc.config import preflight, walltime
from hpc.config.errors import ConfigError
from hpc.plan import campaign, fit, plan_text, plan_words, setup, trace_cache
from hpc.plan.plan import Plan, plan


@dataclass(frozen=True)
class RunPlan:
    """A plan, and what follows from it for the run as a whole."""

    plan: Plan
    title: str
    finish: campaign.Finish | None  # None: it is not known when the run ends
    checkpoint: campaign.Checkpoint | None
    changes: list[str]  # overrides, each of which makes a run fit that does not
    notes: list[str]

    @property
    def rest(self) -> dict[str, Any]:
        """All but the plan itself and its title, by name."""
        return {name: value for name, value in vars(self).items() if name not in ("plan", "title")}


def plan_run(cfg: DictConfig, words: Sequence[str], *, own: dict[str, Any]) -> RunPlan:
    """Plan the run of a config.

    Args:
        words: as typed, of the config.
        own: what plan.py knows by itself, as `plan_words.split` reads it.

    Raises:
        ConfigError: the config breaks a rule, or its network cannot be traced.
    """
    preflight.rules(cfg)
    notes = _look_at_data(cfg)
    made = _plan(cfg, own)
    steps = plan_words.steps(cfg, made.trace, made.setup, own)
    finish = None
    if made.step and steps:
        limit = walltime.walltime("cluster.time", cfg.cluster.time)
        finish = campaign.finish(made.step.seconds, steps, made.setup, limit)
    changes = fit.ways_out(cfg, words, made) if made.fits is False and not own.keys() & plan_words.PIPED else []
    notes += plan_text.notes(made, cfg.cluster, steps=steps, finish=finish)
    notes += _without_way_out(made, changes, own=own)
    if finish and cfg.trainer.max_steps > 0 and cfg.trainer.max_epochs not in (None, -1):
        notes.append(f"trainer.max_epochs={cfg.trainer.max_epochs} ends the run earlier if these are fewer steps")
    return RunPlan(
        plan=made,
        title=plan_text.title(made, strategy=cfg.strategy.name, gpu=cfg.cluster.gpu),
        finish=finish,
        checkpoint=campaign.checkpoint(made.trace, made.setup),
        changes=changes,
        notes=notes,
    )


def text(run: RunPlan) -> str:
    """Return one screen for a person."""
    return "\n".join(plan_text.lines(run.plan, run.title, **run.rest))


def as_json(run: RunPlan) -> str:
    """Return the same for programs."""
    return json.dumps(plan_text.as_dict(run.plan, **run.rest), indent=1)


def draw(run: RunPlan, file: Path) -> None:
    """Write a picture of rate and efficiency over nodes. Raises `ConfigError` where it cannot be written."""
    try:
        chart.write_png(plan_text.charts(run.plan), file)
    except OSError as error:
        raise ConfigError("plot", file, f"cannot be written: {error.strerror}", "plot=plan.png") from None


def _plan(cfg: DictConfig, own: dict[str, Any]) -> Plan:
    layout = plan_words.piped(setup.of(cfg), own)
    machine = fit.machine_of(cfg)
    try:
        trace = trace_cache.of(cfg, [layout])[0]
    except trace_cache.NotTraced as error:
        rule = f"it cannot be run on tensors without content: {error}"
        raise ConfigError("model.network", None, rule, "change that; submit.py submits it unplanned") from None
    plan_words.reject_uneven(trace, layout)
    return plan(trace, layout, machine)


def _look_at_data(cfg: DictConfig) -> list[str]:
    """Fill in what data say of themselves; a plan can do without them where the config says it, which is noted."""
    try:
        preflight.files(cfg)
    except ConfigError as rejected:
        if not rejected.key.startswith("data.") or None in cfg.model.network.values():
            raise
        return [f"data are not looked at: {rejected.key}: {rejected.rule}"]
    return []


def _without_way_out(made: Plan, changes: list[str], *, own: dict[str, Any]) -> list[str]:
    if made.fits is not False or changes:
        return []
    if own.keys() & plan_words.PIPED:
        return ["what would make it fit is told without pipeline= and micro_batch="]
    return [f"to make it fit: {fit.NO_WAY}"]
