"""What the scheduler has counted of a run's jobs: one question to sacct or qstat. Changes nothing."""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..states import call

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


def ask(scheduler: str, jobs: Sequence[str]) -> tuple[list[Account], str]:
    """The accounts of these jobs, oldest first; and, where there are none, why."""
    command = COMMAND[scheduler]
    known = sorted({job for job in jobs if re.fullmatch(r"\d[\w\[\]]*", job)})  # from files: no options, say
    if not known:
        return [], "No job of a scheduler is noted for this run."
    if not shutil.which(command):
        return [], f"There is no {command} on this machine."
    found = _slurm(known) if scheduler == "slurm" else _pbs(known)
    if found is None:
        return [], f"{command} does not answer, or this site keeps no accounts."
    return found, "" if found else f"{command} does not know {', '.join(known)}."


def _slurm(jobs: Sequence[str]) -> list[Account] | None:
    # --duplicates: a requeued job has one record for each of its starts.
    answer = call(
        "sacct", "--noheader", "--parsable2", "--duplicates", f"--format={FIELDS}", f"--jobs={','.join(jobs)}"
    )
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


def _pbs(jobs: Sequence[str]) -> list[Account] | None:
    for options in (["-x"], []):  # -x: ended jobs as well, which fails where the site keeps no history
        answer = call("qstat", *options, "-t", "-f", "-F", "json", *jobs)
        if answer and answer.returncode == 0:
            break
    else:
        return None
    try:
        told: dict[str, dict[str, Any]] = json.loads(answer.stdout)["Jobs"]
        return [_of_pbs(number.split(".")[0], job) for number, job in sorted(told.items())]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []  # of no job, or not JSON


def _of_pbs(number: str, job: dict[str, Any]) -> Account:
    used, asked = job.get("resources_used", {}), job.get("Resource_List", {})
    return Account(
        number,
        str(job.get("job_state", "")),
        str(used.get("walltime", "")),
        str(used.get("mem", "")),
        str(used.get("cput", "")),
        str(asked.get("select", "")),
        str(job.get("Exit_status", "")),
    )
