"""Hand a written job to the scheduler, and say what was queued."""

import sys
from pathlib import Path
from subprocess import Popen

from omegaconf import DictConfig

from hpc.config import walltime
from hpc.submit import scheduler
from hpc.submit.options import Options
from hpc.submit.scripts import describe


def hand_over(cfg: DictConfig, folder: Path, *, options: Options, num_members: int = 1) -> Popen[str]:
    """Queue the job whose script lies in `folder` and print its number; with --wait the command ends when it does."""
    work = describe(cfg, run_dir=folder)
    num_jobs = num_members * (work.chain if cfg.cluster.scheduler == "pbs" else 1)
    cost = f"{work.gpu_hours * num_jobs:g} GPU-hours" if work.gpus_per_node else "no GPU"
    size = f"{work.nodes} nodes x {work.tasks_per_node} tasks, {walltime.clock(work.seconds)}"
    if num_members > 1:
        size = f"{num_members} runs of {size} each"
    elif num_jobs > 1:
        size = f"{num_jobs} jobs, one after the other, of {size} each"
    jobs, command = scheduler.submit(folder, cfg.cluster, work, wait=options.wait)
    if options.parsable:
        print(jobs[0], folder)
    else:
        log = scheduler.log(folder, cfg.cluster.scheduler, jobs[0], array=num_members > 1)
        print(f"job {' '.join(jobs)}\nrun directory {folder}\nlog {log}")
        print(f"asks for at most {size}: {cost}")
    return command


def await_end(command: Popen[str], options: Options) -> None:
    """With --wait, leave with the job's exit code once it has ended, unless that is 0."""
    if options.wait and (code := command.wait()):
        sys.exit(code)
