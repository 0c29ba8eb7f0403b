"""The commands of Slurm and PBS that take a job; states.py calls those that tell of one."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from hpc.config import section_rules
from hpc.config.errors import ConfigError, printable
from hpc.config.freezing import quoted
from hpc.config.typed import as_list
from hpc.jobs.job import Job

COMMAND = {"slurm": "sbatch", "pbs": "qsub"}
# What an outer job, or another launcher, leaves behind in a shell. Passed on, it would describe the wrong job.
LEAKS = re.compile(
    r"(SLURM|SRUN|SBATCH|SALLOC|PMI|PMIX|PALS|OMPI|MPI|PBS|TORCHELASTIC|HPC_RUN)_|PMI"
    r"|(MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK)$"
)
KEPT = {"SLURM_CONF", "PBS_CONF_FILE", "PBS_EXEC", "PBS_SERVER", "PBS_DEFAULT"}  # where the scheduler is
# What sbatch would take from the shell that it is called in, and the keys of a cluster's file that say the same.
ASKED = {"ACCOUNT": "account", "PARTITION": "partition", "QOS": "qos", "CONSTRAINT": "constraint", "TIMELIMIT": "time"}
OPTIONS = {"ARRAY_INX": "array", "MEM_PER_NODE": "mem", "REQ_SWITCH": "switches"}  # variables that are called otherwise
NUMBER = re.compile(r"\d+(;\S+|(\[\])?(\.\S+)?)")  # 17;cluster of sbatch --parsable, 29[].server of qsub
SLOW = 10  # seconds after which a person wants to know what is being waited for


def find(scheduler: str) -> str:
    """The path of sbatch or qsub. Raises `ConfigError` where there is none."""
    if (path := shutil.which(COMMAND[scheduler])) is None:
        rule = "is not on this machine's PATH: jobs are submitted from a login node of the cluster"
        raise ConfigError(COMMAND[scheduler], None, rule, "ssh to a login node, or --dry-run to see the script")
    return path


def submit(folder: Path, cluster: DictConfig, job: Job, wait: bool = False) -> tuple[list[str], subprocess.Popen[str]]:
    """Hand `job.sh` over. `submitted.json` says what became of it, also when nothing did.

    Returns:
        The job's id, or those of a chain; the command, which with `wait` ends when the job does, with its exit code.

    Raises:
        ConfigError: the scheduler's own message; it has not queued the job.
    """
    scheduler = cluster.scheduler
    for told in not_taken(os.environ, cluster):
        print(told, file=sys.stderr)
    asked = {key: getattr(job, key) for key in ("name", "nodes", "gpus_per_node", "seconds")}
    note = {"time": time.time(), "cluster": cluster.name, "scheduler": scheduler, "argv": sys.argv[1:], **asked}
    _write(folder, note | {"job": None, "jobs": [], "error": "not submitted"})
    jobs: list[str] = []
    while True:
        try:
            number, command = _hand_over(folder, scheduler, jobs[-1] if jobs else None, wait)
        except ConfigError as rejected:
            error = f"not submitted: {rejected.rule}"
            _write(folder, note | {"job": next(iter(jobs), None), "jobs": jobs, "error": error})
            raise
        jobs.append(number)
        _write(folder, note | {"job": jobs[0], "jobs": jobs, "error": None})
        if scheduler != "pbs" or len(jobs) == job.chain:
            return jobs, command


def not_taken(environ: Mapping[str, str], cluster: DictConfig) -> list[str]:
    """What .bashrc has for Python and, as many sites tell people to write, for sbatch: jobs follow from configs."""
    found = []
    if (path := environ.get("PYTHONPATH")) and "PYTHONPATH" not in cluster.env:  # imports were checked with it
        word = shlex.quote(f"+cluster.env.PYTHONPATH='{quoted(path)}'")
        found.append(printable(f"note: PYTHONPATH={path} of this shell is not passed on; the job gets it by {word}"))
    if cluster.scheduler != "slurm" or "SLURM_JOB_ID" in environ:  # in a job it is that job's
        return found
    for variable, value in sorted(environ.items()):
        name = variable.removeprefix("SBATCH_") if variable != "SLURM_CLUSTERS" else "CLUSTERS"
        if name == variable or not value:
            continue
        key, option = ASKED.get(name), f"--{OPTIONS.get(name) or name.lower().replace('_', '-')}={value}"
        if written := None if key else section_rules.written_by(option, "slurm"):
            fix = f"{written} says that"
        elif value != cluster.get(key) if key else option not in cluster.options:
            fix = f"the job gets it by {f'cluster.{key}={value}' if key else as_list('cluster.options', option)}"
        else:
            continue
        found.append(printable(f"note: {variable}={value} of this shell is not passed on; {fix}"))
    return found


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
    answer = _number(command.stdout)
    impatient.cancel()
    if not answer or (not wait and command.wait()):
        said = " ".join(command.stderr.read().split()) or f"exit code {command.wait()}, no message"
        rule = f"{said} ({f'the chain ends with {after}' if after else 'nothing is queued'})"
        raise ConfigError(COMMAND[scheduler], folder / "job.sh", rule, "the key of cluster= that this names")
    if not wait:
        sys.stderr.write(command.stderr.read())  # what a site has to say of a job that it takes
    return answer.split(";")[0], command


def _number(said: Iterable[str]) -> str:
    """The line with the job's number; sites put others before it, which no option turns off."""
    for line in map(str.strip, said):
        if NUMBER.fullmatch(line):
            return line
        print(printable(line), file=sys.stderr)
    return ""


def _write(folder: Path, note: dict[str, Any]) -> None:
    (folder / "submitted.json").write_text(json.dumps(note, indent=1), encoding="utf-8")
