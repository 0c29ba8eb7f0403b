"""Check on a login node, before the queue, whether a run may start: first the config, then the files that it names."""

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hpc.config import cluster_rules, missing_values, section_rules, signatures, strategy_rules
from hpc.config.callback_rules import check_callbacks
from hpc.config.conversion import to_dataclass
from hpc.config.errors import ConfigError
from hpc.config.freezing import cluster_for_job_script
from hpc.config.sections import CheckpointConfig, FaultsConfig, RunConfig, StrategyConfig, TrainerConfig
from hpc.system import home


def check_config(cfg: DictConfig) -> None:
    """Check all that can be checked on this machine before torch is imported: the rules, then the files.

    Raises:
        ConfigError: the first rule that is broken.
    """
    check_rules(cfg)
    check_and_fill_from_files(cfg)


def check_rules(cfg: DictConfig, *, needs_data: bool = True) -> None:
    """Check what the config alone decides, so that every rank decides alike. Cheap rules come first.

    Args:
        needs_data: whether the section data must say where the data are.

    Raises:
        ConfigError: the first rule that is broken.
    """
    missing_values.check_complete(cfg, needs_data=needs_data)
    run = to_dataclass(RunConfig, cfg, name="")
    trainer = to_dataclass(TrainerConfig, cfg.trainer, name="trainer", allow_other_keys=True)
    strategy = to_dataclass(StrategyConfig, cfg.strategy, name="strategy")
    cluster = cluster_for_job_script(cfg)
    section_rules.check_run(run)
    section_rules.check_trainer(trainer, cluster)
    section_rules.check_trainer_arguments(cfg.trainer)
    cluster_rules.check_cluster(cluster, cfg)
    section_rules.check_checkpoint(to_dataclass(CheckpointConfig, cfg.checkpoint, name="checkpoint"))
    section_rules.check_faults(to_dataclass(FaultsConfig, cfg.faults, name="faults"), strategy)
    section_rules.check_nonfinite_skip(cfg)
    strategy_rules.check_strategy(strategy, trainer, cfg=cfg)
    strategy_rules.check_model_network(strategy, cfg)
    check_callbacks(cfg)
    section_rules.check_network_sizes(cfg)
    section_rules.check_global_batch_size(cfg)
    section_rules.check_monitor(cfg)
    section_rules.check_loggers(cfg)
    for key, node in _find_targets(cfg, ["data"] if needs_data else []):
        signatures.check_arguments(key, node)


def check_job(cfg: DictConfig) -> None:
    """Check the rules, and what a job needs beyond a run on this machine: a scheduler, and the cluster's required keys.

    The scheduler comes first: without one, other rules would ask for what another cluster's file says.

    Raises:
        ConfigError: naming all keys without a value, or the first rule that is broken.
    """
    if OmegaConf.select(cfg, "cluster.scheduler") is None:
        rule = "must be a cluster with a scheduler"
        fix = "cluster=<one of --help>, or python train.py to train here"
        raise ConfigError("cluster", cfg.cluster.name, rule, fix)
    missing_values.check_complete_for_job(cfg)
    check_rules(cfg)
    cluster = cluster_for_job_script(cfg)
    if cluster.stage_env and not cluster.node_local:
        rule = "must be a folder on the node, to which cluster.stage_env copies the environment"
        fix = "cluster.node_local='$TMPDIR', or cluster.stage_env=false"
        raise ConfigError("cluster.node_local", "null", rule, fix)


def check_and_fill_from_files(cfg: DictConfig, *, reads_data: bool = True) -> None:
    """Check that the files that the config names can be used, as seen from this machine.

    Modifies cfg: `_check_` functions fill in keys that are null.

    Args:
        reads_data: whether the section data is checked, too.

    Raises:
        ConfigError: the first file that cannot be used, or argument that does not fit.
    """
    if cfg.ckpt and not (_has_own_checkpoint(cfg) or home.expand(cfg.ckpt).exists()):
        raise ConfigError("ckpt", cfg.ckpt, "must be an existing file or folder", "ckpt=<checkpoint of a run>")
    sections = [str(name) for name in cfg if reads_data or name != "data"]
    for key, node in _find_targets(cfg, sections):
        given = {name: value for name, value in node.items() if value is not None}
        signatures.check_arguments(key, given, complete=False)
    for name in sections:
        _run_check_functions(cfg[name], cfg)  # they may rely on the types of the arguments
    filled = cfg.copy()
    filled.run_dir = cfg.run_dir or "runs"  # chosen later, but a path by then
    for key, node in _find_targets(filled, sections):
        signatures.check_arguments(key, node)


def _has_own_checkpoint(cfg: DictConfig) -> bool:
    """Return whether the run resumes from a checkpoint of its own and no longer needs the one that it started from."""
    checkpoint = home.expand(cfg.run_dir) / "checkpoints/last.ckpt" if cfg.run_dir else None
    return checkpoint is not None and checkpoint.exists() and cfg.task == "train"


def _find_targets(cfg: DictConfig, sections: Sequence[str]) -> Iterator[tuple[str, dict]]:
    """Yield every node with a `_target_` in some sections, resolved, as (dotted key, node)."""
    for name in sections:
        if OmegaConf.is_config(cfg[name]):
            yield from signatures.find_targets(OmegaConf.to_container(cfg[name], resolve=True), name)


def _run_check_functions(node: Any, cfg: DictConfig) -> None:
    """Run the `_check_` functions that nodes name. The values they return fill keys that are null."""
    for value in list(node.values()) if isinstance(node, DictConfig) else []:
        _run_check_functions(value, cfg)
    if isinstance(node, DictConfig) and (name := node.get("_check_")):
        module, _, function = name.rpartition(".")
        for key, value in (getattr(import_module(module), function)(node, cfg) or {}).items():
            if node[key] is None:
                node[key] = value
