"""Hand a run to the cluster's scheduler: python submit.py [group=choice] [key=value]"""

import atexit
import gc
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from subprocess import Popen

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from omegaconf import DictConfig

from hpc.config import compose, errors, preflight, project, walltime
from hpc.config.errors import ConfigError
from hpc.jobs import job
from hpc.run import allowed_changes, command_line, directory, environment, frozen_config, snapshot
from hpc.studies import search, sweep
from hpc.submit import queued, scheduler
from hpc.submit.scripts import describe, reject_no_training, text, work_dir, write
from hpc.system import files


def main() -> None:
    asked = arguments()
    if asked.render:
        render(Path(asked.render), asked)
    elif asked.multirun:
        submit_sweep(asked)
    elif asked.search:
        submit_search(asked)
    elif run_dir := command_line.resume_directory(asked.overrides):
        go_on(run_dir, asked)
    else:
        submit(asked)


def arguments() -> Namespace:
    parser = compose.parser(__doc__)
    parser.add_argument("--dry-run", action="store_true", help="print the job script and write nothing")
    parser.add_argument("--parsable", action="store_true", help="print JOBID RUN_DIR and nothing else")
    parser.add_argument("--wait", action="store_true", help="wait for the job and exit with its exit code")
    parser.add_argument("--render", metavar="DIR", help="write a script per trainer preset, for sbatch or qsub")
    search.add_options(parser)
    asked = parser.parse_intermixed_args(sys.argv[1:])
    search.reject_options(asked)
    return asked


def go_on(run_dir: Path, asked: Namespace) -> None:
    """The script that was submitted before, once more; or a new one, where what is typed moves the run."""
    cfg = command_line.compose_parsed(asked)
    preflight.job(cfg)
    if not all((run_dir / name).is_file() for name in ("job.sh", "code/train.py")):
        rule = "was not made by submit.py: there is no job.sh with its code in it"
        raise ConfigError("resume", run_dir, rule, f"python train.py resume={run_dir}, in a job")
    moves = frozen_config.list_changes(run_dir, cfg)
    if moves:
        reject_no_training(run_dir)
        os.chdir(work_dir(run_dir))  # its relative paths shall mean what they meant
        preflight.files(cfg)
        reject_too_big(cfg, frozen_config.merge_overrides(run_dir, compose.typed(asked.overrides)))
    if asked.dry_run:
        sys.stderr.write("".join(f"{line}\n" for line in moves))
        script = files.text(run_dir / "job.sh", errors="surrogateescape")
        print(text(describe(cfg, run_dir=run_dir), cfg) if moves else script, end="")
        return
    with queued.alone(run_dir):
        queued.reject_queued(run_dir)
        ready(cfg, asked, run_dir / "code")
        directory.create(run_dir, cfg.group_readable)
        allowed_changes.withdraw(run_dir)  # of a job that was never run
        frozen_config.create_or_replace(run_dir, cfg, words=compose.typed(asked.overrides))
        if moves:
            write(describe(cfg, run_dir=run_dir), cfg, run_dir)
        command = hand_over(cfg, run_dir, asked)
    await_end(command, asked)


def submit(asked: Namespace, program: str = "train.py") -> Path:
    """A job of this program's ranks; its run directory."""
    cfg = checked(command_line.compose_parsed(asked), asked.overrides if program == "train.py" else None)
    cfg.run_dir = str(directory.choose(cfg.run_dir, cfg.name, now=datetime.now(), environ={}))
    run_dir = Path(cfg.run_dir)
    work = describe(cfg, run_dir=run_dir, program=program)
    if asked.dry_run:
        print(text(work, cfg), end="")
        return run_dir
    ready(cfg, asked, project.PROJECT)
    snapshot.reject_unsuitable_code(cfg.dirty_tree)
    directory.reject_used(run_dir)
    with room(run_dir):
        directory.create(run_dir, cfg.group_readable)
        frozen_config.create_exclusively(run_dir, cfg, words=asked.overrides)
        snapshot.copy_code(run_dir)
        write(work, cfg, run_dir)
    await_end(hand_over(cfg, run_dir, asked), asked)
    return run_dir


def submit_sweep(asked: Namespace) -> None:
    folder = directory.choose(None, "sweep", now=datetime.now(), environ={})
    members = sweep.members(asked.overrides, folder)
    array = {"members": folder / "members", "num_members": len(members), "at_once": asked.at_once}
    jobs = [describe(checked(cfg, words), **array) for cfg, words in members]
    sweep.reject_unlike(jobs)
    first, _ = members[0]
    if asked.dry_run:
        print(text(jobs[0], first), end="")
        return
    with room(folder):
        begin_array(first, folder, [Path(cfg.run_dir) for cfg, _ in members], asked)
        for cfg, words in members:
            frozen_config.create_or_replace(Path(cfg.run_dir), cfg, words=words)
            write(describe(cfg, run_dir=Path(cfg.run_dir)), cfg, Path(cfg.run_dir))  # for submit.py resume=, alone
        write(jobs[0], first, folder)
    await_end(hand_over(first, folder, asked, len(members)), asked)


def submit_search(asked: Namespace) -> None:
    """As a sweep, but what its members are is decided when they start: here the corners are looked at."""
    folder = directory.choose(None, "search", now=datetime.now(), environ={})
    cfgs = [checked(cfg, words) for cfg, words in search.corners(asked.overrides, folder)]
    plan = search.plan(asked.search, asked.trials, asked.overrides, cfgs)
    array = {"members": folder / "members", "num_members": asked.trials, "at_once": asked.at_once, "asks": True}
    jobs = [describe(cfg, **array) for cfg in cfgs]
    sweep.reject_unlike(jobs)
    if asked.dry_run:
        print(text(jobs[0], cfgs[0]), end="")
        return
    run_dirs = search.run_dirs(folder, asked.trials)
    with room(folder):
        begin_array(cfgs[0], folder, run_dirs, asked)
        search.save(folder, plan)
        for run_dir in run_dirs:
            write(describe(cfgs[0], run_dir=run_dir), cfgs[0], run_dir)
        write(jobs[0], cfgs[0], folder)
    await_end(hand_over(cfgs[0], folder, asked, asked.trials), asked)


@contextmanager
def room(run_dir: Path) -> Iterator[None]:
    """Whatever of a job cannot be written leaves no run behind. Raises `ConfigError`."""
    try:
        yield
    except OSError as error:
        (run_dir / "config.yaml").unlink(missing_ok=True)
        rule = f"must have room for the code and the script of a job: {error.strerror or error}"
        raise ConfigError("run_dir", run_dir, rule, "make room (quotas count files, too), then submit again") from None


def begin_array(cfg: DictConfig, folder: Path, run_dirs: list[Path], asked: Namespace) -> None:
    """The folder of an array: its code, and a directory for each of its runs."""
    ready(cfg, asked, project.PROJECT)
    snapshot.reject_unsuitable_code(cfg.dirty_tree)
    directory.create(folder, cfg.group_readable)
    try:
        with (folder / "members").open("x", encoding="utf-8") as members:
            members.writelines(f"{run_dir}\n" for run_dir in run_dirs)
    except FileExistsError:  # a process of the same number on another node, in the same second
        raise ConfigError("run_dir", folder, "another array was begun in it just now", "submit again") from None
    snapshot.copy_code(folder)
    for run_dir in run_dirs:
        directory.create(run_dir, cfg.group_readable, free_bytes=0)
        (run_dir / "code").symlink_to(folder / "code")


def checked(cfg: DictConfig, words: Sequence[str] | None) -> DictConfig:
    """A config that may be submitted; `words`, where it trains, are what was typed."""
    preflight.job(cfg)
    preflight.files(cfg)
    if words is not None:
        reject_too_big(cfg, words)
    return cfg


def reject_too_big(cfg: DictConfig, words: Sequence[str]) -> None:
    """What does not fit on the cluster's GPUs, where its file names them; nothing of the plan is read where not."""
    if cfg.cluster.gpu:
        from hpc.plan.fit import reject_too_big

        reject_too_big(cfg, words)


def ready(cfg: DictConfig, asked: Namespace, code: Path) -> None:
    """There is a scheduler here, and an environment for the code that is to run; told before anything is written."""
    scheduler.find(cfg.cluster.scheduler)
    if asked.wait and cfg.cluster.scheduler == "pbs" and cfg.cluster.chain > 1:
        raise ConfigError("--wait", None, "follows one job, and this is a chain", "cluster.chain=1, or without --wait")
    if not cfg.cluster.container:
        environment.reject_incomplete_environment(Path(sys.prefix), code)
        if cfg.cluster.stage_env:
            environment.pack_environment(Path(sys.prefix))


def hand_over(cfg: DictConfig, folder: Path, asked: Namespace, num_members: int = 1) -> Popen[str]:
    """Queue the job and tell of it; with --wait the command ends when the job does."""
    work = describe(cfg, run_dir=folder)
    num_jobs = num_members * (work.chain if cfg.cluster.scheduler == "pbs" else 1)
    cost = f"{work.gpu_hours * num_jobs:g} GPU-hours" if work.gpus_per_node else "no GPU"
    size = f"{work.nodes} nodes x {work.tasks_per_node} tasks, {walltime.clock(work.seconds)}"
    if num_members > 1:
        size = f"{num_members} runs of {size} each"
    elif num_jobs > 1:
        size = f"{num_jobs} jobs, one after the other, of {size} each"
    jobs, command = scheduler.submit(folder, cfg.cluster, work, wait=asked.wait)
    if asked.parsable:
        print(jobs[0], folder)
    else:
        log = scheduler.log(folder, cfg.cluster.scheduler, jobs[0], array=num_members > 1)
        print(f"job {' '.join(jobs)}\nrun directory {folder}\nlog {log}")
        print(f"asks for at most {size}: {cost}")
    return command


def await_end(command: Popen[str], asked: Namespace) -> None:
    """With --wait, end as the job does."""
    if asked.wait and (code := command.wait()):
        sys.exit(code)


def render(folder: Path, asked: Namespace) -> None:
    """Scripts for `sbatch slurm/ddp_4node.sbatch` (or qsub): no run directory, nobody's account unless it is typed."""
    overrides = asked.overrides or ["cluster=slurm"]
    if asked.dry_run:
        raise ConfigError("--render", folder, "writes a script per preset; --dry-run writes nothing", "one of them")
    if word := next((word for word in overrides if word.startswith("trainer=")), None):
        raise ConfigError(word, None, "--render writes a script for each preset of the trainer", "leave it out")
    scripts = {}
    for preset in compose.groups()["trainer"]:
        if preset == "cpu":
            continue
        typed = (f"trainer={preset}", *overrides)
        cfg = compose.compose_overrides(["cluster.account=null", *typed], personal=False)
        if cfg.run_dir:
            rule = "is of each job's own: such a script is submitted many times"
            raise ConfigError("run_dir", cfg.run_dir, rule, "leave it out, or submit.py without --render")
        preflight.rules(cfg)
        name = f"{preset}.{'pbs' if cfg.cluster.scheduler == 'pbs' else 'sbatch'}"
        scripts[folder / name] = text(job.of(cfg, typed), cfg)
    folder.mkdir(parents=True, exist_ok=True)
    for file, script in scripts.items():
        file.write_text(script, encoding="utf-8")
        print(file)


if __name__ == "__main__":
    gc.disable()  # what lives for a third of a second looks for no garbage, at its end neither
    atexit.register(gc.freeze)
    with errors.exit_on_config_error():
        main()
