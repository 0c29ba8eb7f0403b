"""The meeting of ranks before there is a process group: a key-value store, an exchange of values, their addresses.

Imports torch when a store is opened.
"""

import json
import socket
import struct
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from hpc.config.errors import ConfigError
from hpc.launch import rendezvous
from hpc.launch.placement import Placement

GRACE_SECONDS = 10  # that ranks wait for a common answer, in addition to the limit for single ranks


def open_store(place: Placement, environ: MutableMapping[str, str], *, timeout_seconds: float) -> Any:
    """Return a key-value store that all ranks reach, served by rank 0 as long as it lives. Set MASTER_PORT to its port.

    Raises:
        ConfigError: rank 0 is not reached in time, or another launch uses the store.
    """
    from torch.distributed import DistNetworkError, DistStoreError, PrefixStore  # pyright: ignore

    end = time.monotonic() + timeout_seconds
    launch, host = rendezvous.LaunchIdentity.from_environ(place, environ), environ["MASTER_ADDR"]
    if place.rank == 0 and place.launcher != "torchrun":
        store = serve_store(host, environ, timeout_seconds=timeout_seconds)
        if place.world_size > 1:
            rendezvous.PortServer(launch, store.port, timeout_seconds=timeout_seconds)
        return PrefixStore("preflight", store)
    try:
        if place.launcher != "torchrun":  # which serves a store itself, at the port that it was given
            port = rendezvous.find_store_port(launch, place, host=host, timeout_seconds=timeout_seconds)
            environ["MASTER_PORT"] = str(port)
        store = PrefixStore("preflight", join_store(environ, max(end - time.monotonic(), 1)))
    except (TimeoutError, DistNetworkError, DistStoreError):
        me = f"rank {place.rank} on {socket.gethostname()}"
        rule = f"must lead to rank 0, which {me} did not reach within {timeout_seconds:g} s"
        fix = "look for rank 0's message above; if it has none: cluster.master_addr_suffix= or cluster.interface="
        # All ranks but 0 may come here; one of them prints the message.
        address = f"{host}:{launch.ports[0]}"
        raise ConfigError("MASTER_ADDR:MASTER_PORT", address, rule, fix, only_this_rank=place.rank == 1) from None
    if place.launcher == "torchrun":
        _reject_other_launch(store, place, launch=launch, environ=environ)
    return store


def serve_store(host: str, environ: MutableMapping[str, str], *, timeout_seconds: float) -> Any:
    """Return a store that this process serves at a port of the system's choice, also for the process group.

    Raises:
        ConfigError: this process cannot be reached under the name `host`.
    """
    from torch.distributed import DistNetworkError, DistStoreError, TCPStore  # pyright: ignore

    timeout = timedelta(seconds=max(timeout_seconds, 1))
    try:
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    except (DistNetworkError, DistStoreError) as error:
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
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


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


def _reject_other_launch(
    store: Any, place: Placement, *, launch: rendezvous.LaunchIdentity, environ: Mapping[str, str]
) -> None:
    """Raise `ConfigError` if another launch uses the store, or another process has this rank.

    torchrun joins whatever store it finds at the port that it was given.
    """
    key = f"{environ.get('TORCHELASTIC_RUN_ID')}.{launch.key}"
    if store.compare_set("launch", "", key).decode() != key or store.add(f"seat/{place.rank}", 1) > 1:
        rule = "must be a port that no other launch uses, and ranks of torchrun must not be started again"
        fix = "another --master-port=, and no --max-restarts="
        raise ConfigError("--master-port", environ["MASTER_PORT"], rule, fix)


def _format_ranges(numbers: list[int]) -> str:
    """Return 1, 2, 3, 7 as `1-3, 7`."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return ", ".join(f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0]) for numbers in ranges)
