"""TensorBoard on a cluster: find the curves, print the ssh line that leads to them, and become TensorBoard."""

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hpc.config.errors import ConfigError
from hpc.system import home

EVENT_FILE_PREFIX = "events.out.tfevents."


def show_curves(places: Sequence[Path], login_host: str | None) -> NoReturn:
    """Print how to reach TensorBoard, and become TensorBoard, which Ctrl-C or a signal ends.

    Args:
        places: run directories, or folders of them.
        login_host: where ssh leads from outside; None if unknown.

    Raises:
        ConfigError: a place does not exist, or no place has curves.
    """
    arguments = logdir_arguments(select_places(places))
    with socket.socket() as probe:  # if another process takes this port before TensorBoard does, TensorBoard says so
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    print("\n".join(address_lines(port, host=name_of_this_host(), login_host=login_host)), flush=True)
    environ = os.environ | {"no_grpc_proxy": "127.0.0.1,localhost"}  # TensorBoard's data server needs no proxy
    command = [sys.executable, "-m", "tensorboard.main", "--host", "127.0.0.1", "--port", str(port), *arguments]
    os.execve(sys.executable, command, environ)


def select_places(places: Sequence[Path]) -> list[Path]:
    """Return those places that have curves, at whatever depth; name the others on stderr.

    Raises:
        ConfigError: a place does not exist, or none has curves.
    """
    for place in places:
        if not place.is_dir():
            rule = "must be a directory, but " + ("is a file" if place.exists() else "does not exist")
            raise ConfigError("RUN_DIR_OR_FOLDER", place, rule, "a run directory, or a folder of them; default: runs/")
    with_curves = [place for place in places if _has_events(place)]
    if not with_curves:
        rule = "must hold TensorBoard events, but no run in it has logged anything yet"
        raise ConfigError("RUN_DIR_OR_FOLDER", " ".join(map(str, places)), rule, "python train.py, or another folder")
    for place in places:
        if place not in with_curves:
            print(f"{place}: no TensorBoard events", file=sys.stderr)
    return with_curves


def logdir_arguments(places: Sequence[Path]) -> list[str]:
    """Return TensorBoard's arguments for these places; several are named by their paths below their common folder.

    Raises:
        ConfigError: there are several places, and a path contains a comma, which TensorBoard's list cannot hold.
    """
    absolute = list(dict.fromkeys(place.absolute() for place in places))
    if len(absolute) == 1:
        return ["--logdir", str(absolute[0])]
    if place := next((place for place in absolute if "," in str(place)), None):
        rule = "cannot be shown beside others, because TensorBoard separates several places by commas"
        raise ConfigError("RUN_DIR_OR_FOLDER", place, rule, "this one alone")
    common = os.path.commonpath([place.parent for place in absolute])
    names = [os.path.relpath(place, common).replace(":", "_") for place in absolute]
    return ["--logdir_spec", ",".join(f"{name}:{place}" for name, place in zip(names, absolute, strict=True))]


def name_of_this_host() -> str:
    """Return this machine's name within the cluster, with its domain if that is known."""
    name = socket.getfqdn()
    return socket.gethostname() if name.startswith("localhost") else name


def address_lines(port: int, *, host: str, login_host: str | None) -> list[str]:
    """Return where TensorBoard will listen, and the ssh command that leads there, as lines for the terminal.

    Args:
        host: this machine.
        login_host: where ssh leads from outside; None if unknown.
    """
    user = home.user_name()
    is_direct = login_host is None or login_host.partition(".")[0] == host.partition(".")[0]
    jump = "" if is_direct else f"-J {user}@{login_host} "
    lines = [
        f"TensorBoard will be at http://localhost:{port}/ on {host}. On your own computer type",
        f"    ssh {jump}-L {port}:localhost:{port} {user}@{host}",
        f"and open http://localhost:{port}/ there. Ctrl-C ends it here.",
    ]
    if login_host is None:
        key = "cluster.login_host in the cluster's file adds it to the line"
        lines.append(f"(If your computer reaches {host} through a login node only, add -J {user}@LOGIN_NODE; {key}.)")
    if jump:
        lines.append(f"(If ssh to {host} is not allowed, type this on a login node, which has the same files.)")
    return lines


def _has_events(place: Path) -> bool:
    """Return whether there is an event file below this folder. Links are followed, as by TensorBoard, but no circle."""
    visited: set[str] = set()
    for folder, folders, names in os.walk(place, followlinks=True):
        if any(EVENT_FILE_PREFIX in name for name in names):
            return True
        if (real_path := os.path.realpath(folder)) in visited:
            folders.clear()
        visited.add(real_path)
    return False
