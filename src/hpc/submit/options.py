"""The options of submit.py, and which of them exclude each other."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc.config import command_parser
from hpc.config.errors import ConfigError

SAMPLERS = ["random", "tpe"]
MAX_ARRAY_SIZE = 1000  # runs; Slurm's default MaxArraySize is 1001


@dataclass(frozen=True)
class AwaitedRun:
    """An unfinished run, the job that will finish it, and the scheduler of that job.

    Attributes:
        run_dirs: the run, the one that its own job waits for, and so on: all are finished when the new job starts.
    """

    run_dirs: tuple[Path, ...]
    scheduler: str
    job: str


@dataclass(frozen=True)
class SubmitOptions:
    """Options of the submission of a job and of its messages.

    Attributes:
        dry_run: print the job script; write and submit nothing.
        parsable: print JOBID RUN_DIR and nothing else.
        wait: wait for the job and exit with its exit code.
        awaited: the unfinished run that the job waits for.
    """

    dry_run: bool = False
    parsable: bool = False
    wait: bool = False
    awaited: AwaitedRun | None = None


def parse_arguments(description: str | None, argv: Sequence[str]) -> argparse.Namespace:
    """Return the options and overrides of a command line. Raise `ConfigError` if options exclude each other."""
    parser = command_parser.make_parser(description)
    parser.add_argument("--dry-run", action="store_true", help="print the job script and write nothing")
    parser.add_argument("--parsable", action="store_true", help="print JOBID RUN_DIR and nothing else")
    parser.add_argument("--wait", action="store_true", help="wait for the job and exit with its exit code")
    after_help = "start the job once that run, queued by submit.py, is finished; its checkpoint is ckpt=RUN_DIR"
    parser.add_argument("--after", metavar="RUN_DIR", help=after_help)
    parser.add_argument("--render", metavar="DIR", help="write a script per trainer preset, for sbatch or qsub")
    array = parser.add_mutually_exclusive_group()
    sweep_help = "submit all combinations of key=a,b as one job array"
    array.add_argument("--multirun", "-m", action="store_true", help=sweep_help)
    search_help = "submit a job array that searches key=interval(a,b) or choice(a,b) for the best values"
    array.add_argument("--search", choices=SAMPLERS, help=search_help)
    draw_help = "draw the values of this run of a search and write its config: its job does so before its ranks start"
    array.add_argument("--draw", type=Path, metavar="RUN_DIR", help=draw_help)
    parser.add_argument("--trials", type=int, metavar="N", help="with --search: number of runs")
    parser.add_argument("--at-once", type=int, metavar="N", help="number of runs of an array at the same time")
    arguments = parser.parse_intermixed_args(argv)
    _reject_combinations(arguments)
    return arguments


def _reject_combinations(arguments: argparse.Namespace) -> None:
    is_array = arguments.multirun or arguments.search
    if arguments.after is not None and (arguments.render or arguments.draw):
        rule = "cannot be combined with --render or --draw, which submit no job"
        raise ConfigError("--after", arguments.after, rule, "leave one out")
    if is_array and arguments.cfg:
        rule = "cannot be combined with --multirun or --search: it shows the config of one run"
        raise ConfigError("--cfg", None, rule, "--cfg job alone")
    if arguments.at_once is not None and not is_array:
        rule = "cannot be given without --multirun or --search"
        raise ConfigError("--at-once", arguments.at_once, rule, f"--multirun --at-once {max(arguments.at_once, 1)}")
    if arguments.at_once is not None and arguments.at_once < 1:
        raise ConfigError("--at-once", arguments.at_once, "must be at least 1", "--at-once 4")
    if arguments.trials is not None and not arguments.search:
        rule = "cannot be given without --search"
        raise ConfigError("--trials", arguments.trials, rule, f"--search tpe --trials {arguments.trials}")
    trials = arguments.trials or 0
    if arguments.search and not 2 <= trials <= MAX_ARRAY_SIZE:
        rule = f"must be the number of runs of a search, from 2 to {MAX_ARRAY_SIZE}"
        raise ConfigError("--trials", arguments.trials, rule, "--trials 40")
    if arguments.search == "tpe" and (arguments.at_once or trials) >= trials:
        rule = "must start fewer runs at the same time than there are trials, as it learns from those that have ended"
        raise ConfigError("--search tpe", None, rule, f"--at-once {max(trials // 5, 1)}, or --search random")
