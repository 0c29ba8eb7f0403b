"""Train and test the network of the config: python train.py [group=choice] [key=value]"""

import sys
from pathlib import Path
from typing import Any

# A run imports the sources beside this file, such as a job's copy of the code, whatever is installed.
sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from omegaconf import DictConfig

from hpc.config.build import build
from hpc.run import command_line, directory
from hpc.run.program import Program, program
from hpc.training.attempt import attempt


def train(cfg: DictConfig, process: Program) -> dict[str, float]:
    """Fit and test the config's model on its data. Return the test metrics on rank 0, an empty dict elsewhere."""
    with attempt(cfg, process) as run:  # checks the config, meets the other ranks, makes the run directory
        from hpc.resume.trainer import finish, make_trainer, test  # imports lightning: only once the config is accepted

        data, module = build(cfg.data), build(cfg.model)
        trainer = make_trainer(run, module, data, trial=search_trial(run.run_dir))
        if not cfg.test_only:
            trainer.fit(module, data, ckpt_path=run.checkpoint.path if run.checkpoint else None)
        finish(run, trainer, test(trainer, module, data, is_required=cfg.test_only))
    return run.metrics


def search_trial(run_dir: Path) -> Any:
    """Return the trial to which a run of a search reports its metrics; None for other runs."""
    if not directory.is_search_trial(run_dir):
        return None
    from hpc.studies import search  # only here: other runs do not need it

    return search.open_reporter(run_dir)


if __name__ == "__main__":
    with program() as process:  # handles signals from here on, and prints a ConfigError without a traceback
        train(command_line.compose(__doc__, process.words), process)
