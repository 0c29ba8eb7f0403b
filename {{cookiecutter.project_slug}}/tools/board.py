"""Show curves in a browser: python tools/board.py [RUN_DIR_OR_FOLDER ...] [cluster=NAME]

Starts TensorBoard on this machine, a login node or a compute node, and prints the ssh line that brings it to your own
computer. It listens on localhost only and ends with this program (Ctrl-C). Default: all runs, the configured cluster.
"""

import argparse
import os
import re
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from hpc.config import compose, errors, project, section_rules, typed
from hpc.config.sections import ClusterConfig
from hpc.report import ssh_tunnel, tensorboard
from hpc.system import home

CLUSTER = re.compile(r"cluster(\.\w+)?=")  # all other words are paths, which may well hold an =


def main() -> None:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="RUN_DIR_OR_FOLDER | cluster=NAME")
    words = parser.parse_args().words
    overrides = [word for word in words if CLUSTER.match(word)]
    places = [home.expand(word) for word in words if word not in overrides] or [project.PROJECT / "runs"]
    cluster = typed.typed(ClusterConfig, compose.compose_overrides(overrides).cluster, "cluster")
    section_rules.login_host(cluster.login_host)
    wanted = tensorboard.logdir(tensorboard.shown(places))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        with tensorboard.Board(wanted) as serving:
            tell(serving.port, cluster)
            sys.exit(serving.wait() or 1)
    except KeyboardInterrupt:
        print()  # a line of its own for the shell, after ^C


def tell(port: int, cluster: ClusterConfig) -> None:
    host = ssh_tunnel.here(os.environ)
    lines = ssh_tunnel.lines(port, home.user(), host, cluster.login_host, os.environ)
    print(f"TensorBoard is at http://localhost:{port}/ on {host}. On your own computer type")
    print("".join(f"    {line}\n" for line in lines) + f"and open http://localhost:{port}/ there. Ctrl-C ends it here.")
    if not cluster.login_host:
        file = f"configs/cluster/{cluster.name}.yaml or {compose.PERSONAL}"
        print(f"(cluster.login_host is not known: where this machine has another name outside, set it in {file})")
    sys.stdout.flush()


if __name__ == "__main__":
    with errors.exit_on_config_error():
        main()
