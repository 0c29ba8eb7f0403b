"""Hand a run to the cluster's scheduler: python submit.py [group=choice] [key=value]"""

import atexit
import gc
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from hpc.config import errors
from hpc.run import command_line
from hpc.submit import options, queue_run


def main() -> None:
    asked = options.parse_arguments(__doc__, sys.argv[1:])
    how, words = options.SubmitOptions(asked.dry_run, asked.parsable, asked.wait), asked.overrides
    if asked.render:  # what a new run does not need is imported where it is asked for
        from hpc.submit import preset_scripts

        preset_scripts.write_preset_scripts(Path(asked.render), words, dry_run=asked.dry_run)
    elif asked.multirun:
        from hpc.studies import job_array

        job_array.submit_sweep(words, at_once=asked.at_once, options=how)
    elif asked.search:
        from hpc.studies import job_array

        job_array.submit_search(words, sampler=asked.search, trials=asked.trials, at_once=asked.at_once, options=how)
    elif run_dir := command_line.resume_directory(words):
        from hpc.submit import resubmit

        resubmit.resubmit(command_line.compose_parsed(asked), run_dir, words=words, options=how)
    else:
        queue_run.submit_run(command_line.compose_parsed(asked), words, options=how)


if __name__ == "__main__":
    gc.disable()  # what lives for a third of a second looks for no garbage, at its end neither
    atexit.register(gc.freeze)
    with errors.exit_on_config_error():
        main()
