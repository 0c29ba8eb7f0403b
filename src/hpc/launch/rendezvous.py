"""The rendezvous of ranks before there is a process group: a key-value store, an exchange of values, addresses.

Imports torch when a store is opened.
"""

import faulthandler
import json
import os
import socket
import struct
import time
import zlib
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from hpc.config.errors import ConfigError, StartFailed
from hpc.launch import placement
from hpc.launch.placement import Placement

GRACE_SECONDS = 10  # that ranks wait for a common answer, in addition to the limit for single ranks


def open_store(place: Placement, environ: MutableMapping[str, str], *, timeout_seconds: float) -> Any:
    """Return a key-value store that all ranks reach, served by rank 0 at MASTER_PORT as long as it lives.

    A job script draws the port anew for each start. Where no script has, the ranks derive it from their launch; the
    system chooses that of a single rank, which meets nobody.

    Raises:
        StartFailed: the port is taken, by another launch or program.
        ConfigError: rank 0 is not reached in time, or MASTER_PORT is no port.
    """
    from torch.distributed import DistNetworkError, DistStoreError, PrefixStore  # pyright: ignore

    end = time.monotonic() + timeout_seconds
    key = launch_key(place, environ)
    host, port = environ["MASTER_ADDR"], _parse_port(environ.get("MASTER_PORT"))
    port = port or (derive_port(key) if place.world_size > 1 else 0)
    environ["MASTER_PORT"] = str(port)
    is_server = place.rank == 0 and place.launcher != "torchrun"  # whose agent serves a store for its ranks
    try:
        store = serve_store(host, environ, port=port, timeout_seconds=timeout_seconds) if is_server else None
        store = PrefixStore("preflight", store or join_store(environ, max(end - time.monotonic(), 1)))
        # The first rank 0 names its launch. Whoever else reaches this store compares.
        server_key = store.compare_set("launch", "", key) if place.rank == 0 else store.get("launch")
    except (DistNetworkError, DistStoreError):
        me = f"rank {place.rank} on {socket.gethostname()}"
        rule = f"must lead to rank 0, which {me} did not reach within {timeout_seconds:g} s"
        fix = "look for rank 0's message above; if it has none: cluster.master_addr_suffix= or cluster.interface="
        # All ranks but 0 may come here; one of them prints the message.
        address, is_printed = f"{host}:{port}", place.rank == 1
        raise ConfigError("MASTER_ADDR:MASTER_PORT", address, rule, fix, only_this_rank=is_printed) from None
    if server_key.decode() != key or store.add(f"seat/{place.rank}", 1) > 1:
        raise _port_taken(place, port)
    return store


def launch_key(place: Placement, environ: Mapping[str, str]) -> str:
    """Return a text that is equal on the ranks of one launch, and differs between launches that may meet."""
    # The job's number alone does not do: one job may have several launches, and several starts after a requeue.
    # Outside of jobs, ranks share an exported port, or else the process that started all of them on this node. A
    # wrapper around each rank breaks this: the ranks then have different parents.
    exported_port = environ.get("MASTER_PORT")
    shares_parent = place.local_world_size == place.world_size and not exported_port
    job = placement.job_id(environ) or (os.getppid() if shares_parent else "")
    agent = environ.get("TORCHELASTIC_RUN_ID") if place.launcher == "torchrun" else ""
    start = placement.start_key(environ)
    return f"{os.getuid()}.{job}.{place.step}.{start}.{place.world_size}.{exported_port}.{agent}"


def derive_port(key: str) -> int:
    """Return the port of a launch whose script has drawn none; below those that Linux gives to connections."""
    return 10000 + zlib.crc32(key.encode()) % 20000


def serve_store(host: str, environ: MutableMapping[str, str], *, port: int = 0, timeout_seconds: float) -> Any:
    """Return a store that this process serves, also for the process group.

    Args:
        port: 0: the system chooses one.

    Raises:
        StartFailed: the port is taken.
        ConfigError: this process cannot be reached under the name `host`.
    """
    from torch.distributed import DistNetworkError, DistStoreError, TCPStore  # pyright: ignore

    timeout = timedelta(seconds=max(timeout_seconds, 1))
    try:
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout)
    except (DistNetworkError, DistStoreError) as error:
        if "EADDRINUSE" in str(error):
            raise _port_taken(None, port) from None
        rule = f"must lead to {socket.gethostname()}, where rank 0 runs: {str(error).splitlines()[0]}"
        fix = "cluster.master_addr_suffix= as the nodes' names have it"
        raise ConfigError("MASTER_ADDR", host, rule, fix, only_this_rank=True) from None
    # The last variable makes rank 0's process group join this store instead of serving another one at its port.
    environ.update({"MASTER_ADDR": host, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"})
    return store


def join_store(environ: MutableMapping[str, str], timeout_seconds: float) -> Any:
    """Return the store that another process serves at MASTER_ADDR and MASTER_PORT."""
    from torch.distributed import TCPStore  # pyright: ignore

    host, port, timeout = environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), timedelta(seconds=timeout_seconds)
    environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    # torch waits without a limit for a program at this port that accepts and says nothing.
    faulthandler.dump_traceback_later(timeout_seconds + GRACE_SECONDS, exit=True)
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    finally:
        faulthandler.cancel_dump_traceback_later()


def all_gather_json(
    store: Any, place: Placement, *, topic: str, value: dict[str, Any], timeout_seconds: float
) -> list[dict[str, Any]]:
    """Return the values of all ranks on a topic, in order of ranks. Each has a "host".

    Raises:
        ConfigError: on every rank alike, when some have not come in time.
    """
    from torch.distributed import DistStoreError

    keys = [f"{topic}/{rank}" for rank in range(place.world_size)]
    store.set(keys[place.rank], json.dumps(value))
    if place.rank == 0:
        _collect(store, topic, keys=keys, timeout_seconds=timeout_seconds)
    try:
        store.wait([topic], timedelta(seconds=timeout_seconds + GRACE_SECONDS))
        values = json.loads(store.get(topic))
    except (DistStoreError, RuntimeError):
        rule = f"Rank 0 has not answered rank {place.rank} on {socket.gethostname()}"
        fix = "see what rank 0 says in the log"
        raise ConfigError("ranks", place.world_size, rule, fix, only_this_rank=True) from None
    missing = [rank for rank, value in enumerate(values) if value is None]
    # Rank 0 serves the store, so it leaves last: when all ranks that came have read the answer.
    if store.add(f"{topic}/read", 1) == place.world_size - len(missing):
        store.set(f"{topic}/done", "")
    if place.rank == 0:
        with suppress(DistStoreError):
            store.wait([f"{topic}/done"], timedelta(seconds=GRACE_SECONDS))
    if missing:
        hosts = ", ".join(sorted({value["host"] for value in values if value}))
        ranks = f"{'Rank' if len(missing) == 1 else 'Ranks'} {_format_ranges(missing)}"
        rule = f"{ranks} did not report to rank 0's store within {timeout_seconds:g} s; those on {hosts} did"
        fix = "see what those ranks say in the log; is one of the nodes down?"
        raise ConfigError("ranks", place.world_size, rule, fix)
    return values


def own_address(peer: str) -> str:
    """Return the address of this machine from which packets to another host are sent; "" if there is no way to it."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))  # a datagram socket: nothing is sent
            return probe.getsockname()[0]
    except OSError:
        return ""


def find_interface(address: str) -> str | None:
    """Return the name of the network interface that has an address; None if none has it (Linux: ioctl SIOCGIFADDR)."""
    import fcntl

    SIOCGIFADDR = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # this interface has no address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _collect(store: Any, topic: str, *, keys: list[str], timeout_seconds: float) -> None:
    """Wait on rank 0 for the values of all ranks, and publish them in one list, with null for missing ranks."""
    from torch.distributed import DistStoreError

    try:
        store.wait(keys, timedelta(seconds=timeout_seconds))
        answers = store.multi_get(keys)  # one by one, those of a thousand ranks take a fifth of a second
    except DistStoreError:  # all ranks report who is missing
        answers = [store.get(key) if store.check([key]) else b"null" for key in keys]
    store.set(topic, json.dumps(list(map(json.loads, answers))))


def _parse_port(text: str | None) -> int | None:
    if text and not (text.isdecimal() and 0 < int(text) < 2**16):
        raise ConfigError("MASTER_PORT", text, "must be a port number, from 1 to 65535", "unset MASTER_PORT")
    return int(text) if text else None


def _port_taken(place: Placement | None, port: int) -> ConfigError:
    """Return the error of a port at which another launch or program listens.

    Args:
        place: of a rank that has found another launch there; None: rank 0 cannot listen.
    """
    if place and place.launcher == "torchrun":  # it joins whatever store it finds at the port that it was given
        rule = "must be a port that no other launch uses, and ranks of torchrun must not be started again"
        return ConfigError("--master-port", port, rule, "another --master-port=, and no --max-restarts=")
    host = f"on {socket.gethostname()}, where" if place is None else "where"
    rule = f"must be free {host} rank 0 listens, and another launch or program uses it"
    fix = "the same again: a job draws another port; where you have exported it: unset MASTER_PORT"
    return StartFailed("MASTER_PORT", port, rule, fix, only_this_rank=place is None or place.rank == 1)


def _format_ranges(numbers: list[int]) -> str:
    """Return 1, 2, 3, 7 as `1-3, 7`."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return ", ".join(f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0]) for numbers in ranges)
