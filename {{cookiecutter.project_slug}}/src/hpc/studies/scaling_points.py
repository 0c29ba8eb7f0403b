"""A scaling study before anything is submitted: its points, the words that make each. Pure."""

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
OWN = {"nodes": None, "scaling": "strong", "lr": None, "steps": "200", "out": None}  # the study's keys, their defaults
TAKEN = {NODES: "nodes=", STEPS: "steps=", EPOCHS: "steps=", "run_dir": "out=", "resume": "the same words as then"}
# Nobody goes on from a study but the study itself, and the checkpoints of large models are large.
LEAN = ("checkpoint.keep=1", "checkpoint.monitor=null")
SCIENCE = ("model", "data", "trainer", "strategy", "seed", "matmul_precision")  # of the config
WINDOWS = 3  # of log_every_n_steps steps, behind the first one, which is warm-up: a median wants that many


@dataclass(frozen=True)
class Study:
    """What was typed."""

    nodes: tuple[int, ...]  # ascending
    scaling: str  # strong: the global batch is kept; weak: the samples per device are
    lr: str | None  # linear, sqrt or keep; None: as the optimizer wants it
    steps: int
    out: str | None
    words: tuple[str, ...]  # of the config

    @property
    def common(self) -> dict[str, Any]:
        """What all of its points share: further nodes make no other study."""
        return asdict(replace(self, nodes=self.nodes[:1], out=None))

    @property
    def digest(self) -> str:
        """Names the study's folder."""
        return hashlib.sha256(json.dumps(self.common).encode()).hexdigest()[:8]

    @property
    def first(self) -> tuple[str, ...]:
        """The words of the first point, whose batch and rate are those of the config."""
        fixed = (f"{NODES}={self.nodes[0]}", f"{EPOCHS}=-1", f"{STEPS}={self.steps}")
        return *LEAN, *self.words, *fixed


@dataclass(frozen=True)
class Point:
    """One job of a study."""

    nodes: int
    devices: int  # of all nodes
    batch: int  # samples per optimizer step
    lr: float | None  # None: the config does not say it
    rule: str  # linear, sqrt or keep: how lr follows the batch
    warmup: int | None  # steps; None: the config knows no warm-up
    steps: int
    words: tuple[str, ...]

    @property
    def per_device(self) -> float:
        """Samples per optimizer step that each device computes."""
        return self.batch / self.devices


def read(words: Sequence[str]) -> Study:
    """The study that these words ask for. Raises `ConfigError`."""
    own, asked, others = dict(OWN), set[str](), []
    for word in words:
        key, equals, value = word.partition("=")
        if key in own and equals:
            if key in asked:
                raise ConfigError(word, None, f"{key}= is typed twice", f"{key}=<one of the two>")
            asked.add(key)
            own[key] = value
        elif other := TAKEN.get(key):
            raise ConfigError(word, None, "is the study's to say, point by point", other)
        else:
            others.append(word)
    value_checks.require_one_of("scaling", str(own["scaling"]), ["strong", "weak"])
    if own["lr"] is not None:
        value_checks.require_one_of("lr", own["lr"], ["linear", "sqrt", "keep"])
        if own["scaling"] == "strong" and own["lr"] != "keep":
            raise ConfigError("lr", own["lr"], "follows a batch that grows; strong scaling keeps it", "scaling=weak")
    if own["nodes"] is None:
        raise ConfigError("nodes", None, "names the points of the study", "nodes=1,2,4")
    nodes = _nodes(own["nodes"])
    steps = _count("steps", str(own["steps"]), "is a whole number above 0", "steps=200")
    return Study(nodes, str(own["scaling"]), own["lr"], steps, own["out"], tuple(others))


def points(study: Study, first: DictConfig) -> list[Point]:
    """All points, from the composed config of the first. Raises `ConfigError`."""
    _reject_unmeasured(study, first)
    _reject_batch(study, first)
    rule, warmup = _rule(study, first), OmegaConf.select(first, WARMUP)
    fitting = warmup if warmup is None else warmup_steps(warmup, study.steps, rule != "keep")
    batch, lr = first.data.global_batch_size, OmegaConf.select(first, LR)
    made = []
    for nodes in study.nodes:
        grown = batch * nodes // study.nodes[0] if study.scaling == "weak" else batch
        rate = lr if rule == "keep" else scaled(lr, grown / batch, rule)
        changed = {BATCH: (batch, grown), LR: (lr, rate), WARMUP: (warmup, fitting)}
        words = [f"{key}={new}" for key, (old, new) in changed.items() if new != old]
        words = _last([*study.first, f"{NODES}={nodes}", *words])
        made.append(Point(nodes, nodes * first.trainer.devices, grown, rate, rule, fitting, study.steps, words))
    return made


def record(study: Study, first: DictConfig) -> str:
    """What the points of a study have in common, as JSON: one that is submitted later shall be like the others."""
    leaves = flatten(OmegaConf.create(to_frozen_yaml(first)))
    science = {key: value for key, value in leaves.items() if key.split(".")[0] in SCIENCE}
    return json.dumps(study.common | {"config": science}, indent=1)


def scaled(lr: float, growth: float, rule: str) -> float:
    """The learning rate for a global batch that is `growth` times as large, by the rule linear or sqrt.

    linear: for SGD, together with a warm-up (Goyal et al. 2017, arXiv 1706.02677, section 2). sqrt: for Adam and its
    kin (Malladi et al. 2022, arXiv 2205.10287; who change its betas and epsilon, too, which is left out here).
    """
    return float(f"{lr * (growth if rule == 'linear' else math.sqrt(growth)):.6g}")  # as it is typed


def warmup_steps(configured: int, steps: int, scales: bool) -> int:
    """Steps of warm-up in a run of so few steps: half of them at most; a rate that is scaled has a tenth at least."""
    return min(max(configured, steps // 10 if scales else 0), steps // 2)


def _rule(study: Study, first: DictConfig) -> str:
    """linear, sqrt or keep. Raises `ConfigError` where there is no rate to scale."""
    if study.scaling == "strong" or study.lr == "keep":
        return "keep"
    if not isinstance(OmegaConf.select(first, LR), int | float):
        rule = f"weak scaling scales {LR}, which this config does not have"
        raise ConfigError("lr", study.lr, rule, "lr=keep")
    return study.lr or ("linear" if str(first.model.optimizer.get("_target_")).endswith("SGD") else "sqrt")


def _reject_unmeasured(study: Study, first: DictConfig) -> None:
    every = first.trainer.log_every_n_steps
    if study.steps < (1 + WINDOWS) * every:
        rule = f"is at least {1 + WINDOWS} * trainer.log_every_n_steps={every}: the first of these windows is warm-up"
        raise ConfigError("steps", study.steps, rule, f"steps={(1 + WINDOWS) * every}")
    if not OmegaConf.select(first, "callbacks.throughput"):
        raise ConfigError("callbacks.throughput", "null", "measures what a study compares", "leave it as it is")


def _reject_batch(study: Study, first: DictConfig) -> None:
    """One batch for all points of strong scaling; for the first point of weak scaling."""
    size = first.data.global_batch_size
    if not isinstance(size, int) or size < 1:
        section_rules.check_global_batch_size(first)  # says so
    share = derive_layout(first).data_parallel_size * first.trainer.accumulate_grad_batches
    shared = study.nodes if study.scaling == "strong" else study.nodes[:1]
    if size % (multiple := math.lcm(*(share * nodes // study.nodes[0] for nodes in shared))):
        near = (size // multiple * multiple, -(-size // multiple) * multiple)
        fix = " or ".join(f"{BATCH}={n}" for n in near if n)
        rule = f"divides by data-parallel size * accumulate_grad_batches of each point, so by {multiple}"
        raise ConfigError(BATCH, size, f"{rule} for nodes={','.join(map(str, shared))}", fix)


def _nodes(text: str) -> tuple[int, ...]:
    """Ascending."""
    rule = "is a whole number above 0, or several with commas"
    nodes = [_count("nodes", word, rule, "nodes=1,2,4") for word in text.split(",")]
    once = tuple(sorted(set(nodes)))
    if len(once) < len(nodes):
        raise ConfigError("nodes", text, "names each point once", f"nodes={','.join(map(str, once))}")
    return once


def _count(key: str, text: str, rule: str, fix: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ConfigError(key, text, rule, fix)
    return int(text)


def _last(words: Sequence[str]) -> tuple[str, ...]:
    """Of a key that comes again, the last word: as Hydra reads it."""
    return tuple({word.partition("=")[0]: word for word in words}.values())
