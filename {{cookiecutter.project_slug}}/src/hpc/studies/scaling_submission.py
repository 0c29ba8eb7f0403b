"""Submit the points of a scaling study through submit.py, each as a person would, and wait for their jobs."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from hpc.config.project import PROJECT
from hpc.jobs import job
from hpc.studies import scaling_jobs
from hpc.studies.scaling_jobs import Try
from hpc.studies.scaling_points import Point

GRACE = 600  # seconds over the longest walltime, after which nothing is expected any more
PAUSE = 60  # seconds between two questions to the scheduler, at most


def submit(folder: Path, missing: Sequence[Try]) -> None:
    """Submit a job for each of these points. Leaves where submit.py rejects, which says why."""
    for number, one in enumerate(missing):
        words = _to_type(folder, one)
        code, job_id = _hand_over(words)
        if code:
            goes_on = "the jobs above are queued; the same command goes on from there"
            print(goes_on if number else "the same command tries again", file=sys.stderr)
            sys.exit(code)
        print(f"{one.name}: job {job_id}, {words[-1].partition('=')[2]}", flush=True)


def dry_run(folder: Path, point: Point) -> int:
    """Print the job script of a point, as submit.py prints it; return its exit code."""
    command = [sys.executable, str(PROJECT / "submit.py"), "--dry-run", *_words_of_new_try(folder, point)]
    return subprocess.run(command).returncode


def wait(folder: Path, points: Sequence[Point], *, cfgs: Sequence[DictConfig], patient: bool) -> list[Try]:
    """Return what has become of all points once no job is on its way.

    Those that nothing is heard of are given up after a limit.

    Args:
        cfgs: of the points.
        patient: wait at all; otherwise return what is so now.
    """
    limit = GRACE + max(job.job_from_config(cfg).walltime_seconds for cfg in cfgs)
    begun = changed = time.monotonic()
    said = ""
    while True:
        found = scaling_jobs.look(folder, points, cfgs[0].cluster.scheduler)
        active, now = [one for one in found if one.state.is_active], time.monotonic()
        words = ", ".join(one.told for one in found)
        if words != said:
            said, changed = words, now
            print(f"{time.strftime('%H:%M:%S')} {words}", flush=True)
        queued = any(one.state.name == "pending" for one in active)
        if not patient or not active or (not queued and now - changed > limit):
            return found
        time.sleep(min(max((now - begun) / 10, 1), PAUSE))


def _to_type(folder: Path, one: Try) -> list[str]:
    """Return words for submit.py: the job that was written before, if a full queue rejected it; else a new try."""
    if one.state.name == scaling_jobs.REJECTED and one.run and (one.run.path / "job.sh").exists():
        return [f"resume={one.run.path}"]
    return _words_of_new_try(folder, one.point)


def _words_of_new_try(folder: Path, point: Point) -> list[str]:
    return [*point.words, f"run_dir={scaling_jobs.directory(folder, point.nodes, again=True)}"]


def _hand_over(words: Sequence[str]) -> tuple[int, str]:
    """Return submit.py's exit code and the job's number. Ctrl-C does not reach it: it may have queued the job."""
    process = subprocess.Popen(
        [sys.executable, str(PROJECT / "submit.py"), "--parsable", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate()
    except KeyboardInterrupt:
        process.communicate()
        raise
    sys.stderr.write(err)
    return process.returncode, next(iter(out.split()), "")
