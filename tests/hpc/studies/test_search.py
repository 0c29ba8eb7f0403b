"""Check a search: its space from the command line, its shared trials, and its report."""

import json
import multiprocessing
import os
import resource
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typed_fixes
from desk import Desk
from fork import ENVIRON, PROJECT, QUIET, scalars
from optuna.trial import TrialState

from hpc.config.errors import ConfigError
from hpc.programs import submit as submit_program
from hpc.report import overview, run_table, search_results
from hpc.run import frozen_config, history
from hpc.studies import optuna_study, search, search_space
from hpc.studies.search import Search
from hpc.studies.search_space import Choice, Range

pytestmark = pytest.mark.slow

LR = "model.optimizer.lr"
WORDS = ["trainer=cpu", f"{LR}=tag(log, interval(1e-4, 1e-1))", "data.global_batch_size=choice(32, 64)"]
TYPED = ["cluster=slurm", "trainer=ddp", *WORDS[1:]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a search with some members that minimizes a value."""
    return searching(tmp_path / "search")


def searching(folder: Path, sampler: str = "random", trials: int = 8, **others: object) -> Path:
    folder.mkdir()
    asked = {"seed": 1, "metric": "val/loss", "mode": "min", "words": WORDS} | others
    search.save_search(folder, Search(sampler, trials, **asked))  # type: ignore[arg-type]
    for run_dir in search.member_run_dirs(folder, trials):
        run_dir.mkdir()
    return folder


def drawn(folder: Path, *numbers: int) -> list[dict[str, str]]:
    """Return the values that members draw, asked in this order."""
    return [
        dict(word.split("=", 1) for word in optuna_study.draw_member_overrides(folder / f"{number:03}"))
        for number in numbers
    ]


def member(folder: Path, number: int) -> optuna_study.TrialReporter:
    made = optuna_study.open_reporter(folder / f"{number:03}")
    assert made is not None
    return made


def known(folder: Path) -> dict[str, TrialState]:
    return {trial.user_attrs["run"]: trial.state for trial in optuna_study.open_study(folder).get_trials()}


# -- Arguments --


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("a=interval(1, 8)", Range(1.0, 8.0)),
        ("a=int(interval(1, 8))", Range(1, 8)),
        ("a=tag(log, interval(1e-4, 1e-1))", Range(1e-4, 1e-1, log=True)),
        ("a=tag(log, int(interval(1, 100)))", Range(1, 100, log=True)),
        ("a=range(1, 10, 2)", Range(1, 9, step=2)),
        ("a=range(10, 1, -3)", Range(4, 10, step=3)),
        ("a=range(0.1, 0.45, 0.25)", Choice(("0.1", "0.35"))),
        ("a=choice(1, x, [1,2])", Choice(("1", "x", "[1,2]"))),
        ("+a=1,2", Choice(("1", "2"))),
        ("cluster.account=choice(0123, 0456)", Choice(("0123", "0456"))),
        ("ckpt=a b.ckpt,'c,d'", Choice(("a b.ckpt", "'c,d'"))),
    ],
)
def test_the_space_is_what_hydra_would_sweep(word: str, meant: Range | Choice) -> None:
    assert search_space.parse_space(["trainer=gpu", word]) == {word.partition("=")[0]: meant}


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["a=1", "b=x"], "to choose from"),
        (["a=interval(2, 1)"], "to a larger one"),
        (["a=interval(0, inf)"], "to a larger one"),
        (["a=interval(x, y)"], "must be numbers"),
        (["a=tag(log, interval(1, y))"], "must be numbers"),
        (["a=range(x, 3)"], "must be numbers"),
        (["a=tag(log, interval(0, 1))"], "above 0"),
        (["a=tag(lgo, interval(1, 2))"], "only tag is log"),
        (["a=tag(log, choice(1, 2))"], "only tag is log"),
        (["a=range(3, 1)"], "not be empty"),
        (["model=glob(*)"], "no glob"),
        (["a=shuffle(1, 2)"], "cannot be shuffled"),
        (["a=1", "a=interval(1, 2)"], "given twice"),
    ],
)
def test_what_is_no_space_is_rejected(typed: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        search_space.parse_space(typed)
    typed_fixes.follow(search_space.parse_space, typed, caught.value)


def test_corners_are_all_ends_together_or_each_of_them() -> None:
    few = {"a": Range(0.5, 2.0), "b": Choice(("x", "y", "z"))}
    assert [tuple(corner.values()) for corner in search_space.list_corners(few)] == [
        ("0.5", "x"), ("0.5", "y"), ("0.5", "z"), ("2.0", "x"), ("2.0", "y"), ("2.0", "z"),
    ]  # fmt: skip
    many = few | {f"c{i}": Range(1, 9) for i in range(6)}
    corners = search_space.list_corners(many)
    assert len(corners) <= search_space.MAX_CORNERS
    assert {(key, end) for corner in corners for key, end in corner.items()} == {
        (key, end) for key, asked in many.items() for end in asked.corner_values
    }


def test_the_words_of_a_run_are_those_typed_with_values() -> None:
    assert search_space.fill_in(WORDS, {LR: 0.25, "data.global_batch_size": "64"}) == [
        "trainer=cpu", f"{LR}=0.25", "data.global_batch_size=64",
    ]  # fmt: skip


# -- Submitted --


def test_a_search_is_one_array_whose_members_ask(desk: Desk) -> None:
    assert desk.type(*TYPED, "--search", "tpe", "--trials", "40", "--at-once", "8") == 0, desk.err
    (folder,) = desk.runs()
    assert "asks for at most 40 runs of 1 nodes x 4 tasks" in desk.out
    script = desk.noted("sbatch.script")
    assert "#SBATCH --array=0-39%8\n" in script
    ask = '[ -e "$run_dir/config.yaml" ] || python "$code/submit.py" --draw "$run_dir"\n'
    assert script.index("env.sh") < script.index(ask) < script.index("srun --nodes")
    members = [Path(line) for line in (folder / "members").read_text().splitlines()]
    assert [path.name for path in members] == [f"{number:03}" for number in range(40)]
    for path in members:
        assert (path / "code" / "train.py").is_file() and not (path / "config.yaml").exists()
        assert ask in (path / "job.sh").read_text() and "--array" not in (path / "job.sh").read_text()
    assert search.load_search(folder) == Search("tpe", 40, 1, "val/loss", "min", TYPED)
    assert len(run_table.format_runs([folder])) >= 41, "members that wait are shown"


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["--trials", "8"], "cannot be given without --search"),
        (["--search", "random"], "must be the number of runs of a search"),
        (["--search", "random", "--trials", "1"], "2 to 1000"),
        (["--search", "random", "--trials", "1001"], "2 to 1000"),
        (["--search", "random", "--trials", "8", "--at-once", "0"], "at least 1"),
        (["--search", "tpe", "--trials", "8"], "--at-once 1"),
        (["--search", "tpe", "--trials", "8", "--at-once", "8"], "must start fewer runs at the same time"),
        (["--search", "random", "--trials", "8", "--cfg", "job"], "--cfg"),
        (["--search", "random", "--trials", "8", "run_dir=mine"], "leave run_dir= out"),
        (["--search", "random", "--trials", "8", "trainer.devices=1,2"], "here tasks_per_node is 1 and 2"),
        (
            ["--search", "random", "--trials", "8", "trainer.accumulate_grad_batches=int(interval(1, 3))"],
            "must be divisible by",
        ),
        (["--search", "random", "--trials", "8", "model.warmup_steps=5,x"], "warmup_steps"),
        (["--search", "random", "--trials", "8", "checkpoint.monitor=null"], "checkpoint.monitor=val/loss"),
        (["--search", "random", "--trials", "8", "checkpoint.mode=min,max"], "one metric"),
        (["--search", "random", "--trials", "8", "ckpt=.", "task=test"], "runs of a search train"),
    ],
)
def test_a_search_that_cannot_be_writes_nothing(typed: list[str], words: str, desk: Desk) -> None:
    assert desk.type(*TYPED[:3], *typed) == 2
    assert words in desk.err and desk.runs() == [] and desk.noted("sbatch.argv") == ""


def test_the_ends_of_a_search_must_be_rates_that_can_be(desk: Desk) -> None:
    assert desk.type(*TYPED[:2], f"{LR}=interval(-1, 1)", "--search", "random", "--trials", "8") == 2
    assert f"ConfigError: {LR} must be a number above 0; got -1.0." in desk.err and desk.runs() == []


def test_a_search_without_optuna_is_rejected_before_it_is_queued(desk: Desk) -> None:
    desk.set.setattr(search, "find_spec", lambda name: None)
    assert desk.type(*TYPED, "--search", "random", "--trials", "8") == 2
    assert "pip install optuna" in desk.err and desk.runs() == [] and desk.noted("sbatch.argv") == ""


def test_an_interval_is_no_sweep(desk: Desk) -> None:
    assert desk.type(*TYPED, "--multirun") == 2 and "--search random" in desk.err


def test_submitting_needs_neither_torch_nor_optuna() -> None:
    words = ["submit.py", *TYPED, "--search", "random", "--trials", "8", "--dry-run"]
    code = f"import runpy, sys; sys.argv = {words}\nrunpy.run_path('submit.py', run_name='__main__')\n"
    code += "assert not {'torch', 'optuna', 'lightning', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, env=ENVIRON, capture_output=True, text=True)
    assert done.returncode == 0 and "#SBATCH --array=0-7\n" in done.stdout, done.stderr


# -- Drawn --


def test_who_asks_twice_gets_the_same_and_no_second_trial(folder: Path) -> None:
    first, other, again = drawn(folder, 3, 5, 3)
    assert first == again != other
    assert 1e-4 <= float(first[LR]) <= 1e-1 and first["data.global_batch_size"] in ("32", "64")
    assert known(folder) == {"003": TrialState.RUNNING, "005": TrialState.RUNNING}


def test_random_depends_on_the_seed_and_the_member_alone(folder: Path, tmp_path: Path) -> None:
    same, other = searching(tmp_path / "same"), searching(tmp_path / "other", seed=2)
    assert drawn(folder, 0, 1, 2) == drawn(same, 2, 1, 0)[::-1]
    assert drawn(folder, 0) != drawn(other, 0)
    assert len({draw[LR] for draw in drawn(folder, *range(8))}) == 8


def test_tpe_draws_nearer_and_nearer_to_the_best(tmp_path: Path) -> None:
    def found(sampler: str) -> float:
        """Return the mean relative distance of the last draws from 0.01, which only earlier results can reduce."""
        folder = searching(tmp_path / sampler, sampler, trials=40, words=[WORDS[1]])
        distances = []
        for number in range(40):
            (draw,) = drawn(folder, number)
            distances.append(abs(float(draw[LR]) / 0.01 - 1))
            member(folder, number).end("complete", distances[-1])
        return sum(distances[-15:]) / 15

    assert found("tpe") < 0.6 * found("random")


def test_a_member_writes_the_config_that_its_words_mean(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["submit.py", "--draw", str(folder / "002")])
    submit_program.main()
    words = json.loads((folder / "002" / "overrides.json").read_text())
    assert words == [f"{key}={value}" for key, value in drawn(folder, 2)[0].items()]
    cfg = frozen_config.read(folder / "002")
    assert repr(cfg.model.optimizer.lr) == words[1].partition("=")[2] and cfg.run_dir == str(folder / "002")
    assert capsys.readouterr().out == f"002: {' '.join(words)}\n"


# -- Judged --


@pytest.mark.parametrize("mode", ["min", "max"])
def test_who_is_worse_than_the_median_at_the_same_validation_is_given_up(mode: str, tmp_path: Path) -> None:
    folder = searching(tmp_path / "search", trials=20, mode=mode)
    sign = 1 if mode == "min" else -1
    for number in range(5):
        early = member(folder, number)
        assert not early.report(0, sign * 100.0), "nobody to compare with"
        early.report(1, sign * number)
        early.end("complete", sign * number)
    good, bad = member(folder, 5), member(folder, 6)
    assert not good.report(0, sign * 100.0) and not bad.report(0, sign * 100.0)
    assert not good.report(1, sign * 1.5) and bad.report(1, sign * 2.5), "the median is 2"
    bad.end("pruned")
    assert known(folder)["006"] == TrialState.PRUNED


def test_a_member_that_starts_again_goes_on_with_its_trial(folder: Path) -> None:
    (before,) = drawn(folder, 1)
    killed = member(folder, 1)
    for number in range(3):
        killed.report(number, 1.0)
    again = member(folder, 1)  # from a checkpoint before the last two validations
    for number in range(1, 5):
        again.report(number, 1.0)
    again.end("complete", 0.5)
    (trial,) = optuna_study.open_study(folder).get_trials()
    assert sorted(trial.intermediate_values) == [0, 1, 2, 3, 4] and trial.value == 0.5
    assert drawn(folder, 1) == [before] and optuna_study.open_reporter(folder / "001") is None, "it has ended"


def test_a_study_that_cannot_be_reached_costs_a_warning(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reached = member(folder, 0)
    (folder / optuna_study.JOURNAL).unlink()
    (folder / optuna_study.JOURNAL).mkdir()
    assert not reached.report(0, 1.0) and optuna_study.open_reporter(folder / "001") is None
    reached.end("complete", 1.0)
    assert capsys.readouterr().err.count("warning: cannot reach the study of this search") == 3


# -- Failed --


def test_a_run_that_failed_goes_on_with_its_trial(folder: Path) -> None:
    """Check resume= of a failed run: it draws nothing again, and its trial keeps what was reported."""
    (before,) = drawn(folder, 4)
    member(folder, 4).report(0, 1.0)
    again = member(folder, 4)  # nobody has ended the trial
    again.report(1, 0.5)
    again.end("complete", 0.5)
    (trial,) = optuna_study.open_study(folder).get_trials()
    assert (trial.state, trial.value, trial.intermediate_values) == (TrialState.COMPLETE, 0.5, {0: 1.0, 1: 0.5})
    assert drawn(folder, 4) == [before]


def test_tpe_draws_fewer_values_with_which_runs_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a metric that improves with the learning rate, until runs fail: their trials never end."""

    def num_failures(name: str) -> int:
        folder = searching(tmp_path / name, "tpe", trials=60, words=[WORDS[1]])
        failures = 0
        for number in range(60):
            (draw,) = drawn(folder, number)
            if float(draw[LR]) < 1e-2:
                member(folder, number).end("complete", -float(draw[LR]))
            else:
                failures += number >= 40
        return failures

    counted_as_poor = num_failures("poor")
    sampler = optuna_study.optuna.samplers.TPESampler
    monkeypatch.setattr(
        optuna_study.optuna.samplers, "TPESampler", lambda **given: sampler(**given | {"constant_liar": False})
    )
    assert counted_as_poor < 0.6 * num_failures("ignored")


# -- The file --


def dies_while_it_writes(folder: Path, num_bytes: int) -> None:
    """Ask for values, and be killed by the kernel after so many bytes of the first operation."""
    limit = (folder / optuna_study.JOURNAL).stat().st_size + num_bytes
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    drawn(folder, 1)


def test_a_process_that_is_killed_while_it_writes_costs_its_operation_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optuna_study, "LOCK_GRACE_SECONDS", 3)
    drawn(folder, 0)
    path = folder / optuna_study.JOURNAL
    late = optuna_study.open_storage(path)  # has read up to the damage before others append
    killed = multiprocessing.get_context("fork").Process(target=dies_while_it_writes, args=(folder, 40))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGXFSZ and not path.read_bytes().endswith(b"\n")
    assert len(late.get_all_trials(0)) == len(known(folder)) == 1
    drawn(folder, 2, 1)
    assert len(late.get_all_trials(0)) == 3 and sorted(known(folder)) == ["000", "001", "002"]
    assert all(isinstance(json.loads(line), dict) for line in path.read_bytes().splitlines())


@pytest.mark.parametrize("damage", [b'{"op_code": 4, "study_', b"\0\0\0", b"\xff\xfe"])
def test_a_line_that_was_cut_short_counts_as_not_said(damage: bytes, folder: Path) -> None:
    drawn(folder, 0)
    path = folder / optuna_study.JOURNAL
    with path.open("ab") as stream:
        stream.write(damage)
    assert list(known(folder)) == ["000"]
    drawn(folder, 1)
    assert list(known(folder)) == ["000", "001"]


@pytest.mark.parametrize("line", ["{}", '{"op_code": 99}', '{"op_code": 4, "worker_id": "x", "study_id": 0}', "\0"])
def test_a_journal_that_is_damaged_is_named(line: str, folder: Path) -> None:
    drawn(folder, 0)
    path = folder / optuna_study.JOURNAL
    *lines, last = path.read_text().splitlines()
    path.write_text("\n".join([*lines, line, last, ""]))
    done = started("submit.py", "--draw", str(folder / "001"))
    assert done.returncode == 2 and done.stderr.startswith("ConfigError: "), done.stderr
    assert f"{path} cannot be read" in done.stderr and "Traceback" not in done.stderr
    queued(folder)
    done = started("report.py", str(folder))
    assert done.returncode == 0 and done.stderr == "" and "search/007" in done.stdout, done.stderr
    assert f"{path} cannot be read" in done.stdout


def test_a_journal_that_is_no_file_is_not_opened(folder: Path, tmp_path: Path) -> None:
    path = folder / optuna_study.JOURNAL
    os.mkfifo(path)
    assert "cannot be read" in search_results.trial_lines(folder)[0]
    path.unlink()
    path.symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="No such file"):
        drawn(folder, 0)
    (tmp_path / "other").write_text("")
    with pytest.raises(OSError, match="symbolic links"):
        drawn(folder, 0)
    assert (tmp_path / "other").read_text() == ""


def test_no_search_and_no_optuna_are_told_in_plain_words(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "broken" / "optuna").mkdir(parents=True)
    (tmp_path / "broken" / "optuna" / "__init__.py").write_text("raise ImportError('No module named optuna')")
    done = started("submit.py", "--draw", str(folder / "000"), PYTHONPATH=str(tmp_path / "broken"))
    assert done.returncode == 2 and "Try: pip install optuna" in done.stderr and "Traceback" not in done.stderr
    done = started("report.py", str(folder), PYTHONPATH=str(tmp_path / "broken"))
    assert done.returncode == 0 and "Try: pip install optuna" in done.stdout
    (tmp_path / "none" / "000").mkdir(parents=True)
    done = started("submit.py", "--draw", str(tmp_path / "none" / "000"))
    assert done.returncode == 2 and f"it holds no {search.FILE}.\n" in done.stderr and "Errno" not in done.stderr


def started(program: str, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, program, *words], cwd=PROJECT, env=ENVIRON | environ, capture_output=True, text=True
    )


def queued(folder: Path) -> None:
    """Record the members of the array, as submit.py does."""
    members = sorted(path for path in folder.iterdir() if path.is_dir())
    (folder / "members").write_text("".join(f"{path}\n" for path in members))
    for path in members:
        (path / "job.sh").touch()


def test_nothing_in_the_file_is_executed(folder: Path) -> None:
    drawn(folder, 0)
    for line in (folder / optuna_study.JOURNAL).read_text().splitlines():
        assert isinstance(json.loads(line), dict)
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == [optuna_study.JOURNAL, search.FILE]


def crowd(folder: Path, first: int, each: int) -> None:
    """Run several members one after the other, in one of several processes."""
    optuna_study.LOCK_GRACE_SECONDS = 5
    for number in range(first, first + each):
        optuna_study.draw_member_overrides(folder / f"{number:03}")
        told = member(folder, number)
        for validation in range(5):
            told.report(validation, float(number))
        told.end("complete", float(number))


def dies_with_the_lock(path: Path) -> None:
    optuna_study.JournalLock(path).acquire()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.soak
@pytest.mark.slow
def test_many_processes_share_a_study_with_one_that_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes, each = 6, 5
    folder = searching(tmp_path / "search", trials=processes * each)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hpc.studies.optuna_study"])
    killed = context.Process(target=dies_with_the_lock, args=(folder / optuna_study.JOURNAL,))
    killed.start()
    killed.join()
    assert (folder / f"{optuna_study.JOURNAL}.lock").exists()
    others = [context.Process(target=crowd, args=(folder, each * n, each)) for n in range(processes)]
    for process in others:
        process.start()
    for process in others:
        process.join(120)
        process.kill()
    assert [process.exitcode for process in others] == [0] * processes
    made = optuna_study.open_study(folder).get_trials()
    assert sorted(trial.user_attrs["run"] for trial in made) == [f"{n:03}" for n in range(processes * each)]
    for trial in made:
        assert trial.state == TrialState.COMPLETE and trial.value == int(trial.user_attrs["run"])
        assert sorted(trial.intermediate_values) == [0, 1, 2, 3, 4] and len(trial.params) == 2
    assert not (folder / f"{optuna_study.JOURNAL}.lock").exists()


# -- Reports --


def test_the_table_has_the_best_first_and_its_command_line(folder: Path) -> None:
    for number, value in enumerate([0.5, 0.25, 0.75, None]):
        drawn(folder, number)
        told = member(folder, number)
        told.report(0, value or 1.0)
        if value is not None:
            told.end("complete" if number < 2 else "pruned", value if number < 2 else None)
    title, *rows, best, command = search_results.trial_lines(folder)
    assert title.split() == ["trial", "validations", "val/loss", LR, "data.global_batch_size"]
    cells = [row.split()[:3] for row in rows]
    assert cells == [["001", "1", "0.25"], ["000", "1", "0.5"], ["002", "1", "0.75"], ["003", "1", "-"]]
    values = dict(word.split("=") for word in optuna_study.draw_member_overrides(folder / "001"))
    assert float(rows[0].split()[3]) == pytest.approx(float(values[LR]), rel=1e-3)
    assert best == f"best val/loss 0.25 of 2 finished trials: {folder / '001'}"
    assert shlex.split(command) == ["python", "submit.py", *(f"{key}={value}" for key, value in values.items())]


def test_the_best_of_a_search_that_maximizes_is_the_largest(tmp_path: Path) -> None:
    folder = searching(tmp_path / "search", mode="max")
    for number, value in enumerate([0.5, 0.75, 0.25]):
        drawn(folder, number)
        member(folder, number).end("complete", value)
    lines = search_results.trial_lines(folder)
    assert [line.split()[0] for line in lines[1:4]] == ["001", "000", "002"] and "best val/loss 0.75 of 3" in lines[4]


def test_a_report_shows_the_runs_and_below_them_the_trials(folder: Path) -> None:
    queued(folder)
    drawn(folder, 0)
    lines = overview.write_report_or_table([folder])
    assert lines[0].split()[:3] == ["run", "job", "state"] and lines[1].startswith("search/000")
    assert lines[-3:-1] == search_results.trial_lines(folder)[:2] and lines[-1] == "no trial has finished yet"
    assert "trial" not in overview.write_report_or_table([folder.parent])[0], "only where it is asked for"


def test_who_may_only_read_sees_the_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn(folder, 0)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    reader = optuna_study.JournalFileBackend
    monkeypatch.setattr(reader, "append_logs", lambda *_: pytest.fail("somebody else's folder"))
    assert search_results.trial_lines(folder)[1].split()[0] == "000"
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_before_anything_is_found_the_table_says_so(folder: Path, tmp_path: Path) -> None:
    nothing = ["no trial has finished yet"]
    assert search_results.trial_lines(folder) == nothing and not (folder / optuna_study.JOURNAL).exists()
    (folder / optuna_study.JOURNAL).touch()
    assert search_results.trial_lines(folder) == nothing and not (folder / optuna_study.JOURNAL).read_bytes()
    drawn(folder, 0)
    assert search_results.trial_lines(folder)[2:] == nothing
    assert "not the folder of a search" in search_results.trial_lines(tmp_path)[0]


# -- Trained --


def better_ones(folder: Path) -> None:
    """Add three trials that are better than any run."""
    for number in range(1, 4):
        told = member(folder, number)
        for validation in range(3):
            told.report(validation, 0.0)
        told.end("complete", 0.0)


@pytest.mark.soak
@pytest.mark.slow
def test_all_ranks_leave_a_run_that_is_given_up_and_it_is_finished(start: Callable, tmp_path: Path) -> None:
    folder = searching(tmp_path / "search")
    better_ones(folder)
    words = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.max_epochs=3", QUIET]
    said = start(folder / "000", 2, words, code=0)
    assert "pruned: worse than the median trial" in said
    run = history.read_run(folder / "000", "000")
    assert run.is_finished and run.attempts[-1].end and run.attempts[-1].end["step"] == 19, "after one validation"
    (trial,) = (trial for trial in optuna_study.open_study(folder).get_trials() if trial.user_attrs["run"] == "000")
    assert trial.state == TrialState.PRUNED
    assert trial.value == pytest.approx(scalars(folder / "000", "val/loss")[0], rel=1e-6)
    files = (folder / "000" / "tensorboard").glob("events.*")
    assert any(b"_hparams_/session_start_info" in file.read_bytes() for file in files)


@pytest.mark.soak
def test_a_run_that_finishes_tells_its_best_and_one_that_stops_goes_on(start: Callable, tmp_path: Path) -> None:
    folder = searching(tmp_path / "search")
    words = ["trainer=cpu", "trainer.max_epochs=3", QUIET]
    start(folder / "000", 1, words, stop_at=25)
    assert known(folder) == {"000": TrialState.RUNNING}
    start(folder / "000", 1, [])
    (trial,) = optuna_study.open_study(folder).get_trials()
    losses = scalars(folder / "000", "val/loss")
    assert trial.state == TrialState.COMPLETE and trial.value == pytest.approx(min(losses), rel=1e-6)
    assert [trial.intermediate_values[n] for n in range(3)] == pytest.approx(losses, rel=1e-6)


@pytest.mark.soak
@pytest.mark.slow
def test_a_metric_that_nobody_logs_is_told_before_the_first_step(call: Callable, tmp_path: Path) -> None:
    done = call("checkpoint.monitor=val/acuracy", f"run_dir={tmp_path / 'run'}", QUIET)
    assert done.returncode == 2 and "is logged in validation (there are: val/accuracy, val/loss)" in done.stderr
    assert not list((tmp_path / "run").glob("checkpoints/*"))
