"""The words of a network check: what they say besides what is typed, and what they cannot ask for."""

import argparse
from collections.abc import Sequence

from omegaconf import DictConfig

from hpc.config import compose
from hpc.config.errors import ConfigError
from hpc.run import command_line

# What differs from a training run, unless it is typed: it is short, and what failed once fails again.
DEFAULTS = ["name=comm", "cluster.time=0:15:00", "faults.retries=1"]


def parse(description: str | None, argv: Sequence[str]) -> argparse.Namespace:
    """Return the words and options of a command line; the words of a new measurement are completed."""
    parser = compose.parser(description)
    parser.add_argument("--dry-run", action="store_true", help="print the job script and write nothing")
    parser.add_argument("--wait", action="store_true", help="wait for the job and print its table")
    asked = parser.parse_intermixed_args(argv)
    if command_line.resumes(asked.overrides) is None:
        asked.overrides = completed(asked.overrides)
    return asked


def completed(typed: Sequence[str]) -> list[str]:
    """Return the words with the defaults, and with a global batch that any number of ranks can share."""
    words = [*DEFAULTS, *typed]
    trainer = compose.compose_overrides(words).trainer
    if any(word.startswith("data.global_batch_size=") for word in words) or not trainer.devices:
        return words
    size = trainer.num_nodes * trainer.devices * trainer.accumulate_grad_batches
    return [*words, f"data.global_batch_size={size}"]


def reject_alone(cfg: DictConfig) -> None:
    """Raise `ConfigError` for a single rank."""
    if cfg.trainer.num_nodes * (cfg.trainer.devices or 2) == 1:
        rule = "one rank has nobody to talk to: a network is measured between two or more"
        raise ConfigError("trainer.devices", 1, rule, "trainer=ddp trainer.devices=2, or trainer=ddp_4node")
