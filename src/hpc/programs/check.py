"""Try a module and its data on this machine, in about a minute: python tools/check.py model=mine data=mine

Some steps on one process, which are stopped in mid-epoch and resumed; some with ddp and with fsdp on two processes, and
whether they end with the same weights; a plan. Prints what works, what does not, and what one more method would unlock.
It trains on CPUs: trainer.accelerator=gpu on a node with two GPUs.
"""

import signal
import sys

from hpc.config import command_parser, errors
from hpc.run import command_line
from hpc.studies import check


def main() -> None:
    for ending in (signal.SIGTERM, signal.SIGHUP):  # end the run that is being tried, too
        signal.signal(ending, lambda number, frame: sys.exit(128 + number))
    arguments = command_parser.make_parser(__doc__).parse_intermixed_args()
    check.reject_own_words(arguments.overrides)
    command_line.compose_parsed(arguments)  # prints the config, if --cfg asks for it
    sys.exit(0 if check.check(arguments.overrides) else 1)


def run() -> None:
    """Do what the command line says, and exit."""
    with errors.exit_on_config_error():
        main()
