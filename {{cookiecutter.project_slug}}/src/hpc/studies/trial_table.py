"""The trials of a search as a table, and the command line of the best."""

import shlex
from pathlib import Path

from optuna import Study
from optuna.trial import FrozenTrial, TrialState

from hpc.studies import optuna_study, search, search_space
from hpc.studies.search import Search

STATES = {"complete": "finished", "fail": "failed"}


def lines(folder: Path) -> list[str]:
    """For a terminal. Raises `ConfigError` where there is no search."""
    asked = search.load(folder)
    if not (folder / optuna_study.JOURNAL).exists():
        return [f"no run of {folder} has begun: python report.py {shlex.quote(str(folder))}"]
    known = optuna_study.of(folder)
    optuna_study.settle(known, folder)
    return [*table(asked, known.get_trials(deepcopy=False)), "", *best(asked, known, folder)]


def table(asked: Search, trials: list[FrozenTrial]) -> list[str]:
    """A line per trial, the best value first; of those that were given up, the last value."""
    sign = 1 if asked.mode == "min" else -1

    def order(trial: FrozenTrial) -> tuple[bool, float, str]:
        return trial.value is None, sign * (trial.value or 0), trial.user_attrs["run"]

    keys = list(search_space.of(asked.words))
    titles = ["run", "state", "validations", asked.metric, *keys]
    rows = [titles, *(_row(trial, keys) for trial in sorted(trials, key=order))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def best(asked: Search, known: Study, folder: Path) -> list[str]:
    """What to type to train the best one again."""
    finished = known.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if not finished:
        return ["no trial has finished yet"]
    trial = known.best_trial
    command = shlex.join(["python", "submit.py", *search_space.filled(asked.words, trial.params)])
    found = f"best {asked.metric} {trial.value:.6g} of {len(finished)} finished trials"
    return [f"{found}: {folder / trial.user_attrs['run']}", command]


def _row(trial: FrozenTrial, keys: list[str]) -> list[str]:
    state = trial.state.name.lower()
    value = "-" if trial.value is None else f"{trial.value:.4g}"
    params = [f"{p:.4g}" if isinstance(p := trial.params.get(key, "-"), float) else str(p) for key in keys]
    return [trial.user_attrs["run"], STATES.get(state, state), str(len(trial.intermediate_values)), value, *params]
