"""A job as text for Slurm: one task per device, all of them started by one srun."""

import shlex
from pathlib import Path

from .job import Job, clock

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


def text(job: Job) -> str:
    """For sbatch; `bash` runs it too, inside an allocation. Readable from top to bottom."""
    parts = [_head(job), *_directives(job), "", *_surroundings(job), *_launch(job), *_end(job)]
    return "\n".join(parts) + "\n"


def _head(job: Job) -> str:
    nodes = f"{job.nodes} node{'s' * (job.nodes > 1)}"
    ranks = f"{job.nodes * job.tasks_per_node} ranks, {job.tasks_per_node} on each"
    return f"#!/bin/bash\n# {job.name}: {nodes}, {ranks}, one per device. Made by submit.py from the config."


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
    # Requeued under the same number and appended to: a second attempt neither starts a new run nor erases the log.
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
        lines += [f"CLUSTER='' source {_in_code(job, 'env.sh')}  # what the cluster's file sets up is done above"]
    lines += ["", f"export OMP_NUM_THREADS={job.cores_per_task or 1} PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1"]
    lines += ["export MASTER_PORT=$((10000 + RANDOM % 20000))  # of this attempt; the address follows from the nodes"]
    if job.interface:
        lines += [f"export NCCL_SOCKET_IFNAME={job.interface} GLOO_SOCKET_IFNAME={job.interface}"]
    lines += [f'export {name}="{value}"' for name, value in job.env.items()]
    return [*lines, "", *_staging(job)]


def _places(job: Job) -> list[str]:
    """Where the run lives and where relative paths count from."""
    lines = [f"cd {_quote(job.work_dir)}"] if job.work_dir else []
    if job.members:
        lines += [f'run_dir=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {_quote(job.members)})']
    elif job.run_dir:
        lines += [f"run_dir={_quote(job.run_dir)}"]
    else:
        lines += [f"export HPC_RUN_DIR=$PWD/runs/{job.name}_$SLURM_JOB_ID  # the same in all ranks and attempts"]
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
    number = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if job.members else "$SLURM_JOB_ID"
    return [
        "# Exit codes do not come through unchanged, so the ranks leave their common verdict in a file.",
        "case $(sed -n 's/^outcome //p' \"$run_dir/verdict\" 2>/dev/null) in",
        "finished) exit 0 ;;",
        f'continue) scontrol requeue "{number}" && exit 0 ;;',
        "esac",
        'echo "job $SLURM_JOB_ID: failed (exit code $status); what was asked and why: above and in $run_dir" >&2',
        "exit $((status ? status : 1))",
    ]


def _in_code(job: Job, name: str) -> str:
    return f'"$code/{name}"' if job.code else name


def _quote(path: Path | None) -> str:
    return shlex.quote(str(path))
