"""The points of a scaling study: from its command line to a checked config per number of nodes. Writes nothing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hpc.config import compose
from hpc.config.errors import ConfigError, raise_problems
from hpc.config.layout import derive_layout
from hpc.config.project import PROJECT
from hpc.config.sections import Config
from hpc.config.value_rules import one_of
from hpc.studies.scaling_file import PointSizes
from hpc.submit import queue_run
from hpc.system import home

NODES, STEPS, BATCH, LR = "trainer.num_nodes", "trainer.max_steps", "data.global_batch_size", "model.optimizer.lr"
SETTINGS = ("nodes", "scaling", "out")  # words of the study; all others are overrides of the config
SET_PER_POINT = (NODES, "run_dir", "resume")
# Words that are typed override these. One checkpoint is enough for a short run, and may be large.
DEFAULTS = (f"{STEPS}=200", "trainer.max_epochs=-1", "checkpoint.keep=1", "checkpoint.monitor=null")
MIN_WINDOWS = 4  # of log_every_n_steps steps each: one of warm-up, and three for a median


@dataclass(frozen=True)
class ScalingStudy:
    """The words of the command line, parsed."""

    nodes: tuple[int, ...]  # ascending
    scaling: str  # strong: all points have the same global batch; weak: the same samples per device
    out: str | None
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class ScalingPoint:
    """One run of a study.

    Attributes:
        folder: of the study.
    """

    num_nodes: int
    folder: Path
    overrides: tuple[str, ...]
    cfg: Config

    @property
    def name(self) -> str:
        return f"nodes={self.num_nodes}"

    @property
    def run_dir(self) -> Path:
        return self.folder / self.sizes.name

    @property
    def sizes(self) -> PointSizes:
        devices, batch = self.num_nodes * self.cfg.trainer.devices, derive_layout(self.cfg).global_batch_size
        lr = OmegaConf.select(self.cfg.node, LR)
        return PointSizes(self.num_nodes, devices, batch, lr if isinstance(lr, int | float) else None)


def parse_study(words: Sequence[str]) -> ScalingStudy:
    """Return the study that a command line describes. Raises `ConfigError`."""
    pairs = [word.partition("=") for word in words]
    keys = [key for key, _, _ in pairs if key in SETTINGS]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise ConfigError(f"{twice}=", None, "must not be typed twice", f"{twice}=<one of the two>")
    if reserved := next((word for word in words if word.partition("=")[0] in SET_PER_POINT), None):
        rule = "cannot be typed here, as each point of the study has its own"
        raise ConfigError(reserved, None, rule, "nodes=1,2,4 for the points, out=FOLDER for their run directories")
    if rule_word := next((word for word in words if word.startswith("lr=")), None):
        rule = "cannot be typed here: the points of a study have the same learning rate, as they compare speed"
        raise ConfigError(rule_word, None, rule, f"leave lr= out, or {LR}=<a number> for all points")
    settings = {key: value for key, _, value in pairs}
    scaling = settings.get("scaling", "strong")
    raise_problems([one_of("scaling", scaling, ["strong", "weak"])])
    overrides = tuple("".join(pair) for pair in pairs if pair[0] not in SETTINGS)
    return ScalingStudy(_parse_nodes(settings.get("nodes")), scaling, settings.get("out"), overrides)


def study_folder(study: ScalingStudy) -> Path:
    """Return the folder of the run directories."""
    if study.out:
        return home.expand(study.out).absolute()
    name = compose.compose_overrides(study.overrides).name
    return (PROJECT / "runs" / f"scaling_{name}_{study.scaling}").absolute()


def compose_points(study: ScalingStudy, folder: Path, *, also: Sequence[int] = ()) -> list[ScalingPoint]:
    """Return all points of a study. Raises `ConfigError` if one of them cannot run, before anything is submitted.

    Args:
        folder: for their run directories.
        also: numbers of nodes that were asked for before.
    """
    points: list[ScalingPoint] = []
    all_nodes = sorted({*study.nodes, *also})
    for num_nodes in all_nodes:
        overrides = (*DEFAULTS, *study.overrides, f"{NODES}={num_nodes}")
        if points and study.scaling == "weak":
            overrides += _grown_overrides(points[0], num_nodes)
        node = compose.compose_overrides(overrides)
        try:
            cfg = queue_run.check_submission(node, overrides)
        except ConfigError as error:
            fix = error.fix
            if error.key == BATCH and study.scaling == "strong" and error.rule.startswith("must be divisible"):
                fix = _suggest_batch(node, all_nodes)
            raise ConfigError(f"{error.key} (at nodes={num_nodes})", error.value, error.rule, fix) from None
        _reject_unmeasured(cfg)
        if study.scaling == "strong" and cfg.data.get("global_batch_size") is None:
            rule = "must be given for scaling=strong, where all points have the same global batch"
            raise ConfigError(
                BATCH, None, rule, f"{BATCH}=<samples of a step>, without data.batch_size; or scaling=weak"
            )
        point = ScalingPoint(num_nodes, folder, overrides, cfg)
        cfg.run_dir = str(point.run_dir)
        points.append(point)
    return points


def _suggest_batch(cfg: Any, nodes: Sequence[int]) -> str:
    """Return the global batches next to that of the config which the devices of each point can share equally."""
    data_parallel = [num * cfg.trainer.devices // cfg.strategy.tensor_parallel_size for num in nodes]
    unit = math.lcm(*(size * cfg.trainer.accumulate_grad_batches for size in data_parallel))
    below = cfg.data.global_batch_size // unit
    return " or ".join(f"{BATCH}={number * unit}" for number in (below, below + 1) if number)


def _grown_overrides(first: ScalingPoint, num_nodes: int) -> tuple[str, ...]:
    """Return the global batch of a point of weak scaling: each device has the samples that it has at the first point.

    Raises:
        ConfigError: the batch of the first point cannot be shared equally.
    """
    batch = first.cfg.data.get("global_batch_size")
    if batch is None:
        return ()  # each device keeps its data.batch_size, or that of its loaders
    if batch % first.num_nodes:
        rule = f"must be divisible by the number of nodes of the first point ({first.num_nodes})"
        raise ConfigError(BATCH, batch, rule, f"{BATCH}={-(-batch // first.num_nodes) * first.num_nodes}")
    return (f"{BATCH}={batch // first.num_nodes * num_nodes}",)


def _reject_unmeasured(cfg: Config) -> None:
    """Raise `ConfigError` if a run would be too short for its rate to be measured, or would not measure it."""
    steps, window = cfg.trainer.max_steps, cfg.trainer.log_every_n_steps
    if steps < MIN_WINDOWS * window:
        rule = f"must be at least {MIN_WINDOWS * window}, which is {MIN_WINDOWS} windows of trainer.log_every_n_steps="
        raise ConfigError(STEPS, steps, f"{rule}{window}: the first one is warm-up", f"{STEPS}={MIN_WINDOWS * window}")
    if not OmegaConf.select(cfg.node, "callbacks.throughput"):
        rule = "must not be null, as it measures the rates that the study compares"
        raise ConfigError("callbacks.throughput", "null", rule, "leave callbacks.throughput=null out")


def _parse_nodes(text: str | None) -> tuple[int, ...]:
    """Return the numbers of nodes, ascending."""
    numbers = (text or "").split(",")
    if not all(number.isdecimal() and int(number) for number in numbers) or len(set(numbers)) < len(numbers):
        rule = "must be the numbers of nodes to compare: different integers above 0, separated by commas"
        raise ConfigError("nodes", text, rule, "nodes=1,2,4")
    return tuple(sorted(map(int, numbers)))
