"""Bring the ranks together, make the run directory, and begin an attempt."""

from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc.config.errors import ConfigError, RunFinished
from hpc.config.sections import Config
from hpc.launch import placement, rendezvous
from hpc.launch.node_checks import check_agreement, collect_node_facts
from hpc.launch.placement import Placement
from hpc.run import directory, frozen_config, restarts
from hpc.training import starting_point
from hpc.training.starting_point import AttemptStart

CHECKPOINT_READ_SECONDS = 1800  # that ranks may take to look through the files of a checkpoint


def begin_attempt(
    cfg: Config, place: Placement, *, new_run_dir: Path, is_frozen: bool, environ: MutableMapping[str, str]
) -> AttemptStart:
    """Bring the ranks together, reject what differs between them, make one run directory for all, and claim it.

    Imports torch where there are several ranks.

    Args:
        new_run_dir: the run directory that this rank would choose; all ranks use rank 0's.
        is_frozen: the config is that of an earlier attempt and holds the facts about the data, so one process per
            node is enough to check the files.

    Raises:
        ConfigError: on every rank, with the message of the first that has one.
    """
    facts = collect_node_facts(cfg, place, environ=environ, check_files=place.local_rank == 0 or not is_frozen)
    is_chosen = bool(cfg.run_dir) or directory.RUN_DIR_VARIABLE in environ  # by a person, or by what started this
    if place.launcher == "none":  # alone, or one of those that Lightning starts on this machine
        check_agreement([facts])
        run_dir = _make_run_dir(cfg, new_run_dir, is_chosen=is_chosen, environ=environ)
        is_child = starting_point.BEGUN_VARIABLE in environ
        start = starting_point.claim_and_find_checkpoint(run_dir, facts["host"], environ=environ)
        return replace(start, store=_open_local_store(cfg, is_child=is_child, environ=environ))
    placement.export_rank_variables(place, environ, host_suffix=cfg.cluster.master_addr_suffix)
    seconds = cfg.cluster.rendezvous_seconds
    store = rendezvous.open_store(place, environ, timeout_seconds=seconds)
    facts |= {"address": rendezvous.own_address(environ["MASTER_ADDR"]), "run_dir": str(new_run_dir)}
    facts_of_ranks = rendezvous.all_gather_json(store, place, topic="facts", value=facts, timeout_seconds=seconds)
    check_agreement(facts_of_ranks)
    cfg.run_dir = facts_of_ranks[0]["run_dir"]
    if place.local_world_size < place.world_size and not cfg.cluster.interface:
        # gloo would listen at the address of the host's name, on Debian 127.0.1.1. It must be one that others reach.
        others = [rank["address"] for rank in facts_of_ranks if rank["host"] != facts["host"]]
        environ.setdefault("GLOO_SOCKET_IFNAME", rendezvous.find_interface(rendezvous.own_address(others[0])) or "")
    for topic, is_first in {"run_dir made": True, "run_dir seen": False}.items():
        answer = _make_or_check_run_dir(cfg, place, is_first=is_first, is_chosen=is_chosen, environ=environ)
        value = {"host": facts["host"], **answer}
        answers = rendezvous.all_gather_json(store, place, topic=topic, value=value, timeout_seconds=seconds)
        check_agreement(answers)
        cfg.run_dir = answers[0]["run_dir"]
    return starting_point.claim_and_find_checkpoint_on_all_ranks(
        cfg.run_path,
        place,
        hosts=list(dict.fromkeys(rank["host"] for rank in facts_of_ranks)),
        store=store,
        timeout_seconds=max(seconds, CHECKPOINT_READ_SECONDS),
        environ=environ,
    )


def _open_local_store(cfg: Config, *, is_child: bool, environ: MutableMapping[str, str]) -> Any:
    """Return the store of ranks that Lightning starts on this machine; None for one process alone.

    The process that starts the others serves it. Lightning itself would look for a free port, and hope that it is
    still free when the ranks have started.
    """
    if cfg.trainer.num_nodes * cfg.trainer.devices == 1 or ("LOCAL_RANK" in environ and not is_child):
        return None  # the latter: a person has placed the ranks by hand
    seconds = cfg.cluster.rendezvous_seconds
    if is_child:
        return rendezvous.join_store(environ, seconds)
    return rendezvous.serve_store("127.0.0.1", environ, timeout_seconds=seconds)


def _make_or_check_run_dir(
    cfg: Config, place: Placement, *, is_first: bool, is_chosen: bool, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Make the run directory on rank 0 in the first round; in the second, check on each other node that it can write.

    Returns:
        run_dir; rejected: the parts of a `ConfigError`, or None; finished: whether it was `RunFinished`.
    """
    answer: dict[str, Any] = {"rejected": None}
    try:
        if is_first and place.rank == 0:
            _make_run_dir(cfg, cfg.run_path, is_chosen=is_chosen, environ=environ)
        elif not is_first and place.rank and not place.local_rank:
            directory.create_run_dir(cfg.run_path, is_made=True)
    except ConfigError as error:
        answer = {"rejected": error.parts(), "finished": isinstance(error, RunFinished)}
    return answer | {"run_dir": cfg.run_dir}


def _make_run_dir(cfg: Config, path: Path, *, is_chosen: bool, environ: Mapping[str, str]) -> Path:
    """Make the run directory if it is missing, and return its path. Raises `ConfigError` if it cannot be used."""
    if not is_chosen:
        restarts.reject_unnamed_restart(path, environ)
        path = directory.reserve_run_dir(path)
    cfg.run_dir = str(path)
    if not (path / "config.yaml").exists():
        directory.reject_foreign_files(path, directory.TRAINING_FILES)
    directory.create_run_dir(path)
    restarts.reject_finished(path, cfg.node)
    # Before there is an attempt, whose failure would be the run's.
    frozen_config.reject_changed_training(path, cfg.node)
    return path
