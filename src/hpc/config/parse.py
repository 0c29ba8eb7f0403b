"""Parse a composed config, once: from here on, everybody gets a `Config`. All that is wrong with it is told at once."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationResolutionError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from hpc.config import arguments, section_parser, trainer_arguments, trust
from hpc.config.conversion import flatten
from hpc.config.errors import ConfigError, convert_omegaconf_error, raise_problems
from hpc.config.personal_clusters import PERSONAL_CLUSTERS
from hpc.config.rules import RULES
from hpc.config.sections import ClusterConfig, Config


def parse(node: DictConfig, *, needs_data: bool = True, for_job: bool = False) -> Config:
    """Return the config as the program uses it. The config alone decides, so that every rank decides alike.

    Args:
        node: the composed config. The result refers to it: what is set in its nodes later can be seen there, too.
        needs_data: whether the section data must be complete, and name its class.
        for_job: whether a job is to run it, which needs a scheduler and the cluster's required keys.

    Raises:
        ConfigError: all problems at once. Arguments of classes, which need an import, are read if there are no others.
    """
    if for_job and OmegaConf.select(node, "cluster.scheduler") is None:
        # Other rules would ask for the values of its cluster.
        rule = "must be a cluster with a scheduler"
        fix = "cluster=<one of --help>, or python train.py to train here"
        raise ConfigError("cluster", node.cluster.name, rule, fix)
    problems: list[ConfigError | None] = list(_incomplete(node, needs_data=needs_data, for_job=for_job))
    if isinstance(node.get("trainer"), DictConfig):
        problems += _guarded(trainer_arguments.argument_problems, node)
    sections: dict[str, Any] = {}
    for name in section_parser.SECTIONS:
        section, errors = section_parser.parse_section(name, _get(node, name))
        problems += errors
        sections |= {name: section} if section is not None else {}
    values, errors = section_parser.read_values(Config, node, name="")
    problems += [*errors, *section_parser.unknown_keys(Config, node, name="")]
    cfg: Any = None
    empty = dict.fromkeys(section_parser.SECTIONS)
    try:
        cfg = Config(**values, **{**empty, **sections}, node=node)  # type: ignore[arg-type]
    except ConfigError as error:
        problems.append(error)
    problems += _broken_rules(values | sections, _keys_of(problems), needs_data=needs_data)
    if for_job and (cluster := sections.get("cluster")):
        problems += _job_problems(cluster)
    raise_problems(problems)
    raise_problems(arguments.argument_problems(cfg, reads_data=needs_data))
    return cfg


def unset_keys(node: DictConfig) -> list[str]:
    """Return the keys whose value is still `???`."""
    return [key for key, value in flatten(node).items() if value == "???"]


def _broken_rules(values: dict[str, Any], wrong: set[str], *, needs_data: bool) -> Iterator[ConfigError | None]:
    """Yield the errors of the rules all whose sections are right by themselves."""
    for rule in RULES:
        names = list(inspect.signature(rule).parameters)
        if all(name in values and name not in wrong for name in names) and (needs_data or names != ["data"]):
            yield from _guarded(rule, *(values[name] for name in names))


def _guarded(rule: Any, *arguments: Any) -> list[ConfigError | None]:
    """Return the errors of a rule; that of a value that cannot be resolved is one of them."""
    problems: list[ConfigError | None] = []
    try:
        problems.extend(rule(*arguments))
    except OmegaConfBaseException as error:
        problems.append(convert_omegaconf_error(error))
    return problems


def _keys_of(problems: list[ConfigError | None]) -> set[str]:
    singles = [single for problem in problems for single in getattr(problem, "problems", (problem,)) if single]
    return {key for single in singles for key in single.key.split(", ")}


def _get(node: DictConfig, name: str) -> Any:
    try:
        return node.get(name)
    except OmegaConfBaseException:
        return None


def _incomplete(node: DictConfig, *, needs_data: bool, for_job: bool) -> Iterator[ConfigError]:
    """Yield one error for all keys without a value, and those of references that lead to none."""
    unset = [key for key in unset_keys(node) if needs_data or not key.startswith("data.")]
    required = [f"cluster.{name}" for name in _required_names(node) if _is_empty(node, f"cluster.{name}")] * for_job
    missing = [*required, *(key for key in unset if key not in required)]
    is_one, name = len(missing) == 1, OmegaConf.select(node, "cluster.name")
    if required:
        rule = f"must have {'a value' if is_one else 'values'} for a job on cluster={name}"
        overrides = " ".join(f"{key}=<{key.rpartition('.')[2]}>" for key in missing)
        fix = f"{overrides}; {PERSONAL_CLUSTERS} can keep those of the cluster"
        yield ConfigError(", ".join(missing), None, rule, fix)
    elif missing:
        rule = "must have a value, as it has no default" if is_one else "must have values, as they have no default"
        yield ConfigError(", ".join(missing), None, rule, " ".join(f"{key}=<value>" for key in missing))
    for key, value in flatten(node).items():
        yield from _reference_problems(node, key, value)
        yield from _code_key_problems(key, value)
        if problem := trust.former_class_problem(key, value):
            yield problem


def _required_names(node: DictConfig) -> list[str]:
    """Return the names in `cluster.required`; none if it is not a list, which its type rejects."""
    required = OmegaConf.select(node, "cluster.required")
    return [str(name) for name in required] if isinstance(required, ListConfig) else []


def _is_empty(node: DictConfig, key: str) -> bool:
    try:
        return OmegaConf.select(node, key) in (None, "", [])
    except OmegaConfBaseException:
        return False  # a broken reference, which has an error of its own


def _job_problems(cluster: ClusterConfig) -> Iterator[ConfigError]:
    if cluster.stage_env and not cluster.node_local:
        rule = "must be a folder on the node, to which cluster.stage_env copies the environment"
        fix = "cluster.node_local='$TMPDIR', or cluster.stage_env=false"
        yield ConfigError("cluster.node_local", "null", rule, fix)


def _reference_problems(node: DictConfig, key: str, value: object) -> Iterator[ConfigError]:
    """Yield the error of a value that refers to a key or an environment variable that does not exist.

    Other resolution errors pass: the rules on the values involved report them.
    """
    try:
        OmegaConf.select(node, key, throw_on_missing=True)
    except (MissingMandatoryValue, InterpolationToMissingValueError):
        return
    except InterpolationKeyError:
        rule = "must refer to a key of this config (these choices of groups do not go together)"
        other = str(value).strip("${}").split(".")[0]
        yield ConfigError(key, value, rule, f"another choice of {key.split('.')[0]}= or of {other}=")
    except InterpolationResolutionError as error:
        if unset := re.search(r"Environment variable '(.*?)' not found", str(error)):
            rule = f"The environment variable {unset[1]} must be set"
            yield ConfigError(key, value, rule, f"export {unset[1]}=..., here and where jobs are submitted")
    except OmegaConfBaseException:
        return


def _code_key_problems(key: str, value: object) -> Iterator[ConfigError]:
    """Yield the error of a `_target_` or `_check_`, or of what lies below one, that is no name; null is nothing."""
    inside = [part for part in key.split(".") if part in ("_target_", "_check_")]
    if inside and (key.rpartition(".")[2] != inside[0] or not isinstance(value, str | None)):
        rule = "must be the dotted name of a class or function, as text"
        yield ConfigError(key, value, rule, f"{inside[0]}: package.module.Name in the file of configs/")
