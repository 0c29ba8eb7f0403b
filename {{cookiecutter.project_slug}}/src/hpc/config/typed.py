"""A part of the config as a dataclass, and as leaves with dotted keys."""

import json
import shlex
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpc.config.errors import ConfigError, join_key, suggest_key

T = TypeVar("T")


def as_list(key: str, text: str) -> str:
    """How this is typed as a list in a shell: each element in quotes of its own, as Hydra wants it."""
    elements = text[1:].removesuffix("]").split(",") if text.startswith("[") else [text]
    quoted = (json.dumps(element.strip(" '\""), ensure_ascii=False) for element in elements)
    return shlex.quote(f"{key}=[{','.join(quoted)}]")


def typed(schema: type[T], node: DictConfig, name: str, *, only_ours: bool = False) -> T:
    """`node` as the dataclass `schema`, its values checked against the annotations.

    Args:
        name: dotted key of the node, for messages; "" for the whole config.
        only_ours: the node has other keys as well, which somebody else judges.

    Raises:
        ConfigError: a key the dataclass does not have, or a value of another type.
    """
    known = {field.name: field.type for field in fields(schema)}  # type: ignore[arg-type]
    for key in map(str, node):
        if key not in known and not only_ours:
            rule = f"{name or 'the config'} has the keys {', '.join(known)}"
            raise ConfigError(join_key(name, key), None, rule, suggest_key(key, known, name))
    values: dict[str, Any] = {}
    blank = OmegaConf.structured(schema)
    for key, kind in known.items():
        if key not in node:
            continue
        try:
            value = None if kind is Any else node.get(key)
        except OmegaConfBaseException as error:
            rule = f"must have a value: {str(error).splitlines()[0]}"
            raise ConfigError(join_key(name, key), None, rule, f"{join_key(name, key)}=<value>") from None
        if kind in (str, str | None) and isinstance(value, bool | int | float):
            rule = f"is a word, and YAML reads it as {value!r} (no, 0123 and 1:30:00 are no words to it)"
            raise ConfigError(join_key(name, key), None, rule, f'quote it: {key}: "..."')
        try:
            blank[key] = value
            values[key] = blank[key]
        except OmegaConfBaseException:
            kind = getattr(kind, "__name__", str(kind))
            fix = f"{join_key(name, key)}=<{kind}>"
            if kind == "list" and isinstance(value, str):
                fix = list_override(join_key(name, key), value)
            raise ConfigError(join_key(name, key), value, f"is of type {kind}", fix) from None
    for field in fields(schema):  # type: ignore[arg-type]
        if field.default is MISSING and field.name not in values:
            raise ConfigError(
                join_key(name, field.name),
                None,
                f"{name or 'the config'} has to say it",
                f"{field.name}: ... in its file",
            )
    return schema(**values)


def flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of a config as `dotted.key: raw value`; interpolations are left as they are written."""
    if isinstance(node, DictConfig):
        node = OmegaConf.to_container(node, resolve=False)
    if not isinstance(node, dict) or not node:
        return {prefix: node}
    leaves: dict[str, Any] = {}
    for key, value in node.items():
        leaves |= flatten(value, join_key(prefix, str(key)))
    return leaves
