"""How the ranks of one launch find rank 0's store among whatever else listens on its node. No torch.

The store listens on a port that the system chooses. Where it is, rank 0 tells at the first free one of a few ports that
all ranks can derive. A port that answers proves nothing: it may be a neighbour's, or a service that never replies.
"""

import json
import os
import socket
import sys
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any, Self
from uuid import uuid4

from hpc.config.errors import ConfigError
from hpc.launch import placement
from hpc.launch.placement import Placement

NUM_PORTS = 32  # that are tried: neighbours may have as many of them
ANSWER_SECONDS = 2.0  # seconds that whoever listens at a port has to answer
MAX_LINE_BYTES = 4096  # bytes of a question or an answer
MAX_CALLS_PER_SECOND = 10_000  # a second, of all ranks together, for a rank 0 that is not there yet


@dataclass(frozen=True)
class LaunchIdentity:
    """What the ranks of one launch have in common, and those of another one have not.

    `key`: from the scheduler or the parent process. `words`: a checksum of what was typed, and where; ranks of one
    launch should agree about it, and if they do not, they must meet to learn that.
    """

    key: str
    words: str
    ports: tuple[int, ...]

    @classmethod
    def of(cls, place: Placement, environ: Mapping[str, str]) -> Self:
        """This process's. Raises `ConfigError` where MASTER_PORT is exported and is not a port."""
        # Not the job number alone: several launches in one job, and attempts after a requeue, must be told apart.
        # Where there is no job, what a person has exported must do, or else the process that started all ranks here: a
        # wrapper around each rank would be another process for each.
        asked = environ.get("MASTER_PORT")
        alike = place.local_world_size == place.world_size and not asked
        job = placement.job_id(environ) or (os.getppid() if alike else "")
        key = f"{os.getuid()}.{job}.{place.step}.{environ.get('SLURM_RESTART_COUNT', 0)}.{place.world_size}.{asked}"
        first = [_parse_port(asked)] if asked else []
        derived = [10000 + zlib.crc32(f"{key}.{number}".encode()) % 20000 for number in range(NUM_PORTS)]
        words = json.dumps([sys.argv, os.getcwd()])
        return cls(key, f"{zlib.crc32(words.encode()):08x}", (*first, *derived))


def _parse_port(asked: str) -> int:
    if not (asked.isdecimal() and 0 < int(asked) < 2**16):
        raise ConfigError("MASTER_PORT", asked, "must be a port number, from 1 to 65535", "unset MASTER_PORT")
    return int(asked)


class PortServer:
    """On rank 0: tells each rank of this launch, and nobody else, the port of the store. Open for so many seconds.

    Each rank has one seat: where two launches cannot be told apart, each still gets its number of ranks.

    Raises:
        ConfigError: all ports are taken.
    """

    def __init__(self, launch: LaunchIdentity, store_port: int, seconds: float) -> None:
        self._launch, self._store_port, self._limit = launch, store_port, time.monotonic() + seconds
        self._seats: dict[int, str] = {}
        self._lock = threading.Lock()
        self._socket = _listen(launch.ports)
        threading.Thread(target=self._serve, daemon=True, name="reception").start()

    def _serve(self) -> None:
        with self._socket, suppress(OSError):
            while (left := self._limit - time.monotonic()) > 0:
                self._socket.settimeout(left)
                connection, _ = self._socket.accept()
                threading.Thread(target=self._answer, args=[connection], daemon=True, name="reception").start()

    def _answer(self, connection: socket.socket) -> None:
        # What comes from a network may be anything at all: who does not ask as a rank does hears nothing.
        with connection, suppress(Exception):
            answer = self._seat(json.loads(_receive_line(connection)))
            connection.sendall(json.dumps(answer).encode() + b"\n")

    def _seat(self, asked: dict[str, Any]) -> dict[str, Any]:
        ours = asked["key"] == self._launch.key and (asked["words"] == self._launch.words or asked["anyhow"] is True)
        with self._lock:
            if ours and self._seats.setdefault(int(asked["rank"]), asked["who"]) == asked["who"]:
                return {"launch": self._launch.key, "store_port": self._store_port}
        return {}


def find_store_port(launch: LaunchIdentity, place: Placement, host: str, seconds: float) -> int:
    """The port of the store that rank 0 of this launch serves on `host`. Raises `TimeoutError` when time is over."""
    begun = time.monotonic()
    asked = {**asdict(launch), "ports": None, "rank": place.rank, "who": uuid4().hex}
    for look in count():
        for port in launch.ports:
            if (waited := time.monotonic() - begun) > seconds:
                raise TimeoutError
            # A launch of the same key and other words is a neighbour's as long as our own may still come.
            try:
                if store_port := _request_port(host, port, launch, asked | {"anyhow": waited > seconds / 3}):
                    return store_port
            except ConnectionRefusedError:
                if look % 10:  # rank 0 takes the first port that is free: mostly this one is worth a look
                    break
            except socket.gaierror:
                break
            except Exception:  # silent, or no reception: what comes from a network may be anything at all
                continue
        # A rank 0 that needs ten seconds to import torch is found soon after.
        left = seconds - (time.monotonic() - begun)
        time.sleep(max(min(left, max(0.1, place.world_size / MAX_CALLS_PER_SECOND)), 0))
    raise AssertionError("count() has no end")


def _request_port(host: str, port: int, launch: LaunchIdentity, asked: Mapping[str, Any]) -> int | None:
    with socket.create_connection((host, port), timeout=ANSWER_SECONDS) as connection:
        connection.sendall(json.dumps(asked).encode() + b"\n")
        answer = json.loads(_receive_line(connection))
    return int(answer["store_port"]) if answer.get("launch") == launch.key and "store_port" in answer else None


def _receive_line(connection: socket.socket) -> bytes:
    """What the other end says up to the end of a line, soon and not too long. Raises `OSError`."""
    limit, text = time.monotonic() + ANSWER_SECONDS, b""
    while b"\n" not in text and len(text) < MAX_LINE_BYTES:
        connection.settimeout(max(limit - time.monotonic(), 0.001))
        if not (part := connection.recv(MAX_LINE_BYTES)):
            break
        text += part
    return text


def _listen(ports: Sequence[int]) -> socket.socket:
    """A socket that listens at the first of these ports that nobody has."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    for port in ports:
        with suppress(OSError):  # taken, or not ours to take
            return socket.create_server(("", port), family=family, backlog=4096, dualstack_ipv6=both)
    rule = f"rank 0 can listen neither at this port of {socket.gethostname()} nor at {len(ports) - 1} others"
    raise ConfigError("MASTER_PORT", ports[0], rule, "start again, or export another MASTER_PORT")
