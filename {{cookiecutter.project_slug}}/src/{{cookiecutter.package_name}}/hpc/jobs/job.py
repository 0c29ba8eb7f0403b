"""From the config to a job: what the scheduler is asked for, derived from what the Trainer is told. Pure; no torch."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig

from ..config import Refused, references, typed
from .layout import Cluster

# The verdict of an attempt that wants to go on, as an exit code where there is no requeue (PBS).
CONTINUE = 85
# For the ranks' Python: print at once, stacks on a crash; bytecode is made on submitting, not by every rank anew.
PYTHON = "PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 PYTHONDONTWRITEBYTECODE=1"
HASHES = "export PYTHONHASHSEED=${PYTHONHASHSEED:-0}  # else list(set(names)) has another order in each process"
REFUSED = "`"  # no value of cluster.env may hold one
TIME = "D-HH:MM:SS, H:MM:SS, D-HH:MM, D-HH or whole minutes"


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
    def gpu_hours(self) -> float:
        """What the job may cost, in GPU-hours."""
        return self.nodes * self.gpus_per_node * self.seconds / 3600


def of(cfg: DictConfig, arguments: tuple[str, ...] = (), **places: Path | int | str | bool | None) -> Job:
    """The job that a checked config describes; `places` are fields of `Job` from `run_dir` on.

    Raises:
        Refused: a time, or a `{field}` in the cluster's file, that cannot be read.
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


def cluster_in_bash(cfg: DictConfig) -> Cluster:
    """The cluster as a script says it: there `${oc.env:NAME}` is a variable of bash, as its value may be a secret.

    Not in what the scheduler itself reads, such as an account: it fills in no variables, and shows it to everybody.

    Raises:
        Refused: a key that the cluster's files cannot have, or a value of another type.
    """
    cluster = typed(Cluster, cfg.cluster, "cluster")
    with references(_variable):
        env = {str(key): str(value) for key, value in cfg.cluster.env.items()}
        setup = list(cfg.cluster.setup)
        return replace(
            cluster, container=cfg.cluster.container, node_local=cfg.cluster.node_local, setup=setup, env=env
        )


def _variable(name: str, *default: str | None) -> str:
    """`${oc.env:NAME,default}` in bash. Without a default, a job that lacks it says so and ends."""
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise Refused("cluster", f"oc.env:{name!a}", "must name a variable of the environment", "${oc.env:NAME}")
    if default:
        text = default[0] or ""  # another such reference, or plain text, where a } would end the expansion
        return f"${{{name}-{text if text.startswith('${') else text.replace('}', REFUSED)}}}"
    return f"${{{name}?is not in this job: export it where the job is submitted, or in cluster.setup}}"


def walltime(key: str, text: str) -> int:
    """Seconds of a time as Slurm writes them, except `a:b`, which is minutes to Slurm and hours to PBS.

    Raises:
        Refused: none of the forms that `TIME` names, or no time at all.
    """
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)|(\d+)-(\d+)(?::([0-5]\d))?|(\d+)", text)
    if not found:
        raise Refused(key, text, f"is a time: {TIME}", f"{key}={_meant_time(text)}")
    days, hours, minutes, seconds, short_days, short_hours, short_minutes, plain = (int(n or 0) for n in found.groups())
    total = ((days + short_days) * 24 + hours + short_hours) * 3600 + (minutes + short_minutes + plain) * 60 + seconds
    if not total:
        raise Refused(key, text, f"is a time: {TIME}", f"{key}=1:00:00")
    return total


def clock(seconds: int) -> str:
    """Seconds as HH:MM:SS, which Slurm and PBS read alike."""
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _share(cluster: Cluster, gpus: int, all_gpus: bool) -> int | None:
    """Main memory per node, in GB: the share that goes with the GPUs."""
    if cluster.memory_gb is None or all_gpus or not cluster.gpus_per_node:
        return cluster.memory_gb
    return cluster.memory_gb * max(gpus, 1) // cluster.gpus_per_node or None


def _filled(key: str, text: str, sizes: dict[str, int]) -> str:
    try:
        return text.format(**sizes)
    except (KeyError, ValueError, IndexError):
        raise Refused(key, text, f"knows {', '.join(f'{{{name}}}' for name in sizes)}", f"{key}='...'") from None


def _meant_time(text: str) -> str:
    found = re.fullmatch(r"(\d+):(\d\d)", text)
    return f"{found[1]}:{found[2]}:00 (hours) or 0:{found[1]:0>2}:{found[2]} (minutes)" if found else "1:30:00"
