"""The job of a config: what the scheduler is asked for follows from the Trainer and the cluster. Pure; no torch."""

import math
from dataclasses import dataclass
from pathlib import Path

from hpc.config.errors import ConfigError
from hpc.config.sections import ClusterConfig, Config
from hpc.config.walltime import walltime_seconds


@dataclass(frozen=True)
class Job:
    """The contents of a job script. Each task drives one device."""

    name: str
    cluster: str  # its file, whose NAME.sh is sourced
    nodes: int
    tasks_per_node: int
    gpus_per_node: int  # that the run uses; `request` is the option that asks for them
    cores_per_task: int | None
    memory_gb: int | None  # per node; 0 asks for all of it, None for none
    walltime_seconds: int
    is_exclusive: bool  # whole nodes
    account: str | None
    partition: str | None
    qos: str | None
    constraint: str | None
    mail: str | None  # address
    mail_on: tuple[str, ...]  # begin, end, fail; empty without an address
    request: str | None
    options: tuple[str, ...]
    launcher: str
    container: str | None
    env: dict[str, str]
    interface: str | None
    node_local: str | None
    stage_env: bool
    chain: int
    retries: int  # the job stops after so many starts in a row without a newer checkpoint
    arguments: tuple[str, ...]  # of train.py
    run_dir: Path | None = None  # None: the job makes one, named after it
    members_file: Path | None = None  # of a job array: one run directory per line
    num_members: int = 0
    at_once: int | None = None  # members of an array that may run at the same time
    code: Path | None = None  # folder of train.py and env.sh; None: the folder in which sbatch is typed
    work_dir: Path | None = None  # relative paths of the config start here; None: where sbatch is typed
    venv: Path | None = None  # None: the default of env.sh
    is_search_trial: bool = False  # asks the search for its values before its first start
    program: str = "train.py"  # that the ranks run; a path in `code`
    idle_gpus_per_node: int = 0  # that the job gets and no run uses
    runs_per_node: int = 1  # members of an array that share the node of one job
    step_request: str | None = None  # `request` for the GPUs of one of them

    @property
    def is_reusable(self) -> bool:
        """Return True if the script may be submitted many times: each of its jobs makes its own run directory."""
        return not (self.run_dir or self.members_file)

    @property
    def num_array_jobs(self) -> int:
        """Return the number of jobs of the array."""
        return math.ceil(self.num_members / self.runs_per_node)

    @property
    def all_gpus_per_node(self) -> int:
        """Return the number of GPUs that the job gets on each node, idle ones included."""
        return self.gpus_per_node * self.runs_per_node + self.idle_gpus_per_node

    @property
    def gpu_hours(self) -> float:
        """The most that the job may cost, in GPU-hours."""
        return self.nodes * self.all_gpus_per_node * self.walltime_seconds / 3600


def job_from_config(cfg: Config, arguments: tuple[str, ...] = (), **fields: Path | int | str | bool | None) -> Job:
    """Return the job that a checked config describes.

    Args:
        arguments: of train.py, for a script that holds no run directory.
        fields: of `Job`, from `run_dir` on.

    Raises:
        ConfigError: a time, or a `{field}` of the cluster's file, cannot be read.
    """
    cluster = cfg.cluster
    nodes, devices = cfg.trainer.num_nodes, cfg.trainer.devices
    gpus = devices if cfg.trainer.accelerator == cluster.accelerator and cluster.gpus_per_node else 0
    all_gpus = bool(gpus) and gpus == cluster.gpus_per_node
    cores = cluster.cores_per_gpu
    sizes = {"nodes": nodes, "tasks": devices, "ranks": nodes * devices}
    sizes |= {"gpus": gpus, "cores": (cores or 1) * devices}
    return Job(
        name=cfg.name,
        cluster=cluster.name,
        nodes=nodes,
        tasks_per_node=devices,
        gpus_per_node=gpus,
        cores_per_task=cores,
        memory_gb=_memory_share_gb(cluster, gpus, all_gpus=all_gpus),
        walltime_seconds=walltime_seconds("cluster.time", cluster.time),
        is_exclusive=cluster.exclusive and all_gpus,
        account=cluster.account or None,
        partition=cluster.partition,
        qos=cluster.qos,
        constraint=cluster.constraint,
        mail=cluster.mail if cluster.mail_on else None,
        mail_on=tuple(cluster.mail_on) if cluster.mail else (),
        request=fill_in_sizes("cluster.request", cluster.request, sizes) if cluster.request else None,
        options=tuple(cluster.options),
        launcher=fill_in_sizes("cluster.launcher", cluster.launcher, sizes),
        container=cluster.container,
        env=cluster.env,
        interface=cluster.interface,
        node_local=cluster.node_local,
        stage_env=cluster.stage_env,
        chain=cluster.chain,
        retries=cfg.faults.retries,
        arguments=arguments,
        idle_gpus_per_node=(cluster.gpus_per_node or 0) - gpus if cluster.whole_nodes else 0,
        **fields,  # type: ignore[arg-type]
    )


def _memory_share_gb(cluster: ClusterConfig, gpus: int, *, all_gpus: bool) -> int | None:
    """Return the main memory per node, in GB: the share that belongs to the GPUs that are used."""
    if cluster.memory_gb is None or all_gpus or not cluster.gpus_per_node:
        return cluster.memory_gb
    return cluster.memory_gb * max(gpus, 1) // cluster.gpus_per_node or None


def fill_in_sizes(key: str, text: str, sizes: dict[str, int]) -> str:
    """Return a value of the cluster's file with its `{nodes}`, `{gpus}`, ... replaced."""
    try:
        return text.format(**sizes)
    except (KeyError, ValueError, IndexError):
        names = ", ".join(f"{{{name}}}" for name in sizes)
        raise ConfigError(key, text, f"must use no names in braces but {names}", f"{key}='...'") from None
