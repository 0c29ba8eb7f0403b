"""The trials of a search as a table, the best first, and the command line of the best one."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpc.config.errors import ConfigError, make_printable
from hpc.studies import search, search_space
from hpc.studies.search import Search
from hpc.system.tables import table_lines

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial


def trial_lines(folder: Path) -> list[str]:
    """Return lines for the terminal; of a search that cannot be read, why not. Writes nothing."""
    try:
        settings = search.load_search(folder)
        keys = list(search_space.parse_space(settings.words))
        with search.reject_damaged_study(folder):
            from hpc.studies import optuna_study

            lines = _lines(settings, keys, optuna_study.read_trials(folder), folder)
    except ConfigError as error:
        lines = str(error).splitlines()
    return list(map(make_printable, lines))  # words of a file that anybody may have written


def _lines(settings: Search, keys: Sequence[str], trials: Sequence["FrozenTrial"], folder: Path) -> list[str]:
    """Return the table of trials, and what to type to train the best one again."""
    sign = 1 if settings.mode == "min" else -1
    ranked = sorted(trials, key=lambda trial: (trial.value is None, sign * (trial.value or 0), _run_name(trial)))
    head = ["trial", "validations", settings.metric, *keys]
    lines = table_lines(head, [_cells(trial, keys) for trial in ranked]) if ranked else []
    finished = [trial for trial in ranked if trial.state.name == "COMPLETE"]
    if not finished:
        return [*lines, "no trial has finished yet"]
    best = finished[0]
    command = shlex.join(["python", "submit.py", *search_space.fill_in(settings.words, best.params)])
    summary = f"best {settings.metric} {best.value:.6g} of {len(finished)} finished trials"
    return [*lines, f"{summary}: {folder / _run_name(best)}", command]


def _cells(trial: "FrozenTrial", keys: Sequence[str]) -> list[str]:
    """Return the cells of a trial. A pruned one has its last value."""
    values = [trial.value, *(trial.params.get(key) for key in keys)]
    cells = ["-" if v is None else f"{v:.4g}" if isinstance(v, float) else str(v) for v in values]
    return [_run_name(trial), str(len(trial.intermediate_values)), *cells]


def _run_name(trial: "FrozenTrial") -> str:
    return str(trial.user_attrs.get("run", ""))
