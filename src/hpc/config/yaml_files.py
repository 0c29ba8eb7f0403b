"""Read YAML files of any origin."""

import io
import math
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hpc.system import files

# The errors that reading a YAML file of any origin can raise.
YAML_ERRORS = (OSError, ValueError, TypeError, AttributeError, RecursionError, YAMLError, OmegaConfBaseException)
MAX_YAML_NODES = 100_000  # of a YAML file; ours have some hundred


def load_yaml(path: Path) -> DictConfig | ListConfig:
    """Load a YAML file of any origin. Its aliases may not expand to more than `MAX_YAML_NODES` values.

    Raises:
        One of `YAML_ERRORS`.
    """
    text = files.read_text(path)
    if "&" in text and (num_nodes := _count_nodes(yaml.compose(text, yaml.SafeLoader), {})) > MAX_YAML_NODES:
        raise ValueError(f"its aliases stand for {num_nodes:.0e} values")
    return OmegaConf.load(io.StringIO(text))


def _count_nodes(node: Any, counts: dict[int, float]) -> float:
    """Count the nodes below a YAML node when each alias is replaced by what it stands for.

    Args:
        counts: the counts so far, by the id of a node.
    """
    if id(node) not in counts:
        counts[id(node)] = math.inf  # for an alias that lies inside of what it stands for
        children = [part for entry in node.value for part in (entry if isinstance(entry, tuple) else [entry])]
        counts[id(node)] = 1 + sum(_count_nodes(child, counts) for child in children if isinstance(child, yaml.Node))
    return counts[id(node)]
