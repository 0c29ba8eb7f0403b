"""The config as files of a run hold it: resolved, but values of the environment stay references."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.resolvers.oc import decode, env

from hpc.config.errors import ConfigError

FORBIDDEN_CHARACTER = "`"  # no value of cluster.env may hold one


def to_frozen_yaml(cfg: DictConfig) -> str:
    """Return the config as resolved YAML. What comes from the environment stays a reference, as it may be a secret."""
    return OmegaConf.to_yaml(OmegaConf.create(_resolve_except_environment(cfg)))


@contextmanager
def resolve_environment_with(resolver: Callable[..., Any]) -> Iterator[None]:
    """Resolve `${oc.env:NAME,default}` with `resolver(NAME, default)` instead of the environment, meanwhile."""
    OmegaConf.register_new_resolver("oc.env", resolver, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", env, replace=True)


def map_values_to_references(cfg: DictConfig) -> dict[str, str]:
    """Map each string of the config that holds a value of the environment, and each such value, to its reference."""
    references: dict[str, str] = {}

    def note_and_resolve(name: str, *default: str | None) -> Any:
        if (value := env(name, *default)) is not None:
            references[str(value)] = _reference(name, *default)
        return value

    with resolve_environment_with(note_and_resolve):
        values = OmegaConf.to_container(cfg, resolve=True)
    return dict(_differing_texts(values, _resolve_except_environment(cfg))) | references


def with_references(value: Any, references: Mapping[str, str]) -> Any:
    """Return a value as plain data, with references in place of values from the environment, at any depth.

    Args:
        references: the result of `map_values_to_references`.
    """
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=True)
    if isinstance(value, dict):
        return {key: with_references(item, references) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(with_references(item, references) for item in value)
    return references.get(value, value) if isinstance(value, str) else value


def environment_as_bash() -> AbstractContextManager[None]:
    """Resolve `${oc.env:NAME}` as a variable of bash, meanwhile: its value may be a secret: job scripts are read."""
    return resolve_environment_with(_bash_variable)


def escape_quotes(value: str) -> str:
    """Escape quotes, and the backslashes before them, as Hydra wants them between single quotes."""
    return re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), value)


def _bash_variable(name: str, *default: str | None) -> str:
    """Return `${oc.env:NAME,default}` in bash. Without a default, a job that lacks the variable ends with a message."""
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise ConfigError("cluster", f"oc.env:{name!a}", "must name an environment variable", "${oc.env:NAME}")
    if default:
        text = default[0] or ""  # another reference, or plain text, in which a } would end the expansion
        return f"${{{name}-{text if text.startswith('${') else text.replace('}', FORBIDDEN_CHARACTER)}}}"
    return f"${{{name}?is not in this job: export it where the job is submitted, or in NAME.sh of the cluster}}"


def _resolve_except_environment(cfg: DictConfig) -> Any:
    """Return the plain, resolved config with references to the environment, also those within `${oc.decode:}`."""

    def decode_unless_reference(text: str | None, _parent_: Any, _node_: Any) -> Any:
        return f"${{oc.decode:{text}}}" if "${oc.env:" in (text or "") else decode(text, _parent_, _node_)

    with resolve_environment_with(_reference):
        OmegaConf.register_new_resolver("oc.decode", decode_unless_reference, replace=True)
        try:
            return OmegaConf.to_container(cfg, resolve=True)
        finally:
            OmegaConf.register_new_resolver("oc.decode", decode, replace=True)


def _differing_texts(values: Any, references: Any) -> Iterator[tuple[str, str]]:
    """Yield (value, reference) for each string that differs between the two containers.

    In the references, one string may stand in place of a whole node.
    """
    if isinstance(values, dict | list):
        for key in values if isinstance(values, dict) else range(len(values)):
            yield from _differing_texts(values[key], references if isinstance(references, str) else references[key])
    elif isinstance(values, str) and values != references:
        yield values, references


def _reference(name: str, *default: str | None) -> str:
    """Return `${oc.env:NAME,default}`, with another use of quotes than in the file perhaps."""
    words = [name, *("null" if word is None else f"'{escape_quotes(str(word))}'" for word in default)]
    return f"${{oc.env:{','.join(words)}}}"
