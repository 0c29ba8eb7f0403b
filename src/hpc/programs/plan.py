"""Predict memory, time and cost of a run, and how it scales: python plan.py [group=choice] [key=value] [words]

tokens=300e9, samples=1e8     amount of training, for the time to the end; or trainer.max_steps=
network=runs/NAME             with the bandwidths that this run of tools/comm.py has measured
"""

import gc
import signal
import sys

from hpc.config import command_parser, errors
from hpc.plan import plan_arguments, plan_text, run_plan
from hpc.run import command_line


def main() -> None:
    parser = command_parser.make_parser(__doc__)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    arguments = parser.parse_intermixed_args(sys.argv[1:])
    own, arguments.overrides = plan_arguments.split_words(arguments.overrides)
    plan = run_plan.plan_run(command_line.compose_parsed(arguments), arguments.overrides, own=own)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end without a traceback when `| head` closes the pipe
    print(plan_text.as_json(plan) if arguments.json else plan_text.as_text(plan))


def run() -> None:
    """Do what the command line says, and exit."""
    gc.disable()  # a short process: collecting garbage would only delay the answer
    with errors.exit_on_config_error():
        main()
