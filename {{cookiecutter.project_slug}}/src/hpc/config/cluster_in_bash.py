"""The cluster section as a job script holds it."""

import re
from dataclasses import replace

from omegaconf import DictConfig

from hpc.config.conversion import to_dataclass
from hpc.config.errors import ConfigError
from hpc.config.freezing import resolve_environment_with
from hpc.config.sections import ClusterConfig

FORBIDDEN_CHARACTER = "`"  # no value of cluster.env may hold one


def cluster_for_job_script(cfg: DictConfig) -> ClusterConfig:
    """Return the cluster section with `${oc.env:NAME}` as a variable of bash, since its value may be a secret.

    This holds for container, node_local, setup and env, which stand in the script. What the scheduler itself reads,
    such as an account, is resolved: the scheduler expands no variables, and shows such values to everybody.

    Raises:
        ConfigError: a key that the cluster's file cannot have, or a value of another type.
    """
    cluster = to_dataclass(ClusterConfig, cfg.cluster, name="cluster")
    with resolve_environment_with(_bash_variable):
        env = {str(key): str(value) for key, value in cfg.cluster.env.items()}
        setup = list(cfg.cluster.setup)
        return replace(
            cluster, container=cfg.cluster.container, node_local=cfg.cluster.node_local, setup=setup, env=env
        )


def _bash_variable(name: str, *default: str | None) -> str:
    """Return `${oc.env:NAME,default}` in bash. Without a default, a job that lacks the variable ends with a message."""
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise ConfigError("cluster", f"oc.env:{name!a}", "must name an environment variable", "${oc.env:NAME}")
    if default:
        text = default[0] or ""  # another reference, or plain text, in which a } would end the expansion
        return f"${{{name}-{text if text.startswith('${') else text.replace('}', FORBIDDEN_CHARACTER)}}}"
    return f"${{{name}?is not in this job: export it where the job is submitted, or in cluster.setup}}"
