"""Statistics of a run: how its time was spent, what its steps consist of, how its devices were used. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc.jobs import hardware
from hpc.monitor import node_usage
from hpc.monitor.event_files import RunCurves
from hpc.monitor.node_usage import NodeSamples, Phase
from hpc.report.slow_rank import SlowRank

PHASES = {"start": "start-up", "validation": "validation", "checkpoint": "checkpoints", "test": "test"}
PHASES |= {"predict": "prediction"}
STEP_PARTS = ("compute", "data", "other")


@dataclass(frozen=True)
class AttemptSpan:
    """An attempt in unix time."""

    begin: float
    end: float
    is_end_recorded: bool  # the attempt recorded its end; otherwise `end` is its last sign of life

    @property
    def seconds(self) -> float:
        return max(self.end - self.begin, 0.0)


@dataclass(frozen=True)
class RunStatistics:
    """The numbers that findings are made of. A share is between 0 and 1; None: unknown."""

    phase_seconds: dict[str, float]  # by phase: start-up, training, validation, checkpoints, test, prediction
    phase_counts: dict[str, int]
    step_seconds: dict[str, float]  # means: step, and its parts compute, data and other
    mfu: float | None
    communication_share: float | None  # of a step in which devices only communicate
    gpu_percent: float | None  # mean while training
    gpu_memory_gb: float | None  # the peak of any GPU
    gpu_capacity_gb: float | None  # the memory that such a GPU has
    cpu_percent: float | None
    steps_per_epoch: int | None = None  # of an epoch; or all that were made, if fewer
    slow_rank: SlowRank | None = None  # that the others wait for

    def share(self, part: str) -> float:
        """Return the share of a part in a step, or of a phase in the run; 0 if it is unknown."""
        if part in STEP_PARTS:
            step = self.step_seconds.get("step")
            return self.step_seconds.get(part, 0.0) / step if step else 0.0
        total = sum(self.phase_seconds.values())
        return self.phase_seconds.get(part, 0.0) / total if total else 0.0


def compute_statistics(
    spans: Sequence[AttemptSpan],
    phases: Sequence[Phase],
    *,
    curves: RunCurves,
    nodes: Sequence[NodeSamples],
    config: Mapping[str, Any],
) -> RunStatistics:
    """Return the statistics of a run, without `steps_per_epoch` and `slow_rank`."""
    step_seconds = {part: curves.mean(f"perf/{part}_seconds") for part in ("step", *STEP_PARTS)}
    gpu_percent, cpu_percent = _use_in_training(nodes, phases)
    memory = [value for node in nodes for column in node.gpu_columns("memory_gb") for value in column if value == value]
    communication = re.search(r"communication (\d+)%", curves.profile)
    return RunStatistics(
        phase_seconds=_phase_seconds(spans, phases),
        phase_counts={name: sum(phase.name == key for phase in phases) for key, name in PHASES.items()},
        step_seconds={part: value for part, value in step_seconds.items() if value is not None and value >= 0},
        mfu=curves.mean_rate("perf/mfu"),
        communication_share=int(communication[1]) / 100 if communication else None,
        gpu_percent=gpu_percent,
        gpu_memory_gb=max(memory, default=None),
        gpu_capacity_gb=_gpu_capacity_gb(config),
        cpu_percent=cpu_percent,
    )


def config_value(config: Any, key: str) -> Any:
    """Return the value of a dotted key; None if there is none."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config


def _phase_seconds(spans: Sequence[AttemptSpan], phases: Sequence[Phase]) -> dict[str, float]:
    seconds = {name: sum(phase.seconds for phase in phases if phase.name == key) for key, name in PHASES.items()}
    seconds = {name: value for name, value in seconds.items() if value}
    if seconds:
        rest = "other" if "prediction" in seconds else "training"
        seconds[rest] = max(sum(span.seconds for span in spans) - sum(seconds.values()), 0.0)
    return seconds


def _use_in_training(nodes: Sequence[NodeSamples], phases: Sequence[Phase]) -> tuple[float | None, float | None]:
    """Return the mean use of GPUs and of CPUs in percent."""
    gpu_values: list[float] = []
    cpu_values: list[float] = []
    for node in nodes:
        indices = node_usage.indices_while_training(node, phases)
        if node.gpu_columns("percent"):
            percent = node.gpu_percent()
            gpu_values += [percent[index] for index in indices]
        if "cpu_percent" in node.columns:
            cpu_values += [node.columns["cpu_percent"][index] for index in indices]
    return _none_if_nan(node_usage.known_mean(gpu_values)), _none_if_nan(node_usage.known_mean(cpu_values))


def _gpu_capacity_gb(config: Mapping[str, Any]) -> float | None:
    name = config_value(config, "cluster.gpu")
    gpu = hardware.gpu_from_device_name(name) if isinstance(name, str) else None
    return gpu.memory_gb if gpu else None


def _none_if_nan(number: float) -> float | None:
    return number if number == number else None
