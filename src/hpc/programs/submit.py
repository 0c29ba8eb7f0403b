"""Queue a run on the cluster: python submit.py [group=choice] [key=value]"""

import atexit
import gc
import sys
from pathlib import Path

from hpc.config import errors
from hpc.run import command_line
from hpc.submit import options, queue_run


def main() -> None:
    arguments = options.parse_arguments(__doc__, sys.argv[1:])
    words = arguments.overrides
    run_dir = command_line.resume_directory(words)
    awaited = None
    if arguments.after is not None:  # modules that a new run does not need are imported here and below
        from hpc.submit import awaited_run

        awaited = awaited_run.find_awaited_run(arguments.after)
    submit_options = options.SubmitOptions(arguments.dry_run, arguments.parsable, arguments.wait, awaited)
    if arguments.render:
        from hpc.submit import preset_scripts

        preset_scripts.write_preset_scripts(Path(arguments.render), words, dry_run=arguments.dry_run)
    elif arguments.draw:
        from hpc.studies import trial_config

        print(errors.make_printable(trial_config.draw(arguments.draw.absolute())), flush=True)
    elif arguments.multirun:
        from hpc.studies import job_array

        job_array.submit_sweep(words, at_once=arguments.at_once, options=submit_options)
    elif arguments.search:
        from hpc.studies import job_array

        size = {"trials": arguments.trials, "at_once": arguments.at_once}
        job_array.submit_search(words, sampler=arguments.search, **size, options=submit_options)
    elif run_dir:
        from hpc.submit import resubmit

        resubmit.resubmit(command_line.compose_parsed(arguments), run_dir, words=words, options=submit_options)
    else:
        queue_run.submit_run(command_line.compose_parsed(arguments), words, options=submit_options)


def run() -> None:
    """Do what the command line says, and exit."""
    gc.disable()  # a short process: collecting garbage would only delay the answer
    atexit.register(gc.freeze)  # nor at its end
    with errors.exit_on_config_error():
        main()
