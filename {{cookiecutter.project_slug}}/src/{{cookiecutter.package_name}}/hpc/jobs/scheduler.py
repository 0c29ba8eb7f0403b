"""The commands of Slurm and PBS that take a job; states.py calls those that tell of one."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ..config import Refused
from .job import Job

COMMAND = {"slurm": "sbatch", "pbs": "qsub"}
# What an outer job, or another launcher, leaves behind in a shell. Passed on, it would describe the wrong job.
LEAKS = re.compile(
    r"(SLURM|SRUN|SBATCH|SALLOC|PMI|PMIX|PALS|OMPI|MPI|PBS|TORCHELASTIC|HPC_RUN)_|PMI"
    r"|(MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK)$"
)
KEPT = {"SLURM_CONF", "PBS_CONF_FILE", "PBS_EXEC", "PBS_SERVER", "PBS_DEFAULT"}  # where the scheduler is
SLOW = 10  # seconds after which a person wants to know what is being waited for


def find(scheduler: str) -> str:
    """The path of sbatch or qsub. Raises `Refused` where there is none."""
    if (path := shutil.which(COMMAND[scheduler])) is None:
        rule = "is not on this machine's PATH: jobs are submitted from a login node of the cluster"
        raise Refused(COMMAND[scheduler], None, rule, "ssh to a login node, or --dry-run to see the script")
    return path


def submit(folder: Path, cluster: DictConfig, job: Job, wait: bool = False) -> tuple[list[str], subprocess.Popen[str]]:
    """Hand `job.sh` over. `submitted.json` says what became of it, also when nothing did.

    Returns:
        The job's id, or those of a chain; the command, which with `wait` ends when the job does, with its exit code.

    Raises:
        Refused: the scheduler's own message; it has not queued the job.
    """
    scheduler = cluster.scheduler
    asked = {key: getattr(job, key) for key in ("name", "nodes", "gpus_per_node", "seconds")}
    note = {"time": time.time(), "cluster": cluster.name, "scheduler": scheduler, "argv": sys.argv[1:], **asked}
    _write(folder, note | {"job": None, "jobs": [], "error": "not submitted"})
    jobs: list[str] = []
    while True:
        try:
            number, command = _hand_over(folder, scheduler, jobs[-1] if jobs else None, wait)
        except Refused as refused:
            error = f"not submitted: {refused.rule}"
            _write(folder, note | {"job": next(iter(jobs), None), "jobs": jobs, "error": error})
            raise
        jobs.append(number)
        _write(folder, note | {"job": jobs[0], "jobs": jobs, "error": None})
        if scheduler != "pbs" or len(jobs) == job.chain:
            return jobs, command


def log(folder: Path, scheduler: str, job: str, *, array: bool) -> Path:
    """The file that the job's output goes to; of an array, the pattern of those of its members."""
    number = job.split(".")[0].removesuffix("[]")
    if not array:
        return folder / f"job-{number}.log"
    return folder / (f"job-{number}_*.log" if scheduler == "slurm" else f"*/job-{number}.log")


def _hand_over(folder: Path, scheduler: str, after: str | None, wait: bool) -> tuple[str, subprocess.Popen[str]]:
    """Without a limit: a command that was given up might have queued the job."""
    options = {"slurm": ["--parsable"] + ["--wait"] * wait, "pbs": ["-W", "block=true"] * wait}[scheduler]
    if after:
        options += ["-W", f"depend=afternotok:{after}"]
    environ = {key: value for key, value in os.environ.items() if key in KEPT or not LEAKS.match(key)}
    command = subprocess.Popen(
        [find(scheduler), *options, str(folder / "job.sh")],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    impatient = threading.Timer(SLOW, print, [f"waiting for {COMMAND[scheduler]} to answer ..."], {"file": sys.stderr})
    impatient.start()
    assert command.stdout and command.stderr
    answer = command.stdout.readline().strip()
    impatient.cancel()
    if not answer or (not wait and command.wait()):
        said = " ".join(command.stderr.read().split()) or f"exit code {command.wait()}, no message"
        rule = f"{said} ({f'the chain ends with {after}' if after else 'nothing is queued'})"
        raise Refused(COMMAND[scheduler], folder / "job.sh", rule, "the key of cluster= that this names")
    if not wait:
        sys.stderr.write(command.stderr.read())  # what a site has to say of a job that it takes
    return answer.split(";")[0], command


def _write(folder: Path, note: dict[str, Any]) -> None:
    (folder / "submitted.json").write_text(json.dumps(note, indent=1), encoding="utf-8")
