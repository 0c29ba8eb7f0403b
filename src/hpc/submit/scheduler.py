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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from omegaconf import OmegaConf

from hpc.config.errors import ConfigError, make_printable
from hpc.config.freezing import escape_quotes
from hpc.config.sections import ClusterConfig, Config
from hpc.jobs import job_states
from hpc.jobs.job import Job
from hpc.submit.options import AwaitedRun

SUBMIT_COMMAND = {"slurm": "sbatch", "pbs": "qsub"}
CANCEL_COMMAND = {"slurm": "scancel", "pbs": "qdel"}
RELEASE_COMMAND = {"slurm": "scontrol release", "pbs": "qrls"}
# Variables that an outer job or another launcher has left in the shell. They would describe the wrong job.
LEAKED_VARIABLES = re.compile(
    r"(SLURM|SRUN|SBATCH|SALLOC|PMI|PMIX|PALS|OMPI|MPI|PBS|TORCHELASTIC|HPC_RUN|HPC_LOCAL|HPC_WORLD)_|PMI|HPC_RANK"
    r"|(MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK)$"
)
# Passed on nevertheless: they say where the scheduler is.
SCHEDULER_VARIABLES = {"SLURM_CONF", "PBS_CONF_FILE", "PBS_EXEC", "PBS_SERVER", "PBS_DEFAULT"}
# Variable of sbatch -> the key of a cluster's file with the same meaning.
KEYS_OF_SBATCH_VARIABLES = {
    "SBATCH_ACCOUNT": "account", "SBATCH_PARTITION": "partition", "SBATCH_QOS": "qos",
    "SBATCH_CONSTRAINT": "constraint", "SBATCH_TIMELIMIT": "time",
}  # fmt: skip
# Words in the message of a rejection -> the key that it is about.
KEYS_OF_MESSAGES = {
    r"\baccount\b": "cluster.account", "partition|queue": "cluster.partition", "qos": "cluster.qos",
    "constraint|feature": "cluster.constraint", r"\btime|wall": "cluster.time", r"\bmem": "cluster.memory_gb",
    "gres|gpu|resource|select|configuration": "cluster.request", "node": "trainer.num_nodes",
}  # fmt: skip
JOB_ID = re.compile(r"\d+(;\S+|(\[\])?(\.\S+)?)")  # 17;cluster of sbatch --parsable, 29[].server of qsub
NOTICE_AFTER_SECONDS = 10  # then a note says that the scheduler has not answered yet


def find_submit_command(scheduler: str) -> str:
    """Return the path of sbatch or qsub. Raise `ConfigError` if there is none."""
    if (path := shutil.which(SUBMIT_COMMAND[scheduler])) is None:
        rule = "must be on this machine's PATH: jobs are submitted from a login node of the cluster"
        raise ConfigError(SUBMIT_COMMAND[scheduler], None, rule, "ssh to a login node, or --dry-run to see the script")
    return path


def submit_job(
    script: Path,
    cfg: Config,
    *,
    job: Job,
    folder: Path,
    wait: bool = False,
    awaited: AwaitedRun | None = None,
    change: Callable[[], None] | None = None,
) -> tuple[list[str], subprocess.Popen[str]]:
    """Submit a job script, several times for a chain. Record the jobs in submitted.json of `folder`.

    If a job is rejected, nothing is written, and no job of a chain stays. So the jobs of a chain, and one whose files
    replace others, are held until all of them are accepted and the files are there.

    Args:
        awaited: the run that must be finished before the first job starts.
        change: writes these files.

    Returns:
        The job ids, several for a chain; the last command, which with `wait` ends when the job does, with its exit
        code.

    Raises:
        ConfigError: with the scheduler's own message, if it has not queued the job.
    """
    cluster, scheduler = cfg.cluster, cfg.cluster.scheduler
    assert scheduler, "a config that is parsed for a job has one"
    for note in describe_ignored_variables(os.environ, cluster):
        print(note, file=sys.stderr)
    num_jobs = job.chain if scheduler == "pbs" else 1
    is_held = num_jobs > 1 or change is not None
    job_ids: list[str] = []
    commands: list[subprocess.Popen[str]] = []
    try:
        while len(job_ids) < num_jobs:
            options = dependency_options(scheduler, awaited, previous=job_ids[-1] if job_ids else None)
            job_id, command = _call_submit_command(script, cfg, options=options, is_held=is_held, wait=wait)
            job_ids.append(job_id)
            commands.append(command)
        if change:
            change()
        _record_jobs(folder, cfg, job=job, job_ids=job_ids, awaited=awaited)
    except BaseException:
        _call_for_jobs(CANCEL_COMMAND[scheduler], job_ids)
        raise
    if is_held:
        _call_for_jobs(RELEASE_COMMAND[scheduler], job_ids)
    return job_ids, commands[-1]


def _record_jobs(folder: Path, cfg: Config, *, job: Job, job_ids: Sequence[str], awaited: AwaitedRun | None) -> None:
    """Write submitted.json in place, as duplicate_jobs.py locks this file."""
    size = {"nodes": job.nodes, "gpus_per_node": job.gpus_per_node, "seconds": job.walltime_seconds}
    cluster = {"cluster": cfg.cluster.name, "scheduler": cfg.cluster.scheduler}
    submission = {"time": time.time(), **cluster, "argv": sys.argv[1:], "name": job.name, **size}
    submission |= {"job": job_ids[0], "jobs": job_ids}
    submission |= {"after": str(awaited.run_dirs[0])} if awaited else {}
    submission |= {"runs_per_node": job.runs_per_node} if job.runs_per_node > 1 else {}
    (folder / "submitted.json").write_text(json.dumps(submission, indent=1), encoding="utf-8")


def describe_ignored_variables(environ: Mapping[str, str], cluster: ClusterConfig) -> list[str]:
    """Return a note for each variable of this shell that would have changed the job.

    Sites tell people to set SBATCH_ACCOUNT and others in .bashrc. Here jobs follow from configs alone.
    """
    notes = []
    if (path := environ.get("PYTHONPATH")) and "PYTHONPATH" not in cluster.env:  # imports were checked with it
        word = shlex.quote(f"+cluster.env.PYTHONPATH='{escape_quotes(path)}'")
        notes.append(f"PYTHONPATH={path} of this shell is not passed on; the job gets it by {word}")
    if cluster.scheduler == "slurm" and "SLURM_JOB_ID" not in environ:  # inside a job, they describe that job
        for variable, value in sorted(environ.items()):
            key = KEYS_OF_SBATCH_VARIABLES.get(variable)
            is_option = variable.startswith("SBATCH_") or variable == "SLURM_CLUSTERS"
            if value and is_option and not (key and value == getattr(cluster, key)):
                fix = f"the job gets it by cluster.{key}={value}" if key else "cluster.options= takes options of sbatch"
                notes.append(f"{variable}={value} of this shell is not passed on; {fix}")
    return [make_printable(f"note: {note}") for note in notes]


def submit_environ() -> dict[str, str]:
    """Return the environment of sbatch and qsub, without the variables of a job that this shell may be in."""
    return {
        key: value for key, value in os.environ.items() if key in SCHEDULER_VARIABLES or not LEAKED_VARIABLES.match(key)
    }


def dependency_options(scheduler: str, awaited: AwaitedRun | None, *, previous: str | None) -> list[str]:
    """Return the options that let a job wait: for the awaited run's job to succeed, and in a chain (PBS) for a failure.

    If the awaited run fails, the job can never start: PBS deletes it, and so does Slurm when told to.

    Args:
        previous: the job of the chain that this one continues.
    """
    if scheduler == "slurm":
        return [f"--dependency=afterok:{awaited.job}", "--kill-on-invalid-dep=yes"] if awaited else []
    conditions = [f"afterok:{awaited.job}"] if awaited else []
    conditions += [f"afternotok:{previous}"] if previous else []
    return ["-W", f"depend={','.join(conditions)}"] if conditions else []


def log_path(folder: Path, scheduler: str, *, job_id: str, job: Job) -> Path:
    """Return the file of the job's output; for an array, a pattern of its members' files."""
    number = job_id.split(".")[0].removesuffix("[]")
    if job.num_members < 2:
        return folder / f"job-{number}.log"
    if scheduler == "pbs":
        return folder / f"*/job-{number}.log"
    return folder / (f"*/job-{number}_*.log" if job.runs_per_node > 1 else f"job-{number}_*.log")


def _call_submit_command(
    script: Path, cfg: Config, *, options: Sequence[str], is_held: bool, wait: bool
) -> tuple[str, subprocess.Popen[str]]:
    """Run sbatch or qsub with these options, and return the job's id and the command.

    There is no time limit: a command that is killed may have queued the job already.
    """
    scheduler = cfg.cluster.scheduler
    assert scheduler
    is_slurm = scheduler == "slurm"
    words = ["--parsable"] + ["--wait"] * wait if is_slurm else ["-W", "block=true"] * wait
    words += ["--hold" if is_slurm else "-h"] * is_held
    name = SUBMIT_COMMAND[scheduler]
    command = subprocess.Popen(
        [find_submit_command(scheduler), *words, *options, str(script)],
        env=submit_environ(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    timer = threading.Timer(NOTICE_AFTER_SECONDS, print, [f"waiting for {name} to answer ..."], {"file": sys.stderr})
    timer.start()
    assert command.stdout and command.stderr
    try:
        job_id = _read_job_id(command.stdout)
        if not job_id or (not wait and command.wait()):
            message = " ".join(command.stderr.read().split()) or f"exit code {command.wait()}, no message"
            raise ConfigError(name, script, f"{message} (nothing is queued)", _suggest_fix(message, cfg))
    except KeyboardInterrupt:
        command.terminate()
        query = job_states.QUERY_COMMAND[scheduler]
        print(f"\n{name} had not answered, so a job may be queued: {query} shows it", file=sys.stderr)
        raise
    finally:
        timer.cancel()
    if not wait:
        sys.stderr.write(command.stderr.read())  # a site's messages about a job that it has queued
    return job_id.split(";")[0], command


def _suggest_fix(message: str, cfg: Config) -> str:
    """Return what to type after a rejection: the keys that the scheduler's message is about, with their values."""
    if re.search("timed out|contact|connect|try again|temporar", message, re.IGNORECASE):
        return "the same again, in some minutes"
    if re.search("dependency", message, re.IGNORECASE):
        return "the same again: the job that it was to wait for has ended in the meantime"
    if re.search("job submit limit|max_?(submit|queued|jobs)", message, re.IGNORECASE):
        return "the same again, when fewer of your jobs wait, or a smaller or shorter job"
    values = {
        key: OmegaConf.select(cfg.node, key)
        for words, key in KEYS_OF_MESSAGES.items()
        if re.search(words, message, re.IGNORECASE)
    }
    words = [f"{key}=<not {'null' if value is None else value}>" for key, value in values.items()]
    return ", or ".join(words) or f"another value of {', '.join(KEYS_OF_MESSAGES.values())}"


def _call_for_jobs(command: str, job_ids: Sequence[str]) -> None:
    """Call the scheduler's command for these jobs; if it fails, say what to type."""
    if not job_ids:
        return
    words = [*command.split(), *job_ids]
    done = job_states.run_command(*words)
    if done is None or done.returncode:
        reason = " ".join(done.stderr.split()) if done else "it cannot be started, or does not answer"
        print(make_printable(f"warning: this failed ({reason}). Try: {shlex.join(words)}"), file=sys.stderr)


def _read_job_id(lines: Iterable[str]) -> str:
    """Return the line with the job's id, "" if there is none. Print the others: some sites add lines."""
    for line in map(str.strip, lines):
        if JOB_ID.fullmatch(line):
            return line
        print(make_printable(line), file=sys.stderr)
    return ""
