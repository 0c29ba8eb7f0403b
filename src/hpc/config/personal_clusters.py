"""One user's own values for clusters, such as account and partition, for every project made from the template."""

import os
from collections.abc import Set
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from hpc.config.conversion import reject_former_key
from hpc.config.errors import ConfigError, first_line, suggest_key
from hpc.config.yaml_files import YAML_ERRORS, load_yaml
from hpc.system import home

PERSONAL_CLUSTERS = home.expand(os.environ.get("XDG_CONFIG_HOME") or "~/.config") / "hpc-ml-template" / "clusters.yaml"


def load_personal_values(cluster: str) -> dict[str, Any]:
    """Return this user's own values for a cluster; none if the file does not name it.

    Raises:
        ConfigError: the file cannot be read, or is not of cluster names with keys.
    """
    if not PERSONAL_CLUSTERS.is_file():
        return {}
    try:
        return dict((OmegaConf.to_container(load_yaml(PERSONAL_CLUSTERS)).get(cluster) or {}).items())  # type: ignore
    except YAML_ERRORS as error:
        rule = f"must be YAML, cluster names with keys of a cluster's file: {first_line(error)}"
        raise ConfigError(str(PERSONAL_CLUSTERS), None, rule, f"{cluster}: {{account: ...}}") from None


def apply_personal_values(values: dict[str, Any], cluster: DictConfig, *, default: DictConfig, typed: Set[str]) -> None:
    """Replace values of the cluster by the user's own, except those that are typed or set by an experiment.

    Args:
        default: the cluster without any other override or experiment.
        typed: the keys that are typed.

    Raises:
        ConfigError: a key that clusters do not have.
    """
    now, before = (OmegaConf.to_container(node, resolve=False) for node in (cluster, default))
    assert isinstance(now, dict) and isinstance(before, dict)
    for key, value in values.items():
        if key not in now:
            reject_former_key(f"cluster.{key}")
            fix = suggest_key(key, map(str, cluster))
            raise ConfigError(f"{PERSONAL_CLUSTERS}: {key}", None, "must be a key of a cluster's file", fix)
        if f"cluster.{key}" in typed:
            continue
        if isinstance(value, dict) and isinstance(now[key], dict):  # env: name by name, as Hydra merges it
            unchanged = {name for name in value if now[key].get(name) == (before.get(key) or {}).get(name)}
            with open_dict(cluster[key]):
                cluster[key].update({name: value[name] for name in unchanged if f"cluster.{key}.{name}" not in typed})
        elif now[key] == before.get(key):
            cluster[key] = value
