"""The words of plan.py that are not overrides of the config, and the setup that they plan. Imports no torch."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from hpc.config.errors import ConfigError
from hpc.config.sections import Config
from hpc.plan.prediction import with_global_batch
from hpc.plan.setup import ParallelLayout
from hpc.plan.trace_types import Trace

TYPES = {"tokens": float, "samples": float, "pipeline": int, "interleaved": int, "micro_batch": int}
EXAMPLES = {"tokens": "300e9", "samples": "1e8", "pipeline": "2", "interleaved": "2", "micro_batch": "1"}
LAYOUT_WORDS = {"pipeline", "interleaved", "micro_batch"}


def split_words(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return plan.py's own words by key, and the overrides of the config.

    Raises:
        ConfigError: a value is not valid, or two words contradict each other.
    """
    own: dict[str, Any] = {}
    overrides = []
    for word in words:
        key, _, value = word.partition("=")
        if key == "plot":
            own[key] = _prepare_plot_path(value)
        elif key in TYPES:
            own[key] = _positive_number(key, value)
        else:
            overrides.append(word)
    if "tokens" in own and "samples" in own:
        rule = f"cannot be combined with tokens={own['tokens']:g}"
        raise ConfigError("samples", f"{own['samples']:g}", rule, "one of the two")
    if "interleaved" in own and own.get("pipeline", 1) == 1:
        rule = "must come with pipeline=, because it splits the stages of a pipeline"
        raise ConfigError("interleaved", own["interleaved"], rule, f"pipeline=2 interleaved={own['interleaved']}")
    return own, overrides


def with_layout_words(setup: ParallelLayout, own: dict[str, Any]) -> ParallelLayout:
    """Return the setup with the pipeline and the micro-batch of plan.py's own words, and the same global batch.

    Raises:
        ConfigError: the world size is not divisible by the stages, or the batch not by the micro-batch.
    """
    if not own.keys() & LAYOUT_WORDS:
        return setup
    if not setup.micro_batch:
        key = next(key for key in own if key in LAYOUT_WORDS)
        rule = "must be used with a batch size that the config gives; here only the loaders of the data have one"
        raise ConfigError(key, own[key], rule, "data.batch_size=<number>, beside it")
    stages = {key: own[key] for key in ("pipeline", "interleaved") if key in own}
    piped = replace(setup, **stages)
    if setup.world_size % (piped.tensor_parallel * piped.pipeline):
        product = f"pipeline * strategy.tensor_parallel_size ({piped.pipeline} * {piped.tensor_parallel})"
        rule = f"{product} must divide the world size ({setup.world_size})"
        fix = "".join(f"pipeline={stages}, or " for stages in _possible_stages(setup)[:1])
        raise ConfigError("pipeline", piped.pipeline, rule, f"{fix}another trainer.num_nodes=")
    num_ranks, micro_batch = piped.data_parallel, own.get("micro_batch", setup.micro_batch)
    accumulate = max(1, setup.global_batch // (num_ranks * micro_batch))
    planned = with_global_batch(setup, setup.global_batch, **stages, accumulate=accumulate)
    if planned is None or planned.micro_batch != micro_batch:
        rule = f"must divide the batch of a data-parallel rank ({setup.global_batch} / {num_ranks})"
        raise ConfigError("micro_batch", micro_batch, rule, "micro_batch=1, or another data.global_batch_size=")
    return planned


def reject_uneven_stages(trace: Trace, setup: ParallelLayout) -> None:
    """Raise `ConfigError` for a pipeline whose stages cannot have equally many blocks."""
    num_pieces, num_blocks = setup.pipeline * setup.interleaved, len(trace.blocks)
    if setup.pipeline > 1 and (not num_blocks or num_blocks % num_pieces):
        rule = f"must split the {num_blocks} blocks of the network evenly, with interleaved={setup.interleaved}"
        if not num_blocks:
            rule = "cannot be planned for this network, which has no list of equal blocks that stages could share"
            raise ConfigError("pipeline", setup.pipeline, rule, "the command without pipeline=")
        possible = [number for number in _possible_stages(setup) if num_blocks % (number * setup.interleaved) == 0]
        fix = "".join(f"pipeline={number}, or " for number in possible[:1])
        raise ConfigError("pipeline", setup.pipeline, rule, f"{fix}the command without pipeline=")


def _possible_stages(setup: ParallelLayout) -> list[int]:
    """Return the numbers of stages over which the devices can be shared equally."""
    num_ranks = setup.world_size // setup.tensor_parallel
    return [number for number in range(2, num_ranks + 1) if num_ranks % number == 0]


def num_steps(cfg: Config, trace: Trace, *, setup: ParallelLayout, own: dict[str, Any]) -> int | None:
    """Return the optimizer steps of the run; None if neither the config nor plan.py's own words give them.

    Raises:
        ConfigError: both give them, or tokens are counted of a network whose input has none.
    """
    max_steps = cfg.trainer.max_steps if cfg.trainer.max_steps > 0 else None
    key = next((key for key in ("tokens", "samples") if key in own), None)
    if key is None:
        return max_steps
    if max_steps:
        rule = f"cannot be combined with trainer.max_steps={max_steps}"
        raise ConfigError(key, f"{own[key]:g}", rule, "one of the two")
    if key == "tokens" and trace.unit != "tokens":
        rule = "cannot be counted, because the input of this network is samples"
        raise ConfigError(key, f"{own[key]:g}", rule, "samples=<number of samples>")
    num_samples = own[key] / (trace.tokens_per_example if key == "tokens" else 1)
    return ceil(num_samples / setup.global_batch)


def _positive_number(key: str, value: str) -> float | int:
    try:
        number = TYPES[key](value)
    except ValueError:
        number = 0
    if not 0 < number < 1e30:
        kind = "a whole number" if TYPES[key] is int else "a number"
        raise ConfigError(key, value, f"must be {kind} above 0", f"{key}={EXAMPLES[key]}")
    return number


def _prepare_plot_path(value: str) -> Path:
    """Return the path of the page, and make its folder now, so that a wrong path is reported at once."""
    path = Path(value)
    if path.suffix != ".html" or path.is_dir():
        raise ConfigError("plot", value, "must be the name of a file that ends in .html", "plot=plan.html")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule = f"Cannot make the folder of this file: {error.strerror}"
        raise ConfigError("plot", value, rule, "plot=plan.html") from None
    return path
