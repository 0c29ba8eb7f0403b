"""An attempt of a run, on each of its ranks: from a composed config to a verdict."""

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
from hpc.config import preflight
from hpc.config.exit_codes import ExitCode
from hpc.launch import node_checks, placement
from hpc.run import command_line, directory
from hpc.run.claim import Claim
from hpc.run.program import Program
from hpc.run.signals import INTERRUPTED
from hpc.run.watchdog import Stopped, Watch
from hpc.training import begin, beginning


@dataclass
class Attempt:
    """One start of a run, as one of its ranks knows it.

    Attributes:
        number: counts the attempts of this run from 1.
        hosts: the nodes, in the order of their ranks.
        checkpoint: where the run goes on; None: from the beginning.
        claim: on rank 0, the right to write into the run directory.
        job_end: unix time when the scheduler ends the job; None: it does not.
        trains: a batch has come.
        validation_metrics: of the last validation.
        metrics: of the test, on rank 0.
        take_back: undo what this start has changed in the config of the run, if it is rejected.
    """

    cfg: DictConfig
    run_dir: Path
    program: Program
    number: int
    hosts: list[str]
    checkpoint: Checkpoint | None
    claim: Claim | None
    watch: Watch
    job_end: float | None
    trains: bool = False
    validation_metrics: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    take_back: Callable[[], None] | None = None


@contextmanager
def attempt(cfg: DictConfig, program: Program) -> Iterator[Attempt]:
    """Check the config, bring the ranks together, make the run directory, and watch what is done within.

    An attempt that is stopped to be continued leaves with `ExitCode.CONTINUE`; see `ExitCode`.

    Raises:
        ConfigError: on every rank; nothing was written.
    """
    preflight.check_rules(cfg)
    node_checks.check_launch(cfg, program.place, environ=environ)
    try:
        with _watched(cfg, program) as run:
            from hpc.training import rejections

            _prepare_libraries(cfg)
            with rejections.rejections(run):
                yield run
    except Stopped as stopped:
        _exit_stopped(cfg, program, stopped)
    if program.is_reporting_rank:
        print(f"run directory {cfg.run_dir}")
    for name, value in run.metrics.items():
        print(f"{name} {value:.4f}")


@contextmanager
def _watched(cfg: DictConfig, program: Program) -> Iterator[Attempt]:
    """Begin the attempt on all ranks, and end them all soon if one of them fails."""
    place, signals = program.place, program.signals
    # On CPU, threads that wait give way soon: spinning made a step ten times slower on a machine that others use too.
    environ.setdefault("GOMP_SPINCOUNT", "1000")
    environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # nothing in a checkpoint is ever executed, whoever loads it
    signals.parent = getppid() if place.launcher != "none" else None
    job_end = placement.job_end_unix_time(environ)
    beginning.apart(place, environ)
    fresh = directory.choose(cfg.run_dir, cfg.name, datetime.now(), environ, place.step or "0")
    frozen = command_line.resumes(program.words) is not None
    begun = begin.together(cfg, place, fresh, frozen, environ)  # torch from here on
    run_dir, hang_seconds = Path(cfg.run_dir), 60 * cfg.faults.hang_minutes
    ranks = cfg.trainer.num_nodes * cfg.trainer.devices
    watch = Watch(run_dir, begun.claim, begun.attempt, place.rank, ranks, begun.store, hang_seconds, signals)
    with watch:
        yield Attempt(
            cfg=cfg,
            run_dir=run_dir,
            program=program,
            number=begun.attempt,
            hosts=begun.hosts,
            checkpoint=begun.checkpoint,
            claim=begun.claim,
            watch=watch,
            job_end=job_end,
        )


def _prepare_libraries(cfg: DictConfig) -> None:
    import lightning
    import torch

    from hpc.training import record, strategies  # noqa: F401 - with them come the rest of the large libraries

    gc.freeze()  # what the libraries made stays: no later collection looks through it, and no worker copies it
    gc.enable()
    torch.set_float32_matmul_precision(cfg.matmul_precision)
    lightning.seed_everything(cfg.seed, workers=True, verbose=False)


def _exit_stopped(cfg: DictConfig, program: Program, stopped: Stopped) -> NoReturn:
    """Say where the run was stopped and how it goes on, and leave with the exit code that says so, too."""
    place, is_to_go_on = program.place, stopped.outcome == "continue"
    by_hand = stopped.why == INTERRUPTED
    if program.is_reporting_rank:
        print(f"stopped at step {stopped.step}: {stopped.why}\nrun directory {cfg.run_dir}", flush=True)
        if is_to_go_on and (by_hand or not placement.is_in_job(environ)):
            print(f"to go on: python train.py resume={shlex.quote(str(cfg.run_dir))}", flush=True)
    if placement.is_lightning_child(place):  # of a process that Lightning would kill if this one reported a failure
        sys.exit(ExitCode.DONE)
    program.signals.ends_interrupted = by_hand and place.launcher == "none"
    codes = {"continue": ExitCode.CONTINUE, "finished": ExitCode.DONE}
    sys.exit(codes.get(stopped.outcome, ExitCode.FAILED))
