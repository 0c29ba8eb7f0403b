"""A job as text for Slurm: one task per device, all of them started by one srun.

The script holds what differs from job to job; what all of them do is in slurm.bash, which the script sources.
"""

import re
import shlex
from pathlib import Path

from hpc.config.walltime import clock
from hpc.jobs.job import Job, rank_environment, source_library

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


# Slurm's warning, for ranks that do not know by themselves when the job ends: early enough to save, in a short job too.
WARNING = 120  # seconds
LAST_WORDS = 30  # seconds for the other ranks to end by themselves, when one has ended


def text(job: Job) -> str:
    """Return the script for sbatch; `bash` runs it too, inside an allocation. Readable from top to bottom.

    Exit code 0: finished, or Slurm will start it again; 2: rejected; else a failure.
    """
    parts = [[*_head(job), *_directives(job)], _beginning(job), _environment(job), _launch(job)]
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _head(job: Job) -> list[str]:
    nodes = f"{job.nodes} node{'s' * (job.nodes > 1)}"
    ranks = f"{job.nodes * job.tasks_per_node} ranks, {job.tasks_per_node} on each"
    return ["#!/bin/bash", f"# {job.name}: {nodes}, {ranks}, one per device. Made by submit.py from the config."]


def _directives(job: Job) -> list[str]:
    asked = [flag.format(value) for field, flag in DIRECTIVES.items() if (value := getattr(job, field))]
    if job.request and not job.gpus_per_node:
        asked.remove(job.request)
    if job.whole_nodes:
        asked.append("--exclusive")
    if job.memory_gb is not None:
        asked.append(f"--mem={job.memory_gb}{'G' * bool(job.memory_gb)}")
    asked += [f"--time={clock(job.seconds)}", f"--signal=USR2@{min(WARNING, job.seconds // 10)}", *job.options]
    if job.members:
        limit = f"%{job.at_once}" if job.at_once else ""
        asked.append(f"--array=0-{job.num_members - 1}{limit}")
    # Requeued under the same number and appended to: a second attempt neither starts a new run nor erases the log.
    log = f"{job.name}-%j.log" if job.is_by_hand else _log(job)
    return [f"#SBATCH {option}" for option in [*asked, f"--output={log}", "--open-mode=append", "--requeue"]]


def _log(job: Job) -> str:
    folder = job.members.parent if job.members else job.run_dir
    name = "job-%A_%a.log" if job.members else "job-%j.log"
    text = str(folder).replace("%", "%%").replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}/{name}"'


def _beginning(job: Job) -> list[str]:
    """Return the values that slurm.bash wants, and the call that begins."""
    lines, begin = [f"set -eo pipefail; umask {job.umask}"], "begin_run"
    if job.is_by_hand:
        begin = "begin_new_run"
        lines += [f"name={shlex.quote(job.name)} code=$PWD retries={job.retries}"]
    else:
        if job.members:
            begin = "begin_array_run"
            lines += [f"members={_quote(job.members)} code=${{members%/*}}/code  # as it was when this was submitted"]
        else:
            lines += [f"run_dir={_quote(job.run_dir)} code=$run_dir/code  # as it was when this was submitted"]
        lines += [f"work_dir={_quote(job.work_dir or '.')} retries={job.retries}"]
    by_hand = "sbatch" if job.is_by_hand else None
    return [*lines, *source_library("slurm.bash", "run_ranks", by_hand), f'{begin} "$@"']


def _environment(job: Job) -> list[str]:
    """Return the lines from the cluster's own to an environment in which `python` is the right one."""
    lines = [*job.setup]
    if not job.container:
        lines += [f"export VENV={_quote(job.venv)}"] if job.venv else []
        lines += [f"CLUSTER='' source {_in_code(job, 'env.sh')}  # what the cluster's file sets up is done above"]
    lines += [rank_environment(job)]
    lines += [f'export {name}="{value}"' for name, value in job.env.items()]
    if _stages(job):
        # A warning that comes early is not for tar.
        unpack = f'trap "" USR2; mkdir -p "{_staged(job)}" && tar -xf "$VENV.tar" -C "{_staged(job)}"'
        tasks = f"--nodes={job.nodes} --ntasks={job.nodes} --ntasks-per-node=1"
        lines += ["# One big file read by each node, instead of many small ones by each rank."]
        lines += [f"srun {tasks} bash -c {shlex.quote(unpack)}"]
    return lines


def _stages(job: Job) -> bool:
    """submit.py packed the environment. In a container, or for a script given to sbatch, there is none to unpack."""
    return job.stage_env and job.node_local is not None and job.venv is not None


def _staged(job: Job) -> str:
    """Where a node has its copy. For bash on that node: the same words may mean another folder on each."""
    return f"{job.node_local}/env-$SLURM_JOB_ID"


def _launch(job: Job) -> list[str]:
    python = f"{job.container} python" if job.container else "python"
    lines = []
    if job.asks:  # a run of a search gets its values once, before its ranks start; requeued, it keeps them
        ask = f'{python} {_in_code(job, "tools/search.py")} --ask "$run_dir"'
        lines += [f'[ -e "$run_dir/config.yaml" ] || {ask}']
    cores = [f"--cpus-per-task={job.cores_per_task}"] if job.cores_per_task else []  # Slurm 22.05 to 23.02 inherit none
    options = [f"--nodes={job.nodes}", f"--ntasks-per-node={job.tasks_per_node}", *cores]
    arguments = ['resume="$run_dir"'] if job.code else [shlex.quote(argument) for argument in job.arguments]
    if _stages(job):
        python = "bash -c " + shlex.quote(f'PATH="{_staged(job)}/bin:$PATH" exec python "$@"') + " python"
    command = [
        f"{job.launcher} {' '.join(options)} --kill-on-bad-exit=0 --wait={LAST_WORDS} --label \\",
        f"    {' '.join([python, _in_code(job, job.program), *arguments])}",
    ]
    if _is_one_command(job):
        return [*lines, f"run_ranks {command[0]}", command[1]]
    return [*lines, "outlive_ranks", command[0], f"{command[1]} &", "end_as_ranks_did $!"]


def _is_one_command(job: Job) -> bool:
    """Can the launch be words of another command? What a cluster's file says may be any bash: `ulimit -s 9 && srun`."""
    said = f"{job.launcher} {job.container or ''}"
    return said.startswith("srun ") and not re.search(r"[;&|<>()]", said)


def _in_code(job: Job, name: str) -> str:
    return f'"$code/{name}"' if job.code else name


def _quote(path: Path | str | None) -> str:
    return shlex.quote(str(path))
