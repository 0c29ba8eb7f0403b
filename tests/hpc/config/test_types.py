"""Give keys of the config values of other types, for train, submit and plan: accepted, or one sentence."""

import random
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf, open_dict

from hpc.config import arguments, compose, conversion, freezing, parse
from hpc.config.errors import ConfigError, _as_config_error
from hpc.plan import run_plan, trace_cache
from hpc.run import directory
from hpc.submit import scripts

TYPES = {"text": "abc", "number": 7, "list": [1, "a"], "dict": {"a": 1}, "null": None, "bool": True, "float": -1.5}
# Found by drawing.
KNOWN = [
    ("data._target_", "float"),
    ("data._target_", "dict"),
    ("model.optimizer._check_", "number"),
    ("model.network._target_", "list"),
    ("strategy.lightning", "null"),
    ("strategy.lightning", "text"),
    ("faults", "null"),
    ("checkpoint", "number"),
    ("model.network.depths", "null"),
    ("callbacks", "float"),
    ("data.num_workers", "text"),
    ("model.optimizer", "text"),
]


@pytest.fixture(scope="module")
def cfg() -> DictConfig:
    words = ["cluster=slurm", "cluster.account=a", "trainer.devices=1", "faults.nonfinite=skip"]
    return compose.compose_overrides(words)


def keys(cfg: DictConfig) -> list[str]:
    """Return all keys, also those of groups and nodes."""
    found: dict[str, None] = {}
    for key in conversion.flatten(cfg):
        parts = key.split(".")
        found |= dict.fromkeys(".".join(parts[: number + 1]) for number in range(len(parts)))
    return [key for key in found if key not in compose.REQUIRED_GROUPS]


def train(cfg: DictConfig) -> None:
    parse.parse(cfg)
    arguments.check_files(parse.parse(cfg))
    freezing.to_frozen_yaml(cfg)


def submit(cfg: DictConfig) -> None:
    parse.parse(cfg, for_job=True)
    arguments.check_files(parse.parse(cfg))
    cfg.run_dir = str(directory.choose_run_dir(cfg.run_dir, cfg.name, now=datetime.now(), environ={}))
    scripts.render_script(scripts.make_job(cfg, run_dir=Path(cfg.run_dir), program="train.py"), cfg)


def plan(cfg: DictConfig) -> None:
    run_plan.plan_run(cfg, [])


def is_right_or_a_sentence(cfg: DictConfig, program: Callable[[DictConfig], None], key: str, value: Any) -> bool:
    """Return whether a program has accepted this value."""
    cfg = cfg.copy()
    with open_dict(cfg):
        OmegaConf.update(cfg, key, value, merge=False, force_add=True)
    try:
        program(cfg)
    except Exception as error:
        assert _as_config_error(error), f"{program.__name__} {key}={value!r}: {type(error).__name__}: {error}"
        return False
    return True


@pytest.fixture
def no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_trace(cfg: DictConfig, setup: Any) -> Any:
        trace_cache._trace_request(cfg, setup)
        raise trace_cache.TracingError("not here")

    monkeypatch.setattr(trace_cache, "load_trace", load_trace)


@pytest.mark.slow
@pytest.mark.usefixtures("no_trace")
@pytest.mark.parametrize(("key", "kind"), KNOWN)
def test_a_value_of_another_type_is_rejected(key: str, kind: str, cfg: DictConfig) -> None:
    for program in (train, submit):
        assert not is_right_or_a_sentence(cfg, program, key, TYPES[kind]) or (key, kind) == ("model.optimizer", "text")
    is_right_or_a_sentence(cfg, plan, key, TYPES[kind])


@pytest.mark.usefixtures("no_trace")
@pytest.mark.parametrize("count", [60, pytest.param(400, marks=pytest.mark.soak)])
def test_drawn_types(count: int, cfg: DictConfig) -> None:
    rng = random.Random(count)
    num_accepted = 0
    for _ in range(count):
        key, kind, program = rng.choice(keys(cfg)), rng.choice(list(TYPES)), rng.choice([train, submit, plan])
        num_accepted += is_right_or_a_sentence(cfg, program, key, TYPES[kind])
    assert num_accepted > count / 20  # not everything is rejected


def test_a_check_function_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    node = OmegaConf.create({"model": {"_check_": "hpc.nothing.check", "a": 1}})
    with pytest.raises(ConfigError, match=r"model must have values that hpc\.nothing\.check can check: ModuleNotFound"):
        arguments._run_check_functions(node.model, node)
