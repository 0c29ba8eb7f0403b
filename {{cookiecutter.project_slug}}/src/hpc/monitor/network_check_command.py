"""The command line of a network check: its options, its defaults, and what it rejects."""

import argparse
from collections.abc import Sequence

from omegaconf import DictConfig

from hpc.config import compose
from hpc.config.errors import ConfigError
from hpc.run import command_line

# The defaults differ from those of a training run: a check is short, and one that failed would fail again.
DEFAULTS = ["name=comm", "cluster.time=0:15:00", "faults.retries=1"]


def parse_arguments(description: str | None, argv: Sequence[str]) -> argparse.Namespace:
    """Return overrides and options of a command line. The overrides of a new measurement include the defaults."""
    parser = compose.make_parser(description)
    parser.add_argument("--dry-run", action="store_true", help="print the job script and write nothing")
    parser.add_argument("--wait", action="store_true", help="wait for the job and print its table")
    arguments = parser.parse_intermixed_args(argv)
    if command_line.resume_directory(arguments.overrides) is None:
        arguments.overrides = with_defaults(arguments.overrides)
    return arguments


def with_defaults(overrides: Sequence[str]) -> list[str]:
    """Add the defaults, and a global batch that is divisible by the number of ranks."""
    words = [*DEFAULTS, *overrides]
    trainer = compose.compose_overrides(words).trainer
    if any(word.startswith("data.global_batch_size=") for word in words) or not trainer.devices:
        return words
    size = trainer.num_nodes * trainer.devices * trainer.accumulate_grad_batches
    return [*words, f"data.global_batch_size={size}"]


def reject_single_rank(cfg: DictConfig) -> None:
    """Raise `ConfigError` if there is only one rank."""
    if cfg.trainer.num_nodes * (cfg.trainer.devices or 2) == 1:
        rule = "must be at least 2 if trainer.num_nodes=1, because a network is measured between ranks"
        raise ConfigError("trainer.devices", 1, rule, "trainer=ddp trainer.devices=2, or trainer=ddp_4node")
