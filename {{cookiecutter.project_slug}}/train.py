"""Train the network that the config describes, then test it: python train.py [group=choice] [key=value]"""

import gc
import shlex
import sys
from datetime import datetime
from functools import partial
from os import environ, getppid
from pathlib import Path

# A run uses the code it lies beside (a job's snapshot, say), whatever is installed.
sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from omegaconf import DictConfig

from {{ cookiecutter.package_name }}.hpc import config, launch, rundir
from {{ cookiecutter.package_name }}.hpc.checks import preflight, probe
from {{ cookiecutter.package_name }}.hpc.jobs import commandline, job, layout
from {{ cookiecutter.package_name }}.hpc.running import begin, signals, watch


def main(place: launch.Place, warned: watch.Warned) -> None:
    gc.disable()  # till the libraries are there: to look for garbage meanwhile takes a fifth of their time
    cfg = commandline.compose(__doc__, sys.argv[1:])
    preflight.rules(cfg)
    probe.placed(cfg, place, environ)
    try:
        metrics = train(cfg, place, warned, frozen=commandline.resumes(sys.argv[1:]) is not None)
    except watch.Stopped as stopped:
        by_hand = stopped.why == signals.INTERRUPTED
        if launch.speaks(place, environ):
            print(f"stopped at step {stopped.step}: {stopped.why}\nrun directory {cfg.run_dir}", flush=True)
            if stopped.outcome == "continue" and (by_hand or not launch.in_job(environ)):
                print(f"to go on: python train.py resume={shlex.quote(str(cfg.run_dir))}", flush=True)
        if launch.is_child(place):  # of a process that Lightning would kill if this one told a failure
            sys.exit(0)
        warned.ends_interrupted = by_hand and place.launcher == "none"
        sys.exit({"continue": job.CONTINUE, "finished": 0}.get(stopped.outcome, 1))
    if launch.speaks(place, environ):
        print(f"run directory {cfg.run_dir}")
    for name, value in metrics.items():
        print(f"{name} {value:.4f}")


def train(cfg: DictConfig, place: launch.Place, warned: watch.Warned, frozen: bool = False) -> dict[str, float]:
    """Fit and test what a config that keeps the rules describes; the test metrics, on rank 0 (elsewhere empty).

    Raises:
        Stopped: on all ranks, between two steps; what was done is saved.
    """
    # On CPU, threads that wait give way soon: spinning made a step ten times slower on a machine that others use too.
    environ.setdefault("GOMP_SPINCOUNT", "1000")
    environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # nothing in a checkpoint is ever executed, whoever loads it
    warned.parent = getppid() if place.launcher != "none" else None
    end = launch.job_end(environ)
    begin.apart(place, environ)
    directory = rundir.choose(cfg.run_dir, cfg.name, datetime.now(), environ, place.step or "0")
    beginning = probe.together(cfg, place, directory, frozen, environ)  # torch from here on
    run_dir, hang_seconds = Path(cfg.run_dir), 60 * cfg.faults.hang_minutes
    claim, attempt, store = beginning.claim, beginning.attempt, beginning.store
    ranks = cfg.trainer.num_nodes * cfg.trainer.devices
    with watch.Watch(run_dir, claim, attempt, place.rank, ranks, store, hang_seconds, warned) as watching:
        return fit_and_test(cfg, place, beginning, watching, warned, end)


def fit_and_test(
    cfg: DictConfig,
    place: launch.Place,
    beginning: begin.Beginning,
    watching: watch.Watch,
    warned: watch.Warned,
    end: float | None,
) -> dict[str, float]:
    import lightning
    import torch

    from {{ cookiecutter.package_name }}.hpc.checkpoints import weights
    from {{ cookiecutter.package_name }}.hpc.monitoring import curves
    from {{ cookiecutter.package_name }}.hpc.resuming import hyperparameters, resume, same_data
    from {{ cookiecutter.package_name }}.hpc.running import copying, loggers, record
    from {{ cookiecutter.package_name }}.hpc.studies import search
    from {{ cookiecutter.package_name }}.hpc.training import lean, strategies

    gc.freeze()  # what the libraries made stays: no later collection looks through it, and no worker copies it
    gc.enable()
    run_dir, found = Path(cfg.run_dir), beginning.checkpoint
    torch.set_float32_matmul_precision(cfg.matmul_precision)
    lightning.seed_everything(cfg.seed, workers=True, verbose=False)
    data = config.build(cfg.data)
    module = config.build(cfg.model)
    record.hide(cfg, module, data)
    if cfg.ckpt and not found:
        weights.load(module, cfg.ckpt)
    logging = loggers.build_all(cfg, found, rundir.starts(run_dir))
    take_back = None
    if beginning.claim:  # as on rank 0; after what may be refused, so that a refusal leaves no run behind
        take_back = record.begin(cfg, place, beginning, logging, commandline.typed(sys.argv[1:]))
    going_on = resume.Resume(
        run_dir,
        beginning.attempt,
        config.typed(layout.Checkpoint, cfg.checkpoint, "checkpoint"),
        config.typed(layout.Faults, cfg.faults, "faults"),
        watching,
        warned,
        end=end,
        leave=partial(rundir.end, run_dir, beginning.claim, beginning.attempt),
        member=search.member(run_dir) if beginning.claim else None,
        owner=beginning.claim,
    )
    ours = [curves.Curves(), same_data.SameData(run_dir), going_on, hyperparameters.Hyperparameters(cfg.model)]
    copying.Copying(watching, found.step if found else 0)
    strategies.outlast(60 * cfg.faults.hang_minutes)
    double = strategies.double(cfg.trainer.precision)
    with record.rejections(going_on, take_back):
        trainer = config.build(
            cfg.trainer,
            logger=logging,
            callbacks=lean.called([*ours, *config.build_each(cfg.callbacks)]),
            precision=None if double else cfg.trainer.precision,
            plugins=[record.environment(place), *double],
            enable_checkpointing=False,  # Lightning's own: neither atomic nor exact
        )
        record.config(trainer, cfg)
        if not cfg.test_only:
            with record.given_up(trainer, cfg, going_on):
                trainer.fit(module, data, ckpt_path=found.path if found else None)
        tested = record.tested(trainer, module, data, must=cfg.test_only)
    record.result(trainer, cfg, going_on.metrics | tested)
    trainer.strategy.barrier()
    if beginning.claim:
        metrics = {name: float(value) for name, value in tested.items()}
        rundir.end(run_dir, beginning.claim, beginning.attempt, trainer.global_step, "finished", metrics=metrics)
    return tested if trainer.is_global_zero else {}


if __name__ == "__main__":
    told = watch.listen()  # before the heavy imports: a signal that came meanwhile would end the process
    with config.refusals():
        here = launch.place(environ)
    told.speaks = launch.speaks(here, environ)
    with config.refusals(launch.speaks(here, environ)):
        main(here, told)
