"""One user's own values for clusters, such as account and partition, for every project made from the template.

The line `- optional personal@cluster: ${cluster}` of configs/train.yaml takes them, after the cluster's file.
"""

import os
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from hpc.config.cluster_section import unknown_keys_error
from hpc.config.errors import ConfigError, first_line
from hpc.config.project import TRAIN
from hpc.config.yaml_files import YAML_ERRORS, load_yaml
from hpc.system import home

PERSONAL_CLUSTERS = home.expand(os.environ.get("XDG_CONFIG_HOME") or "~/.config") / "hpc-ml-template" / "clusters.yaml"
GROUP = "personal"


def register(*, is_used: bool) -> dict[str, Any]:
    """Give the user's values to Hydra, as the group `personal`, and return them by cluster.

    Args:
        is_used: whether they count; otherwise Hydra forgets them.

    Raises:
        ConfigError: the file cannot be read, or is not of cluster names with keys.
    """
    store: Any = ConfigStore.instance()
    store.repo.pop(GROUP, None)
    if not is_used or not PERSONAL_CLUSTERS.is_file():
        return {}
    try:
        values: dict[str, Any] = OmegaConf.to_container(load_yaml(PERSONAL_CLUSTERS)) or {}  # type: ignore[assignment]
        values = {str(name): dict(keys or {}) for name, keys in values.items()}
        for name, keys in values.items():
            store.store(name=name, node=OmegaConf.create(keys), group=GROUP, provider=str(PERSONAL_CLUSTERS))
    except YAML_ERRORS as error:
        rule = f"must be YAML, cluster names with keys of a cluster's file: {first_line(error)}"
        raise ConfigError(str(PERSONAL_CLUSTERS), None, rule, "NAME: {account: ...}") from None
    return values


def check(values: dict[str, Any], *, name: str, is_taken: bool) -> None:
    """Check the user's values of one cluster.

    Args:
        name: of the cluster.
        is_taken: whether the project's configs take them.

    Raises:
        ConfigError: a key that clusters do not have, or values that would not count.
    """
    if name in values and not is_taken:
        rule = f"must take your values of {PERSONAL_CLUSTERS}"
        fix = f"the line '- optional {GROUP}@cluster: ${{cluster}}' below '- cluster: ...' in {TRAIN}"
        raise ConfigError("defaults", None, rule, fix)
    keys = [str(key) for key in values.get(name, {})]
    if error := unknown_keys_error(keys, prefix=f"{name}.", file=str(PERSONAL_CLUSTERS)):
        raise error
