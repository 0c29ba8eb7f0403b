"""PBS's job scripts (OpenPBS and PBS Professional): one process per device, started by the cluster's launcher.

A script holds what differs between jobs. What all jobs do is in job.bash, pbs.bash and pbs_successor.bash, which the
script sources. In PBS a launcher passes neither the folder nor the environment on, so each rank is this script again.
"""

import re
import shlex

from hpc.config.walltime import format_walltime
from hpc.jobs import script_lines
from hpc.jobs.job import Job
from hpc.jobs.script_lines import quote

# Field of `Job` -> directive. A field that is None has none: some servers have no resource qos and reject it.
DIRECTIVES = {"account": "-A {}", "partition": "-q {}", "qos": "-l qos={}", "mail": "-M {}"}
MAIL_LETTERS = {"begin": "b", "end": "e", "fail": "a"}  # of -m; a: PBS has aborted the job, e also tells the exit code
TMRSH = "pbs_tmrsh"  # cluster.launcher of every PBS: pbs.bash starts one for each rank


def render_job_script(job: Job) -> str:
    """Return the script for qsub, which starts itself again as each rank, and ends as the run's verdict says.

    Its exit code: 0 if the run is finished; 85 if the next job continues it; 2 if it is rejected; else a failure. The
    next job is that of a chain (afternotok); without a chain, this job submits it as long as starts bring newer
    checkpoints.
    """
    parts = [["#!/bin/bash", *_directives(job)], _begin_lines(job), _environment(job), _launch(job)]
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _directives(job: Job) -> list[str]:
    lines = [f"-N {re.sub(r'[^A-Za-z0-9_.+-]', '_', job.name)[:200]}"]  # qsub rejects other characters
    lines += [form.format(quote(value)) for field, form in DIRECTIVES.items() if (value := getattr(job, field))]
    if job.mail_on:
        lines += [f"-m {''.join(MAIL_LETTERS[event] for event in dict.fromkeys(job.mail_on))}"]
    memory = f"mem={job.memory_gb}gb" if job.memory_gb else None
    lines += ["-l " + ":".join(filter(None, [f"select={job.nodes}", job.request, job.constraint, memory]))]
    lines += [f"-l place=scatter{':excl' if job.is_exclusive else ''}"]  # without scatter, two chunks may share a host
    lines += [f"-l walltime={format_walltime(job.walltime_seconds)}"]
    if job.num_members > 1:  # qsub rejects 0-0
        lines += [f"-J 0-{job.num_members - 1}" + (f"%{job.at_once}" if job.at_once else "")]
    # -r y: the server starts the job again when a node was lost. -j, -k: the output of PBS and of the login shell goes
    # to <job id>.OU, at once if the node sees its folder. The job's own output goes to a log that job.sh opens.
    lines += ["-r y", "-j oe", "-k oed"]
    folder = job.members_file.parent if job.members_file else job.run_dir
    if folder and f"{folder}".isascii() and f"{folder}".isprintable():  # qsub accepts no other paths
        lines += ["-o " + quote(f"{folder}/")]
    return [f"#PBS {line}" for line in [*lines, *job.options]]


def _begin_lines(job: Job) -> list[str]:
    """Return the variables that pbs.bash reads, and the call of its first function."""
    lines = [
        f"nodes={job.nodes} tasks={job.tasks_per_node} interface={shlex.quote(job.interface or '')}",
        f"walltime={job.walltime_seconds} retries={job.retries} chain={job.chain}",
    ]
    if job.is_reusable:
        # The copy of the code in the run directory has no environment of its own.
        venv = "" if job.container else 'export VENV="${VENV:-$work_dir/.venv}"; '
        return [
            *lines,
            f"name={shlex.quote(job.name)}",
            "work_dir=${PBS_O_WORKDIR:-$PWD} run_dir=''  # in the copy in the run directory: those of the first job",
            f'code=${{run_dir:+$run_dir/code}}; code=${{code:-$work_dir}}; {venv}cd -- "$work_dir" || exit 1',
            '[ -n "$(type -t module)" ] || { path=$PATH; source /etc/profile; PATH=$PATH:$path; }',
            *script_lines.source_installed_library_lines(job, "pbs"),
            'begin_new_run "$@"',
        ]
    if job.members_file:
        places, function = f"members={quote(job.members_file)} code=${{members%/*}}/code", "begin_array_run"
    else:
        places, function = f"run_dir={quote(job.run_dir)} code=$run_dir/code", "begin_run"
    lines += [f"{places}  # as it was when this was submitted", f"work_dir={quote(job.work_dir or '.')}"]
    return [*lines, *script_lines.source_library_lines("pbs"), f'{function} "$@"']


def _environment(job: Job) -> list[str]:
    lines = script_lines.environment_lines(job, or_else=" || exit 2")  # PBS sets OMP_NUM_THREADS to a node's cores
    if script_lines.is_environment_staged(job):
        lines += [f'unpack_environment "{job.node_local}/env-$id"']
    return lines


def _launch(job: Job) -> list[str]:
    """Return the lines that start the ranks and wait for them; in a rank, they become it."""
    lines = [f"is_rank || {line} || exit 2" for line in script_lines.search_trial_lines(job) if job.is_search_trial]
    if job.launcher != TMRSH:
        lines += [f'launch_ranks() {{ exec {job.launcher} "$@"; }}']
    return [*lines, f"run_ranks {script_lines.rank_command(job)}"]
