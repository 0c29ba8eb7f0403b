"""Train the network that the config describes, then test it: python train.py [group=choice] [key=value]"""

import gc
import shlex
import sys
from datetime import datetime
from functools import partial
from os import environ, getppid
from pathlib import Path
from typing import Any

# A run uses the code it lies beside (a job's snapshot, say), whatever is installed.
sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from omegaconf import DictConfig

from hpc.config import build, compose, errors, preflight, sections, typed
from hpc.config.exit_codes import ExitCode
from hpc.launch import node_checks, placement
from hpc.run import command_line, signals, watchdog
from hpc.run import directory as run_directory
from hpc.training import attempt as training_attempt
from hpc.training import begin as training_begin


def main(place: placement.Place, warned: watchdog.Warned) -> None:
    gc.disable()  # till the libraries are there: to look for garbage meanwhile takes a fifth of their time
    cfg = command_line.compose(__doc__, sys.argv[1:])
    preflight.rules(cfg)
    node_checks.placed(cfg, place, environ)
    try:
        metrics = train(cfg, place, warned, frozen=command_line.resumes(sys.argv[1:]) is not None)
    except watchdog.Stopped as stopped:
        by_hand = stopped.why == signals.INTERRUPTED
        if placement.speaks(place, environ):
            print(f"stopped at step {stopped.step}: {stopped.why}\nrun directory {cfg.run_dir}", flush=True)
            if stopped.outcome == "continue" and (by_hand or not placement.in_job(environ)):
                print(f"to go on: python train.py resume={shlex.quote(str(cfg.run_dir))}", flush=True)
        if placement.is_child(place):  # of a process that Lightning would kill if this one told a failure
            sys.exit(0)
        warned.ends_interrupted = by_hand and place.launcher == "none"
        sys.exit({"continue": ExitCode.CONTINUE, "finished": 0}.get(stopped.outcome, 1))
    if placement.speaks(place, environ):
        print(f"run directory {cfg.run_dir}")
    for name, value in metrics.items():
        print(f"{name} {value:.4f}")


def train(cfg: DictConfig, place: placement.Place, warned: watchdog.Warned, frozen: bool = False) -> dict[str, float]:
    """Fit and test what a config that keeps the rules describes; the test metrics, on rank 0 (elsewhere empty).

    Raises:
        Stopped: on all ranks, between two steps; what was done is saved.
    """
    # On CPU, threads that wait give way soon: spinning made a step ten times slower on a machine that others use too.
    environ.setdefault("GOMP_SPINCOUNT", "1000")
    environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # nothing in a checkpoint is ever executed, whoever loads it
    warned.parent = getppid() if place.launcher != "none" else None
    end = placement.job_end(environ)
    training_attempt.apart(place, environ)
    directory = run_directory.choose(cfg.run_dir, cfg.name, datetime.now(), environ, place.step or "0")
    beginning = training_begin.together(cfg, place, directory, frozen, environ)  # torch from here on
    run_dir, hang_seconds = Path(cfg.run_dir), 60 * cfg.faults.hang_minutes
    claim, attempt, store = beginning.claim, beginning.attempt, beginning.store
    ranks = cfg.trainer.num_nodes * cfg.trainer.devices
    with watchdog.Watch(run_dir, claim, attempt, place.rank, ranks, store, hang_seconds, warned) as watching:
        return fit_and_test(cfg, place, beginning, watching, warned, end)


def fit_and_test(
    cfg: DictConfig,
    place: placement.Place,
    beginning: training_attempt.Beginning,
    watching: watchdog.Watch,
    warned: watchdog.Warned,
    end: float | None,
) -> dict[str, float]:
    import lightning
    import torch

    from hpc.checkpoint import weights
    from hpc.data import same_data, staging_progress
    from hpc.resume import changed_hyperparameters, rejections, resume
    from hpc.training import curves, lean, loggers, record, strategies

    gc.freeze()  # what the libraries made stays: no later collection looks through it, and no worker copies it
    gc.enable()
    run_dir, found = Path(cfg.run_dir), beginning.checkpoint
    torch.set_float32_matmul_precision(cfg.matmul_precision)
    lightning.seed_everything(cfg.seed, workers=True, verbose=False)
    data = build.build(cfg.data)
    module = build.build(cfg.model)
    record.hide(cfg, module, data)
    if cfg.ckpt and not found:
        weights.load(module, cfg.ckpt)
    logging = loggers.build_all(cfg, found, run_directory.starts(run_dir))
    take_back = None
    if beginning.claim:  # as on rank 0; after what may be rejected, so that a rejection leaves no run behind
        take_back = record.begin(cfg, place, beginning, logging, compose.typed(sys.argv[1:]))
    going_on = resume.Resume(
        run_dir,
        beginning.attempt,
        typed.typed(sections.Checkpoint, cfg.checkpoint, "checkpoint"),
        typed.typed(sections.Faults, cfg.faults, "faults"),
        watching,
        warned,
        end=end,
        leave=partial(run_directory.end, run_dir, beginning.claim, beginning.attempt),
        trial=trial(run_dir) if beginning.claim else None,
        owner=beginning.claim,
    )
    ours = [curves.Curves(), same_data.SameData(run_dir), going_on, changed_hyperparameters.Hyperparameters(cfg.model)]
    staging_progress.Copying(watching, found.step if found else 0)
    strategies.outlast(60 * cfg.faults.hang_minutes)
    double = strategies.double(cfg.trainer.precision)
    with rejections.rejections(going_on, take_back):
        trainer = build.build(
            cfg.trainer,
            logger=logging,
            callbacks=lean.called([*ours, *build.build_each(cfg.callbacks)]),
            precision=None if double else cfg.trainer.precision,
            plugins=[record.environment(place), *double],
            enable_checkpointing=False,  # Lightning's own: neither atomic nor exact
        )
        record.config(trainer, cfg)
        if not cfg.test_only:
            with rejections.given_up(trainer, cfg, going_on):
                trainer.fit(module, data, ckpt_path=found.path if found else None)
        tested = record.tested(trainer, module, data, must=cfg.test_only)
    record.result(trainer, cfg, going_on.metrics | tested)
    trainer.strategy.barrier()
    if beginning.claim:
        metrics = {name: float(value) for name, value in tested.items()}
        run_directory.end(run_dir, beginning.claim, beginning.attempt, trainer.global_step, "finished", metrics=metrics)
    return tested if trainer.is_global_zero else {}


def trial(run_dir: Path) -> Any:
    """What a run of a search tells it; None for all others, which need nothing of searches."""
    if not run_directory.is_of_search(run_dir):
        return None
    from hpc.studies import search

    return search.member(run_dir)


if __name__ == "__main__":
    told = watchdog.listen()  # before the heavy imports: a signal that came meanwhile would end the process
    with errors.exit_on_config_error():
        here = placement.place(environ)
    told.speaks = placement.speaks(here, environ)
    with errors.exit_on_config_error(placement.speaks(here, environ)):
        main(here, told)
