"""The choices that configs/ offers, and what else each one needs to make a run."""

from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import lightning as L
import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from hpc.config import preflight, signatures
from hpc.config.build import build
from hpc.config.compose import compose_overrides, config_groups
from hpc.config.conversion import flatten
from hpc.config.errors import ConfigError

GROUPS = config_groups()  # {"model": ["gpt_tiny", ...], "data": [...], ...}
PARTNERS = {"model": "data", "data": "model", "strategy": "model"}  # a choice may go with some of these only
# The first is what `python train.py` learns.
EXPERIMENTS = ["name=default", *(f"experiment={name}" for name in GROUPS.get("experiment", []))]

LARGE = 50_000_000  # parameters


@dataclass
class Run:
    """A config, and its keys without a default (`???`): what a person has to say, and a test makes up."""

    cfg: DictConfig
    needs: list[str]


@cache
def accepted(choice: str) -> Run:
    """Return the run that a choice makes, alone or with the first partner that it goes with.

    Raises:
        ConfigError: it goes with none; this is what is wrong when it is alone.
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
    """Return the run of a command line. All rules are checked; the files that it names, unless a name is made up."""
    has_cluster = any(word.startswith("cluster=") for word in words)
    cfg = compose_overrides([*words, *([] if has_cluster else ["cluster=slurm"])])  # which has GPUs for any trainer
    needs = [key for key, value in flatten(cfg).items() if value == "???"]
    for key in needs:
        OmegaConf.update(cfg, key, made_up(cfg, key))
    preflight.check_rules(cfg)
    if needs:
        for key, node in targets(cfg):
            given = {name: value for name, value in node.items() if value is not None}
            signatures.check_arguments(key, given, complete=False)
    else:
        preflight.check_files(cfg)
    return Run(cfg, needs)


def made_up(cfg: DictConfig, key: str) -> Any:
    """Return a value of the type that the class behind the key takes; a word where that is not known."""
    above, _, argument = key.rpartition(".")
    target = OmegaConf.select(cfg, f"{above}._target_") if above else None
    annotation = signatures.read_signature(target).parameters.get(argument, "") if target else ""
    values = {"str": "made-up", "int": 2, "float": 0.5, "bool": True}
    return next((value for kind, value in values.items() if kind in annotation), "made-up")


def targets(cfg: DictConfig) -> list[tuple[str, dict[str, Any]]]:
    """Return all that a config builds: [("model.optimizer", {"_target_": ..., "lr": ...}), ...]."""
    return [*signatures.find_targets(OmegaConf.to_container(cfg, resolve=True))]


def complete(choice: str) -> DictConfig:
    """Return the config of a choice; skip the test if that needs a value that only you know."""
    run = accepted(choice)
    if run.needs:
        pytest.skip(f"{choice} needs {run.needs[0]}")
    return run.cfg


def computable(choice: str) -> DictConfig:
    """Return the config of a choice; skip the test if that needs your files, or a larger machine."""
    cfg = complete(choice)
    if is_large(cfg.model):
        pytest.skip(f"{choice} is too large to be computed here")
    return cfg


def is_large(node: Any) -> bool:
    """Return whether a network, or a module with one, has too many parameters to be computed in a test."""
    with torch.device("meta"):  # shapes without content
        return sum(parameter.numel() for parameter in build(node).parameters()) > LARGE


def batches(cfg: DictConfig, split: str, num: int) -> list[Any]:
    """Return the first batches of "train", "val" or "test", as the LightningModule gets them."""
    L.seed_everything(cfg.seed, verbose=False)
    data = build(cfg.data)
    data.prepare_data()
    data.setup({"train": "fit", "val": "validate", "test": "test"}[split])
    loader = getattr(data, f"{split}_dataloader")()
    return [data.on_after_batch_transfer(batch, 0) for batch in islice(loader, num)]
