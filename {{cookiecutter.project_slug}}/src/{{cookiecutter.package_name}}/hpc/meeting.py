"""How ranks meet before there is a process group, and what each has to say to all. torch, where they do."""

import json
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from .config import Refused
from .launch import Place

MOST_CALLS = 10_000  # a second, of all ranks together, for a rank 0 that is not there yet
GRACE = 10  # seconds that ranks wait for the common answer beyond the limit for meeting


def meet(place: Place, environ: Mapping[str, str], seconds: float) -> Any:
    """A key-value store that all ranks reach, served by rank 0 as long as it lives.

    Raises:
        Refused: rank 0 is not reached within `seconds`, or its port is taken.
    """
    from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, TCPStore  # pyright: ignore

    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    serves = place.rank == 0 and place.launcher != "torchrun"
    limit = time.monotonic() + seconds
    if not serves:
        _listened_for(host, port, limit, pause=max(0.1, place.world_size / MOST_CALLS))
    left = timedelta(seconds=max(limit - time.monotonic(), 1))
    try:
        store = TCPStore(host, port, is_master=serves, wait_for_workers=False, timeout=left)
    except (DistNetworkError, DistStoreError) as error:
        if serves:
            rule = f"rank 0 could not open this port on {socket.gethostname()}: {str(error).splitlines()[0]}"
            raise Refused("MASTER_PORT", port, rule, "start again, or export another MASTER_PORT") from None
        rule = f"rank {place.rank} on {socket.gethostname()} did not reach rank 0 there within {seconds:g} s"
        fix = "look for rank 0's message above; if it has none: cluster.master_addr_suffix= or cluster.interface="
        # All ranks but 0 may come here: one of them speaks.
        raise Refused("MASTER_ADDR:MASTER_PORT", f"{host}:{port}", rule, fix, alone=place.rank == 1) from None
    return PrefixStore("preflight", store)


def _listened_for(host: str, port: int, limit: float, pause: float) -> None:
    """Until something listens there, or the time is over: whoever connects then will say so.

    TCPStore looks again after half a second, and then ever more rarely: a rank 0 that needs ten seconds to import torch
    would be found three seconds late.
    """
    while (left := limit - time.monotonic()) > 0:
        try:
            socket.create_connection((host, port), timeout=min(left, 5)).close()
            return
        except OSError:
            time.sleep(min(left, pause))


def exchange(store: Any, place: Place, topic: str, mine: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
    """What every rank has to say on a topic, in order of ranks.

    Raises:
        Refused: on every rank alike, when some have not come within `seconds`.
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
        store.wait([topic], timedelta(seconds=seconds + GRACE))
        heard = json.loads(store.get(topic))
    except (DistStoreError, RuntimeError):
        rule = f"rank 0 has not answered rank {place.rank} on {socket.gethostname()}"
        raise Refused("ranks", place.world_size, rule, "see what rank 0 says in the log", alone=True) from None
    missing = [rank for rank, said in enumerate(heard) if said is None]
    # Rank 0 serves the store, so it leaves last: when all who came have read the answer.
    if store.add(f"{topic}/read", 1) == place.world_size - len(missing):
        store.set(f"{topic}/done", "")
    if place.rank == 0:
        with suppress(DistStoreError):
            store.wait([f"{topic}/done"], timedelta(seconds=GRACE))
    if missing:
        came = ", ".join(sorted({said["host"] for said in heard if said}))
        rule = f"ranks {_ranges(missing)} did not come within {seconds:g} s; those on {came} did"
        raise Refused("ranks", place.world_size, rule, "see what those ranks say in the log; is one of the nodes down?")
    return heard


def _ranges(numbers: list[int]) -> str:
    """1, 2, 3, 7 as `1-3, 7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
