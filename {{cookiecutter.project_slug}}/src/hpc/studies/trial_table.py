"""The trials of a search as a table, and the command line of the best one."""

import shlex
from pathlib import Path

from optuna import Study
from optuna.trial import FrozenTrial, TrialState

from hpc.studies import optuna_study, search, search_space
from hpc.studies.search import Search

SHOWN_STATES = {"complete": "finished", "fail": "failed"}


def study_lines(folder: Path) -> list[str]:
    """Return the table and the best trial as lines for a terminal. Raises `ConfigError` if there is no search."""
    settings = search.load_search(folder)
    if not (folder / optuna_study.JOURNAL).exists():
        return [f"no run of {folder} has started: python report.py {shlex.quote(str(folder))}"]
    study = optuna_study.open_study(folder)
    optuna_study.fail_ended_trials(study, folder)
    return [*table_lines(settings, study.get_trials(deepcopy=False)), "", *best_lines(settings, study, folder)]


def table_lines(settings: Search, trials: list[FrozenTrial]) -> list[str]:
    """Return a line per trial, the best value first; a pruned trial has its last value."""
    sign = 1 if settings.mode == "min" else -1

    def sort_key(trial: FrozenTrial) -> tuple[bool, float, str]:
        return trial.value is None, sign * (trial.value or 0), trial.user_attrs["run"]

    keys = list(search_space.parse_space(settings.words))
    titles = ["run", "state", "validations", settings.metric, *keys]
    rows = [titles, *(_cells(trial, keys) for trial in sorted(trials, key=sort_key))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def best_lines(settings: Search, study: Study, folder: Path) -> list[str]:
    """Return the best trial, and what to type to train it again."""
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if not finished:
        return ["no trial has finished yet"]
    trial = study.best_trial
    command = shlex.join(["python", "submit.py", *search_space.fill_in(settings.words, trial.params)])
    summary = f"best {settings.metric} {trial.value:.6g} of {len(finished)} finished trials"
    return [f"{summary}: {folder / trial.user_attrs['run']}", command]


def _cells(trial: FrozenTrial, keys: list[str]) -> list[str]:
    state = trial.state.name.lower()
    value = "-" if trial.value is None else f"{trial.value:.4g}"
    params = [f"{p:.4g}" if isinstance(p := trial.params.get(key, "-"), float) else str(p) for key in keys]
    num_validations = str(len(trial.intermediate_values))
    return [trial.user_attrs["run"], SHOWN_STATES.get(state, state), num_validations, value, *params]
