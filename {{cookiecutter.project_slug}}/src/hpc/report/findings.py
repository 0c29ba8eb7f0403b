"""What limits a run, and which override to try next: plain sentences, each from a number that the page shows. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from hpc.charts.units import percent, seconds
from hpc.report.numbers import Numbers, value
from hpc.report.validation_interval import rarer

MOST = 3
LONGER = "of a longer run it is a smaller share."


@dataclass(frozen=True)
class Finding:
    """A sentence with its number, and what to type. `weight`: about the share of the time that is at stake."""

    weight: float
    says: str
    override: str | None  # words of a command line; None: there is none
    then: str  # what that does, or what else there is to do

    @property
    def text(self) -> str:
        return f"{self.says} Try `{self.override}`: {self.then}" if self.override else f"{self.says} {self.then}"


def findings(numbers: Numbers, config: Mapping[str, Any]) -> list[str]:
    """Three sentences at most, what weighs most first."""
    found = [finding for rule in RULES for finding in rule(numbers, config)]
    found.sort(key=lambda finding: -finding.weight)
    return [finding.text for finding in found[:MOST]] or [_nothing(numbers)]


def _nothing(numbers: Numbers) -> str:
    if numbers.step:
        return (
            f"Nothing that is measured here limits the run: {percent(numbers.share('compute'))} of a step is computing."
        )
    return "There is too little to judge by: no step was timed."


def _data(numbers: Numbers, config: Mapping[str, Any]) -> Iterator[Finding]:
    share = numbers.share("data")
    if share < 0.1:
        return
    waits, whole = seconds(numbers.step["data"]), seconds(numbers.step["step"])
    says = f"Training waits for data during {percent(share)} of a step: {waits} of {whole}."
    workers, busy = value(config, "data.num_workers"), (numbers.cpu_percent or 0) >= 90
    kind = str(value(config, "data._target_")).rpartition(".")[2]
    if value(config, "data.stage") is False and value(config, "data.node_local"):
        yield Finding(share, says, "data.stage=true", "the node reads its own copy of the packed file.")
    elif isinstance(workers, int) and not busy:
        yield Finding(share, says, f"data.num_workers={2 * workers or 2}", "more processes prepare batches.")
    elif kind == "Images":
        then = "The README's tools/pack.py decodes the images once, into one file for data=packed."
        yield Finding(share, says, None, then)
    else:
        yield Finding(
            share, says, None, "No override makes this data quicker: look at what its dataset does for a sample."
        )


def _unmeasured(numbers: Numbers, config: Mapping[str, Any]) -> Iterator[Finding]:
    rest = 1 - numbers.share("compute")
    if not numbers.step.get("step") or "compute" not in numbers.step or "data" in numbers.step or rest < 0.1:
        return
    says = f"{percent(rest)} of a step is not computing; how much of it is waiting for data was not measured."
    yield Finding(rest, says, None, "The trainer.profiler of configs/trainer/base.yaml measures it.")


def _validation(numbers: Numbers, config: Mapping[str, Any]) -> Iterator[Finding]:
    share = numbers.share("validation")
    if share >= 0.1:
        says = f"Validation takes {percent(share)} of the run: {seconds(numbers.wall['validation'])} in all."
        override = rarer(share, numbers, config)
        then = "it validates less often." if override else f"It is rare already: {LONGER}"
        yield Finding(share, says, override, then)


def _checkpoints(numbers: Numbers, config: Mapping[str, Any]) -> Iterator[Finding]:
    share, saves = numbers.share("checkpoints"), numbers.times.get("checkpoints", 0)
    if share < 0.05 or not saves:
        return
    took, each = numbers.wall["checkpoints"], numbers.wall["checkpoints"] / saves
    says = f"Checkpoints hold training up for {percent(share)} of the run: {saves} of them, {seconds(took)} in all."
    steps, minutes = value(config, "checkpoint.every_n_steps"), value(config, "checkpoint.every_minutes")
    by_clock = sum(numbers.wall.values()) / (60 * minutes) if isinstance(minutes, int | float) and minutes > 0 else 0
    if isinstance(steps, int):
        override = f"checkpoint.every_n_steps={steps * ceil(share / 0.02)}"
    elif by_clock > saves / 2:
        override = f"checkpoint.every_minutes={max(ceil(each / 0.02 / 60), ceil(2 * minutes))}"
    elif value(config, "checkpoint.monitor") and numbers.times.get("validation", 0) > saves / 2:
        then = "each validation that finds a better value saves it."
        yield Finding(share, says, rarer(share, numbers, config), then)
        return
    else:
        return
    yield Finding(share, says, override, "it saves less often, and loses more when it is struck.")


def _start(numbers: Numbers, config: Mapping[str, Any]) -> Iterator[Finding]:
    share, starts = numbers.share("start-up"), numbers.times.get("start-up", 0)
    if share < 0.1:
        return
    took = numbers.wall["start-up"]
    says = f"Starting takes {percent(share)} of the run: {seconds(took)} in {starts} start{'s' if starts > 1 else ''}."
    if value(config, "cluster.stage_env") is False and value(config, "cluster.node_local"):
        yield Finding(share, says, "cluster.stage_env=true", "each node imports from its own copy of the environment.")
    elif value(config, "strategy.compile") is True and took / max(starts, 1) > 30:
        yield Finding(share, says, "strategy.compile=false", "a short run does not win back what compiling takes.")
    else:
        yield Finding(share, says, None, f"There is nothing to change: {LONGER}")


def _memory(numbers: Numbers, config: Mapping[str, Any]) -> Iterator[Finding]:
    used, room = numbers.gpu_memory_gb, numbers.gpu_room_gb
    if not used or not room or used > room / 2 or numbers.share("data") > 0.3 or (numbers.mfu or 0) > 0.45:
        return
    says = f"At most {used:.1f} GB of a GPU's {room:.1f} GB are in use, so a larger micro-batch fits."
    yield Finding(0.1, says, *_larger(config))


def _idle(numbers: Numbers, config: Mapping[str, Any]) -> Iterator[Finding]:
    busy, host = numbers.gpu_percent, numbers.share("other")
    if busy is not None and busy < 80 and "data" in numbers.step and numbers.share("data") < 0.1:
        says = f"The GPUs are busy {percent(busy / 100)} of the training time, and data are not what they wait for."
        yield Finding(1 - busy / 100, says, *_fewer_launches(config))
    elif busy is None and host >= 0.2 and _accelerated(config):
        says = f"{percent(host)} of a step is neither computing nor waiting for data: the host is too slow for the GPU."
        yield Finding(host, says, *_fewer_launches(config))


def _arithmetic(numbers: Numbers, config: Mapping[str, Any]) -> Iterator[Finding]:
    mfu, share = numbers.mfu, numbers.share("compute")
    if mfu is None or mfu >= 0.3 or share < 0.6:
        return
    says = f"Computing is {percent(share)} of a step, and reaches {percent(mfu)} of what the GPU can do (MFU)."
    if value(config, "trainer.precision") == "32-true":
        yield Finding(
            share * (1 - mfu), says, "trainer.precision=bf16-mixed", "products in bf16 are several times quicker."
        )
    elif value(config, "strategy.compile") is False:
        yield Finding(share * (1 - mfu) / 2, says, "strategy.compile=true", "fused kernels read and write memory less.")


def _processor(numbers: Numbers, config: Mapping[str, Any]) -> Iterator[Finding]:
    share, busy = numbers.share("compute"), numbers.cpu_percent
    if _accelerated(config):
        if busy is not None and busy >= 95 and numbers.share("data") >= 0.1:
            says = f"The CPU cores of this job are busy {percent(busy / 100)} of the training time."
            yield Finding(
                0.1, says, None, "More cores come with more of cluster.cores_per_gpu, where the site gives them."
            )
    elif share >= 0.5:
        says = f"Computing on the CPU is {percent(share)} of a step."
        if value(config, "cluster.accelerator") == "cpu":
            yield Finding(share / 2, says, None, "This cluster is one of CPUs: more of them share the work.")
        elif value(config, "strategy.name") != "single" or (value(config, "trainer.num_nodes") or 1) > 1:
            yield Finding(share / 2, says, None, "A GPU for each rank, where there are some, computes faster.")
        else:
            yield Finding(share / 2, says, "trainer=gpu", "a GPU, where there is one, computes faster.")


def _communication(numbers: Numbers, config: Mapping[str, Any]) -> Iterator[Finding]:
    share, batch = numbers.communication or 0, value(config, "data.global_batch_size")
    if share < 0.15:
        return
    says = f"The devices wait for each other {percent(share)} of a step, by the profile."
    if (ranks := value(config, "strategy.tensor_parallel_size") or 1) > 1:
        then = "fewer ranks exchange what each layer computes, if the layers fit."
        yield Finding(share, says, f"strategy.tensor_parallel_size={ranks // 2}", then)
    elif isinstance(batch, int):
        accumulate = value(config, "trainer.accumulate_grad_batches") or 1
        override = f"data.global_batch_size={2 * batch} trainer.accumulate_grad_batches={2 * accumulate}"
        yield Finding(
            share, says, override, "gradients are exchanged half as often; the learning rate may have to follow."
        )


RULES = (_data, _unmeasured, _validation, _checkpoints, _start, _communication, _idle, _arithmetic, _processor, _memory)


def _larger(config: Mapping[str, Any]) -> tuple[str | None, str]:
    """The override that makes the micro-batch larger, and what it does."""
    accumulate, batch = value(config, "trainer.accumulate_grad_batches"), value(config, "data.global_batch_size")
    if isinstance(accumulate, int) and accumulate > 1 and accumulate % 2 == 0:
        return f"trainer.accumulate_grad_batches={accumulate // 2}", "the same batch in half as many pieces."
    if value(config, "strategy.activation_checkpointing") is True:
        return "strategy.activation_checkpointing=false", "nothing is computed twice."
    if isinstance(batch, int):
        return f"data.global_batch_size={2 * batch}", "more work for each kernel; the learning rate may have to follow."
    return None, ""


def _fewer_launches(config: Mapping[str, Any]) -> tuple[str | None, str]:
    if value(config, "strategy.compile") is False:
        return "strategy.compile=true", "fewer and larger kernels are launched."
    return _larger(config)


def _accelerated(config: Mapping[str, Any]) -> bool:
    return value(config, "trainer.accelerator") != "cpu"
