"""Train the network that the config describes, then test it: python train.py [group=choice] [key=value]"""

import sys
from datetime import datetime
from os import environ
from pathlib import Path

# A run uses the code it lies beside (a job's snapshot, say), whatever is installed.
sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from omegaconf import DictConfig

from {{ cookiecutter.package_name }}.hpc import commandline, config, launch, preflight, probe, rundir


def main(place: launch.Place) -> None:
    cfg = commandline.compose(__doc__, sys.argv[1:])
    preflight.rules(cfg)
    probe.placed(cfg, place, environ)
    metrics = train(cfg, place, frozen=commandline.resumes(sys.argv[1:]) is not None)
    if metrics:
        print(f"run directory {cfg.run_dir}")
    for name, value in metrics.items():
        print(f"{name} {value:.4f}")


def train(cfg: DictConfig, place: launch.Place, frozen: bool = False) -> dict[str, float]:
    """Fit and test what a config that keeps the rules describes; the test metrics, on rank 0 (elsewhere empty)."""
    # On CPU, threads that wait give way soon: spinning made a step ten times slower on a machine that others use too.
    environ.setdefault("GOMP_SPINCOUNT", "1000")
    directory = rundir.choose(cfg.run_dir, cfg.name, datetime.now(), environ, place.step or "0")
    hosts, store = probe.together(cfg, place, directory, frozen, environ)  # torch from here on
    with rundir.errors(Path(cfg.run_dir), place.rank):
        metrics = fit_and_test(cfg, place, hosts)
    del store  # rank 0 has served it till here
    return metrics


def fit_and_test(cfg: DictConfig, place: launch.Place, hosts: list[str]) -> dict[str, float]:
    import lightning

    from {{ cookiecutter.package_name }}.hpc import record, weights

    lightning.seed_everything(cfg.seed, workers=True, verbose=False)
    data = config.build(cfg.data)
    module = config.build(cfg.model)
    if cfg.ckpt:
        weights.load(module, cfg.ckpt)
    trainer = config.build(
        cfg.trainer,
        logger=config.build(cfg.logger),
        callbacks=[config.build(node) for node in cfg.callbacks.values() if node],
        plugins=[record.environment(place)],
    )
    attempt = record.begin(trainer, cfg, place.launcher, hosts)
    if not cfg.test_only:
        trainer.fit(module, data)
    validated = dict(trainer.callback_metrics)  # testing forgets them
    tested = dict(trainer.test(module, data, verbose=False)[0])
    record.result(trainer, cfg, validated | tested)
    record.finish(trainer, cfg, attempt, tested)
    return tested if trainer.is_global_zero else {}


if __name__ == "__main__":
    here = launch.place(environ)
    with config.refusals(launch.speaks(here, environ)):
        main(here)
