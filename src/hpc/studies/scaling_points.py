"""The points of a scaling study: from its command line to a checked config per number of nodes. Writes nothing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hpc.config import compose
from hpc.config.errors import ConfigError, raise_problems
from hpc.config.project import PROJECT
from hpc.config.sections import Config
from hpc.config.value_rules import one_of
from hpc.submit import queue_run
from hpc.system import home

NODES, STEPS, BATCH, LR = "trainer.num_nodes", "trainer.max_steps", "data.global_batch_size", "model.optimizer.lr"
SETTINGS = ("nodes", "scaling", "lr", "out")  # words of the study; all others are overrides of the config
SET_PER_POINT = (NODES, "run_dir", "resume")
# Words that are typed override these. One checkpoint is enough for a short run, and may be large.
DEFAULTS = (f"{STEPS}=200", "trainer.max_epochs=-1", "checkpoint.keep=1", "checkpoint.monitor=null")
MIN_WINDOWS = 4  # of log_every_n_steps steps each: one of warm-up, and three for a median


@dataclass(frozen=True)
class ScalingStudy:
    """The words of the command line, parsed."""

    nodes: tuple[int, ...]  # ascending
    scaling: str  # strong: all points have the same global batch; weak: the same samples per device
    lr_rule: str  # keep, linear or sqrt: how the learning rate follows the global batch
    out: str | None
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class ScalingPoint:
    """One run of a study."""

    num_nodes: int
    run_dir: Path
    overrides: tuple[str, ...]
    cfg: Config

    @property
    def name(self) -> str:
        return f"nodes={self.num_nodes}"

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.cfg.trainer.devices


def parse_study(words: Sequence[str]) -> ScalingStudy:
    """Return the study that a command line describes. Raises `ConfigError`."""
    pairs = [word.partition("=") for word in words]
    keys = [key for key, _, _ in pairs if key in SETTINGS]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise ConfigError(f"{twice}=", None, "must not be typed twice", f"{twice}=<one of the two>")
    if reserved := next((word for word in words if word.partition("=")[0] in SET_PER_POINT), None):
        rule = "cannot be typed here, as each point of the study has its own"
        raise ConfigError(reserved, None, rule, "nodes=1,2,4 for the points, out=FOLDER for their run directories")
    settings = {key: value for key, _, value in pairs}
    scaling, lr_rule = settings.get("scaling", "strong"), settings.get("lr")
    raise_problems([one_of("scaling", scaling, ["strong", "weak"]), one_of("lr", lr_rule, ["keep", "linear", "sqrt"])])
    if scaling == "weak" and lr_rule is None:
        rule = "must be given with scaling=weak, as the global batch grows with the nodes. The learning rate can stay "
        rule += "(keep), grow like the batch (linear, usual for SGD) or like its square root (sqrt, usual for Adam)"
        raise ConfigError("lr", None, rule, "lr=keep, lr=linear or lr=sqrt")
    if scaling == "strong" and lr_rule not in (None, "keep"):
        rule = "must be keep in strong scaling, as the rate follows the global batch, which stays the same"
        raise ConfigError("lr", lr_rule, rule, "lr=keep, or scaling=weak")
    overrides = tuple("".join(pair) for pair in pairs if pair[0] not in SETTINGS)
    return ScalingStudy(_parse_nodes(settings.get("nodes")), scaling, lr_rule or "keep", settings.get("out"), overrides)


def compose_points(study: ScalingStudy) -> list[ScalingPoint]:
    """Return all points of a study. Raises `ConfigError` if one of them cannot run, before anything is submitted."""
    points: list[ScalingPoint] = []
    for num_nodes in study.nodes:
        overrides = (*DEFAULTS, *study.overrides, f"{NODES}={num_nodes}")
        if points and study.scaling == "weak":
            overrides += _grown_overrides(points[0], num_nodes, lr_rule=study.lr_rule)
        node = compose.compose_overrides(overrides)
        try:
            cfg = queue_run.check_submission(node, overrides)
        except ConfigError as error:
            fix = error.fix
            if error.key == BATCH and study.scaling == "strong" and error.rule.startswith("must be divisible"):
                fix = _suggest_batch(node, study.nodes)
            raise ConfigError(f"{error.key} (at nodes={num_nodes})", error.value, error.rule, fix) from None
        _reject_unmeasured(cfg)
        if study.scaling == "strong" and cfg.data.get("global_batch_size") is None:
            rule = "must be given for scaling=strong, where all points have the same global batch"
            raise ConfigError(
                BATCH, None, rule, f"{BATCH}=<samples of a step>, without data.batch_size; or scaling=weak"
            )
        folder = home.expand(study.out or PROJECT / "runs" / f"scaling_{cfg.name}_{study.scaling}").absolute()
        cfg.run_dir = str(folder / f"nodes-{num_nodes}")
        points.append(ScalingPoint(num_nodes, Path(cfg.run_dir), overrides, cfg))
    return points


def _suggest_batch(cfg: Any, nodes: Sequence[int]) -> str:
    """Return the global batches next to that of the config which the devices of each point can share equally."""
    data_parallel = [num * cfg.trainer.devices // cfg.strategy.tensor_parallel_size for num in nodes]
    unit = math.lcm(*(size * cfg.trainer.accumulate_grad_batches for size in data_parallel))
    below = cfg.data.global_batch_size // unit
    return " or ".join(f"{BATCH}={number * unit}" for number in (below, below + 1) if number)


def _grown_overrides(first: ScalingPoint, num_nodes: int, *, lr_rule: str) -> tuple[str, ...]:
    """Return the global batch and the learning rate of a point of weak scaling.

    The rules are those of Goyal et al. 2017 (arXiv 1706.02677, section 2: linear) and of Malladi et al. 2022 (arXiv
    2205.10287: sqrt; they also change betas and epsilon of Adam).

    Raises:
        ConfigError: the config has no learning rate that a rule could scale, or the batch cannot be shared equally.
    """
    batch = first.cfg.data.get("global_batch_size")
    if batch is None and lr_rule == "keep":
        return ()  # each device keeps its data.batch_size, or that of its loaders
    if batch is None:
        rule = "must be given if the learning rate is to grow with it"
        raise ConfigError(BATCH, None, rule, f"{BATCH}=<samples of a step>, without data.batch_size")
    if batch % first.num_nodes:
        rule = f"must be divisible by the number of nodes of the first point ({first.num_nodes})"
        raise ConfigError(BATCH, batch, rule, f"{BATCH}={-(-batch // first.num_nodes) * first.num_nodes}")
    growth = num_nodes / first.num_nodes
    overrides = (f"{BATCH}={batch // first.num_nodes * num_nodes}",)
    if lr_rule == "keep":
        return overrides
    lr = OmegaConf.select(first.cfg.node, LR)
    if not isinstance(lr, int | float):
        raise ConfigError("lr", lr_rule, f"must be keep, as this config has no {LR} that could grow", "lr=keep")
    factor = growth if lr_rule == "linear" else math.sqrt(growth)
    return *overrides, f"{LR}={float(f'{lr * factor:.6g}')}"


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
