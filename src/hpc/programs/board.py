"""Show curves in a browser: python tools/board.py [RUN_DIR_OR_FOLDER ...] [cluster=NAME]

Prints the ssh command that forwards a port of this machine, a login node or a compute node, to your own computer, and
runs TensorBoard there. It listens on localhost only. Default: all runs, and the cluster of the config.
"""

import argparse
import re

from hpc.config import compose, errors, project, section_parser
from hpc.report import board
from hpc.system import home

CLUSTER = re.compile(r"cluster(\.\w+)?=")  # all other words are paths, which may contain an =


def main() -> None:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="RUN_DIR_OR_FOLDER | cluster=NAME")
    words = parser.parse_args().words
    overrides = [word for word in words if CLUSTER.match(word)]
    paths = [home.expand(word) for word in words if word not in overrides] or [project.PROJECT / "runs"]
    cluster = section_parser.read_section("cluster", compose.compose_overrides(overrides).cluster)
    board.show_curves(paths, cluster.login_host or None)


def run() -> None:
    """Do what the command line says, and exit."""
    with errors.exit_on_config_error():
        main()
