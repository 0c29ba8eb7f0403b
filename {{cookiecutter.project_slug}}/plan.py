"""Will it fit, how long does it take, is one more node worth it: python plan.py [group=choice] [key=value] [words]

tokens=300e9, samples=1e8     how much to train on, for the time to the end; or trainer.max_steps=
plot=FILE.png                 a picture of rate and efficiency over nodes
pipeline=8 interleaved=2 micro_batch=1    stages of a pipeline and pieces in each, to compare: train.py runs none
"""

import gc
import json
import signal
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from omegaconf import DictConfig

from hpc.charts import chart
from hpc.config import compose, errors, preflight, walltime
from hpc.config.errors import ConfigError
from hpc.plan import campaign, fit, plan_text, plan_words, setup, trace_cache
from hpc.plan.plan import Plan, plan
from hpc.run import command_line


def main() -> None:
    parser: ArgumentParser = compose.parser(__doc__)
    parser.add_argument("--json", action="store_true", help="print the plan for programs")
    typed = parser.parse_intermixed_args(sys.argv[1:])
    own, typed.overrides = plan_words.split(typed.overrides)
    cfg = command_line.composed(typed)
    preflight.rules(cfg)
    notes = looked_at(cfg)
    layout = plan_words.piped(setup.of(cfg), own)
    where = fit.machine_of(cfg)
    try:
        trace = trace_cache.of(cfg, [layout])[0]
    except trace_cache.NotTraced as error:
        rule = f"it cannot be run on tensors without content: {error}"
        raise ConfigError("model.network", None, rule, "change that; submit.py submits it unplanned") from None
    plan_words.reject_uneven(trace, layout)
    made = plan(trace, layout, where)
    told(cfg, made, own, typed.overrides, notes, typed.json)


def told(cfg: DictConfig, made: Plan, own: dict[str, Any], words: list[str], notes: list[str], as_json: bool) -> None:
    steps = plan_words.steps(cfg, made.trace, made.setup, own)
    finish = None
    if made.step and steps:
        finish = campaign.finish(
            made.step.seconds, steps, made.setup, walltime.walltime("cluster.time", cfg.cluster.time)
        )
    kept = campaign.checkpoint(made.trace, made.setup)
    changes = fit.ways_out(cfg, words, made) if made.fits is False and not own.keys() & plan_words.PIPED else []
    notes += [*plan_text.notes(made, cfg.cluster, steps, finish), *without_way_out(made, own, changes)]
    if finish and cfg.trainer.max_steps > 0 and cfg.trainer.max_epochs not in (None, -1):
        notes.append(f"trainer.max_epochs={cfg.trainer.max_epochs} ends the run earlier if these are fewer steps")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` has read enough: no traceback
    if as_json:
        print(json.dumps(plan_text.as_dict(made, finish, kept, changes, notes), indent=1))
    else:
        title = plan_text.title(made, cfg.strategy.name, cfg.cluster.gpu)
        print("\n".join(plan_text.lines(made, title, finish, kept, changes, notes)))
    if "plot" in own:
        try:
            chart.write_png(plan_text.charts(made), own["plot"])
        except OSError as error:
            raise ConfigError("plot", own["plot"], f"cannot be written: {error.strerror}", "plot=plan.png") from None


def looked_at(cfg: DictConfig) -> list[str]:
    """What data say of themselves is filled in; a plan can do without them where the config says it."""
    try:
        preflight.files(cfg)
    except ConfigError as rejected:
        if not rejected.key.startswith("data.") or None in cfg.model.network.values():
            raise
        return [f"data are not looked at: {rejected.key}: {rejected.rule}"]
    return []


def without_way_out(made: Plan, own: dict[str, Any], changes: list[str]) -> list[str]:
    if made.fits is not False or changes:
        return []
    if own.keys() & plan_words.PIPED:
        return ["what would make it fit is told without pipeline= and micro_batch="]
    return [f"to make it fit: {fit.NO_WAY}"]


if __name__ == "__main__":
    gc.disable()  # as in submit.py
    with errors.exit_on_config_error():
        main()
