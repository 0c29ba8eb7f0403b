"""Check on a login node, before the queue, whether a run may start: first the config, then the files that it names."""

import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationResolutionError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from hpc.config import batch_size, cluster_rules, section_rules, signatures, strategy_rules, trainer_arguments, trust
from hpc.config.build import ARGUMENT_ERRORS
from hpc.config.conversion import flatten, to_dataclass
from hpc.config.errors import ConfigError, first_line
from hpc.config.freezing import cluster_for_job_script
from hpc.config.personal_clusters import PERSONAL_CLUSTERS
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
    check_complete(cfg, needs_data=needs_data)
    for section in ("model", "data") if needs_data else ("model",):
        section_rules.check_class_named(cfg, section)
    run = to_dataclass(RunConfig, cfg, name="")
    trainer_arguments.check_trainer_arguments(cfg)
    trainer = to_dataclass(TrainerConfig, cfg.trainer, name="trainer", allow_other_keys=True)
    strategy = to_dataclass(StrategyConfig, cfg.strategy, name="strategy")
    strategy.lightning = cfg.strategy.lightning
    cluster = cluster_for_job_script(cfg)
    section_rules.check_run(run)
    section_rules.check_trainer(trainer, cluster)
    cluster_rules.check_cluster(cluster, cfg)
    section_rules.check_checkpoint(to_dataclass(CheckpointConfig, cfg.checkpoint, name="checkpoint"))
    section_rules.check_faults(to_dataclass(FaultsConfig, cfg.faults, name="faults"), strategy)
    section_rules.check_nonfinite_skip(cfg)
    section_rules.check_callbacks(cfg)
    strategy_rules.check_strategy(strategy, trainer, cfg=cfg)
    strategy_rules.check_model_network(strategy, cfg)
    section_rules.check_network_sizes(cfg)
    batch_size.check_batch_size(cfg)
    section_rules.check_stream_splits(cfg)
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
    check_complete_for_job(cfg)
    check_rules(cfg)
    cluster = cluster_for_job_script(cfg)
    if cluster.stage_env and not cluster.node_local:
        rule = "must be a folder on the node, to which cluster.stage_env copies the environment"
        fix = "cluster.node_local='$TMPDIR', or cluster.stage_env=false"
        raise ConfigError("cluster.node_local", "null", rule, fix)


def check_complete(cfg: DictConfig, *, needs_data: bool = True) -> None:
    """Check that every key has a value: no `???` is left, and every reference leads to one.

    Args:
        needs_data: whether the section data must be complete, too.

    Raises:
        ConfigError: naming all keys without a value, or the first broken reference.
    """
    if missing := [key for key in unset_keys(cfg) if needs_data or not key.startswith("data.")]:
        is_one = len(missing) == 1
        rule = "must have a value, as it has no default" if is_one else "must have values, as they have no default"
        raise ConfigError(", ".join(missing), None, rule, " ".join(f"{key}=<value>" for key in missing))
    for key, value in flatten(cfg).items():
        _check_reference(cfg, key, value)
        _check_code_key(key, value)
        trust.reject_former_class(key, value)


def check_complete_for_job(cfg: DictConfig) -> None:
    """Check the same, and that the cluster has what a job on it cannot do without (`cluster.required`).

    Raises:
        ConfigError: naming all keys without a value, or the first broken reference.
    """
    required = [f"cluster.{name}" for name in _required_names(cfg) if _is_empty(cfg, f"cluster.{name}")]
    if required:
        missing = [*required, *(key for key in unset_keys(cfg) if key not in required)]
        noun, name = "a value" if len(missing) == 1 else "values", OmegaConf.select(cfg, "cluster.name")
        overrides = " ".join(f"{key}=<{key.rpartition('.')[2]}>" for key in missing)
        fix = f"{overrides}; {PERSONAL_CLUSTERS} can keep those of the cluster"
        raise ConfigError(", ".join(missing), None, f"must have {noun} for a job on cluster={name}", fix)
    check_complete(cfg)


def unset_keys(cfg: DictConfig) -> list[str]:
    """Return the keys whose value is still `???`."""
    return [key for key, value in flatten(cfg).items() if value == "???"]


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


def _required_names(cfg: DictConfig) -> list[str]:
    """Return the names in `cluster.required`; none if it is not a list, which `to_dataclass` rejects."""
    required = OmegaConf.select(cfg, "cluster.required")
    return [str(name) for name in required] if isinstance(required, ListConfig) else []


def _is_empty(cfg: DictConfig, key: str) -> bool:
    try:
        return OmegaConf.select(cfg, key) in (None, "")
    except OmegaConfBaseException:
        return False  # a broken reference, which check_complete reports


def _check_reference(cfg: DictConfig, key: str, value: object) -> None:
    """Raise `ConfigError` if the value of a key refers to a key or an environment variable that does not exist.

    Other resolution errors pass: the rules on the values involved report them.
    """
    try:
        OmegaConf.select(cfg, key, throw_on_missing=True)
    except (MissingMandatoryValue, InterpolationToMissingValueError):
        return
    except InterpolationKeyError:
        rule = "must refer to a key of this config (these choices of groups do not go together)"
        other = str(value).strip("${}").split(".")[0]
        raise ConfigError(key, value, rule, f"another choice of {key.split('.')[0]}= or of {other}=") from None
    except InterpolationResolutionError as error:
        if unset := re.search(r"Environment variable '(.*?)' not found", str(error)):
            rule = f"The environment variable {unset[1]} must be set"
            raise ConfigError(key, value, rule, f"export {unset[1]}=..., here and where jobs are submitted") from None
    except OmegaConfBaseException:
        return


def _check_code_key(key: str, value: object) -> None:
    """Raise `ConfigError` if a `_target_` or `_check_`, or what lies below one, is no name; null stands for nothing."""
    inside = [part for part in key.split(".") if part in ("_target_", "_check_")]
    if inside and (key.rpartition(".")[2] != inside[0] or not isinstance(value, str | None)):
        rule = "must be the dotted name of a class or function, as text"
        raise ConfigError(key, value, rule, f"{inside[0]}: package.module.Name in the file of configs/")


def _has_own_checkpoint(cfg: DictConfig) -> bool:
    """Return whether the run resumes from a checkpoint of its own and no longer needs the one that it started from."""
    checkpoint = home.expand(cfg.run_dir) / "checkpoints/last.ckpt" if cfg.run_dir else None
    return checkpoint is not None and checkpoint.exists() and cfg.task == "train"


def _find_targets(cfg: DictConfig, sections: Sequence[str]) -> Iterator[tuple[str, dict]]:
    """Yield every node with a `_target_` in some sections, resolved, as (dotted key, node)."""
    for name in sections:
        if OmegaConf.is_config(cfg[name]):
            node: Any = OmegaConf.to_container(cfg[name], resolve=True)
            if name == "data" and node.get("_target_"):
                node = batch_size.with_class_batch_size(node, cfg)
            yield from signatures.find_targets(node, name)


def _run_check_functions(node: Any, cfg: DictConfig) -> None:
    """Run the `_check_` functions that nodes name. The values they return fill keys that are null."""
    for value in list(node.values()) if isinstance(node, DictConfig) else []:
        _run_check_functions(value, cfg)
    if isinstance(node, DictConfig) and (name := node.get("_check_")):
        module, _, function = name.rpartition(".")
        try:
            values = getattr(import_module(module), function)(node, cfg) or {}
        except (ImportError, *ARGUMENT_ERRORS) as error:
            rule = f"must have values that {name} can check: {type(error).__name__}: {first_line(error)}"
            raise ConfigError(node._get_full_key(None), None, rule, "correct these values, or that function") from error
        for key, value in values.items():
            if node[key] is None:
                node[key] = value
