"""Measure how training scales with the number of nodes: one job per number, then a table and a page of charts.

  python tools/scale.py nodes=1,2,4,8 trainer=ddp                       strong scaling: constant global batch
  python tools/scale.py nodes=1,2,4,8 trainer=ddp scaling=weak lr=sqrt  weak scaling: constant batch per device

It waits for the jobs, then writes scaling.csv and scaling.html. Ctrl-C ends no job: the same command continues the
study, also with more nodes=.

  lr=             required with scaling=weak: how the learning rate follows the global batch: keep, linear (usual for
                  SGD) or sqrt (usual for Adam)
  out=FOLDER      default: runs/scaling_NAME_strong or runs/scaling_NAME_weak
  trainer.max_steps=200   steps per point, if nothing else is typed
"""

import argparse
import sys

from hpc.config import errors
from hpc.studies import scaling_study


def main() -> None:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words_help = "nodes=, scaling=, lr=, out=, and overrides as for submit.py"
    parser.add_argument("words", nargs="*", metavar="key=value", help=words_help)
    parser.add_argument("--dry-run", action="store_true", help="print the points and the first job, and write nothing")
    parser.add_argument("--no-wait", action="store_true", help="submit, print the results so far, and exit")
    parser.add_argument("--retry-failed", action="store_true", help="submit failed points again")
    arguments = parser.parse_intermixed_args()
    exit_code = scaling_study.run_study(
        arguments.words, dry_run=arguments.dry_run, retry_failed=arguments.retry_failed, wait=not arguments.no_wait
    )
    sys.exit(exit_code)


def run() -> None:
    """Do what the command line says, and exit."""
    with errors.exit_on_config_error():
        main()
