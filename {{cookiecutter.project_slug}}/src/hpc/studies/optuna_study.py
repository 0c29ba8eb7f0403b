"""The study of a search, in Optuna's terms: who asks it gets values, who reports to it is told when to give up."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import optuna
from optuna.storages.journal import JournalStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from hpc.config.errors import ConfigError
from hpc.jobs import job_states
from hpc.launch import placement
from hpc.run import history, job_logs
from hpc.studies import search, search_space
from hpc.studies.journal import Journal
from hpc.studies.search import Search
from hpc.system.files import parse_json

JOURNAL = "journal.jsonl"
NAME = "search"
RANDOM, JUDGES = 10, 5  # trials before TPE goes by what was found, and completed ones before one is given up
SAME = ("params", "distributions", "intermediate_values")  # what a run has that goes on after its trial has failed


def of(folder: Path, number: int = 0) -> optuna.Study:
    """The study in the folder of a search; it begins with the first that asks.

    Args:
        number: of the member that asks. Seed and number decide what `random` draws, whoever comes first.

    Raises:
        ConfigError: there is no search, or its journal cannot be read.
    """
    asked = search.load(folder)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    journal = Journal(folder / JOURNAL)
    try:
        storage = JournalStorage(journal)
        begun = storage.get_all_studies()
    except OSError as error:
        raise ConfigError(
            "SEARCH", journal.path, f"cannot be read: {error.strerror}", "ask whose search it is"
        ) from None
    except Exception as error:  # whatever Optuna makes of a line that it has not written
        rule = f"is no operation of a study ({type(error).__name__}: {error})"
        raise ConfigError("SEARCH", f"{journal.path}, line {journal.line}", rule, "take this line out") from None
    if not begun:  # who only looks at it may have no right to write
        direction = StudyDirection.MINIMIZE if asked.mode == "min" else StudyDirection.MAXIMIZE
        optuna.create_study(storage=storage, study_name=NAME, direction=direction, load_if_exists=True)
    return optuna.load_study(study_name=NAME, storage=storage, sampler=sampler(asked, number), pruner=pruner(asked))


def sampler(asked: Search, number: int) -> optuna.samplers.BaseSampler:
    seed = int(np.random.SeedSequence([asked.seed % 2**63, number]).generate_state(1)[0])
    if asked.sampler == "random":
        return optuna.samplers.RandomSampler(seed)
    return optuna.samplers.TPESampler(n_startup_trials=min(RANDOM, max(asked.trials // 4, 1)), seed=seed)


def pruner(asked: Search) -> optuna.pruners.BasePruner:
    """Gives a trial up whose best value so far is worse than the median of completed trials at the same validation.

    Rather than successive halving: it needs no number of steps to begin with, gives up about half and not three of
    four, which a learning rate that falls late would not survive, and waits for some whole trials to judge by.
    """
    return optuna.pruners.MedianPruner(n_startup_trials=min(JUDGES, max(asked.trials // 4, 1)))


def ask(run_dir: Path) -> list[str]:
    """The words of a member: as typed, with the values of its trial. Asked again, the same words."""
    asked = search.load(run_dir.parent)
    study = of(run_dir.parent, int(run_dir.name))
    settle(study, run_dir.parent)
    trial = trial_of(study, run_dir.name)
    return search_space.filled(
        asked.words, {key: drawn(trial, key, one) for key, one in search_space.of(asked.words).items()}
    )


def drawn(trial: Trial, key: str, asked: search_space.Range | search_space.Choice) -> float | str:
    """A value of the trial; one that it has already is kept."""
    if isinstance(asked, search_space.Choice):
        return trial.suggest_categorical(key, asked.values)
    if isinstance(asked.low, int) and isinstance(asked.high, int):
        return trial.suggest_int(key, asked.low, asked.high, step=asked.step, log=asked.log)
    return trial.suggest_float(key, asked.low, asked.high, log=asked.log)


def trial_of(study: optuna.Study, name: str) -> Trial:
    """The newest trial of a member. A new one at its first start and, as far as it came, after one that failed."""
    job, known = placement.job_id(os.environ), _trials(study, name)
    if not known or known[-1].state == TrialState.FAIL:
        same = {key: getattr(known[-1], key) for key in SAME} if known else {}
        # In one line of the journal: nobody can be killed between the trial and its name.
        study.add_trial(create_trial(state=TrialState.RUNNING, user_attrs={"run": name, "job": job}, **same))
    last = _last(study, name)
    trial = Trial(study, last._trial_id)
    if last.state == TrialState.RUNNING and last.user_attrs["job"] != job:
        trial.set_user_attr("job", job)
    return trial


def _scheduler(folder: Path) -> str:
    """The scheduler that the search was submitted to; "" where that is not known."""
    try:
        note = parse_json(job_logs.read_tail(folder / "submitted.json") or "{}")
    except ValueError:
        return ""
    return str(note.get("scheduler", "")) if isinstance(note, dict) else ""


def settle(study: optuna.Study, folder: Path) -> None:
    """Trials whose job is over though they have not ended are marked as failed: nobody goes on with them by itself."""
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    scheduler = _scheduler(folder)
    runs = [history.read_run(folder / trial.user_attrs["run"], trial.user_attrs["run"]) for trial in running]
    # With PBS the job that goes on is another one, which is known as soon as it is queued.
    jobs = [{trial.user_attrs["job"], *run.jobs} - {""} for trial, run in zip(running, runs, strict=True)]
    known = scheduler in job_states.QUERY_COMMAND and any(jobs)
    told = job_states.query_states(scheduler, set().union(*jobs), {folder.stat().st_uid}) if known else None
    for trial, run, its in zip(running, runs, jobs, strict=True):
        over = told is not None and its and not any(job in told and told[job].is_active for job in its)
        if over or run.verdict == "failed" or history.num_stalled_starts(run):
            with _reaching():
                study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)


class Member:
    """A trial, to the run that makes it. A study that cannot be reached costs a warning, and no training."""

    def __init__(self, study: optuna.Study, name: str) -> None:
        self._study, self._name = study, name

    def report(self, number: int, value: float) -> bool:
        """The metric of a validation, counted from 0: is the trial to be given up?"""
        with _reaching():
            trial = trial_of(self._study, self._name)
            if number not in _last(self._study, self._name).intermediate_values:  # as in a run that goes on
                trial.report(value, number)
            return trial.should_prune()
        return False

    def end(self, outcome: str, value: float | None = None) -> None:
        """`outcome`: complete, which has a value; pruned; fail."""
        with _reaching():
            trial = trial_of(self._study, self._name)  # a new one, should somebody have taken this run for dead
            self._study.tell(trial, value, TrialState[outcome.upper()], skip_if_finished=True)


def member(run_dir: Path) -> Member | None:
    """None: its trial has ended, or the study cannot be reached."""
    with _reaching():
        study = of(run_dir.parent, int(run_dir.name))
        trial_of(study, run_dir.name)
        return Member(study, run_dir.name) if _last(study, run_dir.name).state == TrialState.RUNNING else None
    return None


def _trials(study: optuna.Study, name: str) -> list[FrozenTrial]:
    return [trial for trial in study.get_trials(deepcopy=False) if trial.user_attrs.get("run") == name]


def _last(study: optuna.Study, name: str) -> FrozenTrial:
    return _trials(study, name)[-1]


@contextmanager
def _reaching() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        print(f"warning: the study of this search cannot be reached: {error!r}", file=sys.stderr, flush=True)
