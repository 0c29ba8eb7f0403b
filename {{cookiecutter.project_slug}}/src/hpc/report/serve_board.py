"""Serve the curves of runs with TensorBoard on this machine, and say how to reach it from another one."""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from hpc.config import cluster_rules, personal_clusters
from hpc.config.sections import ClusterConfig
from hpc.report import ssh_tunnel, tensorboard
from hpc.system import home


def serve(places: Sequence[Path], cluster: ClusterConfig) -> int:
    """Serve until Ctrl-C, a signal, or the end of TensorBoard; return the exit code.

    Args:
        places: run directories, or folders of them.
        cluster: its `login_host` leads to this machine.

    Raises:
        ConfigError: a place does not exist, no place has curves, or TensorBoard does not start.
    """
    cluster_rules.check_login_host(cluster.login_host)
    words = tensorboard.logdir(tensorboard.shown(places))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        with tensorboard.Board(words) as board:
            print("\n".join(address_lines(board.port, cluster)), flush=True)
            return board.wait() or 1
    except KeyboardInterrupt:
        print()  # end the line of ^C
        return 0


def address_lines(port: int, cluster: ClusterConfig) -> list[str]:
    """Return where TensorBoard listens, and the ssh line that leads there."""
    host = ssh_tunnel.here(os.environ)
    lines = [
        f"TensorBoard is at http://localhost:{port}/ on {host}. On your own computer type",
        *(f"    {line}" for line in ssh_tunnel.lines(port, home.user_name(), host, cluster.login_host, os.environ)),
        f"and open http://localhost:{port}/ there. Ctrl-C ends it here.",
    ]
    if not cluster.login_host:
        file = f"configs/cluster/{cluster.name}.yaml or {personal_clusters.PERSONAL_CLUSTERS}"
        lines.append(f"(cluster.login_host is unknown: if this machine has another name outside, set it in {file})")
    return lines
