"""From the config to a job: what the scheduler is asked for, derived from what the Trainer is told. Pure; no torch."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from hpc.config.cluster_in_bash import cluster_in_bash
from hpc.config.errors import ConfigError
from hpc.config.sections import Cluster
from hpc.config.walltime import walltime


@dataclass(frozen=True)
class Job:
    """All that a job script says. Sizes are per node or per task, as named; one task drives one device."""

    name: str
    nodes: int
    tasks_per_node: int
    gpus_per_node: int  # that are used; how they are asked for, if at all, is `request`
    cores_per_task: int | None
    memory_gb: int | None  # per node; 0: all of it; None: not asked for
    seconds: int  # walltime
    whole_nodes: bool
    account: str | None
    partition: str | None
    qos: str | None
    constraint: str | None
    request: str | None
    options: tuple[str, ...]
    launcher: str
    container: str | None
    setup: tuple[str, ...]
    env: dict[str, str]
    interface: str | None
    node_local: str | None
    stage_env: bool
    chain: int
    retries: int  # starts in a row without a newer checkpoint, after which the job does not start again
    umask: str
    arguments: tuple[str, ...]  # of train.py
    run_dir: Path | None = None  # None: named after the job when it runs
    members: Path | None = None  # a sweep: this file holds one run directory per line
    num_members: int = 0
    at_once: int | None = None
    code: Path | None = None  # train.py and env.sh lie here; None: where sbatch is typed
    work_dir: Path | None = None  # relative paths of the config count from here; None: where sbatch is typed
    venv: Path | None = None  # None: env.sh's own default
    asks: bool = False  # a member of a search: before its first start it asks for its values
    program: str = "train.py"  # what the ranks run, a path within the code

    @property
    def is_by_hand(self) -> bool:
        """Is the script for anybody to submit, many times? Then it makes a run directory when it runs."""
        return not (self.run_dir or self.members)

    @property
    def gpu_hours(self) -> float:
        """What the job may cost, in GPU-hours."""
        return self.nodes * self.gpus_per_node * self.seconds / 3600


def rank_environment(job: Job) -> str:
    """Return the call that exports what the ranks need. cluster.env comes after it."""
    words = [f"OMP_NUM_THREADS={job.cores_per_task or 1}"]
    if job.interface:
        words += [f"{key}_SOCKET_IFNAME={shlex.quote(job.interface)}" for key in ("NCCL", "GLOO")]
    return f"set_rank_environment {' '.join(words)}"


def source_library(file: str, function: str, by_hand: str | None) -> list[str]:
    """Source a file of `hpc/jobs` in bash, from `$code`; one message and exit code 2 if it is not there or not whole.

    Its functions are there only if bash could read all of it. `by_hand`: the command that submits such a script.
    """
    path = f"$code/src/hpc/jobs/{file}"
    advice = "if the run was moved, type: python submit.py resume=FOLDER"
    if by_hand:
        advice = f"type {by_hand} in the project's folder"
    return [
        f'{{ source "{path}" 2>/dev/null && declare -F {function} >/dev/null; }} ||',
        f'    {{ echo "job.sh: error: {path} is missing or damaged; {advice}" >&2; exit 2; }}',
    ]


def of(cfg: DictConfig, arguments: tuple[str, ...] = (), **places: Path | int | str | bool | None) -> Job:
    """The job that a checked config describes; `places` are fields of `Job` from `run_dir` on.

    Raises:
        ConfigError: a time, or a `{field}` in the cluster's file, that cannot be read.
    """
    cluster = cluster_in_bash(cfg)
    nodes, devices = cfg.trainer.num_nodes, cfg.trainer.devices
    gpus = devices if cfg.trainer.accelerator == cluster.accelerator and cluster.gpus_per_node else 0
    all_gpus = bool(gpus) and gpus == cluster.gpus_per_node
    cores = cluster.cores_per_gpu
    sizes = {"nodes": nodes, "tasks": devices, "gpus": gpus, "cores": (cores or 1) * devices}
    return Job(
        name=cfg.name,
        nodes=nodes,
        tasks_per_node=devices,
        gpus_per_node=gpus,
        cores_per_task=cores,
        memory_gb=_share(cluster, gpus, all_gpus),
        seconds=walltime("cluster.time", cluster.time),
        whole_nodes=cluster.exclusive and all_gpus,
        account=cluster.account or None,
        partition=cluster.partition,
        qos=cluster.qos,
        constraint=cluster.constraint,
        request=_filled("cluster.request", cluster.request, sizes) if cluster.request else None,
        options=tuple(cluster.options),
        launcher=_filled("cluster.launcher", cluster.launcher, sizes),
        container=cluster.container,
        setup=tuple(cluster.setup),
        env=cluster.env,
        interface=cluster.interface,
        node_local=cluster.node_local,
        stage_env=cluster.stage_env,
        chain=cluster.chain,
        retries=cfg.faults.retries,
        umask="027" if cfg.group_readable else "077",
        arguments=arguments,
        **places,  # type: ignore[arg-type]
    )


def _share(cluster: Cluster, gpus: int, all_gpus: bool) -> int | None:
    """Main memory per node, in GB: the share that goes with the GPUs."""
    if cluster.memory_gb is None or all_gpus or not cluster.gpus_per_node:
        return cluster.memory_gb
    return cluster.memory_gb * max(gpus, 1) // cluster.gpus_per_node or None


def _filled(key: str, text: str, sizes: dict[str, int]) -> str:
    try:
        return text.format(**sizes)
    except (KeyError, ValueError, IndexError):
        raise ConfigError(key, text, f"knows {', '.join(f'{{{name}}}' for name in sizes)}", f"{key}='...'") from None
