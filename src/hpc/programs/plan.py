"""Predict memory, time and cost of a run, and how it scales: python plan.py [group=choice] [key=value] [words]

tokens=300e9, samples=1e8     amount of training, for the time to the end; or trainer.max_steps=
plot=FILE.html                a page of rate and efficiency over the number of nodes
pipeline=8 interleaved=2 micro_batch=1    compare with pipeline stages, and chunks in each; train.py runs none
"""

import gc
import signal
import sys

from hpc.config import command_parser, errors
from hpc.plan import plan_arguments, run_plan
from hpc.run import command_line


def main() -> None:
    parser = command_parser.make_parser(__doc__)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    arguments = parser.parse_intermixed_args(sys.argv[1:])
    plan_options, arguments.overrides = plan_arguments.split_words(arguments.overrides)
    plan = run_plan.plan_run(command_line.compose_parsed(arguments), arguments.overrides, own=plan_options)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end without a traceback when `| head` closes the pipe
    print(run_plan.as_json(plan) if arguments.json else run_plan.as_text(plan))
    if "plot" in plan_options:
        from hpc.plan import scaling_plot  # nothing that draws is imported for a plan in text

        scaling_plot.write_page(plan.prediction, plan_options["plot"], title=plan.title)


def run() -> None:
    """Do what the command line says, and exit."""
    gc.disable()  # a short process: collecting garbage would only delay the answer
    with errors.exit_on_config_error():
        main()
