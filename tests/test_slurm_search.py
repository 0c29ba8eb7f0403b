"""Test a search on a real Slurm: members share one study; one is requeued, one cancelled, some are pruned."""

import json
import re
import shlex
from pathlib import Path

import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock, JournalStorage
from optuna.trial import FrozenTrial, TrialState
from slurm_project import QUIET, Desk, made_for_tests, wait_for

pytestmark = pytest.mark.soak

TRIALS, EPOCHS = 6, 12
REQUEUED, CANCELLED, PRUNED = "000", "001", "005"
SEARCH = ["--search", "tpe", "--trials", str(TRIALS), "--at-once", "2", f"trainer.max_epochs={EPOCHS}"]
LR = "model.optimizer.lr"
SPACE = [f"{LR}=tag(log, interval(1e-6, 1e-2))", "model.optimizer.weight_decay=choice(0.0, 0.1)"]


class Search:
    """An ended job array and its folder."""

    def __init__(self, desk: Desk, job: str, folder: Path) -> None:
        self.desk, self.job, self.folder = desk, job, folder

    def storage(self) -> JournalStorage:
        path = str(self.folder / "journal.jsonl")
        return JournalStorage(JournalFileBackend(path, JournalFileOpenLock(path)))

    def trials(self) -> dict[str, FrozenTrial]:
        """Return the trials by the names of runs, read with Optuna."""
        trials = optuna.load_study(study_name="search", storage=self.storage()).get_trials()
        assert len({trial.user_attrs["run"] for trial in trials}) == len(trials), "a second trial of one run"
        return {trial.user_attrs["run"]: trial for trial in trials}

    def has_validated(self, run: str) -> bool:
        trial = self.trials().get(run)
        return bool(trial and trial.intermediate_values)


@pytest.fixture(scope="module")
def search(slurm, bake) -> Search:
    desk = Desk(slurm, made_for_tests(bake(cluster="local")))
    search = Search(desk, *desk.submit("cluster=test", "trainer=gpu", *QUIET, *SEARCH, *SPACE))
    bring_to_ask(search, PRUNED, lr=1e-6)
    for run in (REQUEUED, CANCELLED):
        wait_for(lambda run=run: search.has_validated(run), 90, f"a validation of {run}\n{logs(search)}")
        job = f"{search.job}_{int(run)}"
        slurm.call("scontrol", "requeue", job) if run == REQUEUED else slurm.cancel(job)
    slurm.wait(search.job, 240)
    return search


def bring_to_ask(search: Search, run: str, lr: float) -> None:
    """Add a running trial for a member, as if it had been killed after asking for its first value."""
    study = optuna.create_study(study_name="search", storage=search.storage(), load_if_exists=True)
    told = {"params": {LR: lr}, "distributions": {LR: FloatDistribution(1e-6, 1e-2, log=True)}}
    who = {"run": run, "job": f"{search.job}_{int(run)}"}
    study.add_trial(optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs=who, **told))


def test_every_member_has_one_trial_and_each_that_was_not_cancelled_has_ended(search):
    trials = search.trials()
    assert sorted(trials) == [f"{number:03}" for number in range(TRIALS)], logs(search)
    states = {run: trial.state for run, trial in trials.items()}
    assert states.pop(CANCELLED) == TrialState.RUNNING, "resume= goes on with it"
    assert set(states.values()) == {TrialState.COMPLETE, TrialState.PRUNED}, logs(search)
    records = {record["ArrayTaskId"]: record["JobState"] for record in search.desk.slurm.records(search.job)}
    assert records.pop(str(int(CANCELLED))) == "CANCELLED"
    assert set(records.values()) == {"COMPLETED"}


def test_a_requeued_member_goes_on_with_its_values(search):
    run_dir = search.folder / REQUEUED
    events = [json.loads(line) for line in (run_dir / "attempts.jsonl").read_text().splitlines()]
    starts = [event["from_step"] for event in events if event["event"] == "start"]
    assert starts[0] == 0 < starts[1] and events[-1]["outcome"] == "finished", events
    trial = search.trials()[REQUEUED]
    words = json.loads((run_dir / "overrides.json").read_text())
    assert words[-2:] == [f"{key}={trial.params[key]}" for key in (word.partition("=")[0] for word in SPACE)]
    assert sorted(trial.intermediate_values) == list(range(len(trial.intermediate_values)))


def test_the_study_has_the_numbers_of_the_events_files(search):
    for run, trial in search.trials().items():
        logged = scalars(search.folder / run, "val/loss")
        told = [value for _, value in sorted(trial.intermediate_values.items())]
        assert told == pytest.approx(logged[: len(told)], rel=1e-6), run
        if trial.state == TrialState.COMPLETE:
            assert len(logged) == EPOCHS and trial.value == pytest.approx(min(logged), rel=1e-6)


def test_a_run_that_is_given_up_is_told_as_such(search):
    pruned = [run for run, trial in search.trials().items() if trial.state == TrialState.PRUNED]
    table = search.desk.python("report.py", str(search.folder)).stdout
    assert PRUNED in pruned and search.trials()[PRUNED].params[LR] == 1e-6
    for run in pruned:
        assert len(scalars(search.folder / run, "val/loss")) < EPOCHS
        assert "outcome finished\nwhy pruned: worse than" in (search.folder / run / "verdict").read_text()
        assert re.search(rf"/{run}\s+\S+\s+finished \(pruned\)", table), table
        files = b"".join(path.read_bytes() for path in (search.folder / run / "tensorboard").glob("events*"))
        assert b"_hparams_/session_start_info" in files, "TensorBoard's HPARAMS page shows it"


def test_the_report_names_the_best_and_how_to_train_it_again(search):
    done = search.desk.python("report.py", str(search.folder))
    assert done.returncode == 0, done.stderr
    *lines, best, command = done.stdout.splitlines()
    table = lines[-1 - TRIALS :]
    trials = search.trials()
    values = {run: trial.value for run, trial in trials.items() if trial.state == TrialState.COMPLETE}
    run = min(values, key=lambda run: values[run])
    assert best == f"best val/loss {values[run]:.6g} of {len(values)} finished trials: {search.folder / run}"
    assert table[0].startswith("trial ") and table[1].startswith(run)
    words = shlex.split(command)
    assert words[:2] == ["python", "submit.py"]
    again = search.desk.python("train.py", "--cfg", "job", *words[2:]).stdout
    assert f"lr: {trials[run].params[LR]}\n" in again


def scalars(run_dir: Path, tag: str) -> list[float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [event.value for event in events.Scalars(tag)]


def logs(search: Search) -> str:
    return "\n".join(f"{path.name}\n{path.read_text()[-1500:]}" for path in sorted(search.folder.glob("*.log")))
