"""An attempt at a run, on each of its ranks: from a composed config to a verdict."""

import gc
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from os import environ, getppid
from pathlib import Path
from typing import NoReturn

from omegaconf import DictConfig

from hpc.checkpoint.on_disk import Checkpoint
from hpc.config import library
from hpc.config.errors import ExitCode
from hpc.config.parse import parse
from hpc.config.sections import Config
from hpc.launch import node_checks, placement
from hpc.run import command_line, directory
from hpc.run.claim import Claim
from hpc.run.program import RankProcess
from hpc.run.signals import INTERRUPTED
from hpc.run.watchdog import Stopped, Watchdog
from hpc.training import meet_ranks, starting_point


@dataclass
class Attempt:
    """One start of a run, as one of its ranks knows it.

    Attributes:
        number: counts the attempts at this run from 1.
        hosts: the nodes, in the order of their ranks.
        checkpoint: the one that the run resumes from; None: it starts from the beginning.
        claim: on rank 0, the right to write into the run directory.
        job_end: unix time at which the scheduler ends the job; None: it does not.
        has_started_training: whether the first batch was fetched, or without training, computed: later errors are no
            mistakes in the config.
        validation_metrics: metrics of the last validation.
        metrics: metrics of the test or prediction, on rank 0.
        keep_config: on rank 0, writes the config of this attempt into the run directory, if it differs from the run's.
    """

    cfg: Config
    run_dir: Path
    process: RankProcess
    number: int
    hosts: list[str]
    checkpoint: Checkpoint | None
    claim: Claim | None
    watch: Watchdog
    job_end: float | None
    has_started_training: bool = False
    validation_metrics: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    keep_config: Callable[[], None] | None = None

    def begin_training(self) -> None:
        """Note that the first batch is there: from now on, nothing rejects what was typed for this attempt."""
        self.has_started_training = True
        if self.keep_config:
            self.keep_config()


@contextmanager
def run_attempt(node: DictConfig, process: RankProcess) -> Iterator[Attempt]:
    """Check the config, bring the ranks together, make the run directory, and watch over the body of the `with`.

    An attempt that stops to be continued exits with `ExitCode.CONTINUE`.

    Raises:
        ConfigError: on every rank; nothing was written.
    """
    node_checks.count_auto_devices(node)
    cfg = parse(node)
    node_checks.check_launch(cfg, process.place, environ=environ)
    try:
        with _begin_watched(cfg, process) as run:
            from hpc.training import lightning_errors

            if process.is_reporting_rank:
                print(f"hpc-ml {library.library_version()}, {library.describe_origin()}", flush=True)
            _prepare_libraries(cfg)
            with lightning_errors.convert_lightning_errors(run):
                yield run
    except Stopped as stopped:
        _exit_stopped(cfg, process, stopped)
    if process.is_reporting_rank:
        print(f"run directory {cfg.run_dir}")
    for name, value in run.metrics.items():
        print(f"{name} {value}" if isinstance(value, int) else f"{name} {value:.4f}")  # a count of samples


@contextmanager
def _begin_watched(cfg: Config, process: RankProcess) -> Iterator[Attempt]:
    """Begin the attempt on all ranks. If one of them fails or hangs, its watchdog ends all of them soon."""
    place, signals = process.place, process.signals
    signals.launcher_pid = getppid() if place.launcher != "none" else None
    job_end = placement.job_end_unix_time(environ)
    starting_point.forget_parent_run(place, environ)
    new_run_dir = directory.choose_run_dir(
        cfg.run_dir, cfg.name, now=datetime.now(), environ=environ, step=place.step or "0"
    )
    is_frozen = command_line.resume_directory(process.arguments) is not None
    start = meet_ranks.begin_attempt(cfg, place, new_run_dir=new_run_dir, is_frozen=is_frozen, environ=environ)
    run_dir = cfg.run_path
    watch = Watchdog(
        run_dir,
        start.claim,
        attempt=start.attempt,
        rank=place.rank,
        world_size=cfg.trainer.num_nodes * cfg.trainer.devices,
        store=start.store,
        hang_seconds=60 * cfg.faults.hang_minutes,
        signals=signals,
    )
    with watch:
        yield Attempt(
            cfg=cfg,
            run_dir=run_dir,
            process=process,
            number=start.attempt,
            hosts=start.hosts,
            checkpoint=start.checkpoint,
            claim=start.claim,
            watch=watch,
            job_end=job_end,
        )


def _prepare_libraries(cfg: Config) -> None:
    """Import the large libraries once the watchdog runs, set the precision of matmuls, and seed."""
    import lightning
    import torch

    from hpc.strategies import ddp  # noqa: F401 - these two import the rest of the large libraries
    from hpc.training import record  # noqa: F401

    gc.freeze()  # objects of the libraries live for ever: collections skip them, and no forked worker copies them
    gc.enable()
    torch.set_float32_matmul_precision(cfg.matmul_precision)
    lightning.seed_everything(cfg.seed, workers=True, verbose=False)


def _exit_stopped(cfg: Config, process: RankProcess, stopped: Stopped) -> NoReturn:
    """Print where the run stopped and how to continue it, and exit with the code of the outcome."""
    place, is_continued = process.place, stopped.outcome == "continue"
    is_interrupted = stopped.why == INTERRUPTED
    if process.is_reporting_rank:
        place_in_run = f" at step {stopped.step}" if cfg.task == "train" else ""
        print(f"stopped{place_in_run}: {stopped.why}\nrun directory {cfg.run_dir}", flush=True)
        if is_continued and (is_interrupted or not placement.is_in_job(environ)):
            print(f"to continue: python train.py resume={shlex.quote(str(cfg.run_dir))}", flush=True)
    if placement.is_lightning_child(place):  # Lightning would kill the process that started this one
        sys.exit(ExitCode.DONE)
    process.signals.ends_by_sigint = is_interrupted and place.launcher == "none"
    codes = {"continue": ExitCode.CONTINUE, "finished": ExitCode.DONE}
    sys.exit(codes.get(stopped.outcome, ExitCode.FAILED))
