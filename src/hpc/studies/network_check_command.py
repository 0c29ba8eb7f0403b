"""The command line of a network check: its options, its defaults, what it rejects; its ranks without a scheduler."""

import argparse
import os
import sys
from collections.abc import Sequence

from omegaconf import DictConfig

from hpc.config import arguments, command_parser, compose
from hpc.config.errors import ConfigError
from hpc.config.parse import parse
from hpc.config.sections import Config
from hpc.run import command_line

# The defaults differ from those of a training run: a check is short, and one that failed would fail again.
DEFAULTS = ["name=comm", "cluster.time=0:15:00", "faults.retries=1"]


def parse_arguments(description: str | None, argv: Sequence[str]) -> argparse.Namespace:
    """Return overrides and options of a command line. The overrides of a new measurement include the defaults."""
    parser = command_parser.make_parser(description)
    parser.add_argument("--dry-run", action="store_true", help="print the job script and write nothing")
    parser.add_argument("--wait", action="store_true", help="wait for the job and print its table")
    arguments = parser.parse_intermixed_args(argv)
    if command_line.resume_directory(arguments.overrides) is None:
        arguments.overrides = with_defaults(arguments.overrides)
    return arguments


def with_defaults(overrides: Sequence[str]) -> list[str]:
    """Add the defaults, and a global batch that is divisible by the number of ranks."""
    words = [*DEFAULTS, *overrides]
    cfg = compose.compose_overrides(words)
    trainer, is_given = cfg.trainer, any(word.startswith("data.global_batch_size=") for word in words)
    if is_given or cfg.data.get("global_batch_size") is None or not isinstance(trainer.devices, int):
        return words
    size = trainer.num_nodes * trainer.devices * trainer.accumulate_grad_batches
    return [*words, f"data.global_batch_size={size}"]


def reject_single_rank(cfg: DictConfig | Config) -> None:
    """Raise `ConfigError` if there is only one rank."""
    if cfg.trainer.num_nodes * (cfg.trainer.devices or 2) == 1:
        rule = "must be at least 2 if trainer.num_nodes=1, because a network is measured between ranks"
        two = "trainer=ddp trainer.devices=2"
        several = "trainer=ddp_4node" if cfg.cluster.scheduler else f"{two} trainer.accelerator=cpu"
        raise ConfigError("trainer.devices", 1, rule, f"{two}, or {several}")


def start_ranks(cfg: DictConfig, words: Sequence[str], *, program: str) -> None:
    """Start a rank per device as children of torchrun. When one dies, torchrun ends the others and this program fails.

    Args:
        words: the words of the program's command line.
        program: the file that each rank runs.

    Raises:
        ConfigError: the config breaks a rule, or asks for other nodes.
    """
    num_nodes = cfg.trainer.num_nodes
    if num_nodes > 1:
        rule = f"must be 1, as cluster={cfg.cluster.name} has no scheduler that could start ranks on other nodes"
        raise ConfigError("trainer.num_nodes", num_nodes, rule, "cluster=<one of --help>, or trainer.num_nodes=1")
    arguments.check_files(parse(cfg))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(["--standalone", f"--nproc-per-node={cfg.trainer.devices}", "--max-restarts=0", program, *words])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.exit(f"rank {rank} ended with exit code {failure.exitcode}: see its messages above, and errors/ of the run")
