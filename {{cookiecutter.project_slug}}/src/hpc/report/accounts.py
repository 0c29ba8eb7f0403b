"""What the scheduler has counted of a run's jobs: one question to sacct or qstat. Changes nothing."""

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hpc.jobs.job_states import call, qstat, users

COMMAND = {"slurm": "sacct", "pbs": "qstat"}
FIELDS = "JobID,State,Elapsed,MaxRSS,TotalCPU,AllocTRES,ExitCode"
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Account:
    """One start of a job, in the scheduler's own words; empty: not told."""

    job: str
    state: str
    elapsed: str
    max_rss: str
    total_cpu: str
    allocated: str
    exit_code: str


def ask(scheduler: str, jobs: Sequence[str], owners: Iterable[int]) -> tuple[list[Account], str]:
    """The accounts of these jobs, oldest first; and, where there are none, why.

    Args:
        owners: user ids of those whose jobs these are.
    """
    command, owners = COMMAND[scheduler], {*owners, os.getuid()}
    known = sorted({job for job in jobs if re.fullmatch(r"\d[\w\[\]]*", job)}, key=_by_number)  # no options, say
    if not known:
        return [], "No job of a scheduler is noted for this run."
    if not shutil.which(command):
        return [], f"There is no {command} on this machine."
    found = _slurm(known, owners) if scheduler == "slurm" else _pbs(known, owners)
    if found is None:
        return [], f"{command} does not answer, or this site keeps no accounts."
    return found, "" if found else f"{command} does not know {', '.join(known)}."


def _slurm(jobs: Sequence[str], owners: set[int]) -> list[Account] | None:
    # --duplicates: a requeued job has one record for each of its starts.
    question = ["sacct", "--noheader", "--parsable2", "--duplicates", f"--format={FIELDS}", *users(owners)]
    answer = call(*question, f"--jobs={','.join(jobs)}")
    if answer is None or answer.returncode:
        return None
    found: list[Account] = []
    for line in answer.stdout.splitlines():
        cells = line.split("|")
        if len(cells) != 7:
            continue
        job, _, step = cells[0].partition(".")
        if not step and job in jobs:
            found.append(Account(*cells))
        elif found and job == found[-1].job:  # memory is counted by step
            found[-1] = replace(found[-1], max_rss=max(found[-1].max_rss, cells[3], key=_bytes))
    return found


def _bytes(size: str) -> float:
    found = re.fullmatch(r"([\d.]+)([KMGT]?)", size)
    return float(found[1]) * UNITS.get(found[2], 1) if found else 0


def _pbs(jobs: Sequence[str], owners: set[int]) -> list[Account] | None:
    told = qstat(jobs, owners)
    return None if told is None else [_of_pbs(job, told[job]) for job in sorted(told, key=_by_number) if job in jobs]


def _by_number(job: str) -> list[int]:
    """29[3] before 29[11], and 9 before 17."""
    return [int(number) for number in re.findall(r"\d+", job)]


def _of_pbs(number: str, job: dict[str, str]) -> Account:
    keys = ("job_state", "resources_used.walltime", "resources_used.mem", "resources_used.cput",
            "Resource_List.select", "Exit_status")  # fmt: skip
    return Account(number, *(job.get(key, "") for key in keys))
