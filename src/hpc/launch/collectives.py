"""Time collectives of torch.distributed. Needs a process group; all ranks make the same calls."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hpc.launch import bandwidth
from hpc.launch.bandwidth import CollectiveTiming

# From a latency to what FSDP gathers at once, and less on CPUs, which share a node's memory.
MESSAGE_BYTES = {"cuda": [1 << n for n in range(10, 32, 3)], "cpu": [1 << n for n in range(10, 26, 3)]}
SIZE_RATIO = 8  # from one message to the next
NEIGHBOUR_BYTES = {"cuda": 1 << 28, "cpu": 1 << 22}  # of the message between neighbouring nodes
SECONDS_PER_TIMING = 0.5  # that all repeats of one message may take
MIN_REPEATS, MAX_REPEATS = 5, 20
MAX_CALLS_PER_REPEAT = 20  # in a row, between two looks at the clock
MAX_CALL_SECONDS = 2.0  # messages of which one call would take longer are left out

ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from torch 2.13 on
Call = Callable[[], object]
ReduceMaxSeconds = Callable[[str, float], float]  # what is timed, this rank's seconds → the slowest rank's seconds


def measure(
    num_nodes: int, ranks_per_node: int, *, device: torch.device, reduce_max_seconds: ReduceMaxSeconds
) -> tuple[list[CollectiveTiming], dict[str, list[float]]]:
    """Time all collectives in all scopes.

    Args:
        reduce_max_seconds: a collective call that returns the longest seconds of all ranks.

    Returns:
        The timings; and the seconds that each node needs for a large message, by itself and with its neighbours.
    """
    timings: list[CollectiveTiming] = []
    seconds_per_node: dict[str, list[float]] = {}
    for scope, ranks in bandwidth.rank_groups(num_nodes, ranks_per_node).items():
        group, num_ranks = _make_own_group(ranks), len(ranks[0])
        for size in MESSAGE_BYTES[device.type]:
            longest_call = 0.0
            for name in bandwidth.BUS_FACTORS:
                call = make_collective(name, size, num_ranks=num_ranks, device=device, group=group)
                what = f"{name} {scope}, {size} bytes"
                call_seconds, seconds = _time_repeats(
                    call, group, what=what, device=device, reduce_max_seconds=reduce_max_seconds
                )
                repeats = seconds.max(dim=0).values.tolist()
                timings.append(
                    bandwidth.summarize_repeats(scope, name, num_ranks=num_ranks, size_bytes=size, seconds=repeats)
                )
                if scope == "within":
                    seconds_per_node[scope] = [_median_of_slowest(seconds, node_ranks) for node_ranks in ranks]
                longest_call = max(longest_call, call_seconds)
            if SIZE_RATIO * longest_call > MAX_CALL_SECONDS:
                break
    if rounds := bandwidth.neighbour_rounds(num_nodes):
        seconds_per_node["neighbours"] = _time_neighbours(
            rounds, num_nodes, ranks_per_node=ranks_per_node, device=device, reduce_max_seconds=reduce_max_seconds
        )
    return timings, seconds_per_node


def make_collective(name: str, size_bytes: int, *, num_ranks: int, device: torch.device, group: Any) -> Call:
    """Return a call with a message of so many bytes: the whole of what is reduced or gathered."""
    share = torch.zeros(max(size_bytes // 4 // num_ranks, 1), device=device)
    whole = torch.zeros(share.numel() * num_ranks, device=device)
    if name == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    return lambda: ALL_GATHER(whole, share, group=group)


def _time_repeats(
    call: Call, group: Any, *, what: str, device: torch.device, reduce_max_seconds: ReduceMaxSeconds
) -> tuple[float, torch.Tensor]:
    """Return the slowest rank's seconds of one call after a warm-up; and those of all repeats, (ranks, repeats)."""
    _seconds_per_call(call, 1, group=group, device=device)  # connects
    call_seconds = reduce_max_seconds(what, _seconds_per_call(call, 1, group=group, device=device))
    num_calls = max(1, min(MAX_CALLS_PER_REPEAT, int(SECONDS_PER_TIMING / MAX_REPEATS / call_seconds)))
    num_repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(SECONDS_PER_TIMING / num_calls / call_seconds)))
    own = [_seconds_per_call(call, num_calls, group=group, device=device) for _ in range(num_repeats)]
    own_seconds = torch.tensor(own, dtype=torch.float64, device=device)
    seconds = torch.zeros(dist.get_world_size() * num_repeats, dtype=torch.float64, device=device)
    ALL_GATHER(seconds, own_seconds)
    return call_seconds, seconds.reshape(-1, num_repeats).cpu()


def _seconds_per_call(call: Call, num_calls: int, *, group: Any, device: torch.device) -> float:
    """Return the seconds of one call out of several in a row, which all ranks start together."""
    devices = [device.index] if device.type == "cuda" else None
    dist.barrier(device_ids=devices)
    if group:  # a slow node lets others out of the first barrier at different times
        dist.barrier(group, device_ids=devices)
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / num_calls


def _make_own_group(groups: list[list[int]]) -> Any:
    """Make all groups, as all ranks must, and return the one of this rank; None if it is in none."""
    process_groups = [dist.new_group(ranks) for ranks in groups]
    pairs = zip(process_groups, groups, strict=True)
    return next((process_group for process_group, ranks in pairs if dist.get_rank() in ranks), None)


def _time_neighbours(
    rounds: list[list[tuple[int, int]]],
    num_nodes: int,
    *,
    ranks_per_node: int,
    device: torch.device,
    reduce_max_seconds: ReduceMaxSeconds,
) -> list[float]:
    """Return per node the seconds of an all-gather with the faster of its two neighbours."""
    best = [float("inf")] * num_nodes
    for pairs in rounds:
        ranks = [[node * ranks_per_node + local for node in pair for local in range(ranks_per_node)] for pair in pairs]
        group = _make_own_group(ranks)
        size, num_ranks = NEIGHBOUR_BYTES[device.type], 2 * ranks_per_node
        gather = make_collective("all_gather", size, num_ranks=num_ranks, device=device, group=group) if group else None
        call = gather or _do_nothing  # of an odd number of nodes, one has no neighbour in this round
        what = "all_gather with neighbours"
        _, seconds = _time_repeats(call, group, what=what, device=device, reduce_max_seconds=reduce_max_seconds)
        for pair, pair_ranks in zip(pairs, ranks, strict=True):
            for node in pair:
                best[node] = min(best[node], _median_of_slowest(seconds, pair_ranks))
    return best


def _do_nothing() -> None:
    """Take the place of a collective on a rank that has no part in it."""


def _median_of_slowest(seconds: torch.Tensor, ranks: list[int]) -> float:
    """Return the median over repeats of the slowest of these ranks, in seconds."""
    return float(seconds[ranks].max(dim=0).values.median())
