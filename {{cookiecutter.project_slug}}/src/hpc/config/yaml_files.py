"""Read YAML that may come from anywhere."""

import io
import math
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hpc.system import files

# What reading YAML that somebody else wrote can raise.
YAML_ERRORS = (OSError, ValueError, TypeError, AttributeError, RecursionError, YAMLError, OmegaConfBaseException)
MAX_NODES = 100_000  # nodes of a YAML file; ours have some hundred


def load_yaml(path: Path) -> DictConfig | ListConfig:
    """A YAML file that may come from anywhere. Raises one of `UNREADABLE`."""
    text = files.read_text(path)
    if "&" in text and (most := _count_nodes(yaml.compose(text, yaml.SafeLoader), {})) > MAX_NODES:
        raise ValueError(f"its aliases stand for {most:.0e} values")
    return OmegaConf.load(io.StringIO(text))


def _count_nodes(node: Any, known: dict[int, float]) -> float:
    """How many there are when each alias is replaced by what it stands for."""
    if id(node) not in known:
        known[id(node)] = math.inf  # an alias of what it is in
        inside = [part for pair in node.value for part in (pair if isinstance(pair, tuple) else [pair])]
        known[id(node)] = 1 + sum(_count_nodes(part, known) for part in inside if isinstance(part, yaml.Node))
    return known[id(node)]
