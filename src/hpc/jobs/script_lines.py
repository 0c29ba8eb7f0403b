"""Lines that the job scripts of Slurm and PBS share: they source bash functions, make the environment, call a rank."""

import shlex
from pathlib import Path

from hpc.jobs.job import Job
from hpc.jobs.print_bash import SOURCED_FILES

ONE_FUNCTION_OF_EACH = {
    "slurm": "read_verdict run_ranks run_members",
    "pbs": "read_verdict run_ranks submit_next",
}


def source_library_lines(scheduler: str) -> list[str]:
    """Return the lines of bash that source files of `hpc/jobs` in `$code`, or end with one message and exit code 2."""
    stems = ",".join(file.removesuffix(".bash") for file in SOURCED_FILES[scheduler])
    rule = "a file of $code/src/hpc/jobs is missing or damaged"
    advice = "if the run was moved, type: python submit.py resume=FOLDER"
    return [
        f'{{ source <(cat "$code/src/hpc/jobs/"{{{stems}}}.bash) &&',
        f"    declare -F {ONE_FUNCTION_OF_EACH[scheduler]}; }} >/dev/null 2>&1 ||",
        f'    {{ echo "job.sh: error: {rule}; {advice}" >&2; exit 2; }}',
    ]


def source_installed_library_lines(job: Job, scheduler: str) -> list[str]:
    """Return the lines of bash that do so in a script that a person submits: with the library of the environment.

    The first start copies the code into the run directory. A job that is started again has that copy in `$code`.
    """
    lines = [f'{{ [ -e "$code/env.sh" ] && CLUSTER=\'{job.cluster}\' source "$code/env.sh" &&']
    if job.container:
        setup = 'for file in "$code/configs/cluster" "${XDG_CONFIG_HOME:-${HOME:-}/.config}/hpc-ml-template"; do'
        name = shlex.quote(f"{job.cluster}.sh")
        lines = [setup, f'    [ ! -e "$file/"{name} ] || source "$file/"{name} || exit 2', "done"]
        # env: an image may unset PYTHONPATH, as that of container.def does.
        lines += [f'{{ python() {{ {job.container} env PYTHONPATH="$PYTHONPATH" python "$@"; }} &&']
    sentence = "job.sh: error: this must be submitted in the folder of a project whose environment is complete"
    return [
        *lines,
        f"    source <(PYTHONPATH=$code/src python -sPm hpc.jobs.print_bash {scheduler}) &&",
        f"    declare -F {ONE_FUNCTION_OF_EACH[scheduler]} >/dev/null; }} ||",
        f'    {{ echo "{sentence}" >&2; exit 2; }}',
    ]


def environment_lines(job: Job, *, or_else: str = "") -> list[str]:
    """Return the lines that make `python` the environment's and export the ranks' variables; cluster.env comes last.

    Args:
        or_else: what bash does if env.sh fails, where the script does not `set -e`.
    """
    lines = []
    if job.container and not job.is_reusable:
        lines = [f"source_cluster_files {quote(job.cluster)}"]
    elif not job.is_reusable:  # otherwise the lines before have done so
        lines = [f"export VENV={quote(job.venv)}"] if job.venv else []
        lines += [f"CLUSTER='{job.cluster}' source \"$code/env.sh\"{or_else}"]
    words = [f"OMP_NUM_THREADS={job.cores_per_task or 1}"]
    if job.interface:
        words += [f"{key}_SOCKET_IFNAME={shlex.quote(job.interface)}" for key in ("NCCL", "GLOO")]
    lines += [f"set_rank_environment {' '.join(words)}"]
    return [*lines, *(f'export {name}="{value}"' for name, value in job.env.items())]  # values may name variables


def search_trial_lines(job: Job) -> list[str]:
    """Return the line that draws a trial's values, once, before its ranks start; a job that continues keeps them."""
    return [f'[ -e "$run_dir/config.yaml" ] || {_python(job)} "$code/submit.py" --draw "$run_dir"']


def rank_command(job: Job, python: str = "") -> str:
    """Return the command line of a rank."""
    arguments = ['resume="$run_dir"'] if job.code else [shlex.quote(argument) for argument in job.arguments]
    return " ".join([python or _python(job), f'"$code/{job.program}"', *arguments])


def is_environment_staged(job: Job) -> bool:
    """Return whether submit.py has packed the environment: not for a container, nor for a reusable script."""
    return job.stage_env and job.node_local is not None and job.venv is not None


def quote(path: Path | str | None) -> str:
    """Return a word of bash."""
    return shlex.quote(str(path))


def _python(job: Job) -> str:
    return f"{job.container} python" if job.container else "python"
