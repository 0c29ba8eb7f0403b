"""The study of a search in Optuna: it gives a member its values, and decides when a member is pruned."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import optuna
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock, JournalStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from hpc.studies import search, search_space
from hpc.studies.search import Search
from hpc.system.files import open_for_append, open_regular_file

JOURNAL = "journal.jsonl"
LOCK_GRACE_SECONDS = 30  # a lock that is older was left by a process that died
STUDY_NAME = "search"
NUM_RANDOM_TRIALS = 10  # before TPE uses earlier results
NUM_UNPRUNED_TRIALS = 5  # completed, before one is pruned


class JournalLock(JournalFileOpenLock):
    """Optuna's lock of a journal. Whoever gets it first removes a line that a crash or a full disk has cut short.

    Optuna would append to this line, and then reject the whole journal. Its lock by symbolic links is not used: its age
    is that of the journal, so that of two processes that wait for a dead one, the second would remove the lock of the
    first.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), LOCK_GRACE_SECONDS)
        self._path = path

    def acquire(self) -> bool:
        super().acquire()
        try:
            with open_for_append(self._path) as stream:
                stream.seek(max(stream.seek(0, os.SEEK_END) - 1, 0))
                if stream.read() not in (b"", b"\n"):
                    stream.seek(0)
                    stream.truncate(stream.read().rfind(b"\n") + 1)
        except BaseException:
            self.release()
            raise
        return True

    def release(self) -> None:
        with suppress(RuntimeError):  # another process has removed the lock, as this disk was very slow
            super().release()


def open_storage(path: Path) -> JournalStorage:
    """Return the storage of a study: Optuna's journal, one JSON line per operation. Nothing in it is executed.

    Raises:
        OSError: the file cannot be read, or is no regular file.
    """
    if os.path.lexists(path):
        open_regular_file(path).close()
    return JournalStorage(JournalFileBackend(str(path), lock_obj=JournalLock(path)))


def open_study(folder: Path, member: int = 0) -> optuna.Study:
    """Return the study in the folder of a search; the first call creates it.

    Args:
        member: the number of the run that asks. Seed and number decide what `random` draws, in whatever order runs ask.

    Raises:
        ConfigError: there is no search.
        Exception: of any type, if the journal is damaged.
    """
    settings = search.load_search(folder)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = open_storage((folder / JOURNAL).absolute())
    if not storage.get_all_studies():
        direction = StudyDirection.MINIMIZE if settings.mode == "min" else StudyDirection.MAXIMIZE
        optuna.create_study(storage=storage, study_name=STUDY_NAME, direction=direction, load_if_exists=True)
    sampler, pruner = make_sampler(settings, member), make_pruner(settings)
    return optuna.load_study(study_name=STUDY_NAME, storage=storage, sampler=sampler, pruner=pruner)


def make_sampler(settings: Search, member: int) -> optuna.samplers.BaseSampler:
    """Return the sampler of a member. Its seed depends on the seed of the search and on the member's number."""
    seed = int(np.random.SeedSequence([settings.seed % 2**63, member]).generate_state(1)[0])
    if settings.sampler == "random":
        return optuna.samplers.RandomSampler(seed)
    num_random = min(NUM_RANDOM_TRIALS, max(settings.trials // 4, 1))
    # A liar takes each trial that has not ended for a poor one: whether it still runs or its run has failed.
    return optuna.samplers.TPESampler(n_startup_trials=num_random, seed=seed, constant_liar=True)


def make_pruner(settings: Search) -> optuna.pruners.BasePruner:
    """Return the median pruner.

    It prunes a trial whose best value so far is worse than the median of completed trials at the same validation.
    Unlike successive halving it needs no number of steps in advance, prunes about half of the trials instead of three
    of four, among them those whose learning rate falls late, and first waits for some complete trials to compare with.
    """
    return optuna.pruners.MedianPruner(n_startup_trials=min(NUM_UNPRUNED_TRIALS, max(settings.trials // 4, 1)))


def draw_member_overrides(run_dir: Path) -> list[str]:
    """Return the overrides of a member, with the values of its trial. Every call returns the same overrides."""
    settings = search.load_search(run_dir.parent)
    study = open_study(run_dir.parent, int(run_dir.name))
    trial = Trial(study, get_or_create_trial(study, run_dir.name)._trial_id)
    space = search_space.parse_space(settings.words)
    values = {key: suggest_value(trial, key, dimension) for key, dimension in space.items()}
    return search_space.fill_in(settings.words, values)


def suggest_value(trial: Trial, key: str, dimension: search_space.Range | search_space.Choice) -> float | str:
    """Return the trial's value of a key, which is drawn at the first call."""
    if isinstance(dimension, search_space.Choice):
        return trial.suggest_categorical(key, dimension.values)
    if isinstance(dimension.low, int) and isinstance(dimension.high, int):
        return trial.suggest_int(key, dimension.low, dimension.high, step=dimension.step, log=dimension.log)
    return trial.suggest_float(key, dimension.low, dimension.high, log=dimension.log)


def get_or_create_trial(study: optuna.Study, run_name: str) -> FrozenTrial:
    """Return the trial of a member. It is made when the member first starts, and kept by all later starts."""
    if not (trials := _trials_of_run(study, run_name)):
        # One line of the journal: no process can be killed between the trial and its name.
        study.add_trial(create_trial(state=TrialState.RUNNING, user_attrs={"run": run_name}))
        trials = _trials_of_run(study, run_name)
    return trials[0]


def read_trials(folder: Path) -> list[FrozenTrial]:
    """Return the trials of a search, none before its first run has started. Writes nothing.

    Raises:
        Exception: of any type, if the journal is damaged.
    """
    path = (folder / JOURNAL).absolute()
    if not path.exists():
        return []
    storage = open_storage(path)
    if not storage.get_all_studies():  # the first run has just started
        return []
    return optuna.load_study(study_name=STUDY_NAME, storage=storage).get_trials(deepcopy=False)


class TrialReporter:
    """Reports the metric of a run to the study. If the study cannot be reached, it warns, and training goes on."""

    def __init__(self, study: optuna.Study, run_name: str) -> None:
        self._study, self._run_name = study, run_name

    def report(self, number: int, value: float) -> bool:
        """Report the metric of a validation, counted from 0; return whether the trial should be pruned."""
        with _warn_if_unreachable():
            stored = get_or_create_trial(self._study, self._run_name)
            trial = Trial(self._study, stored._trial_id)
            if number not in stored.intermediate_values:  # a resumed run repeats the validations after its checkpoint
                trial.report(value, number)
            return trial.should_prune()
        return False

    def end(self, outcome: str, value: float | None = None) -> None:
        """End the trial: complete, which needs a value, or pruned.

        The trial of a run that fails has no end: `resume=` continues the run and its trial.
        """
        with _warn_if_unreachable():
            trial = get_or_create_trial(self._study, self._run_name)
            self._study.tell(trial.number, value, TrialState[outcome.upper()], skip_if_finished=True)


def open_reporter(run_dir: Path) -> TrialReporter | None:
    """Return the reporter of a member; None if its trial has ended or the study cannot be reached."""
    with _warn_if_unreachable():
        study = open_study(run_dir.parent, int(run_dir.name))
        is_running = get_or_create_trial(study, run_dir.name).state == TrialState.RUNNING
        return TrialReporter(study, run_dir.name) if is_running else None
    return None


def _trials_of_run(study: optuna.Study, run_name: str) -> list[FrozenTrial]:
    return [trial for trial in study.get_trials(deepcopy=False) if trial.user_attrs.get("run") == run_name]


@contextmanager
def _warn_if_unreachable() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        print(f"warning: cannot reach the study of this search: {error!r}", file=sys.stderr, flush=True)
