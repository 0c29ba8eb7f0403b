"""Train the network that the config describes, then test it: python train.py [group=choice] [key=value]"""

import sys
from datetime import datetime
from os import environ
from pathlib import Path

# A run uses the code it lies beside (a job's snapshot, say), whatever is installed.
sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from omegaconf import DictConfig

from {{ cookiecutter.package_name }}.hpc import config, preflight, rundir


def main() -> None:
    cfg = config.compose(__doc__, sys.argv[1:])
    preflight.check(cfg)
    metrics = train(cfg)
    if metrics:
        print(f"run directory {cfg.run_dir}")
    for name, value in metrics.items():
        print(f"{name} {value:.4f}")


def train(cfg: DictConfig) -> dict[str, float]:
    """Fit and test what a checked config describes; the test metrics, on rank 0 (elsewhere empty)."""
    # On CPU, threads that wait give way soon: spinning made a step ten times slower on a machine that others use too.
    environ.setdefault("GOMP_SPINCOUNT", "1000")
    import lightning  # torch from here on: --help and refusals above answer at once

    from {{ cookiecutter.package_name }}.hpc import record, weights

    preflight.probe(cfg, environ)
    cfg.run_dir = str(rundir.choose(cfg.run_dir, cfg.name, datetime.now(), environ))
    lightning.seed_everything(cfg.seed, workers=True, verbose=False)
    data = config.build(cfg.data)
    module = config.build(cfg.model)
    if cfg.ckpt:
        weights.load(module, cfg.ckpt)
    rundir.create(Path(cfg.run_dir))  # nothing is written before this line
    trainer = config.build(
        cfg.trainer,
        logger=config.build(cfg.logger),
        callbacks=[config.build(node) for node in cfg.callbacks.values() if node],
    )
    record.config(trainer, cfg)
    if not cfg.test_only:
        trainer.fit(module, data)
    validated = dict(trainer.callback_metrics)  # testing forgets them
    tested = dict(trainer.test(module, data, verbose=False)[0])
    record.result(trainer, cfg, validated | tested)
    return tested if trainer.is_global_zero else {}


if __name__ == "__main__":
    with config.refusals():
        main()
