"""The scheduler's accounting of a run's jobs, from a single call of sacct or qstat. Changes nothing."""

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hpc.jobs.job_states import query_pbs_jobs, run_command, slurm_user_option

COMMANDS = {"slurm": "sacct", "pbs": "qstat"}
SACCT_FIELDS = "JobID,State,Elapsed,MaxRSS,TotalCPU,AllocTRES,ExitCode"
SIZE_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class JobAccount:
    """One start of a job, in the scheduler's own words; an unknown field is empty."""

    job: str
    state: str
    elapsed: str
    max_rss: str
    total_cpu: str
    allocated: str
    exit_code: str


def query_accounts(scheduler: str, jobs: Sequence[str], owners: Iterable[int]) -> tuple[list[JobAccount], str]:
    """Return the accounts of these jobs, oldest first; and, if there are none, the reason.

    Args:
        owners: user ids of the people whose jobs these are.
    """
    command, owners = COMMANDS[scheduler], {*owners, os.getuid()}
    # A run directory may contain anything: an option, for example, is not a job number.
    numbers = sorted({job for job in jobs if re.fullmatch(r"\d[\w\[\]]*", job)}, key=_sort_key)
    if not numbers:
        return [], "No scheduler job is recorded for this run."
    if not shutil.which(command):
        return [], f"There is no {command} on this machine."
    accounts = _query_sacct(numbers, owners) if scheduler == "slurm" else _query_qstat(numbers, owners)
    if accounts is None:
        return [], f"{command} does not answer, or this site has no accounting."
    return accounts, "" if accounts else f"{command} does not know {', '.join(numbers)}."


def _query_sacct(jobs: Sequence[str], owners: set[int]) -> list[JobAccount] | None:
    # --duplicates: a requeued job has one record for each of its starts.
    command = ["sacct", "--noheader", "--parsable2", "--duplicates", f"--format={SACCT_FIELDS}"]
    answer = run_command(*command, *slurm_user_option(owners), f"--jobs={','.join(jobs)}")
    if answer is None or answer.returncode:
        return None
    accounts: list[JobAccount] = []
    for line in answer.stdout.splitlines():
        cells = line.split("|")
        if len(cells) != 7:
            continue
        job, _, step = cells[0].partition(".")
        if not step and job in jobs:
            accounts.append(JobAccount(*cells))
        elif accounts and job == accounts[-1].job:  # memory is counted by step
            max_rss = max(accounts[-1].max_rss, cells[3], key=_size_bytes)
            accounts[-1] = replace(accounts[-1], max_rss=max_rss)
    return accounts


def _size_bytes(size: str) -> float:
    match = re.fullmatch(r"([\d.]+)([KMGT]?)", size)
    return float(match[1]) * SIZE_UNITS.get(match[2], 1) if match else 0


def _query_qstat(jobs: Sequence[str], owners: set[int]) -> list[JobAccount] | None:
    attributes = query_pbs_jobs(jobs, owners)
    if attributes is None:
        return None
    return [_pbs_account(job, attributes[job]) for job in sorted(attributes, key=_sort_key) if job in jobs]


def _sort_key(job: str) -> list[int]:
    """Sort by number: 29[3] before 29[11], and 9 before 17."""
    return [int(number) for number in re.findall(r"\d+", job)]


def _pbs_account(number: str, attributes: dict[str, str]) -> JobAccount:
    keys = ("job_state", "resources_used.walltime", "resources_used.mem", "resources_used.cput",
            "Resource_List.select", "Exit_status")  # fmt: skip
    return JobAccount(number, *(attributes.get(key, "") for key in keys))
