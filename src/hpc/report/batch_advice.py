"""Overrides that change the micro-batch of a device and keep the global batch, whichever key gives it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpc.report.run_statistics import config_value

GLOBAL, PER_DEVICE, ACCUMULATE = "data.global_batch_size", "data.batch_size", "trainer.accumulate_grad_batches"
DOUBLED = "the global batch doubles, so the learning rate may have to change."
LOADERS_DECIDE = "The loaders of the data give the batch size"

Advice = tuple[str | None, str]  # an override and its effect; without an override, a sentence on what else can be done


@dataclass(frozen=True)
class BatchSizes:
    """The sizes that a config gives."""

    key: str | None  # data.global_batch_size or data.batch_size; None: the loaders of the data decide
    micro: int | None  # samples of a device at a time
    accumulate: int

    def overrides(self, *, micro: int, accumulate: int) -> str:
        """Return what to type for these sizes: a micro-batch follows from a global batch, but is else its own key."""
        size = [f"{PER_DEVICE}={micro}"] if self.key == PER_DEVICE else []
        return " ".join([f"{ACCUMULATE}={accumulate}", *size])


def read_batch_sizes(config: Mapping[str, Any]) -> BatchSizes | None:
    """Return the batch sizes of a run's config; None if it is damaged."""
    keys = ("trainer.num_nodes", "trainer.devices", ACCUMULATE, "strategy.tensor_parallel_size")
    counts = [config_value(config, key) for key in keys]
    if not all(_is_count(count) for count in counts):
        return None
    nodes, devices, accumulate, tensor_parallel = counts
    key = next((key for key in (GLOBAL, PER_DEVICE) if config_value(config, key) is not None), None)
    size = config_value(config, key) if key else None
    if key == GLOBAL and _is_count(size):
        size //= max(nodes * devices // tensor_parallel, 1) * accumulate
    return BatchSizes(key, size, accumulate) if key is None or _is_count(size) else None


def smaller_micro_batch(config: Mapping[str, Any]) -> Advice:
    """Return the override after which the same global batch is computed in smaller pieces."""
    sizes = read_batch_sizes(config)
    if sizes is None:
        return None, ""
    if sizes.micro is None:
        return None, f"{LOADERS_DECIDE}: halve it there, and type {ACCUMULATE}={2 * sizes.accumulate}."
    if (factor := smallest_divisor(sizes.micro)) is None:
        return None, "A device computes one sample at a time already."
    override = sizes.overrides(micro=sizes.micro // factor, accumulate=sizes.accumulate * factor)
    return override, f"the same global batch is computed in {factor} times as many pieces."


def larger_micro_batch(config: Mapping[str, Any]) -> Advice:
    """Return the override after which a device computes more samples at a time."""
    sizes = read_batch_sizes(config)
    if sizes is None:
        return None, ""
    if factor := smallest_divisor(sizes.accumulate):
        accumulate, more = sizes.accumulate // factor, f"{factor} times as many samples"
        if sizes.micro is None:
            return None, f"{LOADERS_DECIDE}: give a batch {more} there, and type {ACCUMULATE}={accumulate}."
        override = sizes.overrides(micro=sizes.micro * factor, accumulate=accumulate)
        return override, f"the same global batch is computed in pieces of {more}."
    if config_value(config, "strategy.activation_checkpointing") is True:
        return "strategy.activation_checkpointing=false", "nothing is computed twice."
    if sizes.key is None:
        return None, f"{LOADERS_DECIDE}."
    return f"{sizes.key}={2 * config_value(config, sizes.key)}", f"each kernel has more work, but {DOUBLED}"


def less_communication(config: Mapping[str, Any]) -> Advice:
    """Return the override after which devices exchange less."""
    sizes, ranks = read_batch_sizes(config), config_value(config, "strategy.tensor_parallel_size")
    if sizes is None:
        return None, ""
    if factor := smallest_divisor(ranks):  # so many times as many devices then share the batch
        effect = "fewer ranks then exchange what each layer computes, if the layers fit."
        if sizes.micro is None or sizes.micro % factor:
            return None, f"strategy.tensor_parallel_size may be smaller if more devices can share the batch: {effect}"
        size = f" {PER_DEVICE}={sizes.micro // factor}" if sizes.key == PER_DEVICE else ""
        return f"strategy.tensor_parallel_size={ranks // factor}{size}", effect
    size = f"{GLOBAL}={2 * config_value(config, GLOBAL)} " if sizes.key == GLOBAL else ""
    return f"{size}{ACCUMULATE}={2 * sizes.accumulate}", f"gradients are then exchanged half as often, but {DOUBLED}"


def smallest_divisor(number: int) -> int | None:
    """Return the smallest divisor above 1; None if there is none."""
    return next((factor for factor in range(2, number + 1) if number % factor == 0), None)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
