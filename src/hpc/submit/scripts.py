"""The files that a scheduler gets for a checked config."""

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from hpc.config.errors import ConfigError
from hpc.config.project import HPC, LIBRARY
from hpc.config.sections import Config
from hpc.jobs import pbs, slurm
from hpc.jobs.job import Job, job_from_config
from hpc.jobs.print_bash import SOURCED_FILES
from hpc.run import directory
from hpc.system import files
from hpc.system.files import write_atomically


def make_job(cfg: Config, **fields: Any) -> Job:
    """Return the job of a config, with this Python's environment and this working directory.

    Args:
        fields: of `Job`, as in `job_from_config`.
    """
    venv = None if cfg.cluster.container else Path(sys.prefix)
    run_dir = fields.get("run_dir") or cfg.run_path
    fields.setdefault("is_search_trial", directory.is_search_trial(run_dir))
    return job_from_config(cfg, work_dir=Path.cwd(), code=run_dir / "code", venv=venv, **fields)


def render_script(job: Job, cfg: Config) -> str:
    """Return the script for sbatch or qsub."""
    return pbs.render_job_script(job) if cfg.cluster.scheduler == "pbs" else slurm.render_job_script(job)


def write_job_script(job: Job, cfg: Config, *, folder: Path) -> None:
    """Write job.sh."""
    write_atomically(folder / "job.sh", render_script(job, cfg))


def read_work_dir(run_dir: Path) -> Path:
    """Return the folder in which a submitted run's relative paths start; the current one if that is gone."""
    script = files.read_text(run_dir / "job.sh", errors="surrogateescape")
    match = re.search(r"(?m)^work_dir=(.+)$", script)
    folder = Path(shlex.split(match[1])[0]) if match else Path.cwd()
    return folder if folder.is_dir() else Path.cwd()


def renew_environment(run_dir: Path, *, folder: Path, venv: Path) -> None:
    """Write the run's job.sh into `folder`, with this environment, if the one that it names is gone."""
    text = files.read_text(run_dir / "job.sh", errors="surrogateescape")
    match = re.search(r"(?m)^export VENV=(.+)$", text)
    if match and not os.path.lexists(Path(shlex.split(match[1])[0], "bin", "python")):
        renewed = text.replace(f"export VENV={match[1]}", f"export VENV={shlex.quote(str(venv))}")
        if renewed != text:
            (folder / "job.sh").write_text(renewed, encoding="utf-8", errors="surrogateescape")
            print(f"note: job.sh gets the environment {venv}, as {match[1]} is gone", flush=True)


def reject_run_with_fixed_script(run_dir: Path) -> None:
    """Raise `ConfigError` if a new job script would not work for a submitted run.

    Its copy of the code has other functions for job scripts, or its ranks run another program than train.py.
    """
    for name in sorted({f"jobs/{file}" for sourced in SOURCED_FILES.values() for file in sourced}):
        if _read_bytes(run_dir / "code" / "src" / HPC / name) != _read_bytes(LIBRARY / name):
            rule = f"A new job script sources hpc/{name}, which differs between the run's copy and this library"
            own_submit = shlex.quote(str(run_dir / "code" / "submit.py"))
            fix = f"python {own_submit} resume={shlex.quote(str(run_dir))}, and these words"
            raise ConfigError("resume", run_dir, rule, fix)
    if "/train.py" not in files.read_text(run_dir / "job.sh", errors="surrogateescape"):
        rule = "Only a run of train.py can continue with changes"
        fix = f"resume={run_dir} alone; or the tool that made the run, with these words"
        raise ConfigError("resume", run_dir, rule, fix)


def _read_bytes(path: Path) -> bytes | None:
    """Return a file's content; None if it cannot be read."""
    try:
        with files.open_regular_file(path) as stream:
            return stream.read()
    except OSError:
        return None
