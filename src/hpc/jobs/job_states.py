"""The states of jobs, as squeue, sacct or qstat report them. Changes nothing."""

import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from hpc.config.errors import ExitCode

QUERY_COMMAND = {"slurm": "squeue", "pbs": "qstat"}
CHANGES_ANSWERS = re.compile("(SQUEUE|SACCT|SINFO|SCONTROL)_|SLURM_CLUSTERS$")  # variables of the environment
TIMEOUT_SECONDS = 20  # an overloaded scheduler counts as none
# Slurm's names of final states. A job in any other state is pending or running.
SLURM_END_STATES = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
}  # fmt: skip
PBS_STATES = dict.fromkeys("QWTH", "pending") | dict.fromkeys("RBE", "running") | dict.fromkeys("SU", "suspended")
# The others, F and for a part of an array X, are final. There the exit code says how the job ended.
PBS_EXIT_STATES = {"0": "completed", f"{ExitCode.CONTINUE}": "to be continued", "-29": "timeout"}
PBS_EXIT_STATES |= {"265": "cancelled", "271": "cancelled"}  # 256 + signal
# PBS reports the same for a deleted job as for one whose node was lost and came back.
DELETED_OR_NODE_LOST = "by qdel, or PBS lost a node"


@dataclass(frozen=True)
class JobState:
    """The state of a job or a run.

    Attributes:
        name: in lower case, e.g. "pending".
        reason: why the job is pending, or how it failed.
        is_active: whether the job is queued, running or suspended.
    """

    name: str
    reason: str = ""
    is_active: bool = False


def query_states(scheduler: str, jobs: Iterable[str], *, owners: Iterable[int]) -> dict[str, JobState] | None:
    """Return the states of those jobs that the scheduler knows; None if it is not installed or does not answer.

    Args:
        scheduler: slurm or pbs.
        jobs: numbers, e.g. `17`; `17_3` in a Slurm array, `17[3]` in a PBS array.
        owners: user ids of the people whose jobs these are.
    """
    if not shutil.which(QUERY_COMMAND[scheduler]):
        return None
    owners = {*owners, os.getuid()}  # a file server may report another owner of this user's files
    return _query_slurm(set(jobs), owners) if scheduler == "slurm" else _query_pbs(set(jobs), owners)


def _query_slurm(jobs: set[str], owners: set[int]) -> dict[str, JobState] | None:
    command = ["squeue", "--noheader", "--array", "--states=all", "--format=%i %T %r", *_user_option(owners)]
    answer = run_command(*command, "--jobs=" + ",".join(sorted({job.split("_")[0] for job in jobs})))
    if answer and answer.returncode:  # it may have forgotten one job; some versions then do not list the others
        answer = run_command(*command)
    if answer is None or answer.returncode:
        return None
    states = {}
    for line in answer.stdout.splitlines():
        job, name, reason = (*line.split(maxsplit=2), "", "")[:3]
        if job in jobs and name:
            states[job] = _slurm_state(name, reason if name == "PENDING" else "")
    return states | _query_sacct(jobs - set(states), owners)


def _user_option(owners: Iterable[int]) -> list[str]:
    """Return the option that leaves out other people's jobs: Slurm may have given them a number of ours by now."""
    names = [f"{uid}" for uid in sorted(owners) if user_name(uid)]  # Slurm rejects an unknown user
    return [f"--user={','.join(names)}"] if names else []


def _query_sacct(jobs: set[str], owners: set[int]) -> dict[str, JobState]:
    """Return the states of ended jobs, if the site keeps accounts."""
    command = ["sacct", "-n", "-X", "-P", "-o", "JobID,State,ExitCode", *_user_option(owners)]
    answer = run_command(*command, "-j", ",".join(sorted(jobs))) if jobs else None
    if answer is None or answer.returncode:
        return {}
    states = {}
    for line in answer.stdout.splitlines():
        job, name, code = (*line.split("|"), "", "")[:3]
        if job in jobs and name:
            code, _, signal = code.partition(":")
            reason = f"signal {signal}" if signal not in ("", "0") else f"exit code {code}"
            states[job] = _slurm_state(name.split()[0], reason if name == "FAILED" else "")  # "CANCELLED by 1000"
    return states


def _slurm_state(name: str, reason: str) -> JobState:
    is_active = name not in SLURM_END_STATES
    return JobState(name.lower().replace("_", " "), reason if reason != "None" else "", is_active=is_active)


def _query_pbs(jobs: set[str], owners: set[int]) -> dict[str, JobState] | None:
    """Return the states of those jobs that PBS knows, by number, with all parts of an array; None: no answer.

    qstat is asked for DSV: in JSON, recent versions print only the first of several jobs, and a job's own variables
    can make any version print invalid JSON.
    """
    numbers = sorted({re.sub(r"\[\d+\]", "[]", job) for job in jobs if re.fullmatch(r"\d+(\[\d*\])?", job)})
    # -t lists the parts of arrays. -x lists ended jobs too, but prints nothing, with exit code 0, where the site keeps
    # no history.
    for options in (["-x"], []):
        answer = run_command("qstat", *options, "-t", "-f", "-F", "dsv", *numbers) if numbers else None
        if answer is None:
            return {} if not numbers else None
        is_one_unknown = re.search("Unknown Job|has finished", answer.stderr)  # it lists the others nevertheless
        if "job history" not in answer.stderr and (answer.returncode == 0 or is_one_unknown):
            known = {name.split(".")[0]: fields for name, fields in parse_dsv(answer.stdout).items()}
            jobs_of_owners = _select_owned(known, owners)
            return {number: _pbs_state(job) for number, job in jobs_of_owners.items()}
    return None


def parse_dsv(text: str, prefix: str = "Job Id: ") -> dict[str, dict[str, str]]:
    """Parse lines such as `Job Id: 17.server|job_state=R|comment=a \\| b` into fields by the name of each item."""
    items = {}
    for line in text.split("\n"):
        name, *fields = re.findall(r"(?:\\.|[^|])+", line) or [""]
        if name.startswith(prefix):
            pairs = (re.sub(r"\\([|\\])", r"\1", field).partition("=") for field in fields)
            items[name.removeprefix(prefix)] = {key: value for key, _, value in pairs}
    return items


def _select_owned(jobs: dict[str, dict[str, str]], owners: Iterable[int]) -> dict[str, dict[str, str]]:
    """Return the jobs of these users. On another cluster, or after a reset, other people's jobs have these numbers."""
    user_names = {user_name(uid) for uid in owners} - {""}
    job_owners = {number: job.get("Job_Owner", "").rpartition("@")[0] for number, job in jobs.items()}
    return {number: job for number, job in jobs.items() if not user_names or job_owners[number] in {*user_names, ""}}


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""


def _pbs_state(job: dict[str, str]) -> JobState:
    if name := PBS_STATES.get(job.get("job_state", "")):
        return JobState(name, job.get("comment", "") if name == "pending" else "", is_active=True)
    if not (code := job.get("Exit_status")):  # it was never started
        return JobState("cancelled")
    name = PBS_EXIT_STATES.get(code, "failed")
    return JobState(name, {"failed": f"exit code {code}", "cancelled": DELETED_OR_NODE_LOST}.get(name, ""))


def run_command(*command: str) -> subprocess.CompletedProcess[str] | None:
    """Run a command of the scheduler. Return None if it cannot be started or does not answer in time."""
    # Users' own SQUEUE_FORMAT2, SINFO_PARTITION or SLURM_CLUSTERS would change the answer.
    environ = {key: value for key, value in os.environ.items() if not CHANGES_ANSWERS.match(key)}
    try:
        return subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=TIMEOUT_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
