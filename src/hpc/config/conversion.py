"""Convert a part of the config into a dataclass, or into leaves with dotted keys."""

import json
import re
import shlex
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpc.config.errors import ConfigError, join_key, suggest_key

T = TypeVar("T")


# Keys of earlier versions, and what is in their place.
FORMER_KEYS = {
    "test_only": "task=test",
    "cluster.setup": "a file NAME.sh beside NAME.yaml, with these lines of bash",
    "group_readable": "umask 027, in your shell or in the NAME.sh of the cluster",
}


def reject_former_key(key: str) -> None:
    """Raise `ConfigError` if earlier versions had this key."""
    if key in FORMER_KEYS:
        raise ConfigError(key, None, "This key was one of earlier versions", FORMER_KEYS[key]) from None


def to_dataclass(schema: type[T], node: DictConfig, *, name: str, allow_other_keys: bool = False) -> T:
    """Return a config node as the dataclass `schema`, its values checked against the annotations.

    Args:
        name: dotted key of the node, for messages; "" for the whole config.
        allow_other_keys: whether the node may have keys that the dataclass does not have.

    Raises:
        ConfigError: a key that the dataclass does not have, a missing key, or a value of another type.
    """
    if not isinstance(node, DictConfig):
        raise ConfigError(name, node, "must be a group of keys", f"the command without {name}=")
    types = {field.name: field.type for field in fields(schema)}  # type: ignore[arg-type]
    for key in map(str, node):
        if key not in types and not allow_other_keys:
            reject_former_key(join_key(name, key))
            rule = f"must be one of the keys of {name or 'the config'}: {', '.join(types)}"
            raise ConfigError(join_key(name, key), None, rule, suggest_key(key, types, name))
    validator = OmegaConf.structured(schema)
    values = {
        key: _typed_value(validator, node, key=key, kind=kind, full_key=join_key(name, key))
        for key, kind in types.items()
        if key in node
    }
    for field in fields(schema):  # type: ignore[arg-type]
        if field.default is MISSING and field.name not in values:
            key = join_key(name, field.name)
            raise ConfigError(
                key, None, "must have a value", f"{field.name}: ... in the file of {name or 'the config'}"
            )
    return schema(**values)


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a config as `dotted.key: raw value`. Interpolations stay as they are written."""
    if isinstance(node, DictConfig):
        node = OmegaConf.to_container(node, resolve=False)
    if not isinstance(node, dict) or not node:
        return {prefix: node}
    leaves: dict[str, Any] = {}
    for key, value in node.items():
        leaves |= flatten(value, join_key(prefix, str(key)))
    return leaves


def format_list_override(key: str, text: str) -> str:
    """Return `key=[...]` as it is typed in a shell, with each element of the text in quotes, as Hydra wants it."""
    elements = text[1:].removesuffix("]").split(",") if text.startswith("[") else [text]
    quoted = (json.dumps(element.strip(" '\""), ensure_ascii=False) for element in elements)
    return shlex.quote(f"{key}=[{','.join(quoted)}]")


def _typed_value(validator: Any, node: DictConfig, *, key: str, kind: Any, full_key: str) -> Any:
    """Return the value of one key, converted to its type `kind` by the structured config `validator`.

    Raises:
        ConfigError: the value cannot be resolved, or is of another type.
    """
    try:
        value = None if kind is Any else node.get(key)
    except OmegaConfBaseException as error:
        rule = f"must have a value: {str(error).splitlines()[0]}"
        raise ConfigError(full_key, None, rule, f"{full_key}=<value>") from None
    text = str(OmegaConf.to_container(node, resolve=False)[key])  # type: ignore[index]
    if isinstance(value, str) and "${oc.env:" in text and kind not in (Any, str, str | None):
        rule = f"must not be text, which {text} is"
        name = re.sub(r"^.*?oc\.env:\s*|[\s,}].*$", "", text)
        raise ConfigError(full_key, repr(value), rule, f'{full_key}="${name}", so that the shell fills it in')
    if kind in (str, str | None) and isinstance(value, bool | int | float):
        rule = "must be text; YAML reads no, 0123 and 1:30:00 as other types"
        raise ConfigError(full_key, repr(value), rule, f'quote it: {key}: "..."')
    try:
        validator[key] = value
        return validator[key]
    except OmegaConfBaseException:
        type_name = getattr(kind, "__name__", str(kind))
        fix = f"{full_key}=<{type_name}>"
        if type_name == "list" and isinstance(value, str):
            fix = format_list_override(full_key, value)
        raise ConfigError(full_key, value, f"must be of type {type_name}", fix) from None
