"""How a person's own computer reaches a port of this machine that listens on localhost alone: the ssh line to type."""

import socket
from collections.abc import Mapping


def here(environ: Mapping[str, str]) -> str:
    """This machine's name as others of the cluster know it, with its domain where one is known."""
    name = socket.getfqdn()
    return environ.get("SLURMD_NODENAME") or (socket.gethostname() if name.startswith("localhost") else name)


def lines(port: int, user: str, host: str, login_host: str | None, environ: Mapping[str, str]) -> list[str]:
    """What to type there, a line each to be copied whole; in brackets, when something else is needed.

    Args:
        host: this machine, as `here` names it.
        login_host: where ssh leads from outside; None: not known.
    """
    forward = f"-L {port}:localhost:{port}"
    if "SLURMD_NODENAME" in environ or "PBS_JOBID" in environ:  # a compute node; salloc's shell may not be on one
        login = login_host or environ.get("SLURM_SUBMIT_HOST") or environ.get("PBS_O_HOST")
        return [
            f"ssh -J {user}@{login or 'LOGIN_HOST'} {forward} {user}@{host}",
            f"(a jump, because only {_short(host)} itself reaches its localhost. Where ssh to compute nodes is not",
            "allowed, run this on a login node instead: it reads the same run directories)",
        ]
    direct = f"ssh {forward} {user}@{login_host or host}"
    if not login_host or _short(login_host) == _short(host):
        return [direct]
    return [
        direct,
        f"(if {login_host} leads to another login node than {_short(host)}, where this runs:)",
        f"ssh -J {user}@{login_host} {forward} {user}@{host}",
    ]


def _short(host: str) -> str:
    return host.partition(".")[0]
