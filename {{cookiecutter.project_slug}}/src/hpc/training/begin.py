"""Bring the ranks together, make the run directory, and begin an attempt."""

import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from hpc.config import compose
from hpc.config.errors import ConfigError, RunFinished
from hpc.launch import meeting, placement
from hpc.launch.addresses import find_interface, own_address
from hpc.launch.node_checks import check_agreement, collect_node_facts
from hpc.launch.placement import Placement
from hpc.run import changes, directory, restarts
from hpc.training import beginning

READING = 1800  # seconds that ranks may take to look through a checkpoint's files


def together(
    cfg: DictConfig, place: Placement, fresh: Path, frozen: bool, environ: MutableMapping[str, str]
) -> beginning.Beginning:
    """Bring the ranks together, reject what differs, make the run directory that all of them see, and begin.

    Args:
        fresh: the run directory that this rank would choose; rank 0's is taken.
        frozen: the config holds what the data say of themselves, so one process per node is enough to look at them.

    Raises:
        ConfigError: on every rank, with the message of the first that has one.
    """
    mine = collect_node_facts(cfg, place, environ=environ, check_files=place.local_rank == 0 or not frozen)
    chosen = bool(cfg.run_dir) or directory.CHOSEN in environ  # by a person, or by what started this
    if place.launcher == "none":  # alone, or one of those that Lightning starts on this machine
        check_agreement([mine])
        run_dir = _made(cfg, fresh, chosen, environ)
        begun = beginning.BEGUN in environ
        begun_here = beginning.alone(run_dir, mine["host"], environ)
        return replace(begun_here, store=_store_on_this_machine(cfg, begun, environ))
    placement.export_rank_variables(place, environ, host_suffix=cfg.cluster.master_addr_suffix)
    seconds = cfg.cluster.rendezvous_seconds
    store = meeting.open_store(place, environ, timeout_seconds=seconds)
    mine |= {"address": own_address(environ["MASTER_ADDR"]), "run_dir": str(fresh)}
    known = meeting.all_gather_json(store, place, topic="facts", value=mine, timeout_seconds=seconds)
    check_agreement(known)
    cfg.run_dir = known[0]["run_dir"]
    if place.local_world_size < place.world_size and not cfg.cluster.interface:
        # gloo would listen where the host's name leads, on Debian to 127.0.1.1; instead: where the other nodes are.
        others = [fact["address"] for fact in known if fact["host"] != mine["host"]]
        environ.setdefault("GLOO_SOCKET_IFNAME", find_interface(own_address(others[0])) or "")
    for topic, makes in {"run_dir made": True, "run_dir seen": False}.items():
        seen = {"host": mine["host"], **_in_run_dir(cfg, place, makes, chosen, environ)}
        heard = meeting.all_gather_json(store, place, topic=topic, value=seen, timeout_seconds=seconds)
        check_agreement(heard)
        cfg.run_dir = heard[0]["run_dir"]
    hosts = list(dict.fromkeys(fact["host"] for fact in known))
    return beginning.together(Path(cfg.run_dir), place, hosts, store, max(seconds, READING), environ)


def _store_on_this_machine(cfg: DictConfig, begun: bool, environ: MutableMapping[str, str]) -> Any:
    """For the ranks that Lightning starts here: the process that starts them serves it. None for one process alone.

    Lightning itself would look for a free port, and hope that it still is when the ranks have come.
    """
    if cfg.trainer.num_nodes * cfg.trainer.devices == 1 or ("LOCAL_RANK" in environ and not begun):
        return None  # or placed by hand
    seconds = cfg.cluster.rendezvous_seconds
    if begun:
        return meeting.join_store(environ, seconds)
    return meeting.serve_store("127.0.0.1", environ, timeout_seconds=seconds)


def _in_run_dir(
    cfg: DictConfig, place: Placement, makes: bool, chosen: bool, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Rank 0 makes the directory; after that, one process per node shows that it can write there."""
    known: dict[str, Any] = {"rejected": None}
    try:
        if makes and place.rank == 0:
            _made(cfg, Path(cfg.run_dir), chosen, environ)
        elif not makes and place.rank and not place.local_rank:
            directory.create(Path(cfg.run_dir), cfg.group_readable, there=True)
        directory.permit(cfg.group_readable)
    except ConfigError as rejected:
        known = {"rejected": rejected.parts(), "finished": isinstance(rejected, RunFinished)}
    return known | {"run_dir": cfg.run_dir}


def _made(cfg: DictConfig, path: Path, chosen: bool, environ: Mapping[str, str]) -> Path:
    """The run directory, there and writable. Raises `ConfigError`."""
    if not chosen:
        words, who = compose.select_overrides(sys.argv[1:]), beginning.who(environ)
        path = directory.reserve(path, cfg.group_readable, lambda there: restarts.goes_on(there, words, who, environ))
    cfg.run_dir = str(path)
    if not (path / "config.yaml").exists():
        directory.reject_others(path, directory.TRAINING)
    directory.create(path, cfg.group_readable)
    restarts.reject_finished(path, cfg)
    changes.reject_other(path, cfg)  # before there is an attempt, whose failure would be the run's
    return path
