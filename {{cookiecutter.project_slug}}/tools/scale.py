"""Measure how training scales: one job per number of nodes, through submit.py, then a table and a picture of them all.

  python tools/scale.py nodes=1,2,4,8 trainer=ddp                  strong scaling: the global batch is kept
  python tools/scale.py nodes=1,2,4,8 trainer=ddp scaling=weak     weak: the samples per device are; the rate follows

It waits for the jobs, and writes scaling.csv, scaling.md and scaling.png. Ctrl-C ends no job: called again with the
same words it goes on where it was, and takes further nodes= into the same study.

  steps=200       optimizer steps per point
  lr=             with scaling=weak: linear (default for SGD), sqrt (for other optimizers), keep
  out=FOLDER      default: below runs/, named after what was typed
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from hpc.config import errors
from hpc.studies import scaling_study


def main() -> None:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = "nodes=, scaling=, lr=, steps=, out=, and whatever submit.py takes"
    parser.add_argument("words", nargs="*", metavar="key=value", help=words)
    parser.add_argument("--dry-run", action="store_true", help="print the points and the first job, and write nothing")
    parser.add_argument("--no-wait", action="store_true", help="submit, show what is there, and leave")
    parser.add_argument("--again", action="store_true", help="submit failed points again, with the code as it is now")
    asked = parser.parse_intermixed_args()
    options = {"dry_run": asked.dry_run, "retry_failed": asked.again, "wait": not asked.no_wait}
    sys.exit(scaling_study.run_study(asked.words, **options))


if __name__ == "__main__":
    with errors.exit_on_config_error():
        main()
