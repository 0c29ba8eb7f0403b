"""A job as PBS wants it: Job → the script that is submitted, and the script that each of its nodes runs.

For OpenPBS and PBS Professional. There a user cannot requeue, nothing ends a job when one rank fails, pbsdsh returns 0
whatever happened, and what it starts on a node has neither the environment nor the directory of the job. So each node
runs node.sh, which leaves its exit code in a file, and job.sh watches these files. Both hold what differs from job to
job; what all of them do is in pbs.bash, which they source.
"""

import re
import shlex
from pathlib import Path

from hpc.config.walltime import clock
from hpc.jobs.job import Job, rank_environment, source_library

# Fields that are a directive of their own while they are set. A server without a resource qos rejects it by name.
DIRECTIVES = {"account": "-A {}", "partition": "-q {}", "qos": "-l qos={}", "umask": "-W umask={}"}


def text(job: Job) -> str:
    """Return job.sh, which starts node.sh on each node and ends as the run's verdict says.

    Exit code 0: finished; 85: the next job goes on; 2: could not start; else a failure. The next job is that of a
    chain (afternotok), or this one submits it, as long as starts bring newer checkpoints.
    """
    functions = [
        *_function("setup", *job.setup, *_asking(job)),
        *_function("launch", f'exec {job.launcher} /bin/bash "$node" "$@"'),
    ]
    run = "run_array_job" if job.members else "run_job"
    if job.is_by_hand:  # it makes the script of its nodes from itself
        functions += _node_functions(job)
        run = "run_new_job"
    lines = [*_values(job), *functions, *_source(job), f'{run} "$@"']
    return "\n".join(["#!/bin/bash", *_directives(job), "", *lines, ""])


def node_text(job: Job) -> str:
    """Return node.sh, which runs the ranks of one node; run_node in pbs.bash names its arguments."""
    code = "$1/code  # as it was when this was submitted" if job.code else "$7"
    functions = [*_function("setup", *job.setup), *_node_functions(job)]
    lines = [f"umask {job.umask}", f"code={code}", *functions, *_source(job), 'run_node "$@"']
    return "\n".join(["#!/bin/bash", *lines, ""])


def _directives(job: Job) -> list[str]:
    lines = [f"-N {re.sub(r'[^A-Za-z0-9_.+-]', '_', job.name)[:200]}"]  # qsub rejects other characters
    lines += [form.format(_quote(value)) for field, form in DIRECTIVES.items() if (value := getattr(job, field))]
    memory = f"mem={job.memory_gb}gb" if job.memory_gb else None
    lines += ["-l " + ":".join(filter(None, [f"select={job.nodes}", job.request, job.constraint, memory]))]
    lines += [f"-l place=scatter{':excl' if job.whole_nodes else ''}"]  # else two chunks may lie on one host
    lines += [f"-l walltime={clock(job.seconds)}"]
    if job.num_members > 1:  # qsub rejects 0-0
        lines += [f"-J 0-{job.num_members - 1}" + (f"%{job.at_once}" if job.at_once else "")]
    # The server starts the job again when a node was lost (r). What PBS and the login shell say goes to <job id>.OU, at
    # once where the node sees its folder (d). The job's own words go to a file that job.sh opens: that is always live.
    lines += ["-r y", "-j oe", "-k oed"]
    folder = job.members.parent if job.members else job.run_dir
    if folder and f"{folder}".isascii() and f"{folder}".isprintable():  # qsub takes no other paths, and quotes as bash
        lines += ["-o " + _quote(f"{folder}/")]
    return [f"#PBS {line}" for line in [*lines, *job.options]]


def _values(job: Job) -> list[str]:
    """Return the values that pbs.bash wants of a job."""
    lines = [
        f"umask {job.umask}",
        f"nodes={job.nodes} interface={shlex.quote(job.interface or '')}",
        f"walltime={job.seconds} retries={job.retries} chain={job.chain}",
    ]
    work_dir = _quote(job.work_dir) if job.work_dir else "${PBS_O_WORKDIR:-$PWD}"
    if job.members:
        code = "code=${members%/*}/code  # as it was when this was submitted"
        return [*lines, f"work_dir={work_dir}", f"members={_quote(job.members)}", code]
    if job.run_dir:
        code = "code=$run_dir/code  # as it was when this was submitted"
        return [*lines, f"work_dir={work_dir}", f"run_dir={_quote(job.run_dir)}", code]
    places = f"work_dir={work_dir} run_dir=''  # in the copy that goes on: those of the first job"
    return [*lines, f"name={shlex.quote(job.name)}", places, "code=$work_dir"]


def _node_functions(job: Job) -> list[str]:
    """Return the functions that run_node in pbs.bash calls, but for `setup`."""
    lines = []
    if not job.container:
        lines += [f"export VENV={_quote(job.venv)}"] if job.venv else []
        lines += ["CLUSTER='' source \"$code/env.sh\" || exit 1  # what the cluster's file sets up is done above"]
        if job.stage_env and job.node_local and job.venv:  # one big file to read instead of many small ones
            lines += [f'local here="{job.node_local}/env-$id"']
            lines += ['mkdir -p "$here" && tar -xf "$VENV.tar" -C "$here" && export PATH="$here/bin:$PATH" || exit 1']
    lines += [rank_environment(job)]  # PBS has set OMP_NUM_THREADS to the cores of the node
    for name, value in job.env.items():  # in double quotes, as a value may name other variables
        lines += [f'export {name}="' + re.sub(r'([\\`"])', r"\\\1", value) + '"']
    arguments = ['resume="$run_dir"'] if job.code else [shlex.quote(argument) for argument in job.arguments]
    ranks = [" ".join(filter(None, ["exec setsid", job.container, 'python -c "$torchrun"']))]
    ranks += [f'--nnodes={job.nodes} --nproc-per-node={job.tasks_per_node} --max-restarts=0 "$@"']
    ranks += [" ".join([f'"$code/{job.program}"', *arguments])]
    return [*_function("environment", *lines), *_function("ranks", " \\\n        ".join(ranks))]


def _source(job: Job) -> list[str]:
    return source_library("pbs.bash", "run_node", "qsub" if job.is_by_hand else None)


def _asking(job: Job) -> list[str]:
    """Return the line by which a run of a search gets its values, once, on the first node, before its ranks start."""
    if not job.asks:
        return []
    env = [] if job.container else [f"export VENV={_quote(job.venv)}", "CLUSTER='' source \"$run_dir/code/env.sh\""]
    python = " ".join(filter(None, [job.container, "python"]))
    ask = " && ".join([*env, f'{python} "$run_dir/code/tools/search.py" --ask "$run_dir"'])
    return [f'[ -e "$run_dir/config.yaml" ] || ({ask}) || exit 2']


def _function(name: str, *lines: str) -> list[str]:
    return [f"{name}() {{", *(f"    {line}" for line in lines or [":"]), "}"]


def _quote(path: Path | str | None) -> str:
    return shlex.quote(str(path))
