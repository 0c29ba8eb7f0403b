"""Make the dataclass of a section from its node, with the errors of all its values."""

import re
from dataclasses import MISSING, Field, fields
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from hpc.config.cluster_section import unknown_keys_error
from hpc.config.conversion import format_list_override
from hpc.config.errors import ConfigError, join_key, raise_problems, suggest_key
from hpc.config.freezing import environment_as_bash
from hpc.config.sections import CheckpointConfig, ClusterConfig, FaultsConfig, StrategyConfig, TrainerConfig

SECTIONS = {
    "checkpoint": CheckpointConfig,
    "faults": FaultsConfig,
    "trainer": TrainerConfig,
    "strategy": StrategyConfig,
    "cluster": ClusterConfig,
}
SET_BY_PARSER = ("node", "arguments")  # fields that are no keys of the config
# Keys of the cluster that stand in the job script, where a value of the environment stays a variable. What the
# scheduler itself reads, such as an account, is resolved: it expands no variables, and shows such values to everybody.
IN_BASH = ("cluster.container", "cluster.node_local", "cluster.env")


def parse_section(name: str, node: Any) -> tuple[Any, list[ConfigError]]:
    """Return the dataclass of a section, None if something in it is wrong, and all its errors."""
    schema, section = SECTIONS[name], None
    if not isinstance(node, DictConfig):
        return None, [ConfigError(name, node, "must be a group of keys", f"the command without {name}=")]
    values, problems = read_values(schema, node, name=name)
    if name == "trainer":  # all arguments of Lightning's Trainer
        values["arguments"] = node
    else:
        problems += unknown_keys(schema, node, name=name)
    try:
        section = schema(**values)
    except ConfigError as error:
        problems.append(error)
    return (None if problems else section), problems


def read_section(name: str, node: Any) -> Any:
    """Return the dataclass of a section. Raises `ConfigError`."""
    section, problems = parse_section(name, node)
    raise_problems(problems)
    return section


def unknown_keys(schema: type, node: DictConfig, *, name: str) -> list[ConfigError]:
    """Return the errors of keys that a section does not have."""
    if name == "cluster":
        choice = OmegaConf.select(node, "name", throw_on_resolution_failure=False)
        error = unknown_keys_error(list(map(str, node)), prefix="cluster.", file=f"configs/cluster/{choice}.yaml")
        return [error] if error else []
    known = [field.name for field in fields(schema) if field.name not in SET_BY_PARSER]
    rule = f"must be one of the keys of {name or 'the config'}: {', '.join(known)}"
    unknown = [str(key) for key in node if key not in known]
    return [ConfigError(join_key(name, key), None, rule, suggest_key(key, known, name)) for key in unknown]


def read_values(schema: type, node: DictConfig, *, name: str) -> tuple[dict[str, Any], list[ConfigError]]:
    """Return the values of a node as the dataclass `schema` types them, and the errors of those that it cannot have.

    The value of these is None. A key that the node lacks has its default.

    Args:
        name: dotted key of the node, for messages; "" for the top of the config.
    """
    values: dict[str, Any] = {}
    problems: list[ConfigError] = []
    raw: Any = OmegaConf.to_container(node, resolve=False)
    for field in fields(schema):
        if field.name in SET_BY_PARSER or (not name and field.name in SECTIONS):
            continue
        try:
            if field.name in node:
                values[field.name] = _typed_value(schema, node, field, join_key(name, field.name), raw[field.name])
            elif OmegaConf.is_missing(node, field.name):
                values[field.name] = None  # ???, which another error names
            elif _is_composed(field):
                key, place = join_key(name, field.name), name or "the config"
                raise ConfigError(key, None, "must have a value", f"{field.name}: ... in the file of {place}")
        except ConfigError as error:
            values[field.name] = None
            problems.append(error)
    return values, problems


def _is_composed(field: Any) -> bool:
    """Return whether a key has its default only in a composed config, where it leads to another key."""
    return field.default is not MISSING and "${" in str(field.default)


@cache
def _validator(schema: type) -> DictConfig:
    return OmegaConf.structured(schema)


def _typed_value(schema: type, node: DictConfig, field: Field[Any], full_key: str, raw: object) -> Any:
    """Return the value of one key, converted to the type of its field.

    Args:
        raw: the value without its references resolved.

    Raises:
        ConfigError: the value cannot be resolved, or is of another type.
    """
    key, kind, text = field.name, field.type, str(raw)
    try:
        value = node.get(key)
        if kind is not Any and OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
    except MissingMandatoryValue:
        return None  # ???, which another error names
    except OmegaConfBaseException as error:
        rule = f"must have a value: {str(error).splitlines()[0]}"
        raise ConfigError(full_key, None, rule, f"{full_key}=<value>") from None
    if kind is Any:
        return value
    if isinstance(value, str) and "${oc.env:" in text and kind not in (str, str | None):
        rule = f"must not be text, which {text} is"
        name = re.sub(r"^.*?oc\.env:\s*|[\s,}].*$", "", text)
        raise ConfigError(full_key, repr(value), rule, f'{full_key}="${name}", so that the shell fills it in')
    if kind in (str, str | None) and isinstance(value, bool | int | float):
        rule = "must be text; YAML reads no, 0123 and 1:30:00 as other types"
        raise ConfigError(full_key, repr(value), rule, f'quote it: {key}: "..."')
    if value is None and kind in (bool, int, float, str):
        reference = re.fullmatch(r"\${([\w.]+)}", text)
        rule = f"must be given, as {reference[1]} is null" if reference else "must be given"
        raise ConfigError(full_key, None, rule, f"{full_key}=<{kind.__name__}>")
    validator = _validator(schema)
    try:
        validator[key] = value
        typed = validator[key]
    except OmegaConfBaseException:
        type_name = getattr(kind, "__name__", str(kind))
        fix = f"{full_key}=<{type_name}>"
        if type_name == "list" and isinstance(value, str):
            fix = format_list_override(full_key, value)
        raise ConfigError(full_key, value, f"must be of type {type_name}", fix) from None
    if full_key in IN_BASH:
        return _in_bash(node, key)
    return OmegaConf.to_container(typed) if OmegaConf.is_config(typed) else typed


def _in_bash(node: DictConfig, key: str) -> Any:
    """Return a value as a job script has it: `${oc.env:NAME}` is a variable of bash."""
    with environment_as_bash():
        value = node.get(key)
        return {str(name): str(text) for name, text in value.items()} if isinstance(value, DictConfig) else value
