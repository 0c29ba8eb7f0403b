"""PBS's job scripts (OpenPBS and PBS Professional): job.sh, which is submitted, and node.sh, which each node runs.

In PBS a user cannot requeue a job, a failed rank does not end it, and pbsdsh always returns 0. What pbsdsh starts has
neither the environment nor the directory of the job. So each node runs node.sh, which writes its exit code into a file,
and job.sh watches these files. Both hold what differs between jobs. What all jobs do is in pbs.bash, which they source.
"""

import re
import shlex
from pathlib import Path

from hpc.config.walltime import format_walltime
from hpc.jobs.job import Job, rank_environment_call, source_installed_library_lines, source_library_lines

# Field of `Job` -> directive. A field that is None has none: some servers have no resource qos and reject it.
DIRECTIVES = {"account": "-A {}", "partition": "-q {}", "qos": "-l qos={}"}


def render_job_script(job: Job) -> str:
    """Return job.sh, which starts node.sh on each node and ends as the run's verdict says.

    Its exit code: 0 if the run is finished; 85 if the next job continues it; 2 if it is rejected; else a failure. The
    next job is that of a chain (afternotok); without a chain, this job submits it as long as starts bring newer
    checkpoints.
    """
    functions = [
        *_function("setup", f"source_cluster_files {_quote(job.cluster)}", *_search_trial_lines(job)),
        *_function("launch", f'exec {job.launcher} /bin/bash "$node" "$@"'),
    ]
    run = "run_array_job" if job.members_file else "run_job"
    if job.is_reusable:  # run_new_job makes node.sh from this script
        functions += _node_functions(job)
        run = "run_new_job"
    lines = [*_variables(job), *functions, *_source(job), f'{run} "$@"']
    return "\n".join(["#!/bin/bash", *_directives(job), "", *lines, ""])


def render_node_script(job: Job) -> str:
    """Return node.sh, which runs the ranks of one node. Its arguments are those of run_node in pbs.bash."""
    lines = [
        "code=$1/code  # as it was when this was submitted",
        *_node_functions(job),
        *_source(job),
        'run_node "$@"',
    ]
    return "\n".join(["#!/bin/bash", *lines, ""])


def _directives(job: Job) -> list[str]:
    lines = [f"-N {re.sub(r'[^A-Za-z0-9_.+-]', '_', job.name)[:200]}"]  # qsub rejects other characters
    lines += [form.format(_quote(value)) for field, form in DIRECTIVES.items() if (value := getattr(job, field))]
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
        lines += ["-o " + _quote(f"{folder}/")]
    return [f"#PBS {line}" for line in [*lines, *job.options]]


def _variables(job: Job) -> list[str]:
    """Return the variables that pbs.bash reads."""
    lines = [
        f"nodes={job.nodes} interface={shlex.quote(job.interface or '')}",
        f"walltime={job.walltime_seconds} retries={job.retries} chain={job.chain}",
    ]
    work_dir = _quote(job.work_dir) if job.work_dir else "${PBS_O_WORKDIR:-$PWD}"
    if job.members_file:
        code = "code=${members%/*}/code  # as it was when this was submitted"
        return [*lines, f"work_dir={work_dir}", f"members={_quote(job.members_file)}", code]
    if job.run_dir:
        code = "code=$run_dir/code  # as it was when this was submitted"
        return [*lines, f"work_dir={work_dir}", f"run_dir={_quote(job.run_dir)}", code]
    places = f"work_dir={work_dir} run_dir=''  # in the copy in the run directory: those of the first job"
    return [*lines, f"name={shlex.quote(job.name)}", places]


def _node_functions(job: Job) -> list[str]:
    """Return the functions `environment` and `ranks`, which run_node in pbs.bash calls."""
    if job.container:
        lines = [f"source_cluster_files {_quote(job.cluster)}"]
    else:
        lines = [f"export VENV={_quote(job.venv)}"] if job.venv else []
        lines += [f"CLUSTER='{job.cluster}' source \"$code/env.sh\" || exit 2"]
        if job.stage_env and job.node_local and job.venv:
            # Each node reads one large file, instead of each rank many small ones.
            lines += [f'local here="{job.node_local}/env-$id"']
            lines += ['mkdir -p "$here" && tar -xf "$VENV.tar" -C "$here" && export PATH="$here/bin:$PATH" || exit 1']
    lines += [rank_environment_call(job)]  # PBS sets OMP_NUM_THREADS to the cores of the node
    for name, value in job.env.items():  # in double quotes: a value may contain other variables
        lines += [f'export {name}="' + re.sub(r'([\\`"])', r"\\\1", value) + '"']
    arguments = ['resume="$run_dir"'] if job.code else [shlex.quote(argument) for argument in job.arguments]
    ranks = [" ".join(filter(None, ["exec setsid", job.container, 'python -c "$torchrun"']))]
    ranks += [f'--nnodes={job.nodes} --nproc-per-node={job.tasks_per_node} --max-restarts=0 "$@"']
    ranks += [" ".join([f'"$code/{job.program}"', *arguments])]
    return [*_function("environment", *lines), *_function("ranks", " \\\n        ".join(ranks))]


def _source(job: Job) -> list[str]:
    if not job.is_reusable:
        return source_library_lines("pbs.bash", "run_node")
    # The copy of the code in the run directory has no environment of its own.
    venv = "" if job.container else 'export VENV="${VENV:-$work_dir/.venv}"; '
    return [
        f'code=${{run_dir:+$run_dir/code}}; code=${{code:-$work_dir}}; {venv}cd -- "$work_dir" || exit 1',
        '[ -n "$(type -t module)" ] || { path=$PATH; source /etc/profile; PATH=$PATH:$path; }',
        *source_installed_library_lines(job, "pbs.bash", "run_node"),
    ]


def _search_trial_lines(job: Job) -> list[str]:
    """Return the line that draws a search trial's values, once, on the first node, before its ranks start."""
    if not job.is_search_trial:
        return []
    env = [] if job.container else [f"export VENV={_quote(job.venv)}", "CLUSTER='' source \"$run_dir/code/env.sh\""]
    python = " ".join(filter(None, [job.container, "python"]))
    draw = " && ".join([*env, f'{python} "$run_dir/code/submit.py" --draw "$run_dir"'])
    return [f'[ -e "$run_dir/config.yaml" ] || ({draw}) || exit 2']


def _function(name: str, *lines: str) -> list[str]:
    return [f"{name}() {{", *(f"    {line}" for line in lines or [":"]), "}"]


def _quote(path: Path | str | None) -> str:
    return shlex.quote(str(path))
