"""Train and test the network of the config, or do another task=: python train.py [group=choice] [key=value]"""

from typing import Any

import env

env.use_library()  # src/ comes first on the path; without the environment, this says what to type

from hpc.config.build import build, build_data
from hpc.run import command_line, directory
from hpc.run.program import RankProcess, rank_process
from hpc.training.attempt import Attempt, run_attempt
from omegaconf import DictConfig


def train(node: DictConfig, process: RankProcess) -> dict[str, float]:
    """Do the task of the config. Return the test metrics for scripts that call this, on rank 0; elsewhere nothing."""
    # Entry: check the config, meet the other ranks, make the run directory. Exit: note how it ended; after a signal or
    # near the time limit, with the exit code that makes the job resume.
    with run_attempt(node, process) as attempt:
        cfg = attempt.cfg
        # They import lightning: only once the config is accepted.
        from hpc.resume.trainer import finish, make_trainer, predict, test

        data, module = build_data(cfg), build(cfg.model)  # as hydra.utils.instantiate does
        # A Trainer that can stop and resume. It loads the weights of cfg.ckpt; ckpt_path below resumes this run.
        trainer = make_trainer(attempt, module, data, trial=search_reporter(attempt))
        metrics: dict[str, float] = {}
        if cfg.task == "train":
            trainer.fit(module, data, ckpt_path=attempt.checkpoint.path if attempt.checkpoint else None)
        if cfg.task == "predict":
            metrics = predict(trainer, module, data)  # into predictions.pt of the run directory
        else:
            metrics = test(trainer, module, data, is_required=cfg.task == "test")
        finish(attempt, trainer, metrics)
    return attempt.metrics


def search_reporter(attempt: Attempt) -> Any:
    """Return the reporter of a hyperparameter search (submit.py --search), on rank 0; None if there is no search."""
    if not attempt.claim or not directory.is_search_trial(attempt.run_dir):
        return None
    from hpc.studies import optuna_study  # only here: other runs do not need it

    return optuna_study.open_reporter(attempt.run_dir)


if __name__ == "__main__":
    with rank_process() as process:  # handles signals from here on, and prints a ConfigError without a traceback
        train(command_line.compose(__doc__, process.arguments), process)  # configs/train.yaml and the overrides
