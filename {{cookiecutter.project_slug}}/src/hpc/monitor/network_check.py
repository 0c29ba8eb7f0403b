"""The network check as its ranks run it: meet as a training run does, measure, leave a table and network.json."""

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

from hpc.config import compose, layout, preflight, sections, typed
from hpc.launch import bandwidth, measured_links, nccl_log, node_checks, placement
from hpc.launch.bandwidth import Point
from hpc.launch.measured_links import Measured
from hpc.monitor.network_check_words import reject_alone
from hpc.run import command_line, directory, frozen_config, watchdog
from hpc.system import files
from hpc.training import begin as training_begin
from hpc.training import beginning

RESULT = "network.json"
TABLE = "network.txt"


def run(cfg: DictConfig, place: placement.Place, *, warned: watchdog.Warned, words: Sequence[str]) -> None:
    """Check the config and measure, on every rank; leave with exit code 1 where all of them are told to stop.

    Args:
        words: as typed; they are kept beside the config.
    """
    preflight.rules(cfg)
    reject_alone(cfg)
    is_frozen = command_line.resumes(words) is not None
    try:
        _measure_and_keep(cfg, place, warned=warned, words=compose.typed(words), frozen=is_frozen)
    except watchdog.Stopped as stopped:
        if placement.speaks(place, os.environ):
            print(f"stopped: {stopped.why}", flush=True)
        sys.exit(1)


def _measure_and_keep(
    cfg: DictConfig, place: placement.Place, *, warned: watchdog.Warned, words: Sequence[str], frozen: bool
) -> None:
    """Measure between all ranks. Rank 0 prints the table, and keeps it in the run directory and for the plan.

    Args:
        frozen: the config is the one that a run directory holds.

    Raises:
        Stopped: on all ranks, between two measurements.
    """
    node_checks.placed(cfg, place, os.environ)
    warned.parent = os.getppid()
    fresh = directory.choose(cfg.run_dir, cfg.name, datetime.now(), os.environ, place.step or "0")
    start = training_begin.together(cfg, place, fresh, frozen, os.environ)  # torch from here on
    run_dir, hang_seconds = Path(cfg.run_dir), 60 * cfg.faults.hang_minutes
    if start.claim:
        frozen_config.keep(run_dir, cfg, words)
        facts = {"launcher": place.launcher, "hosts": start.hosts, "world_size": place.world_size}
        gpus = cfg.trainer.devices if layout.on_gpu(cfg) else 0
        directory.start(run_dir, start.attempt, os.environ, **facts, gpus_per_node=gpus)
    with watchdog.Watch(
        run_dir, start.claim, start.attempt, place.rank, place.world_size, start.store, hang_seconds, warned
    ) as watching:
        points, seconds = _measure(cfg, place, start, watching, warned)
        if start.claim:
            report = judged(cfg, start.hosts, points, seconds, _logs(run_dir))
            _leave(report, cfg.cluster.name, run_dir)
            directory.end(run_dir, start.claim, start.attempt, len(points), "finished")


def judged(
    cfg: DictConfig,
    hosts: list[str],
    points: Sequence[Point],
    seconds: Mapping[str, Sequence[float]],
    logs: Mapping[str, str],
) -> dict[str, Any]:
    """What network.json holds.

    Args:
        seconds: per comparison of nodes, the time of each.
        logs: what NCCL said on each host.
    """
    per_node, date = cfg.trainer.devices, f"{datetime.now().astimezone():%Y-%m-%d %H:%M %z}"
    links = {scope: bandwidth.link(points, scope, hosts, date) for scope in bandwidth.SCOPES}
    by_host = {what: dict(zip(hosts, some, strict=False)) for what, some in seconds.items()}
    cluster = typed.typed(sections.Cluster, cfg.cluster, "cluster")
    return {
        "cluster": cluster.name,
        "backend": _backend(cfg),
        "date": date,
        "nodes": hosts,
        "ranks_per_node": per_node,
        "links": asdict(Measured(**links)),
        "transports": {host: sorted(nccl_log.transports(log)) for host, log in logs.items()},
        "seconds_per_node": by_host,
        "compared": bandwidth.compared(links, per_node, cluster),
        "warnings": [*_sockets(logs), *_slow(by_host)],
        "points": [asdict(p) | {"algorithm_gbs": p.algorithm_gbs, "bus_gbs": p.bus_gbs} for p in points],
    }


def _measure(
    cfg: DictConfig,
    place: placement.Place,
    start: beginning.Beginning,
    watching: watchdog.Watch,
    warned: watchdog.Warned,
) -> tuple[list[Point], dict[str, list[float]]]:
    import torch
    import torch.distributed as dist

    from hpc.launch import collectives

    _let_nccl_speak(Path(cfg.run_dir) / "nccl")
    device = torch.device("cuda", place.local_rank) if layout.on_gpu(cfg) else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(_backend(cfg))
    done = count()

    def slowest(doing: str, seconds: float) -> float:
        watching.progress(next(done), doing)
        both = torch.tensor([seconds, float(warned.signal is not None)], dtype=torch.float64, device=device)
        dist.all_reduce(both, dist.ReduceOp.MAX)
        if both[1]:
            _stop(cfg, start, f"{warned.signal or 'a signal to another rank'} during {doing}")
        return float(both[0])

    found = collectives.measure(cfg.trainer.num_nodes, cfg.trainer.devices, device, slowest)
    dist.destroy_process_group()
    return found


def _stop(cfg: DictConfig, start: beginning.Beginning, why: str) -> NoReturn:
    if start.claim:
        directory.end(Path(cfg.run_dir), start.claim, start.attempt, 0, "failed", why)
    raise watchdog.Stopped(0, why, "failed")


def _let_nccl_speak(folder: Path) -> None:
    """Into a file per rank, whose name begins with its host."""
    folder.mkdir(exist_ok=True)
    file = str(folder).replace("%", "%%") + "/%h.%p.log"
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV", "NCCL_DEBUG_FILE": file}


def _backend(cfg: DictConfig) -> str:
    return "nccl" if layout.on_gpu(cfg) else "gloo"


def _logs(run_dir: Path) -> dict[str, str]:
    """What NCCL said, per host; nothing where it was not used."""
    logs: dict[str, str] = {}
    for path in sorted((run_dir / "nccl").glob("*.log")):
        host = path.name.rsplit(".", 2)[0]
        logs[host] = logs.get(host, "") + path.read_text(errors="replace")
    return logs


def _sockets(logs: Mapping[str, str]) -> list[str]:
    fell = [host for host, log in logs.items() if any(name.startswith("Socket") for name in nccl_log.transports(log))]
    if not fell:
        return []
    why = list(dict.fromkeys(reason for host in fell for reason in nccl_log.reasons(logs[host])))
    return [
        f"NCCL sends over sockets (TCP) on {', '.join(fell)}: the fast network between nodes is not used",
        *(f"  it says: {reason}" for reason in why[:3]),
    ]


def _slow(seconds: Mapping[str, Mapping[str, float]]) -> list[str]:
    words = {"within": "its own ranks", "neighbours": "its neighbours"}
    found = [(times, host, what) for what in words for host, times in bandwidth.slow(seconds.get(what, {})).items()]
    return [
        f"{host} is slow: with {words[what]} it takes {times:.1f} times as long as other nodes"
        for times, host, what in sorted(found, reverse=True)
    ]


def _leave(report: dict[str, Any], cluster: str, run_dir: Path) -> None:
    points = [Point(**{key: p[key] for key in Point.__dataclass_fields__}) for p in report["points"]]
    nodes = f"{len(report['nodes'])} nodes" if len(report["nodes"]) > 1 else "one node"
    title = f"{report['backend']} on {nodes} of {cluster} ({', '.join(report['nodes'])}), {report['date']}"
    networks = sorted({name for names in report["transports"].values() for name in names})
    lines = [title, "bandwidths in GB/s, as nccl-tests define them", *bandwidth.table(points)]
    lines += [f"NCCL's network: {', '.join(networks)}"] if networks else []
    lines += [*report["compared"], *(f"warning: {line}" for line in report["warnings"])]
    files.put(run_dir / RESULT, json.dumps(report, indent=1))
    try:
        kept = measured_links.keep(cluster, report["backend"], measured_links.read(report["links"]))
        lines += [f"kept for the plan in {kept}"]
    except OSError as error:
        lines += [f"warning: not kept for the plan: {error}"]
    files.put(run_dir / TABLE, "".join(f"{line}\n" for line in lines))
    print("\n".join(lines), flush=True)
