"""How ranks meet before there is a process group, and what each has to say to all. torch, where they do."""

import json
import socket
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from hpc.config.errors import ConfigError
from hpc.launch import rendezvous
from hpc.launch.placement import Placement

GRACE_SECONDS = 10  # seconds that ranks wait for the common answer beyond the limit for meeting


def open_store(place: Placement, environ: MutableMapping[str, str], seconds: float) -> Any:
    """A key-value store that all ranks reach, served by rank 0 as long as it lives; MASTER_PORT is its port afterwards.

    Raises:
        ConfigError: rank 0 is not reached within `seconds`, or another launch is met.
    """
    from torch.distributed import DistNetworkError, DistStoreError, PrefixStore  # pyright: ignore

    launch, host, limit = (
        rendezvous.LaunchIdentity.from_environ(place, environ),
        environ["MASTER_ADDR"],
        time.monotonic() + seconds,
    )
    if place.rank == 0 and place.launcher != "torchrun":
        store = serve_store(host, environ, timeout_seconds=seconds)
        if place.world_size > 1:
            rendezvous.PortServer(launch, store.port, seconds)
        return PrefixStore("preflight", store)
    try:
        if place.launcher != "torchrun":  # which has a store of its own, at the port that it was told
            environ["MASTER_PORT"] = str(rendezvous.find_store_port(launch, place, host, seconds))
        store = PrefixStore("preflight", join_store(environ, max(limit - time.monotonic(), 1)))
    except (TimeoutError, DistNetworkError, DistStoreError):
        rule = f"rank {place.rank} on {socket.gethostname()} did not reach rank 0 there within {seconds:g} s"
        fix = "look for rank 0's message above; if it has none: cluster.master_addr_suffix= or cluster.interface="
        # All ranks but 0 may come here: one of them speaks.
        where = f"{host}:{launch.ports[0]}"
        raise ConfigError("MASTER_ADDR:MASTER_PORT", where, rule, fix, only_this_rank=place.rank == 1) from None
    if place.launcher == "torchrun":
        _reject_other_launch(store, place, launch, environ)
    return store


def serve_store(host: str, environ: MutableMapping[str, str], seconds: float) -> Any:
    """A store at a port that the system chooses, so it can be nobody else's; for the process group as well.

    Raises:
        ConfigError: this process cannot be reached under the name `host`.
    """
    from torch.distributed import DistNetworkError, DistStoreError, TCPStore  # pyright: ignore

    limit = timedelta(seconds=max(seconds, 1))
    try:
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
    except (DistNetworkError, DistStoreError) as error:
        rule = f"must lead to {socket.gethostname()}, where rank 0 runs: {str(error).splitlines()[0]}"
        fix = "cluster.master_addr_suffix= as the nodes' names have it"
        raise ConfigError("MASTER_ADDR", host, rule, fix, only_this_rank=True) from None
    # With the last one rank 0's process group joins this store. Without it, it would serve another at the same port.
    environ.update({"MASTER_ADDR": host, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"})
    return store


def join_store(environ: MutableMapping[str, str], seconds: float) -> Any:
    """The store that another process serves at MASTER_ADDR and MASTER_PORT."""
    from torch.distributed import TCPStore  # pyright: ignore

    host, port, limit = environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), timedelta(seconds=seconds)
    environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)


def _reject_other_launch(
    store: Any, place: Placement, launch: rendezvous.LaunchIdentity, environ: Mapping[str, str]
) -> None:
    """torchrun joins whatever store it finds at the port it was told: each rank must be the first of its number."""
    key = f"{environ.get('TORCHELASTIC_RUN_ID')}.{launch.key}"
    if store.compare_set("launch", "", key).decode() != key or store.add(f"seat/{place.rank}", 1) > 1:
        rule = "torchrun must have a port of its own: another launch meets there, or these ranks were started again"
        raise ConfigError(
            "--master-port", environ["MASTER_PORT"], rule, "another --master-port=, and no --max-restarts="
        )


def all_gather_json(
    store: Any, place: Placement, topic: str, mine: dict[str, Any], seconds: float
) -> list[dict[str, Any]]:
    """What every rank has to say on a topic, in order of ranks.

    Raises:
        ConfigError: on every rank alike, when some have not come within `seconds`.
    """
    from torch.distributed import DistStoreError

    keys = [f"{topic}/{rank}" for rank in range(place.world_size)]
    store.set(keys[place.rank], json.dumps(mine))
    if place.rank == 0:
        try:
            store.wait(keys, timedelta(seconds=seconds))
            answers = store.multi_get(keys)  # one by one, those of a thousand ranks take a fifth of a second
        except DistStoreError:  # whoever is missing is told of below
            answers = [store.get(key) if store.check([key]) else b"null" for key in keys]
        store.set(topic, json.dumps(list(map(json.loads, answers))))
    try:
        store.wait([topic], timedelta(seconds=seconds + GRACE_SECONDS))
        heard = json.loads(store.get(topic))
    except (DistStoreError, RuntimeError):
        rule = f"rank 0 has not answered rank {place.rank} on {socket.gethostname()}"
        raise ConfigError(
            "ranks", place.world_size, rule, "see what rank 0 says in the log", only_this_rank=True
        ) from None
    missing = [rank for rank, said in enumerate(heard) if said is None]
    # Rank 0 serves the store, so it leaves last: when all who came have read the answer.
    if store.add(f"{topic}/read", 1) == place.world_size - len(missing):
        store.set(f"{topic}/done", "")
    if place.rank == 0:
        with suppress(DistStoreError):
            store.wait([f"{topic}/done"], timedelta(seconds=GRACE_SECONDS))
    if missing:
        came = ", ".join(sorted({said["host"] for said in heard if said}))
        rule = f"ranks {_format_ranges(missing)} did not come within {seconds:g} s; those on {came} did"
        raise ConfigError(
            "ranks", place.world_size, rule, "see what those ranks say in the log; is one of the nodes down?"
        )
    return heard


def _format_ranges(numbers: list[int]) -> str:
    """1, 2, 3, 7 as `1-3, 7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
