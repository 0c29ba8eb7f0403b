"""Submit job scripts with sbatch or qsub. `hpc.jobs.job_states` calls the commands that report the states of jobs."""

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

from hpc.config import cluster_rules
from hpc.config.conversion import format_list_override
from hpc.config.errors import ConfigError, make_printable
from hpc.config.freezing import escape_quotes
from hpc.jobs.job import Job

SUBMIT_COMMAND = {"slurm": "sbatch", "pbs": "qsub"}
# Variables that an outer job or another launcher has left in the shell. They would describe the wrong job.
LEAKED_VARIABLES = re.compile(
    r"(SLURM|SRUN|SBATCH|SALLOC|PMI|PMIX|PALS|OMPI|MPI|PBS|TORCHELASTIC|HPC_RUN)_|PMI"
    r"|(MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK)$"
)
# Passed on nevertheless: they say where the scheduler is.
SCHEDULER_VARIABLES = {"SLURM_CONF", "PBS_CONF_FILE", "PBS_EXEC", "PBS_SERVER", "PBS_DEFAULT"}
# SBATCH_<name> -> the key of a cluster's file with the same meaning.
KEYS_OF_SBATCH_VARIABLES = {
    "ACCOUNT": "account", "PARTITION": "partition", "QOS": "qos", "CONSTRAINT": "constraint", "TIMELIMIT": "time",
}  # fmt: skip
# SBATCH_<name> -> the option, if it is not called like the variable.
OPTIONS_OF_SBATCH_VARIABLES = {"ARRAY_INX": "array", "MEM_PER_NODE": "mem", "REQ_SWITCH": "switches"}
JOB_ID = re.compile(r"\d+(;\S+|(\[\])?(\.\S+)?)")  # 17;cluster of sbatch --parsable, 29[].server of qsub
NOTICE_AFTER_SECONDS = 10  # then a note says that the scheduler has not answered yet


def find_submit_command(scheduler: str) -> str:
    """Return the path of sbatch or qsub. Raise `ConfigError` if there is none."""
    if (path := shutil.which(SUBMIT_COMMAND[scheduler])) is None:
        rule = "must be on this machine's PATH: jobs are submitted from a login node of the cluster"
        raise ConfigError(SUBMIT_COMMAND[scheduler], None, rule, "ssh to a login node, or --dry-run to see the script")
    return path


def submit_job(
    folder: Path, cluster: DictConfig, *, job: Job, wait: bool = False
) -> tuple[list[str], subprocess.Popen[str]]:
    """Submit `job.sh`, several times for a chain. Record the result in submitted.json, also if it fails.

    Returns:
        The job ids, several for a chain; the last command, which with `wait` ends when the job does, with its exit
        code.

    Raises:
        ConfigError: with the scheduler's own message, if it has not queued the job.
    """
    scheduler = cluster.scheduler
    for note in describe_ignored_variables(os.environ, cluster):
        print(note, file=sys.stderr)
    size = {"name": job.name, "nodes": job.nodes, "gpus_per_node": job.gpus_per_node, "seconds": job.walltime_seconds}
    submission = {"time": time.time(), "cluster": cluster.name, "scheduler": scheduler, "argv": sys.argv[1:], **size}
    _write_submission(folder, submission | {"job": None, "jobs": [], "error": "not submitted"})
    job_ids: list[str] = []
    while True:
        try:
            job_id, command = _call_submit_command(folder, scheduler, after=job_ids[-1] if job_ids else None, wait=wait)
        except ConfigError as rejected:
            error = f"not submitted: {rejected.rule}"
            _write_submission(folder, submission | {"job": next(iter(job_ids), None), "jobs": job_ids, "error": error})
            raise
        job_ids.append(job_id)
        _write_submission(folder, submission | {"job": job_ids[0], "jobs": job_ids, "error": None})
        if scheduler != "pbs" or len(job_ids) == job.chain:
            return job_ids, command


def describe_ignored_variables(environ: Mapping[str, str], cluster: DictConfig) -> list[str]:
    """Return a note for each variable of this shell that would have changed the job, and the override that does.

    Sites tell people to set SBATCH_ACCOUNT and others in .bashrc. Here jobs follow from configs alone.
    """
    notes = []
    if (path := environ.get("PYTHONPATH")) and "PYTHONPATH" not in cluster.env:  # imports were checked with it
        word = shlex.quote(f"+cluster.env.PYTHONPATH='{escape_quotes(path)}'")
        notes.append(f"PYTHONPATH={path} of this shell is not passed on; the job gets it by {word}")
    if cluster.scheduler == "slurm" and "SLURM_JOB_ID" not in environ:  # inside a job, they describe that job
        for variable, value in sorted(environ.items()):
            if fix := _suggest_for_sbatch_variable(variable, value, cluster):
                notes.append(f"{variable}={value} of this shell is not passed on; {fix}")
    return [make_printable(f"note: {note}") for note in notes]


def _suggest_for_sbatch_variable(variable: str, value: str, cluster: DictConfig) -> str:
    """Return how to give the job what a variable of sbatch asks for; "" if it has that already, or asks for nothing."""
    name = variable.removeprefix("SBATCH_") if variable != "SLURM_CLUSTERS" else "CLUSTERS"
    if name == variable or not value:
        return ""
    if key := KEYS_OF_SBATCH_VARIABLES.get(name):
        return f"the job gets it by cluster.{key}={value}" if value != cluster.get(key) else ""
    option = f"--{OPTIONS_OF_SBATCH_VARIABLES.get(name) or name.lower().replace('_', '-')}={value}"
    if key_of_option := cluster_rules.key_of_option(option, "slurm"):
        return f"{key_of_option} sets that"
    if option in cluster.options:
        return ""
    return f"the job gets it by {format_list_override('cluster.options', option)}"


def log_path(folder: Path, scheduler: str, *, job_id: str, is_array: bool) -> Path:
    """Return the file of the job's output; for an array, a pattern of its members' files."""
    number = job_id.split(".")[0].removesuffix("[]")
    if not is_array:
        return folder / f"job-{number}.log"
    return folder / (f"job-{number}_*.log" if scheduler == "slurm" else f"*/job-{number}.log")


def _call_submit_command(
    folder: Path, scheduler: str, *, after: str | None, wait: bool
) -> tuple[str, subprocess.Popen[str]]:
    """Run sbatch or qsub, and return the job's id and the command.

    There is no time limit: a command that is killed may have queued the job already.
    """
    options = {"slurm": ["--parsable"] + ["--wait"] * wait, "pbs": ["-W", "block=true"] * wait}[scheduler]
    if after:
        options += ["-W", f"depend=afternotok:{after}"]
    environ = {
        key: value for key, value in os.environ.items() if key in SCHEDULER_VARIABLES or not LEAKED_VARIABLES.match(key)
    }
    command = subprocess.Popen(
        [find_submit_command(scheduler), *options, str(folder / "job.sh")],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    notice = f"waiting for {SUBMIT_COMMAND[scheduler]} to answer ..."
    timer = threading.Timer(NOTICE_AFTER_SECONDS, print, [notice], {"file": sys.stderr})
    timer.start()
    assert command.stdout and command.stderr
    job_id = _read_job_id(command.stdout)
    timer.cancel()
    if not job_id or (not wait and command.wait()):
        message = " ".join(command.stderr.read().split()) or f"exit code {command.wait()}, no message"
        rule = f"{message} ({f'the chain ends with {after}' if after else 'nothing is queued'})"
        fix = "the key of the cluster's file that this message is about"
        raise ConfigError(SUBMIT_COMMAND[scheduler], folder / "job.sh", rule, fix)
    if not wait:
        sys.stderr.write(command.stderr.read())  # a site's messages about a job that it has queued
    return job_id.split(";")[0], command


def _read_job_id(lines: Iterable[str]) -> str:
    """Return the line with the job's id, "" if there is none. Print the others: some sites add lines."""
    for line in map(str.strip, lines):
        if JOB_ID.fullmatch(line):
            return line
        print(make_printable(line), file=sys.stderr)
    return ""


def _write_submission(folder: Path, submission: dict[str, Any]) -> None:
    (folder / "submitted.json").write_text(json.dumps(submission, indent=1), encoding="utf-8")
