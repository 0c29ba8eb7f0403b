"""Compose a config for each choice in configs/, for the tests beside this file."""

from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import lightning as L
import pytest
import torch
from hpc.config import signatures
from hpc.config.arguments import check_files
from hpc.config.build import build
from hpc.config.compose import compose_overrides, config_groups
from hpc.config.conversion import flatten
from hpc.config.errors import ConfigError
from hpc.config.parse import parse
from omegaconf import DictConfig, OmegaConf

GROUPS = config_groups()  # {"model": ["gpt_tiny", ...], "data": [...], ...}
# A choice of the first group may need another choice of the second: a network for images needs images.
PARTNERS = {"model": "data", "data": "model", "strategy": "model"}
DEFAULT_EXPERIMENT = "name=default"  # what `python train.py` learns: this override changes only the run's name
EXPERIMENTS = [DEFAULT_EXPERIMENT, *(f"experiment={name}" for name in GROUPS.get("experiment", []))]

LARGE = 50_000_000  # parameters


@dataclass
class Run:
    """A config that passes the checks, and its keys without a default (`???`), whose values the test has made up."""

    cfg: DictConfig
    needs: list[str]


@cache
def compose_choice(choice: str) -> Run:
    """Return the run of a choice, alone or with the first choice of its partner group that it fits.

    Raises:
        ConfigError: it fits none; this is the error of the choice alone.
    """
    partner = PARTNERS.get(choice.partition("=")[0])
    errors = []
    for words in [[choice], *([choice, f"{partner}={name}"] for name in GROUPS.get(str(partner), []))]:
        try:
            return compose(*words)
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def compose(*words: str) -> Run:
    """Return the run of a command line, checked as train.py does. Files are checked only if no value is made up."""
    has_cluster = any(word.startswith("cluster=") for word in words)
    cfg = compose_overrides([*words, *([] if has_cluster else ["cluster=slurm"])])  # which has GPUs for any trainer
    needs = [key for key, value in flatten(cfg).items() if value == "???"]
    for key in needs:
        OmegaConf.update(cfg, key, make_up_value(cfg, key))
    checked = parse(cfg)
    if not needs:
        check_files(checked)
    return Run(cfg, needs)


def make_up_value(cfg: DictConfig, key: str) -> Any:
    """Return a value of the type that the class behind the key takes; a str if the type is unknown."""
    above, _, argument = key.rpartition(".")
    target = OmegaConf.select(cfg, f"{above}._target_") if above else None
    annotation = signatures.read_signature(target).parameters.get(argument, "") if target else ""
    values = {"str": "made-up", "int": 2, "float": 0.5, "bool": True}
    return next((value for kind, value in values.items() if kind in annotation), "made-up")


def list_targets(cfg: DictConfig) -> list[tuple[str, dict[str, Any]]]:
    """Return the nodes of a config with a `_target_`: [("model.optimizer", {"_target_": ..., "lr": ...}), ...]."""
    return [*signatures.find_targets(OmegaConf.to_container(cfg, resolve=True))]


def compose_or_skip(choice: str) -> DictConfig:
    """Return the config of a choice; skip the test if it needs a value that only you know, such as a path."""
    run = compose_choice(choice)
    if run.needs:
        pytest.skip(f"{choice} needs {run.needs[0]}")
    return run.cfg


def compose_small_or_skip(choice: str) -> DictConfig:
    """Return the config of a choice; skip the test if it needs your files, or if its network is too large for this."""
    cfg = compose_or_skip(choice)
    if is_large(cfg.model):
        pytest.skip(f"{choice} is too large to be computed here")
    return cfg


def is_large(node: Any) -> bool:
    """Return whether a network, or a module with one, has too many parameters to be computed in a test."""
    with torch.device("meta"):  # shapes without content
        return sum(parameter.numel() for parameter in build(node).parameters()) > LARGE


def load_batches(cfg: DictConfig, split: str, num: int) -> list[Any]:
    """Return the first batches of "train", "val" or "test", as the LightningModule gets them."""
    L.seed_everything(cfg.seed, verbose=False)
    data = build(cfg.data)
    data.prepare_data()
    data.setup({"train": "fit", "val": "validate", "test": "test"}[split])
    loader = getattr(data, f"{split}_dataloader")()
    return [data.on_after_batch_transfer(batch, 0) for batch in islice(loader, num)]
