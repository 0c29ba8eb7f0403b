"""What the scheduler says of jobs: one question each to squeue, sacct or qstat. Changes nothing."""

import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from hpc.config.exit_codes import ExitCode

COMMAND = {"slurm": "squeue", "pbs": "qstat"}
PATIENCE = 20  # seconds: a scheduler that is overloaded is as good as none
# Slurm's names for jobs that will not go on; all others are on their way.
ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
}  # fmt: skip
PBS = {"Q": "pending", "W": "pending", "T": "pending", "H": "pending", "R": "running", "B": "running", "E": "running"}
PBS |= {"S": "suspended", "U": "suspended"}  # F, and X for a part of an array: ended
PBS_CODES = {"0": "completed", f"{ExitCode.CONTINUE}": "to be continued", "-29": "timeout"}
PBS_CODES |= {"265": "cancelled", "271": "cancelled"}  # 256 + signal
# Of a job whose node was lost and came back, PBS tells the same as of one that was deleted.
EITHER = "by qdel, or PBS lost a node"


@dataclass(frozen=True)
class State:
    """Of a job or a run. `active`: the scheduler has still to do with it."""

    word: str
    why: str = ""  # why it waits, or how it failed
    active: bool = False


def ask(scheduler: str, jobs: Iterable[str], owners: Iterable[int]) -> dict[str, State] | None:
    """The states of those jobs that the scheduler knows; None: there is none here, or it does not answer.

    Args:
        jobs: as `17`; `17_3` of a Slurm array, `17[3]` of a PBS one.
        owners: user ids of those whose jobs these are.
    """
    if not shutil.which(COMMAND[scheduler]):
        return None
    owners = {*owners, os.getuid()}  # a file server may show files of mine as somebody else's
    return _slurm(set(jobs), owners) if scheduler == "slurm" else _pbs(set(jobs), owners)


def users(owners: Iterable[int]) -> list[str]:
    """The option of Slurm's commands that leaves out other people's jobs, which may have a number of ours by now."""
    known = [f"{uid}" for uid in sorted(owners) if _name(uid)]  # another one is an error to Slurm
    return [f"--user={','.join(known)}"] if known else []


def _slurm(jobs: set[str], owners: set[int]) -> dict[str, State] | None:
    question = ["squeue", "--noheader", "--array", "--states=all", "--format=%i %T %r", *users(owners)]
    answer = call(*question, "--jobs=" + ",".join(sorted({job.split("_")[0] for job in jobs})))
    if answer and answer.returncode:  # perhaps it has forgotten a job; some versions then say nothing of the others
        answer = call(*question)
    if answer is None or answer.returncode:
        return None
    known = {}
    for line in answer.stdout.splitlines():
        job, word, why = (*line.split(maxsplit=2), "", "")[:3]
        if job in jobs and word:
            known[job] = _state(word, why if word == "PENDING" else "")
    return known | _accounted(jobs - set(known), owners)


def _accounted(jobs: set[str], owners: set[int]) -> dict[str, State]:
    """The rest, where the site keeps accounts."""
    question = ["sacct", "-n", "-X", "-P", "-o", "JobID,State,ExitCode", *users(owners)]
    answer = call(*question, "-j", ",".join(sorted(jobs))) if jobs else None
    if answer is None or answer.returncode:
        return {}
    known = {}
    for line in answer.stdout.splitlines():
        job, word, code = (*line.split("|"), "", "")[:3]
        if job in jobs and word:
            code, _, signal = code.partition(":")
            why = f"signal {signal}" if signal not in ("", "0") else f"exit code {code}"
            known[job] = _state(word.split()[0], why if word == "FAILED" else "")  # "CANCELLED by 1000"
    return known


def _state(word: str, why: str) -> State:
    return State(word.lower().replace("_", " "), why if why != "None" else "", active=word not in ENDED)


def _pbs(jobs: set[str], owners: set[int]) -> dict[str, State] | None:
    known = qstat(jobs, owners)
    return None if known is None else {number: _pbs_state(job) for number, job in known.items()}


def qstat(jobs: Iterable[str], owners: Iterable[int]) -> dict[str, dict[str, str]] | None:
    """The attributes of those jobs that PBS knows, by number, all parts of an array included; None: no answer.

    Asked for JSON, recent versions print only the first of several jobs; and a job's own variables can make any
    version print JSON that cannot be read.
    """
    numbers = sorted({re.sub(r"\[\d+\]", "[]", job) for job in jobs if re.fullmatch(r"\d+(\[\d*\])?", job)})
    # -t: the parts of arrays. -x: ended jobs, too; where the site keeps no history, nothing is told (with exit code 0).
    for options in (["-x"], []):
        answer = call("qstat", *options, "-t", "-f", "-F", "dsv", *numbers) if numbers else None
        if answer is None:
            return {} if not numbers else None
        unknown = re.search("Unknown Job|has finished", answer.stderr)  # of the others it tells nevertheless
        if "job history" not in answer.stderr and (answer.returncode == 0 or unknown):
            return _of(_dsv(answer.stdout), owners)
    return None


def _dsv(text: str) -> dict[str, dict[str, str]]:
    """A job per line: `Job Id: 17.server|job_state=R|resources_used.mem=3gb`, with \\| for a | inside of a value."""
    known = {}
    for line in text.split("\n"):
        number, *fields = re.findall(r"(?:\\.|[^|])+", line) or [""]
        if number.startswith("Job Id: "):
            pairs = (re.sub(r"\\([|\\])", r"\1", field).partition("=") for field in fields)
            known[number.removeprefix("Job Id: ").split(".")[0]] = {key: value for key, _, value in pairs}
    return known


def _of(jobs: dict[str, dict[str, str]], owners: Iterable[int]) -> dict[str, dict[str, str]]:
    """Those of these users: on another cluster, or a server that counts anew, others' jobs have these numbers."""
    names = {_name(uid) for uid in owners} - {""}
    theirs = {number: job.get("Job_Owner", "").rpartition("@")[0] for number, job in jobs.items()}
    return {number: job for number, job in jobs.items() if not names or theirs[number] in {*names, ""}}


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""


def _pbs_state(job: dict[str, str]) -> State:
    if word := PBS.get(job.get("job_state", "")):
        return State(word, job.get("comment", "") if word == "pending" else "", active=True)
    if not (code := job.get("Exit_status")):  # it never ran
        return State("cancelled")
    word = PBS_CODES.get(code, "failed")
    return State(word, {"failed": f"exit code {code}", "cancelled": EITHER}.get(word, ""))


def call(*command: str) -> subprocess.CompletedProcess[str] | None:
    # A person's own SQUEUE_FORMAT2 or SQUEUE_PARTITION would change what is asked.
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("SQUEUE_", "SACCT_"))}
    try:
        return subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=PATIENCE,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
