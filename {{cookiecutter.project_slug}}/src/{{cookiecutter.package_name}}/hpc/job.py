"""From the config to a job: what the scheduler is asked for, derived from what the Trainer is told. Pure; no torch."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from .config import Refused, typed
from .layout import Cluster

# The verdict of an attempt that wants to go on, as an exit code where there is no requeue (PBS).
CONTINUE = 85
TIME = "D-HH:MM:SS, H:MM:SS, D-HH:MM, D-HH or whole minutes"


@dataclass(frozen=True)
class Job:
    """All that a job script says. Sizes are per node or per task, as named; one task drives one device."""

    name: str
    nodes: int
    tasks_per_node: int
    gpus_per_node: int  # 0: none asked for
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
    umask: str
    arguments: tuple[str, ...]  # of train.py
    run_dir: Path | None = None  # None: named after the job when it runs
    members: Path | None = None  # a sweep: this file holds one run directory per line
    num_members: int = 0
    at_once: int | None = None
    code: Path | None = None  # train.py and env.sh lie here; None: where sbatch is typed
    work_dir: Path | None = None  # relative paths of the config count from here; None: where sbatch is typed
    venv: Path | None = None  # None: env.sh's own default

    @property
    def gpu_hours(self) -> float:
        """What the job may cost, in GPU-hours."""
        return self.nodes * self.gpus_per_node * self.seconds / 3600


def of(cfg: DictConfig, arguments: tuple[str, ...] = (), **places: Path | int | None) -> Job:
    """The job that a checked config describes; `places` are fields of `Job` from `run_dir` on.

    Raises:
        Refused: a time, or a `{field}` in the cluster's file, that cannot be read.
    """
    cluster = typed(Cluster, cfg.cluster, "cluster")
    nodes, devices = cfg.trainer.num_nodes, cfg.trainer.devices
    gpus = devices if cfg.trainer.accelerator == cluster.accelerator and cluster.gpus_per_node else 0
    all_gpus = bool(gpus) and gpus == cluster.gpus_per_node
    cores = cluster.cores_per_gpu
    sizes = {"nodes": nodes, "tasks": devices, "gpus": gpus, "cores": (cores or 1) * devices}
    return Job(
        name=cfg.name,
        nodes=nodes,
        tasks_per_node=devices,
        gpus_per_node=gpus if cluster.request or all_gpus else 0,
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
        env={str(key): str(value) for key, value in cluster.env.items()},
        interface=cluster.interface,
        node_local=cluster.node_local,
        stage_env=cluster.stage_env,
        chain=cluster.chain,
        umask="027" if cfg.group_readable else "077",
        arguments=arguments,
        **places,  # type: ignore[arg-type]
    )


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


def slurm(job: Job) -> str:
    """The job as text for sbatch; `bash` runs it too, inside an allocation."""
    parts = [_head(job), *_directives(job), "", *_surroundings(job), *_launch(job), *_end(job)]
    return "\n".join(parts) + "\n"


# Field -> directive. A field that is None or 0 is not asked for.
DIRECTIVES = {
    "name": "--job-name={}",
    "nodes": "--nodes={}",
    "tasks_per_node": "--ntasks-per-node={}",
    "cores_per_task": "--cpus-per-task={}",
    "request": "{}",
    "account": "--account={}",
    "partition": "--partition={}",
    "qos": "--qos={}",
    "constraint": "--constraint={}",
}


def _head(job: Job) -> str:
    ranks = job.nodes * job.tasks_per_node
    return (
        f"#!/bin/bash\n# {job.name}: {job.nodes} nodes x {job.tasks_per_node} tasks = {ranks} ranks, "
        f"one per device. Made by submit.py: change the config, not this."
    )


def _directives(job: Job) -> list[str]:
    asked = [flag.format(value) for field, flag in DIRECTIVES.items() if (value := getattr(job, field))]
    if job.request and not job.gpus_per_node:
        asked.remove(job.request)
    if job.whole_nodes:
        asked.append("--exclusive")
    if job.memory_gb is not None:
        asked.append(f"--mem={job.memory_gb}{'G' * bool(job.memory_gb)}")
    asked += [f"--time={clock(job.seconds)}", *job.options]
    if job.members:
        limit = f"%{job.at_once}" if job.at_once else ""
        asked.append(f"--array=0-{job.num_members - 1}{limit}")
    # Appended to, and requeued under the same number: a second attempt neither erases the first log nor starts a new run.
    log = f"{job.name}-%j.log" if not (job.run_dir or job.members) else _log(job)
    return [f"#SBATCH {option}" for option in [*asked, f"--output={log}", "--open-mode=append", "--requeue"]]


def _log(job: Job) -> str:
    folder = job.members.parent if job.members else job.run_dir
    name = "job-%A_%a.log" if job.members else "job-%j.log"
    text = str(folder).replace("%", "%%").replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}/{name}"'


def _surroundings(job: Job) -> list[str]:
    """From the directives to an environment in which `python` is the right one."""
    lines = [
        "set -eo pipefail  # not -u: the module command of some sites trips over it",
        f"umask {job.umask}",
        ': "${SLURM_JOB_ID:?there is no allocation here: sbatch this file, or run it with bash inside salloc}"',
        "",
        "# Nothing of the shell that submitted this steers the ranks; srun passes on all that is set from here on.",
        "unset RANK WORLD_SIZE LOCAL_RANK NODE_RANK GROUP_RANK MASTER_ADDR MASTER_PORT PYTHONPATH",
        "export SLURM_EXPORT_ENV=ALL",
        "",
        *_places(job),
        *job.setup,
    ]
    if not job.container:
        lines += [f"export VENV={_quote(job.venv)}"] if job.venv else []
        lines += [f"source {_in_code(job, 'env.sh')}"]
    lines += ["", f"export OMP_NUM_THREADS={job.cores_per_task or 1} PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1"]
    lines += ["export MASTER_PORT=$((10000 + RANDOM % 20000))  # of this attempt; the address follows from the nodes"]
    if job.interface:
        lines += [f"export NCCL_SOCKET_IFNAME={job.interface} GLOO_SOCKET_IFNAME={job.interface}"]
    lines += [f'export {name}="{value}"' for name, value in job.env.items()]
    return lines + ["", *_staging(job)]


def _places(job: Job) -> list[str]:
    """Where the run lives and where relative paths count from."""
    lines = [f"cd {_quote(job.work_dir)}"] if job.work_dir else []
    if job.members:
        lines += [f'run_dir=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {_quote(job.members)})']
    elif job.run_dir:
        lines += [f"run_dir={_quote(job.run_dir)}"]
    else:
        lines += [
            f"export HPC_RUN_DIR=$PWD/runs/{job.name}_$SLURM_JOB_ID  # the same for every rank and after a requeue"
        ]
        return [*lines, "run_dir=$HPC_RUN_DIR", ""]
    return [*lines, "code=$run_dir/code  # as it was when this was submitted", ""]


def _staging(job: Job) -> list[str]:
    if not _stages(job):
        return []
    unpack = f'mkdir -p "{_staged(job)}" && tar -xf "$VENV.tar" -C "{_staged(job)}"'
    return [
        "# One big file read by each node, instead of many small ones by each rank.",
        f"srun --nodes={job.nodes} --ntasks={job.nodes} --ntasks-per-node=1 bash -c {shlex.quote(unpack)}",
        "",
    ]


def _stages(job: Job) -> bool:
    """submit.py packed the environment. In a container, or for a script given to sbatch, there is none to unpack."""
    return job.stage_env and job.node_local is not None and job.venv is not None


def _staged(job: Job) -> str:
    """Where a node has its copy. For bash on that node: the same words may mean another folder on each."""
    return f"{job.node_local}/env-$SLURM_JOB_ID"


def _launch(job: Job) -> list[str]:
    cores = [f"--cpus-per-task={job.cores_per_task}"] if job.cores_per_task else []  # Slurm 22.05 to 23.02 inherit none
    options = [f"--nodes={job.nodes}", f"--ntasks-per-node={job.tasks_per_node}", *cores]
    arguments = ['resume="$run_dir"'] if job.code else [shlex.quote(argument) for argument in job.arguments]
    python = f"{job.container} python" if job.container else "python"
    if _stages(job):
        python = "bash -c " + shlex.quote(f'PATH="{_staged(job)}/bin:$PATH" exec python "$@"') + " python"
    program = [python, _in_code(job, "train.py"), *arguments]
    return [
        "# One rank that fails ends all of them.",
        'rm -f "$run_dir/verdict"',
        "status=0",
        f"{job.launcher} {' '.join(options)} --kill-on-bad-exit=1 --wait=60 --label \\",
        f"    {' '.join(program)} || status=$?",
        "",
    ]


def _end(job: Job) -> list[str]:
    return [
        "# Exit codes do not come through unchanged, so the ranks leave their common verdict in a file.",
        "case $(sed -n 's/^outcome //p' \"$run_dir/verdict\" 2>/dev/null) in",
        "finished) exit 0 ;;",
        f'continue) scontrol requeue "{"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if job.members else "$SLURM_JOB_ID"}" && exit 0 ;;',
        "esac",
        'echo "job $SLURM_JOB_ID: failed (exit code $status); what was asked and why: above and in $run_dir" >&2',
        "exit $((status ? status : 1))",
    ]


def _in_code(job: Job, name: str) -> str:
    return f'"$code/{name}"' if job.code else name


def _quote(path: Path | None) -> str:
    return shlex.quote(str(path))


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
