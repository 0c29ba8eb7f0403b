"""TensorBoard as a process that lives no longer than this one, on a port that nobody else has. Imports no torch."""

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

PATIENCE = 120  # seconds till TensorBoard answers: on a parallel file system its imports may take one minute
GOODBYE = 5  # seconds that it has to end when told to
URL = re.compile(r" at http://127\.0\.0\.1:(\d+)/")
EVENTS = "events.out.tfevents."


def shown(places: Sequence[Path]) -> list[Path]:
    """Those places that have curves, at whatever depth; the others are named on stderr.

    Raises:
        ConfigError: a place that does not exist, or none that has curves.
    """
    for place in places:
        if not place.is_dir():
            rule = "is a file" if place.exists() else "there is no such directory"
            raise ConfigError("RUN_DIR_OR_FOLDER", place, rule, "a run directory, or a folder of them; default: runs/")
    found = [place for place in places if _has_events(place)]
    if not found:
        rule = "holds no TensorBoard events: no run here has logged anything yet"
        raise ConfigError("RUN_DIR_OR_FOLDER", " ".join(map(str, places)), rule, "python train.py, or another folder")
    for place in places:
        if place not in found:
            print(f"{place}: no TensorBoard events", file=sys.stderr)
    return found


def logdir(places: Sequence[Path]) -> list[str]:
    """TensorBoard's words for these places; several are told apart by their paths below the folder they share.

    Raises:
        ConfigError: several, and a path that TensorBoard's list of places cannot hold.
    """
    absolute = list(dict.fromkeys(place.absolute() for place in places))
    if len(absolute) == 1:
        return ["--logdir", str(absolute[0])]
    if bad := next((place for place in absolute if "," in str(place)), None):
        raise ConfigError("RUN_DIR_OR_FOLDER", bad, "TensorBoard separates several places by commas", "this one alone")
    common = os.path.commonpath([place.parent for place in absolute])
    names = [os.path.relpath(place, common).replace(":", "_") for place in absolute]
    return ["--logdir_spec", ",".join(f"{name}:{place}" for name, place in zip(names, absolute, strict=True))]


class Board:
    """A TensorBoard that serves on 127.0.0.1 while the `with` lasts, and dies with this process however that dies.

    It asks the kernel for a port itself and binds it at once, so nobody can take the port in between.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.port = 0
        self._said: deque[str] = deque(maxlen=20)
        self._bound = threading.Event()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tensorboard.main", "--host", "127.0.0.1", "--port", "0", *words],
            env=os.environ | {"no_grpc_proxy": "127.0.0.1,localhost"},  # its data server is asked without one, too
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            preexec_fn=placement.die_with_parent,  # SIGKILL leaves this process no time to end it
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def __enter__(self) -> "Board":
        limit = time.monotonic() + PATIENCE
        try:
            while not (self._bound.wait(0.1) and self._answers()):
                if self._process.poll() is not None or time.monotonic() > limit:
                    raise self._rejection()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(GOODBYE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait(self) -> int:
        """Till TensorBoard ends by itself, which it does not as a rule; its exit code."""
        return self._process.wait()

    def _listen(self) -> None:
        """Read what it says as long as it speaks: a full pipe would hold it up."""
        assert self._process.stderr
        for line in self._process.stderr:
            self._said.append(line.rstrip())
            if found := URL.search(line):
                self.port = int(found[1])
                self._bound.set()

    def _rejection(self) -> ConfigError:
        """What it said last: of a traceback, the error."""
        version = "python -m tensorboard.main --version"
        if self._process.returncode is None:
            rule, fix = f"no answer in {PATIENCE} s", f"{version}, to see whether it starts here"
        else:
            self._listener.join(GOODBYE)  # there is no more to come
            rule, fix = f"ended with exit code {self._process.returncode}", "pip install tensorboard -c constraints.txt"
        said = next((line for line in reversed(self._said) if line.strip()), "it said nothing")
        return ConfigError("tensorboard", None, f"{rule}: {said.strip()}", fix)

    def _answers(self) -> bool:
        """Asked without the proxy that clusters like to set in the environment."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        with suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/data/environment")
            return connection.getresponse().status == 200
        return False


def _has_events(place: Path) -> bool:
    """As TensorBoard looks for them: through links, too, which may lead back to where they are."""
    seen: set[str] = set()
    for folder, folders, names in os.walk(place, followlinks=True):
        if any(EVENTS in name for name in names):
            return True
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()
        seen.add(real)
    return False
