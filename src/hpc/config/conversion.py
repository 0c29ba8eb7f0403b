"""Leaves of the config with dotted keys, and lists as they are typed."""

import json
import shlex
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hpc.config.errors import join_key


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
