"""The options of submit.py: what each means, and which go together."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from hpc.config import compose
from hpc.config.errors import ConfigError

SAMPLERS = ["random", "tpe"]
MOST = 1000  # runs of an array; Slurm's default MaxArraySize is 1001


@dataclass(frozen=True)
class Options:
    """How a job is handed over, and what is printed of it."""

    dry_run: bool = False
    parsable: bool = False
    wait: bool = False


def parse(description: str | None, argv: Sequence[str]) -> argparse.Namespace:
    """Return the words and options of a command line. Raises `ConfigError` where options do not go together."""
    parser = compose.parser(description)
    parser.add_argument("--dry-run", action="store_true", help="print the job script and write nothing")
    parser.add_argument("--parsable", action="store_true", help="print JOBID RUN_DIR and nothing else")
    parser.add_argument("--wait", action="store_true", help="wait for the job and exit with its exit code")
    parser.add_argument("--render", metavar="DIR", help="write a script per trainer preset, for sbatch or qsub")
    several = parser.add_mutually_exclusive_group()
    every = "key=a,b makes one job array of all combinations"
    several.add_argument("--multirun", "-m", action="store_true", help=every)
    some = "key=interval(a,b) or choice(a,b) makes one job array that looks for the best"
    several.add_argument("--search", choices=SAMPLERS, help=some)
    parser.add_argument("--trials", type=int, metavar="N", help="with --search: so many runs")
    parser.add_argument("--at-once", type=int, metavar="N", help="so many runs of an array at the same time")
    asked = parser.parse_intermixed_args(argv)
    _reject_together(asked)
    return asked


def _reject_together(asked: argparse.Namespace) -> None:
    several = asked.multirun or asked.search
    if several and asked.cfg:
        raise ConfigError(
            "--cfg", None, "shows the config of one run, and this is several", "--cfg job without --multirun"
        )
    if asked.at_once is not None and (asked.at_once < 1 or not several):
        rule = "is at least 1, and goes with --multirun or --search"
        raise ConfigError("--at-once", asked.at_once, rule, "--multirun --at-once 4")
    if asked.trials is not None and not asked.search:
        raise ConfigError("--trials", asked.trials, "goes with --search", f"--search tpe --trials {asked.trials}")
    trials = asked.trials or 0
    if asked.search and not 2 <= trials <= MOST:
        rule = f"says how many runs there are, 2 to {MOST}"
        raise ConfigError("--trials", asked.trials, rule, "--trials 40")
    if asked.search == "tpe" and (asked.at_once or trials) >= trials:
        rule = "chooses by what other runs have found, and all of them would start together"
        raise ConfigError("--search", "tpe", rule, f"--at-once {max(trials // 5, 1)}, or --search random")
