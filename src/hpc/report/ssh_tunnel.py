"""The ssh command by which a person's own computer reaches a port of this machine that listens on localhost only."""

import socket
from collections.abc import Mapping


def name_of_this_host(environ: Mapping[str, str]) -> str:
    """Return this machine's name within the cluster, with its domain if that is known."""
    name = socket.getfqdn()
    return environ.get("SLURMD_NODENAME") or (socket.gethostname() if name.startswith("localhost") else name)


def ssh_lines(port: int, *, user: str, host: str, login_host: str | None, environ: Mapping[str, str]) -> list[str]:
    """Return the commands to type on one's own computer, each on one line; explanations are in brackets.

    Args:
        host: this machine, see `name_of_this_host`.
        login_host: where ssh leads from outside; None if unknown.
    """
    forward = f"-L {port}:localhost:{port}"
    if "SLURMD_NODENAME" in environ or "PBS_JOBID" in environ:  # a compute node; salloc's shell may not be on one
        login = login_host or environ.get("SLURM_SUBMIT_HOST") or environ.get("PBS_O_HOST")
        return [
            f"ssh -J {user}@{login or 'LOGIN_HOST'} {forward} {user}@{host}",
            f"(a jump, because only {_short_name(host)} itself reaches its localhost. If ssh to compute nodes is not",
            "allowed, run this on a login node instead: it reads the same run directories)",
        ]
    direct = f"ssh {forward} {user}@{login_host or host}"
    if not login_host or _short_name(login_host) == _short_name(host):
        return [direct]
    return [
        direct,
        f"(if {login_host} leads to another login node than {_short_name(host)}, where this runs:)",
        f"ssh -J {user}@{login_host} {forward} {user}@{host}",
    ]


def _short_name(host: str) -> str:
    return host.partition(".")[0]
