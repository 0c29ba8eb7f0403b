"""Slurm's job scripts: one task per device, all of them started by one srun.

A script holds what differs between jobs. What all jobs do is in job.bash and slurm.bash, which the script sources.
"""

import re
import shlex
from dataclasses import replace

from hpc.config.walltime import format_walltime
from hpc.jobs import script_lines
from hpc.jobs.job import Job
from hpc.jobs.script_lines import quote

# Field of `Job` -> directive. A field that is None or 0 has none.
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
    "mail": "--mail-user={}",
}
# Slurm's signal before the end leaves time for a checkpoint. A short job gets it after nine tenths of its time.
WARNING_SECONDS = 120
RANK_EXIT_SECONDS = 30  # for the other ranks to end by themselves, after the first one has ended


def render_job_script(job: Job) -> str:
    """Return the script for sbatch. Inside an allocation, `bash` runs it too.

    Its exit code: 0 if the run is finished or Slurm will start the job again; 2 if it is rejected; else a failure.
    """
    parts = [[*_header(job), *_directives(job)], _begin_lines(job), _environment(job), _launch(job)]
    if job.runs_per_node > 1:  # one blank line less, as a script has at most 40 lines
        parts[2:] = [[*parts[2], *parts[3]]]
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _header(job: Job) -> list[str]:
    nodes = f"{job.nodes} node{'s' * (job.nodes > 1)}"
    if job.runs_per_node > 1:
        nodes = f"one of {job.runs_per_node} runs that share a node"
    num_ranks = job.nodes * job.tasks_per_node
    ranks = f"{num_ranks} rank{'s' * (num_ranks > 1)}, {job.tasks_per_node} on each"
    contents = f"# {job.name}: {nodes}, {ranks}, one per device."
    if job.is_reusable:
        return ["#!/bin/bash", contents, "# Made by `python submit.py --render FOLDER`, which overwrites edits."]
    return ["#!/bin/bash", f"{contents} Made by submit.py from the config."]


def _directives(job: Job) -> list[str]:
    whole = replace(job, tasks_per_node=job.tasks_per_node * job.runs_per_node)
    options = [form.format(value) for field, form in DIRECTIVES.items() if (value := getattr(whole, field))]
    if job.request and not job.gpus_per_node:
        options.remove(job.request)
    if job.mail_on:
        options.append(f"--mail-type={','.join(job.mail_on).upper()}")
    if job.is_exclusive:
        options.append("--exclusive")
    if job.memory_gb is not None:
        options.append(f"--mem={job.memory_gb}{'G' * bool(job.memory_gb)}")
    warning_seconds = min(WARNING_SECONDS, job.walltime_seconds // 10)
    options += [
        f"--time={format_walltime(job.walltime_seconds)}",
        f"--signal=USR2@{warning_seconds}",
        *job.options,
    ]
    if job.members_file:
        limit = f"%{job.at_once // job.runs_per_node}" if job.at_once else ""
        options.append(f"--array=0-{job.num_array_jobs - 1}{limit}")
    # A requeued job keeps its number, so its log is appended to.
    log = f"{job.name}-%j.log" if job.is_reusable else _log_pattern(job)
    lines = [f"#SBATCH {option}" for option in [*options, f"--output={log}", "--open-mode=append", "--requeue"]]
    if job.is_reusable:  # comments for the person who reads and submits it
        lines += [f"# --signal: {warning_seconds} s before the time limit each rank gets SIGUSR2, saves and exits."]
    return lines


def _log_pattern(job: Job) -> str:
    folder = job.members_file.parent if job.members_file else job.run_dir
    name = "job-%A_%a.log" if job.members_file else "job-%j.log"
    escaped = str(folder).replace("%", "%%").replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}/{name}"'


def _begin_lines(job: Job) -> list[str]:
    """Return the variables that slurm.bash reads, and the call of its first function."""
    lines = ["set -eo pipefail"]
    snapshot = "# as it was when this was submitted"
    if job.is_reusable:
        # The copy of the code in the run directory has no environment of its own.
        venv = "" if job.container else '; export VENV="${VENV:-$PWD/.venv}"'
        lines = [
            f"{lines[0]}{venv}",
            f"name={shlex.quote(job.name)} retries={job.retries}  # read by slurm.bash",
            "code=$PWD/runs/${name}_${SLURM_JOB_ID:-}/code  # a requeued job's copy, which its first start made",
            '[ "${SLURM_RESTART_COUNT:-0}" != 0 ] && [ -e "$code/env.sh" ] || code=$PWD',
        ]
        return [*lines, *script_lines.source_installed_library_lines(job, "slurm"), 'begin_new_run "$@"']
    if job.members_file:
        function = "enter_array" if job.runs_per_node > 1 else "begin_array_run"
        lines += [f"members={quote(job.members_file)} code=${{members%/*}}/code  {snapshot}"]
    else:
        function = "begin_run"
        lines += [f"run_dir={quote(job.run_dir)} code=$run_dir/code  {snapshot}"]
    runs_per_node = f" runs_per_node={job.runs_per_node}" if job.runs_per_node > 1 else ""
    lines += [f"work_dir={quote(job.work_dir or '.')} retries={job.retries}{runs_per_node}"]
    return [*lines, *script_lines.source_library_lines("slurm"), f'{function} "$@"']


def _environment(job: Job) -> list[str]:
    """Return the lines that make `python` the environment's on each node, and export the ranks' variables."""
    lines = script_lines.environment_lines(job)
    if script_lines.is_environment_staged(job):
        folder = _staged_environment(job)
        # The trap keeps Slurm's warning signal from tar.
        unpack = f'trap "" USR2; mkdir -p "{folder}" && tar -xf "$VENV.tar" -C "{folder}"'
        tasks = f"--nodes={job.nodes} --ntasks={job.nodes} --ntasks-per-node=1"
        lines += ["# Each node reads one large file, instead of each rank many small ones."]
        lines += [f"srun {tasks} bash -c {shlex.quote(unpack)}"]
    return lines


def _staged_environment(job: Job) -> str:
    """Return the folder of a node's copy, as bash expands it on that node: the variables differ between nodes."""
    return f"{job.node_local}/env-$SLURM_JOB_ID"


def _launch(job: Job) -> list[str]:
    """Return the lines that start the ranks and wait for them."""
    lines = script_lines.search_trial_lines(job) if job.is_search_trial else []
    options = [f"--nodes={job.nodes}", f"--ntasks-per-node={job.tasks_per_node}"]
    # srun 22.05 to 23.02 does not inherit the cores.
    options += [f"--cpus-per-task={job.cores_per_task}"] if job.cores_per_task else []
    options += _step_options(job) if job.runs_per_node > 1 else []
    python = ""
    if script_lines.is_environment_staged(job):
        python = "bash -c " + shlex.quote(f'PATH="{_staged_environment(job)}/bin:$PATH" exec python "$@"') + " python"
    command = [
        f"{job.launcher} {' '.join(options)} --kill-on-bad-exit=0 --wait={RANK_EXIT_SECONDS} --label \\",
        f"    {script_lines.rank_command(job, python)}",
    ]
    if job.is_reusable:
        lines += [f"# When a rank ends, the others have {RANK_EXIT_SECONDS} s to save, or to record their errors."]
    if _is_simple_command(job):
        lines += [f"run_ranks {command[0]}", command[1]]
    else:
        lines += ["stay_alive_on_term", command[0], f"{command[1]} &", "exit_as_ranks_did $!"]
    if job.runs_per_node > 1:
        lines = ["run_member() {", *(f"    {line}" for line in lines), "}; run_members"]
    return lines


def _step_options(job: Job) -> list[str]:
    """Return the options of srun for a run that shares its node: its own GPUs, cores and memory, and no more."""
    memory_gb = (job.memory_gb or 0) * job.gpus_per_node // job.all_gpus_per_node
    # Without --mem the first step would take all memory of the job; with 0 the steps share it.
    memory = f"--mem={memory_gb}{'G' * bool(memory_gb)}"
    options = ["--exact", f"--ntasks={job.tasks_per_node}", f"{job.step_request}", memory]
    # A launcher's list of cores is for the ranks of a whole node.
    return [*options, "--cpu-bind=cores"] if re.search("--cpu-bind=(mask|map)_", job.launcher) else options


def _is_simple_command(job: Job) -> bool:
    """Return whether the launch can be an argument of run_ranks. A launcher may be any bash: `ulimit -s 9 && srun`."""
    words = f"{job.launcher} {job.container or ''}"
    return words.startswith("srun ") and not re.search(r"[;&|<>()]", words)
