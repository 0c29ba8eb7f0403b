"""Collectives of torch.distributed, timed. Needs a process group; all ranks call alike."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hpc.launch import bandwidth
from hpc.launch.bandwidth import CollectiveTiming

# Bytes of the messages: from a latency to what FSDP gathers at once, and less on CPUs, which share a node's memory.
MESSAGE_BYTES = {"cuda": [1 << n for n in range(10, 32, 3)], "cpu": [1 << n for n in range(10, 26, 3)]}
NEIGHBOUR_BYTES = {"cuda": 1 << 28, "cpu": 1 << 22}  # bytes that neighbours gather
SECONDS_PER_TIMING = 0.5  # seconds that one point of the table may take
NUM_REPEATS = (5, 20)
MAX_CALLS_PER_REPEAT = 20  # at most so many in a row, between two looks at the clock
SIZE_RATIO = 8  # from one size to the next
MAX_CALL_SECONDS = 2.0  # seconds: larger messages, of which one call would take longer, are left out

ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # their names from torch 2.13 on
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
Call = Callable[[], object]
SlowestRank = Callable[[str, float], float]  # what is being done, this rank's seconds -> the slowest rank's


def measure(
    nodes: int, per_node: int, device: torch.device, ask: SlowestRank
) -> tuple[list[CollectiveTiming], dict[str, list[float]]]:
    """Points of all scopes; and the seconds that each node needs for a large message, by itself and with neighbours."""
    points: list[CollectiveTiming] = []
    per_node_seconds: dict[str, list[float]] = {}
    for scope, ranks in bandwidth.rank_groups(nodes, per_node).items():
        group = _make_own_group(ranks)
        for size in MESSAGE_BYTES[device.type]:
            slowest = 0.0
            for name in bandwidth.BUS_FACTORS:
                call = make_collective(name, size, len(ranks[0]), device, group)
                first, times = _time_repeats(
                    call, group, device, lambda s, what=f"{name} {scope}, {size} bytes": ask(what, s)
                )
                points.append(
                    bandwidth.summarize_repeats(scope, name, len(ranks[0]), size, times.max(dim=0).values.tolist())
                )
                if scope == "within":
                    per_node_seconds[scope] = [_median_of_slowest(times, some) for some in ranks]
                slowest = max(slowest, first)
            if SIZE_RATIO * slowest > MAX_CALL_SECONDS:
                break
    if rounds := bandwidth.neighbour_rounds(nodes):
        per_node_seconds["neighbours"] = _time_neighbours(rounds, nodes, per_node, device, ask)
    return points, per_node_seconds


def make_collective(name: str, size: int, ranks: int, device: torch.device, group: Any) -> Call:
    """A call with a message of so many bytes; of what is gathered or scattered, that is the whole."""
    share = torch.zeros(max(size // 4 // ranks, 1), device=device)
    whole = torch.zeros(share.numel() * ranks, device=device)
    calls = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: ALL_GATHER(whole, share, group=group),
        "reduce_scatter": lambda: REDUCE_SCATTER(share, whole, group=group),
    }
    return calls[name]


def _time_repeats(
    call: Call, group: Any, device: torch.device, ask: Callable[[float], float]
) -> tuple[float, torch.Tensor]:
    """The slowest rank's seconds for one call, once it is warm; and those of all repeats, (ranks, repeats)."""
    _seconds_per_call(call, 1, group, device)  # connects
    first = ask(_seconds_per_call(call, 1, group, device))
    calls = max(1, min(MAX_CALLS_PER_REPEAT, int(SECONDS_PER_TIMING / NUM_REPEATS[1] / first)))
    repeats = max(NUM_REPEATS[0], min(NUM_REPEATS[1], int(SECONDS_PER_TIMING / calls / first)))
    seconds = [_seconds_per_call(call, calls, group, device) for _ in range(repeats)]
    mine = torch.tensor(seconds, dtype=torch.float64, device=device)
    times = torch.zeros(dist.get_world_size() * repeats, dtype=torch.float64, device=device)
    ALL_GATHER(times, mine)
    return first, times.reshape(-1, repeats).cpu()


def _seconds_per_call(call: Call, calls: int, group: Any, device: torch.device) -> float:
    """Of one call out of several in a row, which all ranks begin together."""
    devices = [device.index] if device.type == "cuda" else None
    dist.barrier(device_ids=devices)
    if group:  # a slow node lets others out of the first barrier at different times
        dist.barrier(group, device_ids=devices)
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begun) / calls


def _make_own_group(groups: list[list[int]]) -> Any:
    """All ranks make all groups; each keeps its own, if it has one."""
    made = [dist.new_group(ranks) for ranks in groups]
    return next((group for group, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks), None)


def _time_neighbours(
    rounds: list[list[tuple[int, int]]], nodes: int, per_node: int, device: torch.device, ask: SlowestRank
) -> list[float]:
    """Per node the seconds of an all-gather with that neighbour with which it is faster."""
    best = [float("inf")] * nodes
    for pairs in rounds:
        ranks = [[node * per_node + local for node in pair for local in range(per_node)] for pair in pairs]
        group = _make_own_group(ranks)  # of an odd number of nodes one looks on
        call = (
            make_collective("all_gather", NEIGHBOUR_BYTES[device.type], 2 * per_node, device, group)
            if group
            else lambda: None
        )
        _, times = _time_repeats(call, group, device, lambda s: ask("all_gather with neighbours", s))
        for pair, some in zip(pairs, ranks, strict=True):
            for node in pair:
                best[node] = min(best[node], _median_of_slowest(times, some))
    return best


def _median_of_slowest(times: torch.Tensor, ranks: list[int]) -> float:
    """The median over repeats of the slowest of these ranks, in seconds."""
    return float(times[ranks].max(dim=0).values.median())
