"""TensorBoard as a process that ends with this one, on a port that no other process has. Imports no torch."""

import http.client
import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hpc.config.errors import ConfigError
from hpc.launch import placement

START_TIMEOUT_SECONDS = 120  # on a parallel file system TensorBoard's imports may take one minute
END_TIMEOUT_SECONDS = 5  # after SIGTERM
URL = re.compile(r" at http://127\.0\.0\.1:(\d+)/")
EVENT_FILE_PREFIX = "events.out.tfevents."


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


class TensorBoardServer:
    """A TensorBoard that serves on 127.0.0.1 within a `with` block, and dies with this process however that dies.

    It asks the kernel for a port and binds it at once, so no other process can take the port in between.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.port = 0
        self._last_lines: deque[str] = deque(maxlen=20)
        self._has_port = threading.Event()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tensorboard.main", "--host", "127.0.0.1", "--port", "0", *arguments],
            env=os.environ | {"no_grpc_proxy": "127.0.0.1,localhost"},  # its data server is asked without one, too
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            preexec_fn=placement.die_with_parent,  # SIGKILL leaves this process no time to end it
        )
        self._reader = threading.Thread(target=self._read_stderr, daemon=True)
        self._reader.start()

    def __enter__(self) -> "TensorBoardServer":
        limit = time.monotonic() + START_TIMEOUT_SECONDS
        try:
            while not (self._has_port.wait(0.1) and self._is_responding()):
                if self._process.poll() is not None or time.monotonic() > limit:
                    raise self._start_error()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait(self) -> int:
        """Wait until TensorBoard ends by itself, which it normally does not; return its exit code."""
        return self._process.wait()

    def _read_stderr(self) -> None:
        """Read what TensorBoard prints until it ends, as a full pipe would block it."""
        assert self._process.stderr
        for line in self._process.stderr:
            self._last_lines.append(line.rstrip())
            if match := URL.search(line):
                self.port = int(match[1])
                self._has_port.set()

    def _start_error(self) -> ConfigError:
        """Return the error with TensorBoard's last line, which names the error if it printed a traceback."""
        version = "python -m tensorboard.main --version"
        if self._process.returncode is None:
            rule = f"TensorBoard did not answer within {START_TIMEOUT_SECONDS} s"
            fix = f"{version}, to see whether it starts here"
        else:
            self._reader.join(END_TIMEOUT_SECONDS)  # the rest of its messages
            rule = f"TensorBoard ended with exit code {self._process.returncode}"
            fix = "pip install tensorboard -c constraints.txt"
        message = next((line for line in reversed(self._last_lines) if line.strip()), "it printed nothing")
        return ConfigError("tensorboard", None, f"{rule}: {message.strip()}", fix)

    def _is_responding(self) -> bool:
        """Return whether it answers a request, made without the proxy that clusters often set in the environment."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        with suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/data/environment")
            return connection.getresponse().status == 200
        return False


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
