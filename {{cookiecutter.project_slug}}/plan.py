"""Will it fit, how long does it take, is one more node worth it: python plan.py [group=choice] [key=value] [words]

tokens=300e9, samples=1e8     how much to train on, for the time to the end; or trainer.max_steps=
plot=FILE.png                 a picture of rate and efficiency over nodes
pipeline=8 interleaved=2 micro_batch=1    stages of a pipeline and pieces in each, to compare: train.py runs none
"""

import gc
import json
import sys
from argparse import ArgumentParser
from dataclasses import replace
from math import ceil
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from omegaconf import DictConfig

from {{ cookiecutter.package_name }}.hpc import config
from {{ cookiecutter.package_name }}.hpc.charts import chart, units
from {{ cookiecutter.package_name }}.hpc.checks import preflight
from {{ cookiecutter.package_name }}.hpc.config import Refused
from {{ cookiecutter.package_name }}.hpc.jobs import commandline, job
from {{ cookiecutter.package_name }}.hpc.planning import campaign, fitting, planned, setup, traces
from {{ cookiecutter.package_name }}.hpc.planning.plan import Plan, on, plan

WORDS = {"tokens": float, "samples": float, "pipeline": int, "interleaved": int, "micro_batch": int, "plot": Path}


def main() -> None:
    parser: ArgumentParser = commandline.parser(__doc__)
    parser.add_argument("--json", action="store_true", help="print the plan for programs")
    asked = parser.parse_intermixed_args(sys.argv[1:])
    own, asked.overrides = ours(asked.overrides)
    cfg = commandline.composed(asked)
    preflight.rules(cfg)
    notes = looked_at(cfg)
    layout = piped(setup.of(cfg), own)
    where = fitting.machine_of(cfg)
    notes += missing(cfg, layout, where is not None)
    try:
        trace = traces.of(cfg, [layout])[0]
    except traces.NotTraced as error:
        rule = f"it cannot be run on tensors without content: {error}"
        raise Refused("model.network", None, rule, "the operation it names; or submit.py without a plan") from None
    made = plan(trace, layout, where)
    changes = fitting.ways_out(cfg, asked.overrides, made) if made.fits is False and layout.pipeline == 1 else []
    told(cfg, made, own, changes, notes, asked.json)


def told(cfg: DictConfig, made: Plan, own: dict, changes: list[str], notes: list[str], as_json: bool) -> None:
    steps = steps_of(cfg, made, own)
    if steps is None:
        notes = [*notes, f"{made.trace.examples_are}=1e9 or trainer.max_steps= tells the time to the end"]
    limit = job.walltime("cluster.time", cfg.cluster.time)
    finish = campaign.finish(made.step.seconds, steps, made.setup, limit) if made.step and steps else None
    kept = campaign.checkpoint(made.trace, made.setup)
    if as_json:
        print(json.dumps(planned.as_dict(made, finish, kept, changes, notes), indent=1))
    else:
        ways = [f"to make it fit: {change}" for change in changes]
        print("\n".join(planned.lines(made, title(cfg, made), finish, kept, [*ways, *notes])))
    if "plot" in own:
        chart.png(planned.charts(made), own["plot"])


def ours(words: list[str]) -> tuple[dict, list[str]]:
    """What this program knows by itself, read; and the words of a config."""
    own, others = {}, []
    for word in words:
        key, _, value = word.partition("=")
        if key not in WORDS:
            others.append(word)
            continue
        try:
            own[key] = WORDS[key](value)
            if key != "plot" and not 0 < own[key] < float("inf"):
                raise ValueError
        except ValueError:
            raise Refused(key, value, f"is a number above 0 of type {WORDS[key].__name__}", f"{key}=8") from None
    return own, others


def looked_at(cfg: DictConfig) -> list[str]:
    """What data say of themselves is filled in; a plan can do without them where the config says it."""
    try:
        preflight.files(cfg)
    except Refused as refused:
        if config.flat(cfg.model.network) and any(value is None for value in cfg.model.network.values()):
            raise
        return [f"data are not looked at: {refused.key}: {refused.rule}"]
    return []


def piped(layout: setup.Setup, own: dict) -> setup.Setup:
    """With the stages of a pipeline and the micro-batch that are asked for, and the same global batch."""
    if not own.keys() & {"pipeline", "interleaved", "micro_batch"}:
        return layout
    stages = {key: own[key] for key in ("pipeline", "interleaved") if key in own}
    micro = own.get("micro_batch", layout.micro_batch)
    ranks = replace(layout, **stages).data_parallel
    found = on(layout, layout.global_batch, **stages, accumulate=max(1, layout.global_batch // max(1, ranks * micro)))
    if found is None or found.micro_batch != micro:
        rule = f"global batch {layout.global_batch} = data-parallel size {ranks} * accumulate * micro-batch"
        raise Refused("micro_batch", micro, rule, "another pipeline=, micro_batch= or data.global_batch_size=")
    return found


def missing(cfg: DictConfig, layout: setup.Setup, known: bool) -> list[str]:
    """What the plan does without, and what the project cannot run."""
    notes = []
    if not layout.accelerated:
        notes.append("a run on CPUs: only its memory is computed")
    elif not known:
        notes.append(f"which GPU cluster={cfg.cluster.name} has is not known (cluster.gpu=), nor whether it fits")
    elif cfg.cluster.network_gbs is None:
        notes.append("cluster.network_gbs= is not known: what a node sends per second; only one node is timed")
    if layout.pipeline > 1:
        notes.append("train.py has no pipeline: of these degrees it runs data and tensor parallelism")
    if layout.compile:
        notes.append("torch.compile keeps less than is counted here")
    return notes


def steps_of(cfg: DictConfig, made: Plan, own: dict) -> int | None:
    """Optimizer steps to the end; None: not said."""
    for key, size in (("tokens", made.trace.tokens), ("samples", 1)):
        if key in own:
            return ceil(own[key] / size / made.setup.global_batch)
    return cfg.trainer.max_steps if cfg.trainer.max_steps > 0 else None


def title(cfg: DictConfig, made: Plan) -> str:
    layout = made.setup
    gpu = f"{layout.world_size} {cfg.cluster.gpu or ('GPUs' if layout.accelerated else 'CPU ranks')}"
    each = f"{layout.micro_batch} at a time on each" + (f", {layout.accumulate} times a step" * (layout.accumulate > 1))
    size = units.si(made.trace.parameters * layout.tensor_parallel)
    return f"{size} parameters, {cfg.strategy.name}, {layout.precision}: {gpu} on {layout.nodes} nodes, {each}"


if __name__ == "__main__":
    gc.disable()  # as in submit.py
    with config.refusals():
        main()
