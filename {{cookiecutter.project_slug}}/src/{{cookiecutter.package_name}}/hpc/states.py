"""What the scheduler says of jobs: one question each to squeue, sacct or qstat. Changes nothing."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

COMMAND = {"slurm": "squeue", "pbs": "qstat"}
PATIENCE = 20  # seconds: a scheduler that is overloaded is as good as none
# Slurm's names for jobs that will not go on; all others are on their way.
ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
}  # fmt: skip
PBS = {"Q": "pending", "W": "pending", "T": "pending", "H": "pending", "R": "running", "B": "running", "E": "running"}
PBS |= {"S": "suspended", "U": "suspended"}  # F, and X for a part of an array: ended
PBS_CODES = {0: "completed", -29: "timeout", 265: "cancelled", 271: "cancelled"}  # 256 + signal


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
    return _slurm(set(jobs), set(owners)) if scheduler == "slurm" else _pbs(set(jobs))


def _slurm(jobs: set[str], owners: set[int]) -> dict[str, State] | None:
    question = ["squeue", "--noheader", "--array", "--states=all", "--format=%i %T %r"]
    answer = call(*question, "--jobs=" + ",".join(sorted({job.split("_")[0] for job in jobs})))
    if answer and answer.returncode:  # perhaps it has forgotten a job; some versions then say nothing of the others
        answer = call(*question, "--user=" + ",".join(map(str, sorted(owners))))
    if answer is None or answer.returncode:
        return None
    known = {}
    for line in answer.stdout.splitlines():
        job, word, why = (*line.split(maxsplit=2), "", "")[:3]
        if job in jobs and word:
            known[job] = _state(word, why if word == "PENDING" else "")
    return known | _accounted(jobs - set(known))


def _accounted(jobs: set[str]) -> dict[str, State]:
    """The rest, where the site keeps accounts."""
    question = ["sacct", "-n", "-X", "-P", "-o", "JobID,State,ExitCode", "-j", ",".join(sorted(jobs))]
    answer = call(*question) if jobs else None
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


def _pbs(jobs: set[str]) -> dict[str, State] | None:
    numbers = sorted({re.sub(r"\[\d+\]", "[]", job) for job in jobs})
    # -t: the parts of arrays. -x: ended jobs as well, which fails where the site keeps no history.
    for options in (["-x"], []):
        answer = call("qstat", *options, "-t", "-f", "-F", "json", *numbers)
        if answer and (answer.returncode == 0 or re.search("Unknown Job|has finished", answer.stderr)):
            return _pbs_states(answer.stdout)
    return None


def _pbs_states(text: str) -> dict[str, State]:
    try:
        jobs: dict[str, dict[str, Any]] = json.loads(text)["Jobs"]
        return {number.split(".")[0]: _pbs_state(job) for number, job in jobs.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}  # of no job, or not JSON


def _pbs_state(job: dict[str, Any]) -> State:
    if word := PBS.get(job["job_state"]):
        return State(word, str(job.get("comment", "")) if word == "pending" else "", active=True)
    if "Exit_status" not in job:  # it never ran
        return State("cancelled")
    word = PBS_CODES.get(job["Exit_status"], "failed")
    return State(word, f"exit code {job['Exit_status']}" if word == "failed" else "")


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
