"""The trials of a search as a table, and the command line of the best one."""

import shlex
from pathlib import Path

from optuna import Study
from optuna.trial import FrozenTrial, TrialState

from hpc.studies import optuna_study, search, search_space
from hpc.studies.search import Search
from hpc.system.tables import table_lines

SHOWN_STATES = {"complete": "finished", "fail": "failed"}


def study_lines(folder: Path) -> list[str]:
    """Return the table and the best trial as lines for a terminal. Writes nothing.

    Raises:
        ConfigError: there is no search.
    """
    settings = search.load_search(folder)
    journal = folder / optuna_study.JOURNAL
    if not journal.exists() or (journal.is_file() and not journal.stat().st_size):
        return [f"no run of {folder} has started: python report.py {shlex.quote(str(folder))}"]
    study = optuna_study.open_study(folder)
    ended = optuna_study.ended_trials(study, folder)
    sign = 1 if settings.mode == "min" else -1
    trials = sorted(
        study.get_trials(deepcopy=False),
        key=lambda trial: (trial.value is None, sign * (trial.value or 0), trial.user_attrs["run"]),
    )
    keys = list(search_space.parse_space(settings.words))
    head = ["run", "state", "validations", settings.metric, *keys]
    return [
        *table_lines(head, [_cells(trial, keys, ended=ended) for trial in trials]),
        "",
        *best_lines(settings, study, folder),
    ]


def best_lines(settings: Search, study: Study, folder: Path) -> list[str]:
    """Return the best trial, and what to type to train it again."""
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if not finished:
        return ["no trial has finished yet"]
    trial = study.best_trial
    command = shlex.join(["python", "submit.py", *search_space.fill_in(settings.words, trial.params)])
    summary = f"best {settings.metric} {trial.value:.6g} of {len(finished)} finished trials"
    return [f"{summary}: {folder / trial.user_attrs['run']}", command]


def _cells(trial: FrozenTrial, keys: list[str], *, ended: set[int]) -> list[str]:
    """Return the cells of a trial. A pruned one has its last value. `ended`: numbers of trials whose run has ended."""
    state = "fail" if trial.number in ended else trial.state.name.lower()
    values = [trial.value, *(trial.params.get(key) for key in keys)]
    cells = ["-" if v is None else f"{v:.4g}" if isinstance(v, float) else str(v) for v in values]
    return [trial.user_attrs["run"], SHOWN_STATES.get(state, state), str(len(trial.intermediate_values)), *cells]
