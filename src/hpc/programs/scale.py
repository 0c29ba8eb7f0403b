"""Measure how training scales with the number of nodes: one job per number.

  python tools/scale.py nodes=1,2,4,8 trainer=ddp               strong scaling: constant global batch
  python tools/scale.py nodes=1,2,4,8 trainer=ddp scaling=weak  weak scaling: constant batch per device

Once the jobs have ended, python report.py FOLDER shows the table, and writes scaling.csv and scaling.html. The same
command continues the study, also with more nodes=.

  out=FOLDER      default: runs/scaling_NAME_strong or runs/scaling_NAME_weak
  trainer.max_steps=200   steps per point, if nothing else is typed
"""

import argparse
import sys

from hpc.config import errors
from hpc.studies import scaling_study

FORMER_OPTIONS = {
    "--no-wait": "the command without --no-wait",
    "--retry-failed": "python submit.py resume=RUN_DIR, for a point that has failed",
}


def main() -> None:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words_help = "nodes=, scaling=, out=, and overrides as for submit.py"
    parser.add_argument("words", nargs="*", metavar="key=value", help=words_help)
    parser.add_argument("--dry-run", action="store_true", help="print the points and the first job, and write nothing")
    for option, fix in FORMER_OPTIONS.items():
        if option in sys.argv:
            raise errors.ConfigError(option, None, "cannot be given: a study submits its jobs and ends", fix)
    arguments = parser.parse_intermixed_args()
    sys.exit(scaling_study.run_study(arguments.words, dry_run=arguments.dry_run))


def run() -> None:
    """Do what the command line says, and exit."""
    with errors.exit_on_config_error():
        main()
