"""The command tools/board.py: serve the curves of runs with TensorBoard on this machine, and print how to reach it."""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from hpc.config import personal_clusters
from hpc.config.sections import ClusterConfig
from hpc.report import ssh_tunnel, tensorboard_server
from hpc.system import home


def serve_until_stopped(places: Sequence[Path], cluster: ClusterConfig) -> int:
    """Serve until Ctrl-C, a signal, or the end of TensorBoard; return the exit code.

    Args:
        places: run directories, or folders of them.
        cluster: its `login_host` leads to this machine.

    Raises:
        ConfigError: a place does not exist, no place has curves, or TensorBoard does not start.
    """
    arguments = tensorboard_server.logdir_arguments(tensorboard_server.select_places(places))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        with tensorboard_server.TensorBoardServer(arguments) as server:
            print("\n".join(address_lines(server.port, cluster)), flush=True)
            return server.wait() or 1
    except KeyboardInterrupt:
        print()  # end the line of ^C
        return 0


def address_lines(port: int, cluster: ClusterConfig) -> list[str]:
    """Return where TensorBoard listens, and the ssh command that leads there, as lines for the terminal."""
    host, login_host = ssh_tunnel.name_of_this_host(os.environ), cluster.login_host
    commands = ssh_tunnel.ssh_lines(port, user=home.user_name(), host=host, login_host=login_host, environ=os.environ)
    lines = [
        f"TensorBoard is at http://localhost:{port}/ on {host}. On your own computer type",
        *(f"    {command}" for command in commands),
        f"and open http://localhost:{port}/ there. Ctrl-C ends it here.",
    ]
    if not login_host:
        file = f"configs/cluster/{cluster.name}.yaml or {personal_clusters.PERSONAL_CLUSTERS}"
        lines.append(f"(cluster.login_host is unknown: if this machine has another name outside, set it in {file})")
    return lines
