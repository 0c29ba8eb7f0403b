"""The points of a scaling study, and the overrides of each, before anything is submitted. Pure."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hpc.config import section_rules, value_checks
from hpc.config.conversion import flatten
from hpc.config.errors import ConfigError
from hpc.config.freezing import to_frozen_yaml
from hpc.config.layout import derive_layout

NODES, STEPS, EPOCHS, WARMUP = "trainer.num_nodes", "trainer.max_steps", "trainer.max_epochs", "model.warmup_steps"
BATCH, LR = "data.global_batch_size", "model.optimizer.lr"
STUDY_KEYS = {"nodes": None, "scaling": "strong", "lr": None, "steps": "200", "out": None}  # with their defaults
# Config keys that the study sets, and what to type instead.
RESERVED_KEYS = {NODES: "nodes=", STEPS: "steps=", EPOCHS: "steps=", "run_dir": "out="}
RESERVED_KEYS["resume"] = "the words that started the study"
# Only the study resumes its runs, and the checkpoints of large models are large.
CHECKPOINT_OVERRIDES = ("checkpoint.keep=1", "checkpoint.monitor=null")
COMPARED_SECTIONS = ("model", "data", "trainer", "strategy", "seed", "matmul_precision")  # of the config
MIN_WINDOWS = 3  # of log_every_n_steps steps, after the first one, which is warm-up: enough for a median


@dataclass(frozen=True)
class ScalingStudy:
    """The words of the command line, parsed."""

    nodes: tuple[int, ...]  # ascending
    scaling: str  # strong: all points have the same global batch; weak: the same samples per device
    lr: str | None  # linear, sqrt or keep; None: chosen for the optimizer
    steps: int
    out: str | None
    words: tuple[str, ...]  # overrides of the config

    @property
    def shared_settings(self) -> dict[str, Any]:
        """The settings that all points share. More nodes do not make another study."""
        return asdict(replace(self, nodes=self.nodes[:1], out=None))

    @property
    def digest(self) -> str:
        """The part of the folder's name that tells studies apart."""
        return hashlib.sha256(json.dumps(self.shared_settings).encode()).hexdigest()[:8]

    @property
    def first_overrides(self) -> tuple[str, ...]:
        """The overrides of the first point, whose batch and learning rate are those of the config."""
        fixed = (f"{NODES}={self.nodes[0]}", f"{EPOCHS}=-1", f"{STEPS}={self.steps}")
        return *CHECKPOINT_OVERRIDES, *self.words, *fixed


@dataclass(frozen=True)
class ScalingPoint:
    """One job of a study."""

    num_nodes: int
    num_devices: int  # of all nodes
    global_batch_size: int  # samples per optimizer step
    lr: float | None  # None: the config does not set it
    lr_rule: str  # linear, sqrt or keep: how lr follows the batch
    warmup_steps: int | None  # None: the config has no warm-up
    steps: int
    words: tuple[str, ...]  # overrides of the config

    @property
    def samples_per_device(self) -> float:
        """Samples per optimizer step that each device computes."""
        return self.global_batch_size / self.num_devices


def parse_study(words: Sequence[str]) -> ScalingStudy:
    """Return the study that a command line describes. Raises `ConfigError`."""
    settings, typed_keys, overrides = dict(STUDY_KEYS), set[str](), []
    for word in words:
        key, equals, value = word.partition("=")
        if key in settings and equals:
            if key in typed_keys:
                raise ConfigError(word, None, f"{key}= must not be typed twice", f"{key}=<one of the two>")
            typed_keys.add(key)
            settings[key] = value
        elif fix := RESERVED_KEYS.get(key):
            raise ConfigError(key, value, "cannot be set here, as the study sets it for each point", fix)
        else:
            overrides.append(word)
    scaling, lr = str(settings["scaling"]), settings["lr"]
    value_checks.require_one_of("scaling", scaling, choices=["strong", "weak"])
    if lr is not None:
        value_checks.require_one_of("lr", lr, choices=["linear", "sqrt", "keep"])
        if scaling == "strong" and lr != "keep":
            rule = "must be keep in strong scaling, as the rate follows the global batch, which stays the same"
            raise ConfigError("lr", lr, rule, "lr=keep, or scaling=weak")
    if settings["nodes"] is None:
        raise ConfigError("nodes", None, "must be given: the numbers of nodes to compare", "nodes=1,2,4")
    nodes = _parse_nodes(settings["nodes"])
    steps = _parse_count("steps", str(settings["steps"]), "must be an integer above 0", fix="steps=200")
    return ScalingStudy(nodes, scaling, lr, steps, settings["out"], tuple(overrides))


def plan_points(study: ScalingStudy, first_cfg: DictConfig) -> list[ScalingPoint]:
    """Return all points, given the composed config of the first one. Raises `ConfigError`."""
    _reject_unmeasured(study, first_cfg)
    _reject_indivisible_batch(study, first_cfg)
    rule, warmup = _choose_lr_rule(study, first_cfg), OmegaConf.select(first_cfg, WARMUP)
    fitted_warmup = None if warmup is None else clamp_warmup_steps(warmup, study.steps, is_lr_scaled=rule != "keep")
    batch, lr = first_cfg.data.global_batch_size, OmegaConf.select(first_cfg, LR)
    points = []
    for num_nodes in study.nodes:
        point_batch = batch * num_nodes // study.nodes[0] if study.scaling == "weak" else batch
        point_lr = lr if rule == "keep" else scale_learning_rate(lr, point_batch / batch, rule=rule)
        changes = {BATCH: (batch, point_batch), LR: (lr, point_lr), WARMUP: (warmup, fitted_warmup)}
        words = [f"{key}={new}" for key, (old, new) in changes.items() if new != old]
        points.append(
            ScalingPoint(
                num_nodes=num_nodes,
                num_devices=num_nodes * first_cfg.trainer.devices,
                global_batch_size=point_batch,
                lr=point_lr,
                lr_rule=rule,
                warmup_steps=fitted_warmup,
                steps=study.steps,
                words=_drop_repeated_keys([*study.first_overrides, f"{NODES}={num_nodes}", *words]),
            )
        )
    return points


def study_record(study: ScalingStudy, first_cfg: DictConfig) -> str:
    """Return what the points of a study share, as JSON. A point that is submitted later must have the same."""
    leaves = flatten(OmegaConf.create(to_frozen_yaml(first_cfg)))
    compared = {key: value for key, value in leaves.items() if key.split(".")[0] in COMPARED_SECTIONS}
    return json.dumps(study.shared_settings | {"config": compared}, indent=1)


def scale_learning_rate(lr: float, batch_growth: float, *, rule: str) -> float:
    """Return the learning rate for a global batch that is `batch_growth` times as large.

    Args:
        rule: linear, for SGD with a warm-up (Goyal et al. 2017, arXiv 1706.02677, section 2); sqrt, for Adam and
            similar optimizers (Malladi et al. 2022, arXiv 2205.10287, who also change betas and epsilon, unlike this).
    """
    growth = batch_growth if rule == "linear" else math.sqrt(batch_growth)
    return float(f"{lr * growth:.6g}")  # as it is typed


def clamp_warmup_steps(configured_steps: int, max_steps: int, *, is_lr_scaled: bool) -> int:
    """Return the warm-up steps of a short run: at most half of it and, if the rate is scaled, at least a tenth."""
    return min(max(configured_steps, max_steps // 10 if is_lr_scaled else 0), max_steps // 2)


def _choose_lr_rule(study: ScalingStudy, first_cfg: DictConfig) -> str:
    """Return linear, sqrt or keep. Raises `ConfigError` if there is no learning rate to scale."""
    if study.scaling == "strong" or study.lr == "keep":
        return "keep"
    if not isinstance(OmegaConf.select(first_cfg, LR), int | float):
        rule = f"must be keep: this config has no {LR} that weak scaling could scale"
        raise ConfigError("lr", study.lr, rule, "lr=keep")
    return study.lr or ("linear" if str(first_cfg.model.optimizer.get("_target_")).endswith("SGD") else "sqrt")


def _reject_unmeasured(study: ScalingStudy, first_cfg: DictConfig) -> None:
    """Raise `ConfigError` if a run would be too short for its rate to be measured, or would not measure it."""
    window = first_cfg.trainer.log_every_n_steps
    min_steps = (1 + MIN_WINDOWS) * window
    if study.steps < min_steps:
        rule = f"must be at least {min_steps}, which is {1 + MIN_WINDOWS} windows of trainer.log_every_n_steps={window}"
        raise ConfigError("steps", study.steps, f"{rule}: the first one is warm-up", f"steps={min_steps}")
    if not OmegaConf.select(first_cfg, "callbacks.throughput"):
        rule = "must not be null, as it measures the rates that the study compares"
        raise ConfigError("callbacks.throughput", "null", rule, "leave callbacks.throughput=null out")


def _reject_indivisible_batch(study: ScalingStudy, first_cfg: DictConfig) -> None:
    """Raise `ConfigError` if the batch is not divisible at all points (strong scaling) or at the first one (weak)."""
    size = first_cfg.data.global_batch_size
    if not isinstance(size, int) or size < 1:
        section_rules.check_global_batch_size(first_cfg)  # raises
    unit = derive_layout(first_cfg).data_parallel_size * first_cfg.trainer.accumulate_grad_batches
    nodes = study.nodes if study.scaling == "strong" else study.nodes[:1]
    if size % (multiple := math.lcm(*(unit * num_nodes // study.nodes[0] for num_nodes in nodes))):
        nearest = (size // multiple * multiple, -(-size // multiple) * multiple)
        fix = " or ".join(f"{BATCH}={near}" for near in nearest if near)
        rule = f"must be divisible by {multiple}, the least common multiple of (data-parallel size * "
        rule += f"accumulate_grad_batches) at nodes={','.join(map(str, nodes))}"
        raise ConfigError(BATCH, size, rule, fix)


def _parse_nodes(text: str) -> tuple[int, ...]:
    """Return the numbers of nodes, ascending."""
    rule = "must be one or several integers above 0, separated by commas"
    nodes = [_parse_count("nodes", word, rule, fix="nodes=1,2,4") for word in text.split(",")]
    unique = tuple(sorted(set(nodes)))
    if len(unique) < len(nodes):
        rule = "must not contain a number twice"
        raise ConfigError("nodes", text, rule, f"nodes={','.join(map(str, unique))}")
    return unique


def _parse_count(key: str, text: str, rule: str, *, fix: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ConfigError(key, text, rule, fix)
    return int(text)


def _drop_repeated_keys(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words without those whose key comes again later, which Hydra would override."""
    return tuple({word.partition("=")[0]: word for word in words}.values())
