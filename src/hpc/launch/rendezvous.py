"""Discovery of the port of rank 0's store by the ranks of one launch. Imports no torch.

The store listens on a port that the system chooses. Rank 0 serves this number at the first free one of a few ports that
all ranks can derive. Another program may listen at such a port, so each answer names the launch that it belongs to.
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

NUM_PORTS = 32  # that are tried: all but one may be in use by other launches
ANSWER_SECONDS = 2.0  # that a program at a port has to answer
MAX_LINE_BYTES = 4096  # of a request or an answer
MAX_CALLS_PER_SECOND = 10_000  # of all ranks together, while rank 0 does not listen yet


@dataclass(frozen=True)
class LaunchIdentity:
    """Identity of one launch: equal on its ranks, different on those of others."""

    key: str  # from the scheduler or the parent process
    command: str  # checksum of the command line and its folder. Ranks that differ in it still meet, to report it
    ports: tuple[int, ...]  # at which rank 0 may serve the port of its store

    @classmethod
    def from_environ(cls, place: Placement, environ: Mapping[str, str]) -> Self:
        """Return the identity of this process's launch.

        Raises:
            ConfigError: MASTER_PORT is exported and is not a port.
        """
        # The job number alone does not do: one job may have several launches, and several attempts after a requeue.
        # Outside of jobs, ranks share an exported port, or else the process that started all of them on this node. A
        # wrapper around each rank breaks this: the ranks then have different parents.
        exported_port = environ.get("MASTER_PORT")
        shares_parent = place.local_world_size == place.world_size and not exported_port
        job = placement.job_id(environ) or (os.getppid() if shares_parent else "")
        key = f"{os.getuid()}.{job}.{place.step}.{placement.start_key(environ)}.{place.world_size}.{exported_port}"
        first = [_parse_port(exported_port)] if exported_port else []
        derived = [10000 + zlib.crc32(f"{key}.{number}".encode()) % 20000 for number in range(NUM_PORTS)]
        command = json.dumps([sys.argv, os.getcwd()])
        return cls(key, f"{zlib.crc32(command.encode()):08x}", (*first, *derived))


class PortServer:
    """A server on rank 0 that tells the ranks of this launch, and nobody else, the port of the store.

    The first process to ask for a rank number gets it, so two launches with one key cannot mix into too many ranks.

    Args:
        timeout_seconds: how long the server runs.

    Raises:
        ConfigError: all ports are taken.
    """

    def __init__(self, launch: LaunchIdentity, store_port: int, *, timeout_seconds: float) -> None:
        self._launch, self._store_port, self._end = launch, store_port, time.monotonic() + timeout_seconds
        self._processes: dict[int, str] = {}  # rank → id of the process that has asked first
        self._lock = threading.Lock()
        self._socket = _listen(launch.ports)
        threading.Thread(target=self._serve, daemon=True, name="port-server").start()

    def _serve(self) -> None:
        with self._socket, suppress(OSError):
            while (remaining_seconds := self._end - time.monotonic()) > 0:
                self._socket.settimeout(remaining_seconds)
                connection, _ = self._socket.accept()
                arguments: dict[str, Any] = {"args": [connection], "daemon": True, "name": "port-server"}
                threading.Thread(target=self._handle_connection, **arguments).start()

    def _handle_connection(self, connection: socket.socket) -> None:
        # Any program may connect and send anything. It gets no answer unless it asks as a rank does.
        with connection, suppress(Exception):
            answer = self._make_answer(json.loads(_receive_line(connection)))
            connection.sendall(json.dumps(answer).encode() + b"\n")

    def _make_answer(self, request: dict[str, Any]) -> dict[str, Any]:
        has_same_command = request["command"] == self._launch.command or request["any_command"] is True
        if request["key"] != self._launch.key or not has_same_command:
            return {}
        with self._lock:
            first_process = self._processes.setdefault(int(request["rank"]), request["process"])
        if request["process"] != first_process:
            return {}
        return {"launch": self._launch.key, "store_port": self._store_port}


def find_store_port(launch: LaunchIdentity, place: Placement, *, host: str, timeout_seconds: float) -> int:
    """Return the port of the store that rank 0 of this launch serves on `host`.

    Raises:
        TimeoutError: it was not found within `timeout_seconds`.
    """
    start = time.monotonic()
    request = {**asdict(launch), "ports": None, "rank": place.rank, "process": uuid4().hex}
    for attempt in count():
        for port in launch.ports:
            if (elapsed_seconds := time.monotonic() - start) > timeout_seconds:
                raise TimeoutError
            # A server with the same key and another command belongs to another launch, as long as ours may still come.
            request["any_command"] = elapsed_seconds > timeout_seconds / 3
            try:
                if store_port := _request_port(host, port, launch=launch, request=request):
                    return store_port
            except ConnectionRefusedError:
                if attempt % 10:  # rank 0 mostly listens at the first port, so the others are tried once in ten rounds
                    break
            except socket.gaierror:
                break
            except Exception:  # another program listens there: it is silent, or may answer anything
                continue
        # A rank 0 that needs ten seconds to import torch is found soon after.
        remaining_seconds = timeout_seconds - (time.monotonic() - start)
        time.sleep(max(min(remaining_seconds, max(0.1, place.world_size / MAX_CALLS_PER_SECOND)), 0))
    raise AssertionError("count() has no end")


def _parse_port(text: str) -> int:
    if not (text.isdecimal() and 0 < int(text) < 2**16):
        raise ConfigError("MASTER_PORT", text, "must be a port number, from 1 to 65535", "unset MASTER_PORT")
    return int(text)


def _request_port(host: str, port: int, *, launch: LaunchIdentity, request: Mapping[str, Any]) -> int | None:
    """Return the port of the store, or None if another launch answers. Raise what the network or its answer causes."""
    with socket.create_connection((host, port), timeout=ANSWER_SECONDS) as connection:
        connection.sendall(json.dumps(request).encode() + b"\n")
        answer = json.loads(_receive_line(connection))
    return int(answer["store_port"]) if answer.get("launch") == launch.key and "store_port" in answer else None


def _receive_line(connection: socket.socket) -> bytes:
    """Return what the other end sends up to the end of a line, limited in time and length. Raise `OSError`."""
    end, text = time.monotonic() + ANSWER_SECONDS, b""
    while b"\n" not in text and len(text) < MAX_LINE_BYTES:
        connection.settimeout(max(end - time.monotonic(), 0.001))
        if not (part := connection.recv(MAX_LINE_BYTES)):
            break
        text += part
    return text


def _listen(ports: Sequence[int]) -> socket.socket:
    """Return a socket that listens at the first of these ports that is free.

    Raises:
        ConfigError: none is.
    """
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    for port in ports:
        with suppress(OSError):  # in use, or not permitted
            return socket.create_server(("", port), family=family, backlog=4096, dualstack_ipv6=has_both)
    rule = f"must be free on {socket.gethostname()}, where rank 0 listens; {len(ports) - 1} other ports are taken, too"
    raise ConfigError("MASTER_PORT", ports[0], rule, "start again, or export another MASTER_PORT")
