"""Train the network that the config describes, then test it: python train.py [group=choice] [key=value]"""

import sys
from pathlib import Path
from typing import Any

# A run uses the code it lies beside (a job's snapshot, say), whatever is installed.
sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from omegaconf import DictConfig

from hpc.config.build import build
from hpc.run import command_line, directory
from hpc.run.program import Program, program
from hpc.training.attempt import attempt


def train(cfg: DictConfig, this: Program) -> dict[str, float]:
    """Fit and test what the config describes. Return the test metrics on rank 0, nothing elsewhere."""
    with attempt(cfg, this) as run:  # checks, meets the other ranks, makes the run directory, and watches
        from hpc.resume.trainer import finish, make_trainer, test  # imports lightning, which an answer does not need

        data, module = build(cfg.data), build(cfg.model)
        trainer = make_trainer(run, module, data, trial=trial_of_search(run.run_dir))
        if not cfg.test_only:
            trainer.fit(module, data, ckpt_path=run.checkpoint.path if run.checkpoint else None)
        finish(run, trainer, test(trainer, module, data, is_required=cfg.test_only))
    return run.metrics


def trial_of_search(run_dir: Path) -> Any:
    """Return what a run of a search reports to; None for all others, which import nothing of searches."""
    if not directory.is_search_trial(run_dir):
        return None
    from hpc.studies import search

    return search.open_reporter(run_dir)


if __name__ == "__main__":
    with program() as this:  # a signal counts from here on, and a mistake ends with one message
        train(command_line.compose(__doc__, this.words), this)
