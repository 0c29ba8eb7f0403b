"""The network check as its ranks run it: meet like a training run, measure, write network.txt and network.json."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig

from hpc.config import compose, layout
from hpc.config.parse import parse
from hpc.config.sections import Config
from hpc.launch import bandwidth, nccl_log, node_checks, placement
from hpc.launch.bandwidth import CollectiveTiming
from hpc.run import attempt_log, command_line, directory, frozen_config, signals, watchdog
from hpc.studies.network_check_command import reject_single_rank
from hpc.system import files
from hpc.training import meet_ranks, starting_point

RESULT_FILE = "network.json"
TABLE_FILE = "network.txt"


def run_network_check(
    node: DictConfig, place: placement.Placement, *, signal_state: signals.SignalState, words: Sequence[str]
) -> None:
    """Check the config and measure; every rank calls this. Leave with exit code 1 if all ranks are told to stop.

    Args:
        signal_state: the signals that this process received.
        words: the command line, which is kept beside the config.
    """
    cfg = parse(node)
    reject_single_rank(cfg)
    is_frozen = command_line.resume_directory(words) is not None
    try:
        overrides = compose.select_overrides(words)
        _measure_and_write(cfg, place, signal_state=signal_state, words=overrides, is_frozen=is_frozen)
    except watchdog.Stopped as stopped:
        if placement.is_reporting_rank(place, os.environ):
            print(f"stopped: {stopped.why}", flush=True)
        sys.exit(1)


def _measure_and_write(
    cfg: Config,
    place: placement.Placement,
    *,
    signal_state: signals.SignalState,
    words: Sequence[str],
    is_frozen: bool,
) -> None:
    """Measure between all ranks. Rank 0 prints the table, and keeps it in the run directory and for plan.py.

    Args:
        is_frozen: the config comes from the run directory.

    Raises:
        Stopped: on all ranks, between two measurements.
    """
    node_checks.check_launch(cfg, place, environ=os.environ)
    signal_state.launcher_pid = os.getppid()
    fresh = directory.choose_run_dir(
        cfg.run_dir, cfg.name, now=datetime.now(), environ=os.environ, step=place.step or "0"
    )
    start = meet_ranks.begin_attempt(
        cfg, place, new_run_dir=fresh, is_frozen=is_frozen, environ=os.environ
    )  # torch from here on
    run_dir, hang_seconds = cfg.run_path, 60 * cfg.faults.hang_minutes
    if start.claim:
        frozen_config.create_or_replace(run_dir, cfg.node, words=words)
        facts = {"launcher": place.launcher, "hosts": start.hosts, "world_size": place.world_size}
        gpus = cfg.trainer.devices if layout.is_on_gpu(cfg) else 0
        attempt_log.record_start(run_dir, start.attempt, environ=os.environ, **facts, gpus_per_node=gpus)
    with watchdog.Watchdog(
        run_dir,
        start.claim,
        attempt=start.attempt,
        rank=place.rank,
        world_size=place.world_size,
        store=start.store,
        hang_seconds=hang_seconds,
        signals=signal_state,
    ) as watch:
        points, seconds = _measure(cfg, place, start=start, watch=watch, signal_state=signal_state)
        if start.claim:
            report = make_report(cfg, start.hosts, points=points, seconds=seconds, logs=_nccl_logs(run_dir))
            _write_report(report, points, run_dir)
            attempt_log.record_end(run_dir, start.claim, attempt=start.attempt, step=len(points), outcome="finished")


def make_report(
    cfg: Config,
    hosts: list[str],
    *,
    points: Sequence[CollectiveTiming],
    seconds: Mapping[str, Sequence[float]],
    logs: Mapping[str, str],
) -> dict[str, Any]:
    """Return the content of network.json.

    Args:
        points: the collectives that were timed.
        seconds: for each comparison (within, neighbours), the time of each node.
        logs: NCCL's log of each host.
    """
    per_node, date = cfg.trainer.devices, f"{datetime.now().astimezone():%Y-%m-%d %H:%M %z}"
    links = {scope: bandwidth.link_from_timings(points, scope, nodes=hosts, date=date) for scope in bandwidth.SCOPES}
    by_host = {comparison: dict(zip(hosts, times, strict=False)) for comparison, times in seconds.items()}
    cluster = cfg.cluster
    return {
        "cluster": cluster.name,
        "backend": _backend(cfg),
        "date": date,
        "nodes": hosts,
        "ranks_per_node": per_node,
        "links": {scope: asdict(link) if link else None for scope, link in links.items()},
        "transports": {host: sorted(nccl_log.used_networks(log)) for host, log in logs.items()},
        "seconds_per_node": by_host,
        "compared": bandwidth.compare_with_cluster(links, cluster, ranks_per_node=per_node),
        "warnings": [*_socket_warnings(logs), *_slow_node_warnings(by_host)],
        "points": [
            asdict(point) | {"algorithm_gbs": point.algorithm_gbs, "bus_gbs": point.bus_gbs} for point in points
        ],
    }


def _measure(
    cfg: Config,
    place: placement.Placement,
    *,
    start: starting_point.AttemptStart,
    watch: watchdog.Watchdog,
    signal_state: signals.SignalState,
) -> tuple[list[CollectiveTiming], dict[str, list[float]]]:
    """Time the collectives; return the points, and by comparison of nodes the seconds of each."""
    import torch
    import torch.distributed as dist

    from hpc.launch import collectives

    _enable_nccl_logs(cfg.run_path / "nccl")
    device = torch.device("cuda", place.local_rank) if layout.is_on_gpu(cfg) else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(_backend(cfg))
    measurement_numbers = count()

    def reduce_max_seconds(measurement: str, seconds: float) -> float:
        """Return the seconds of the slowest rank; stop all ranks if one of them received a signal."""
        watch.report_progress(next(measurement_numbers), measurement)
        both = torch.tensor([seconds, float(signal_state.signal is not None)], dtype=torch.float64, device=device)
        dist.all_reduce(both, dist.ReduceOp.MAX)
        if both[1]:
            _stop(cfg, start, f"{signal_state.signal or 'a signal to another rank'} during {measurement}")
        return float(both[0])

    timings = collectives.measure(
        cfg.trainer.num_nodes, cfg.trainer.devices, device=device, reduce_max_seconds=reduce_max_seconds
    )
    dist.destroy_process_group()
    return timings


def _stop(cfg: Config, start: starting_point.AttemptStart, why: str) -> NoReturn:
    """Note the end of the attempt on the rank that holds its claim, and raise `Stopped`."""
    if start.claim:
        attempt_log.record_end(cfg.run_path, start.claim, attempt=start.attempt, step=0, outcome="failed", why=why)
    raise watchdog.Stopped(0, why, "failed")


def _enable_nccl_logs(folder: Path) -> None:
    """Make NCCL log into a file per rank, whose name begins with its host."""
    folder.mkdir(exist_ok=True)
    file = str(folder).replace("%", "%%") + "/%h.%p.log"
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV", "NCCL_DEBUG_FILE": file}


def _backend(cfg: Config) -> str:
    return "nccl" if layout.is_on_gpu(cfg) else "gloo"


def _nccl_logs(run_dir: Path) -> dict[str, str]:
    """Return NCCL's log by host; empty if NCCL was not used."""
    logs: dict[str, str] = {}
    for path in sorted((run_dir / "nccl").glob("*.log")):
        host = path.name.rsplit(".", 2)[0]
        logs[host] = logs.get(host, "") + path.read_text(errors="replace")
    return logs


def _socket_warnings(logs: Mapping[str, str]) -> list[str]:
    hosts = [
        host for host, log in logs.items() if any(name.startswith("Socket") for name in nccl_log.used_networks(log))
    ]
    if not hosts:
        return []
    reasons = list(dict.fromkeys(reason for host in hosts for reason in nccl_log.failure_reasons(logs[host])))
    return [
        f"NCCL uses sockets (TCP) on {', '.join(hosts)} instead of the fast network between nodes",
        *(f"  NCCL's log: {reason}" for reason in reasons[:3]),
    ]


def _slow_node_warnings(seconds: Mapping[str, Mapping[str, float]]) -> list[str]:
    partners = {"within": "its own ranks", "neighbours": "its neighbours"}
    slow_nodes = [
        (times, host, comparison)
        for comparison in partners
        for host, times in bandwidth.find_slow_nodes(seconds.get(comparison, {})).items()
    ]
    return [
        f"{host} is slow: with {partners[comparison]} it takes {times:.1f} times as long as other nodes"
        for times, host, comparison in sorted(slow_nodes, reverse=True)
    ]


def _write_report(report: dict[str, Any], points: Sequence[CollectiveTiming], run_dir: Path) -> None:
    """Write network.json and network.txt, and print the table."""
    nodes = f"{len(report['nodes'])} nodes" if len(report["nodes"]) > 1 else "one node"
    title = f"{report['backend']} on {nodes} of {report['cluster']} ({', '.join(report['nodes'])}), {report['date']}"
    networks = sorted({name for names in report["transports"].values() for name in names})
    lines = [title, "bandwidths in GB/s, as nccl-tests define them", *bandwidth.timing_table(points)]
    lines += [f"NCCL's network: {', '.join(networks)}"] if networks else []
    lines += [*report["compared"], *(f"warning: {line}" for line in report["warnings"])]
    files.write_atomically(run_dir / RESULT_FILE, json.dumps(report, indent=1))
    if report["backend"] == "nccl":
        lines += [f"python plan.py network={run_dir} plans with these links"]
    files.write_atomically(run_dir / TABLE_FILE, "".join(f"{line}\n" for line in lines))
    print("\n".join(lines), flush=True)
