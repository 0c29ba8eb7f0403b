"""The words of plan.py that are no overrides of the config, and what follows from them. No torch."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from hpc.config.errors import ConfigError
from hpc.plan.plan import on
from hpc.plan.setup import Setup
from hpc.plan.trace_types import Trace

KINDS = {"tokens": float, "samples": float, "pipeline": int, "interleaved": int, "micro_batch": int}
EXAMPLES = {"tokens": "300e9", "samples": "1e8", "pipeline": "2", "interleaved": "2", "micro_batch": "1"}
PIPED = {"pipeline", "interleaved", "micro_batch"}


def split(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """What plan.py knows by itself, read; and the words of a config.

    Raises:
        ConfigError: a word that means nothing, or two that say the same.
    """
    own: dict[str, Any] = {}
    others = []
    for word in words:
        key, _, value = word.partition("=")
        if key == "plot":
            own[key] = _picture(value)
        elif key in KINDS:
            own[key] = _number(key, value)
        else:
            others.append(word)
    if "tokens" in own and "samples" in own:
        raise ConfigError("samples", f"{own['samples']:g}", f"tokens={own['tokens']:g} says how long", "one of the two")
    if "interleaved" in own and own.get("pipeline", 1) == 1:
        raise ConfigError("interleaved", own["interleaved"], "are pieces of a pipeline's stage", "pipeline=2 with it")
    return own, others


def _number(key: str, value: str) -> float | int:
    try:
        number = KINDS[key](value)
    except ValueError:
        number = 0
    if not 0 < number < 1e30:
        kind = "a whole number" if KINDS[key] is int else "a number"
        raise ConfigError(key, value, f"is {kind} above 0", f"{key}={EXAMPLES[key]}")
    return number


def _picture(value: str) -> Path:
    """Its folder is made, so that nothing is in the way when it is drawn."""
    path = Path(value)
    if path.suffix != ".png" or path.is_dir():
        raise ConfigError("plot", value, "is a file that is made, and its name ends in .png", "plot=plan.png")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("plot", value, f"its folder cannot be made: {error.strerror}", "plot=plan.png") from None
    return path


def piped(layout: Setup, own: dict[str, Any]) -> Setup:
    """With the stages of a pipeline and the micro-batch that are asked for, and the same global batch."""
    if not own.keys() & PIPED:
        return layout
    stages = {key: own[key] for key in ("pipeline", "interleaved") if key in own}
    split_over = replace(layout, **stages)
    each = split_over.tensor_parallel * split_over.pipeline
    if layout.world_size % each:
        rule = f"times tensor parallelism, {each}, divides the world size, {layout.world_size}"
        raise ConfigError("pipeline", split_over.pipeline, rule, "pipeline=2, or other trainer.num_nodes=")
    ranks, micro = split_over.data_parallel, own.get("micro_batch", layout.micro_batch)
    found = on(layout, layout.global_batch, **stages, accumulate=max(1, layout.global_batch // (ranks * micro)))
    if found is None or found.micro_batch != micro:
        rule = f"global batch {layout.global_batch} = data-parallel size {ranks} * accumulate * micro_batch"
        raise ConfigError("micro_batch", micro, rule, "micro_batch=1, or another data.global_batch_size=")
    return found


def reject_uneven(trace: Trace, setup: Setup) -> None:
    """Raise `ConfigError` for a pipeline whose stages cannot hold equally many blocks."""
    pieces, blocks = setup.pipeline * setup.interleaved, len(trace.blocks)
    if setup.pipeline > 1 and (not blocks or blocks % pieces):
        rule = f"times interleaved={setup.interleaved} divides the {blocks} blocks of the network"
        raise ConfigError("pipeline", setup.pipeline, rule, "pipeline=2, or without it")


def steps(cfg: DictConfig, trace: Trace, setup: Setup, own: dict[str, Any]) -> int | None:
    """Optimizer steps to the end; None: not said."""
    typed = cfg.trainer.max_steps if cfg.trainer.max_steps > 0 else None
    word = next((word for word in ("tokens", "samples") if word in own), None)
    if word is None:
        return typed
    if typed:
        raise ConfigError(word, f"{own[word]:g}", f"trainer.max_steps={typed} says how long", "one of the two")
    if word == "tokens" and trace.examples_are != "tokens":
        raise ConfigError(word, f"{own[word]:g}", "this network is given samples", f"samples={own[word]:g}")
    return ceil(own[word] / (trace.tokens if word == "tokens" else 1) / setup.global_batch)
