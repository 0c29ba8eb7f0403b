"""Sentences on what limits a run, and the override to try next. Each is made from numbers that the page shows. Pure."""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from hpc.charts.units import format_percent, format_seconds
from hpc.report.batch_advice import larger_micro_batch, less_communication
from hpc.report.run_statistics import RunStatistics, config_value

MAX_FINDINGS = 3
VALIDATION_SHARE, CHECKPOINT_SHARE = 0.05, 0.02  # of the time of the run, after the overrides for them
SMALLER_WHEN_LONGER = "in a longer run this share is smaller."


@dataclass(frozen=True)
class Finding:
    """An observation with its number, an override to try, and its effect."""

    weight: float  # about the share of the time that is at stake
    observation: str
    override: str | None
    effect: str  # without an override, a sentence on what else can be done

    @property
    def text(self) -> str:
        return f"{self.observation} {f'Try `{self.override}`: ' if self.override else ''}{self.effect}"


def list_findings(statistics: RunStatistics, config: Mapping[str, Any]) -> list[str]:
    """Return at most MAX_FINDINGS findings, the weightiest first; or a sentence that there are none."""
    findings = [finding for rule in RULES for finding in rule(statistics, config)]
    findings.sort(key=lambda finding: -finding.weight)
    if findings:
        return [finding.text for finding in findings[:MAX_FINDINGS]]
    if statistics.step_seconds:
        return [f"No bottleneck was measured: {format_percent(statistics.share('compute'))} of a step is computation."]
    return ["No step was timed, so the speed of the run cannot be judged."]


def _waiting_for_data(statistics: RunStatistics, config: Mapping[str, Any]) -> Iterator[Finding]:
    share = statistics.share("data")
    if share < 0.1:
        return
    waiting = format_seconds(statistics.step_seconds["data"])
    step = format_seconds(statistics.step_seconds["step"])
    observation = f"Training waits for data during {format_percent(share)} of a step: {waiting} of {step}."
    num_workers = config_value(config, "data.num_workers")
    are_cores_busy = (statistics.cpu_percent or 0) >= 90
    dataset = str(config_value(config, "data._target_")).rpartition(".")[2]
    if config_value(config, "data.stage") is False and config_value(config, "data.node_local"):
        effect = "each node then reads its own copy of the packed file."
        yield Finding(share, observation, "data.stage=true", effect)
    elif isinstance(num_workers, int) and not are_cores_busy:
        effect = "more processes then prepare batches."
        yield Finding(share, observation, f"data.num_workers={2 * num_workers or 2}", effect)
    elif dataset == "Images":
        effect = "tools/pack.py decodes all images once, into a single file for data=packed (see the README)."
        yield Finding(share, observation, None, effect)
    else:
        effect = "No override makes this dataset faster: look at what it does for one sample."
        yield Finding(share, observation, None, effect)


def _unmeasured_wait(statistics: RunStatistics, config: Mapping[str, Any]) -> Iterator[Finding]:
    step, rest = statistics.step_seconds, 1 - statistics.share("compute")
    if not step.get("step") or "compute" not in step or "data" in step or rest < 0.1:
        return
    observation = (
        f"{format_percent(rest)} of a step is not computation. How much of it is waiting for data was not measured."
    )
    yield Finding(rest, observation, None, "The default of trainer.profiler measures it.")


def _validation_time(statistics: RunStatistics, config: Mapping[str, Any]) -> Iterator[Finding]:
    share = statistics.share("validation")
    if share < 0.1:
        return
    total = format_seconds(statistics.phase_seconds["validation"])
    observation = f"Validation takes {format_percent(share)} of the run: {total} in all."
    if override := _less_frequent_validation(statistics, config, share=share, target=VALIDATION_SHARE):
        yield Finding(share, observation, override, "the run then validates less often.")
    else:
        yield Finding(share, observation, None, f"It is rare already; {SMALLER_WHEN_LONGER}")


def _checkpoint_time(statistics: RunStatistics, config: Mapping[str, Any]) -> Iterator[Finding]:
    share, num_saves = statistics.share("checkpoints"), statistics.phase_counts.get("checkpoints", 0)
    if share < 0.05 or not num_saves:
        return
    total_seconds = statistics.phase_seconds["checkpoints"]
    observation = (
        f"Checkpoints hold up training for {format_percent(share)} of the run: "
        f"{num_saves} of them, {format_seconds(total_seconds)} in all."
    )
    every_n_steps = config_value(config, "checkpoint.every_n_steps")
    every_minutes = config_value(config, "checkpoint.every_minutes")
    run_seconds = sum(statistics.phase_seconds.values())
    has_minutes = isinstance(every_minutes, int | float) and every_minutes > 0
    num_saves_by_clock = run_seconds / (60 * every_minutes) if has_minutes else 0
    if isinstance(every_n_steps, int):
        override = f"checkpoint.every_n_steps={every_n_steps * ceil(share / CHECKPOINT_SHARE)}"
    elif num_saves_by_clock > num_saves / 2:
        minutes = ceil(total_seconds / num_saves / CHECKPOINT_SHARE / 60)
        override = f"checkpoint.every_minutes={max(minutes, ceil(2 * every_minutes))}"
    elif config_value(config, "checkpoint.monitor") and statistics.phase_counts.get("validation", 0) > num_saves / 2:
        override = _less_frequent_validation(statistics, config, share=share, target=CHECKPOINT_SHARE)
        effect = f"{'each' if override else 'Each'} validation with a better value saves a checkpoint."
        yield Finding(share, observation, override, effect)
        return
    else:
        return
    yield Finding(share, observation, override, "the run saves less often, but an interruption then costs more work.")


def _start_up_time(statistics: RunStatistics, config: Mapping[str, Any]) -> Iterator[Finding]:
    share, num_starts = statistics.share("start-up"), statistics.phase_counts.get("start-up", 0)
    if share < 0.1:
        return
    total_seconds = statistics.phase_seconds["start-up"]
    starts = f"{num_starts} start{'s' if num_starts > 1 else ''}"
    observation = f"Starting takes {format_percent(share)} of the run: {format_seconds(total_seconds)} in {starts}."
    if config_value(config, "cluster.stage_env") is False and config_value(config, "cluster.node_local"):
        effect = "each node then imports from its own copy of the environment."
        yield Finding(share, observation, "cluster.stage_env=true", effect)
    elif config_value(config, "strategy.compile") is True and total_seconds / max(num_starts, 1) > 30:
        effect = "a short run does not regain the time that compiling takes."
        yield Finding(share, observation, "strategy.compile=false", effect)
    else:
        yield Finding(share, observation, None, f"No override shortens it; {SMALLER_WHEN_LONGER}")


def _waiting_for_a_rank(statistics: RunStatistics, config: Mapping[str, Any]) -> Iterator[Finding]:
    slow, step_seconds = statistics.slow_rank, statistics.step_seconds.get("step")
    if slow is None or not step_seconds:
        return
    share = slow.wait_seconds / step_seconds
    place, own, fastest = f" on {slow.host}" * bool(slow.host), slow.own_seconds, slow.fastest_seconds
    factor = f"{own / fastest:.1f} times" if own < 100 * fastest else "more than 100 times"
    observation = (
        f"Rank {slow.rank}{place} is slow: by itself it takes {format_seconds(own)} of a step, {factor} as long as the "
        f"fastest rank ({format_seconds(fastest)}), in {slow.num_slowest} of {slow.num_exchanges} exchanges. "
        f"The others wait for it during {format_percent(share)} of a step."
    )
    options = config_value(config, "cluster.options")
    is_alone = (config_value(config, "trainer.num_nodes") or 1) == 1 or not slow.host
    if is_alone or config_value(config, "cluster.scheduler") != "slurm" or not isinstance(options, list):
        effect = "Compare its node and device with the others below, and the size of its samples."
        yield Finding(share, observation, None, f"{effect} `python tools/comm.py` measures the network.")
        return
    override = shlex.quote(f"cluster.options={json.dumps([*options, f'--exclude={slow.host}'])}")
    effect = "the next job, also with resume=, runs on other nodes. `python tools/comm.py` measures the network."
    yield Finding(share, observation, override, effect)


def _communication_time(statistics: RunStatistics, config: Mapping[str, Any]) -> Iterator[Finding]:
    if (share := statistics.communication_share or 0) < 0.15:
        return
    observation = f"According to the profile, the devices wait for each other during {format_percent(share)} of a step."
    override, effect = less_communication(config)
    if effect:
        yield Finding(share, observation, override, effect)


def _low_mfu(statistics: RunStatistics, config: Mapping[str, Any]) -> Iterator[Finding]:
    mfu, share = statistics.mfu, statistics.share("compute")
    if mfu is None or mfu >= 0.3 or share < 0.6:
        return
    peak = f"{format_percent(mfu)} of the GPU's peak (MFU)"
    observation = f"Computation is {format_percent(share)} of a step, but reaches only {peak}."
    if config_value(config, "trainer.precision") == "32-true":
        effect = "matrix products in bf16 are several times faster."
        yield Finding(share * (1 - mfu), observation, "trainer.precision=bf16-mixed", effect)
    elif config_value(config, "strategy.compile") is False:
        effect = "fused kernels read and write less memory."
        yield Finding(share * (1 - mfu) / 2, observation, "strategy.compile=true", effect)


def _busy_cpu(statistics: RunStatistics, config: Mapping[str, Any]) -> Iterator[Finding]:
    share, percent = statistics.share("compute"), statistics.cpu_percent
    if _is_on_gpu(config):
        if percent is not None and percent >= 95 and statistics.share("data") >= 0.1:
            observation = f"The CPU cores of this job are busy {format_percent(percent / 100)} of the training time."
            effect = "A larger cluster.cores_per_gpu gives the job more cores, if the site allows it."
            yield Finding(0.1, observation, None, effect)
    elif share >= 0.5:
        observation = f"Computation on the CPU is {format_percent(share)} of a step."
        if config_value(config, "cluster.accelerator") == "cpu":
            yield Finding(share / 2, observation, None, "This cluster has only CPUs: more of them can share the work.")
        elif config_value(config, "strategy.name") != "single" or (config_value(config, "trainer.num_nodes") or 1) > 1:
            yield Finding(share / 2, observation, None, "A GPU for each rank would compute faster, if there are GPUs.")
        else:
            yield Finding(share / 2, observation, "trainer=gpu", "a GPU computes faster, if there is one.")


def _unused_gpu_memory(statistics: RunStatistics, config: Mapping[str, Any]) -> Iterator[Finding]:
    used, capacity = statistics.gpu_memory_gb, statistics.gpu_capacity_gb
    if not used or not capacity or used > capacity / 2:
        return
    if statistics.share("data") > 0.3 or (statistics.mfu or 0) > 0.45:
        return
    observation = f"At most {used:.1f} GB of a GPU's {capacity:.1f} GB are used, so a larger micro-batch fits."
    yield Finding(0.1, observation, *larger_micro_batch(config))


RULES = (
    _waiting_for_data, _unmeasured_wait, _validation_time, _checkpoint_time, _start_up_time, _waiting_for_a_rank,
    _communication_time, _low_mfu, _busy_cpu, _unused_gpu_memory,
)  # fmt: skip


def _less_frequent_validation(
    statistics: RunStatistics, config: Mapping[str, Any], *, share: float, target: float
) -> str | None:
    """Return the override after which what takes `share` of the run takes `target`; None if validation is rare."""
    factor, key = max(ceil(share / target), 2), "trainer.val_check_interval"
    interval, longest = config_value(config, key), _max_batches(statistics, config)
    if isinstance(interval, float) and 0 < interval < 1:  # a share of an epoch
        return f"{key}={min(interval * factor, 1.0):.3}"
    if not isinstance(interval, int):
        key = "trainer.check_val_every_n_epoch"
        interval, epochs = config_value(config, key) or 1, config_value(config, "trainer.max_epochs")
        longest = epochs if isinstance(epochs, int) and epochs > 0 else None
    factor = min(factor, longest // max(interval, 1)) if longest else factor
    return f"{key}={interval * factor}" if factor > 1 else None


def _max_batches(statistics: RunStatistics, config: Mapping[str, Any]) -> int | None:
    """Return the batches of an epoch or, if that has fewer, of the run: Lightning rejects a longer interval."""
    counts = (config_value(config, "trainer.max_steps"), statistics.steps_per_epoch)
    steps = [count for count in counts if isinstance(count, int) and count > 0]
    accumulate = config_value(config, "trainer.accumulate_grad_batches")
    return min(steps) * (accumulate if isinstance(accumulate, int) else 1) if steps else None


def _is_on_gpu(config: Mapping[str, Any]) -> bool:
    return config_value(config, "trainer.accelerator") != "cpu"
