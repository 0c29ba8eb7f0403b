"""The config as it is written beside a run: resolved, but values of the environment stay references."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.resolvers.oc import decode, env


def to_frozen_yaml(cfg: DictConfig) -> str:
    """The config as YAML, resolved, but what comes from the environment stays a reference: it may be a secret."""
    return OmegaConf.to_yaml(OmegaConf.create(_as_written(cfg)))


@contextmanager
def resolve_environment_with(written: Callable[..., Any]) -> Iterator[None]:
    """Meanwhile `${oc.env:NAME,default}` gives what `written` makes of these words, not a value: it may be secret."""
    OmegaConf.register_new_resolver("oc.env", written, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", env, replace=True)


def environment_values(cfg: DictConfig) -> dict[str, str]:
    """What `${oc.env:NAME}` has given to this config, by itself or in a longer text, and how each is written."""
    known: dict[str, str] = {}

    def note(name: str, *default: str | None) -> Any:
        if (value := env(name, *default)) is not None:
            known[str(value)] = _reference(name, *default)
        return value

    with resolve_environment_with(note):
        values = OmegaConf.to_container(cfg, resolve=True)
    return dict(_texts(values, _as_written(cfg))) | known


def _as_written(cfg: DictConfig) -> Any:
    """All of it resolved, but for what comes from the environment, by itself or through `${oc.decode:}`."""

    def decoded(text: str | None, _parent_: Any, _node_: Any) -> Any:
        return f"${{oc.decode:{text}}}" if "${oc.env:" in (text or "") else decode(text, _parent_, _node_)

    with resolve_environment_with(_reference):
        OmegaConf.register_new_resolver("oc.decode", decoded, replace=True)
        try:
            return OmegaConf.to_container(cfg, resolve=True)
        finally:
            OmegaConf.register_new_resolver("oc.decode", decode, replace=True)


def _texts(values: Any, written: Any) -> Iterator[tuple[str, str]]:
    """Texts of one container that are others at the same place of the second, where one text may stand for many."""
    if isinstance(values, dict | list):
        for key in values if isinstance(values, dict) else range(len(values)):
            yield from _texts(values[key], written if isinstance(written, str) else written[key])
    elif isinstance(values, str) and values != written:
        yield values, written


def _reference(name: str, *default: str | None) -> str:
    """`${oc.env:NAME,default}` as it was written, more or less."""
    words = [name, *("null" if word is None else f"'{escape_quotes(str(word))}'" for word in default)]
    return f"${{oc.env:{','.join(words)}}}"


def escape_quotes(value: str) -> str:
    """As Hydra wants it between single quotes: quotes, and the backslashes before them, escaped."""
    return re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value)
