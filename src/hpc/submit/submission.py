"""Submit a written job, and print what was queued."""

import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from subprocess import Popen

from hpc.config import walltime
from hpc.config.sections import Config
from hpc.jobs.job import Job
from hpc.submit import scheduler
from hpc.submit.awaited_run import reject_other_scheduler
from hpc.submit.options import SubmitOptions
from hpc.submit.scripts import make_job


def submit_and_report(
    cfg: Config,
    folder: Path,
    *,
    options: SubmitOptions,
    start: datetime | None,
    array_job: Job | None = None,
    script: Path | None = None,
    change: Callable[[], None] | None = None,
) -> Popen[str]:
    """Submit the job script in `folder` and print the job's number, its log and its cost.

    Args:
        start: when the scheduler expects to start the job; None if that is not known.
        array_job: the job of each member, if this is a job array.
        script: the script to submit, if it is not in its place yet.
        change: what puts it there, and changes other files of the run, once the scheduler has accepted the job.

    Returns:
        The command of the scheduler. With --wait, it ends when the job does, with the job's exit code.
    """
    job = array_job or make_job(cfg, run_dir=folder)
    if options.awaited:
        reject_other_scheduler(options.awaited, cfg)
    job_ids, command = scheduler.submit_job(
        script or folder / "job.sh",
        cfg,
        job=job,
        folder=folder,
        wait=options.wait,
        awaited=options.awaited,
        change=change,
    )
    if options.parsable:
        print(job_ids[0], folder)
    else:
        log = scheduler.log_path(folder, cfg.cluster.scheduler or "", job_id=job_ids[0], job=job)
        print(f"job {' '.join(job_ids)}\nrun directory {folder}\nlog {log}")
        if awaited := options.awaited:
            print(f"starts once job {awaited.job} has finished the run {awaited.run_dirs[0]}, and never if it does not")
        print(f"asks for at most {describe_size(job, chain=job.chain if cfg.cluster.scheduler == 'pbs' else 1)}")
        if start and not options.awaited:
            print(f"Slurm expects to start it {describe_start(start, datetime.now())}")
    return command


def describe_start(start: datetime, now: datetime) -> str:
    """Return an expected time in words. Both are times of this machine's zone, as Slurm prints them."""
    if (start - now).total_seconds() < 60:
        return "at once"
    return f"at {start:%H:%M}" if start.date() == now.date() else f"on {start:%Y-%m-%d at %H:%M}"


def describe_size(job: Job, *, chain: int) -> str:
    """Return the nodes, tasks, time and cost of a job, or of all jobs of an array.

    Args:
        chain: number of jobs of a run, one after the other.
    """
    num_runs = max(job.num_members, 1)
    size = f"{job.nodes} nodes x {job.tasks_per_node} tasks, {walltime.format_walltime(job.walltime_seconds)}"
    if job.num_members > 1:
        size = f"{num_runs} runs of {size} each"
        size += f", {job.runs_per_node} on a node" if job.runs_per_node > 1 else ""
    elif chain > 1:
        size = f"{chain} jobs, one after the other until the run is finished, of {size} each"
    if not job.gpu_hours:
        return f"{size}: no GPU"
    num_jobs = max(job.num_array_jobs, 1)
    num_idle = job.nodes * (job.all_gpus_per_node * num_jobs - job.gpus_per_node * num_runs) * chain
    idle = f", {num_idle * job.walltime_seconds / 3600:g} of them for GPUs that stay idle" if num_idle else ""
    return f"{size}: {job.gpu_hours * num_jobs * chain:g} GPU-hours{idle}"


def exit_if_job_failed(command: Popen[str], options: SubmitOptions) -> None:
    """With --wait, wait for the job, and exit with its exit code unless that is 0."""
    if options.wait and (code := command.wait()):
        sys.exit(code)
