"""From a checked config to the files that a scheduler is given."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from hpc.config import project
from hpc.config.errors import ConfigError
from hpc.jobs import job, pbs, slurm
from hpc.run import directory
from hpc.system import files
from hpc.system.files import write_atomically

SOURCED = ("src/hpc/jobs/slurm.bash", "src/hpc/jobs/pbs.bash")  # by job scripts, from the run's copy of the code


def describe(cfg: DictConfig, **places: Any) -> job.Job:
    """The job of a config, in this environment and from this directory; `places` as for `job.of`."""
    venv = None if cfg.cluster.container else Path(sys.prefix)
    run_dir = places.get("run_dir") or Path(cfg.run_dir)
    places.setdefault("asks", directory.is_search_trial(run_dir))
    return job.of(cfg, work_dir=Path.cwd(), code=run_dir / "code", venv=venv, **places)


def text(work: job.Job, cfg: DictConfig) -> str:
    """The script for sbatch or qsub."""
    return pbs.text(work) if cfg.cluster.scheduler == "pbs" else slurm.text(work)


def write(work: job.Job, cfg: DictConfig, folder: Path) -> None:
    """The script, and for PBS the one that runs on each node."""
    write_atomically(folder / "job.sh", text(work, cfg))
    if cfg.cluster.scheduler == "pbs":
        write_atomically(folder / "node.sh", pbs.node_text(work))


def work_dir(run_dir: Path) -> Path:
    """Where relative paths of a submitted run count from, as its job script says; here, if that place is gone."""
    found = re.search(r"(?m)^(?:cd |work_dir=)(.+)$", files.read_text(run_dir / "job.sh", errors="surrogateescape"))
    place = Path(shlex.split(found[1])[0]) if found else Path.cwd()
    return place if place.is_dir() else Path.cwd()


def reject_no_training(run_dir: Path) -> None:
    """Raise `ConfigError` where a new job script would not do for a submitted run that moves.

    Its ranks start another program than train.py, or its copy of the code has other functions for job scripts.
    """
    scripts = [path for name in ("job.sh", "node.sh") if (path := run_dir / name).is_file()]
    if not any("/train.py" in files.read_text(path, errors="surrogateescape") for path in scripts):
        rule = "trains nothing, so that it cannot go on elsewhere"
        raise ConfigError(
            "resume", run_dir, rule, f"resume={run_dir} alone; or the tool that made it, with these words"
        )
    for name in SOURCED:
        if _content(run_dir / "code" / name) != _content(project.PROJECT / name):
            rule = f"must have {name} in its copy of the code as this project has it: a new job script sources that"
            own = shlex.quote(str(run_dir / "code" / "submit.py"))
            raise ConfigError(
                "resume", run_dir, rule, f"python {own} resume={shlex.quote(str(run_dir))}, and these words"
            )


def _content(path: Path) -> bytes | None:
    """Return what a file holds; None where there is none to read."""
    try:
        with files.open_regular_file(path) as stream:
            return stream.read()
    except OSError:
        return None
