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
from hpc.studies.scaling_jobs import PointJob
from hpc.studies.scaling_points import ScalingPoint

GRACE_SECONDS = 600  # beyond the longest wall time, after which no change of a state is expected
MAX_PAUSE_SECONDS = 60  # between two queries of the scheduler


def submit_points(folder: Path, missing: Sequence[PointJob]) -> None:
    """Submit a job for each of these points. Exit with submit.py's code if it rejects one; it prints the reason."""
    for index, point_job in enumerate(missing):
        words = _submit_words(folder, point_job)
        code, job_id = _submit(words)
        if code:
            retry = "the jobs above are queued; the same command continues with this one"
            print(retry if index else "the same command tries again", file=sys.stderr)
            sys.exit(code)
        print(f"{point_job.name}: job {job_id}, {words[-1].partition('=')[2]}", flush=True)


def print_first_job(folder: Path, point: ScalingPoint) -> int:
    """Print the job script of a point, as submit.py prints it; return its exit code."""
    command = [sys.executable, str(PROJECT / "submit.py"), "--dry-run", *_new_run_words(folder, point)]
    return subprocess.run(command).returncode


def poll_jobs(
    folder: Path, points: Sequence[ScalingPoint], *, cfgs: Sequence[DictConfig], wait: bool
) -> list[PointJob]:
    """Return the newest job of each point once none is queued or running.

    If no job is queued, and no state changes for the longest wall time and GRACE_SECONDS, the wait ends, too.

    Args:
        cfgs: of the points.
        wait: if false, return the current states at once.
    """
    limit_seconds = GRACE_SECONDS + max(job.job_from_config(cfg).walltime_seconds for cfg in cfgs)
    start_time = change_time = time.monotonic()
    printed = ""
    while True:
        point_jobs = scaling_jobs.read_point_jobs(folder, points, scheduler=cfgs[0].cluster.scheduler)
        active = [point_job for point_job in point_jobs if point_job.state.is_active]
        now = time.monotonic()
        states = ", ".join(point_job.short_state for point_job in point_jobs)
        if states != printed:
            printed, change_time = states, now
            print(f"{time.strftime('%H:%M:%S')} {states}", flush=True)
        is_queued = any(point_job.state.name == "pending" for point_job in active)
        if not wait or not active or (not is_queued and now - change_time > limit_seconds):
            return point_jobs
        time.sleep(min(max((now - start_time) / 10, 1), MAX_PAUSE_SECONDS))


def _submit_words(folder: Path, point_job: PointJob) -> list[str]:
    """Return words for submit.py: those of a job that is written but was rejected by a full queue; else a new run's."""
    run = point_job.run
    if point_job.state.name == scaling_jobs.NOT_SUBMITTED and run and (run.path / "job.sh").exists():
        return [f"resume={run.path}"]
    return _new_run_words(folder, point_job.point)


def _new_run_words(folder: Path, point: ScalingPoint) -> list[str]:
    return [*point.words, f"run_dir={scaling_jobs.next_run_dir(folder, point.num_nodes)}"]


def _submit(words: Sequence[str]) -> tuple[int, str]:
    """Return submit.py's exit code and the job id. Ctrl-C does not reach it, as it may just have queued the job."""
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
