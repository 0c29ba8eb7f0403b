"""The cluster section as a job script holds it."""

import re
from dataclasses import replace

from omegaconf import DictConfig

from hpc.config.errors import ConfigError
from hpc.config.freezing import references
from hpc.config.sections import ClusterConfig
from hpc.config.typed import typed

REJECTED = "`"  # no value of cluster.env may hold one


def cluster_in_bash(cfg: DictConfig) -> ClusterConfig:
    """The cluster as a script says it: there `${oc.env:NAME}` is a variable of bash, as its value may be a secret.

    Not in what the scheduler itself reads, such as an account: it fills in no variables, and shows it to everybody.

    Raises:
        ConfigError: a key that the cluster's files cannot have, or a value of another type.
    """
    cluster = typed(ClusterConfig, cfg.cluster, "cluster")
    with references(_variable):
        env = {str(key): str(value) for key, value in cfg.cluster.env.items()}
        setup = list(cfg.cluster.setup)
        return replace(
            cluster, container=cfg.cluster.container, node_local=cfg.cluster.node_local, setup=setup, env=env
        )


def _variable(name: str, *default: str | None) -> str:
    """`${oc.env:NAME,default}` in bash. Without a default, a job that lacks it says so and ends."""
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise ConfigError("cluster", f"oc.env:{name!a}", "must name a variable of the environment", "${oc.env:NAME}")
    if default:
        text = default[0] or ""  # another such reference, or plain text, where a } would end the expansion
        return f"${{{name}-{text if text.startswith('${') else text.replace('}', REJECTED)}}}"
    return f"${{{name}?is not in this job: export it where the job is submitted, or in cluster.setup}}"
