"""Check that a run has one attempt at a time, resumes from the newest complete checkpoint, and never starts over."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from test_checkpoint import edit, truncate, written

from hpc.checkpoint import on_disk
from hpc.config.errors import ConfigError
from hpc.launch import placement
from hpc.run import attempt_log, directory
from hpc.training import starting_point
from hpc.training.starting_point import AttemptStart

JOB = {"SLURM_JOB_ID": "7"}


def alone(run_dir: Path) -> list[AttemptStart | ConfigError]:
    try:
        return [starting_point.claim_and_find_checkpoint(run_dir, "here", environ=dict(JOB))]
    except ConfigError as rejected:
        return [rejected]


def two(run_dir: Path) -> list[AttemptStart | ConfigError]:
    """Start two ranks that have met, as threads; processes would make no difference here."""
    from torch.distributed import HashStore

    store, said = HashStore(), {}

    def rank(number: int) -> None:
        place = placement.Placement("srun", number, 2, number, 2)
        try:
            said[number] = starting_point.claim_and_find_checkpoint_on_all_ranks(
                run_dir, place, hosts=["n1", "n2"], store=store, timeout_seconds=30, environ=dict(JOB)
            )
        except ConfigError as rejected:
            said[number] = rejected

    ranks = [threading.Thread(target=rank, args=[number]) for number in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(60)
    return [said[number] for number in range(2)]


Begin = Callable[[Path], list[AttemptStart | ConfigError]]


@pytest.fixture(params=[alone, two])
def start(request: pytest.FixtureRequest) -> Begin:
    """Return a function that starts an attempt and then ends it, as if its process had exited."""

    def run(run_dir: Path) -> list[AttemptStart | ConfigError]:
        begun = request.param(run_dir)
        if isinstance(begun[0], AttemptStart) and begun[0].claim:
            begun[0].claim.release()
        return begun

    return run


def went_on(begun: list[AttemptStart | ConfigError]) -> tuple[int, int | None]:
    """Return attempt and step, on which all ranks agree; only rank 0 has the claim."""
    found = []
    for number, beginning in enumerate(begun):
        assert isinstance(beginning, AttemptStart), beginning
        assert (beginning.claim is not None) == (number == 0)
        found.append((beginning.attempt, beginning.checkpoint.step if beginning.checkpoint else None))
    assert len(set(found)) == 1
    return found[0]


def rejection(begun: list[AttemptStart | ConfigError]) -> str:
    assert all(isinstance(rejected, ConfigError) for rejected in begun)
    assert len({str(rejected) for rejected in begun}) == 1
    return str(begun[0])


def note(run_dir: Path, attempt: int, from_step: int) -> None:
    attempt_log.record_start(run_dir, attempt, environ=JOB, from_step=from_step)


def test_a_run_begins_and_goes_on(start: Begin, tmp_path: Path) -> None:
    assert went_on(start(tmp_path)) == (1, None)
    note(tmp_path, 1, 0)
    for step in (10, 20):
        written(tmp_path, step, attempt=1)
    assert went_on(start(tmp_path)) == (2, 20)


def test_processes_that_were_started_from_one_take_over_what_it_found(tmp_path: Path) -> None:
    written(tmp_path, 10)
    environ = dict(JOB)
    first = starting_point.claim_and_find_checkpoint(tmp_path, "here", environ=environ)
    second = starting_point.claim_and_find_checkpoint(tmp_path, "here", environ=environ)
    assert first.claim and not second.claim and second.attempt == 1
    assert second.checkpoint and first.checkpoint and second.checkpoint.path == first.checkpoint.path
    first.claim.release()


@pytest.mark.slow
@pytest.mark.parametrize("begins", [alone, two])
def test_of_two_jobs_the_second_is_rejected(begins: Begin, tmp_path: Path) -> None:
    first = begins(tmp_path)
    assert went_on(first) == (1, None)
    said = rejection(begins(tmp_path))
    assert "Job 7" in said and "writes into it" in said and "scancel 7" in said
    first[0].claim.release()


DAMAGE = {
    "truncated": lambda final: truncate(final / "__0_0.distcp"),
    "a file is missing": lambda final: (final / "empty").unlink(),
    "half a manifest": lambda final: os.truncate(final / on_disk.MANIFEST, 20),
    "both": lambda final: (truncate(final / "meta.pt"), (final / "__0_0.distcp").unlink()),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_one_is_reported_and_the_one_before_is_used(
    what: str, start: Begin, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (10, 20, 30):
        written(tmp_path, step)
    for step in (20, 30):
        DAMAGE[what](on_disk.checkpoint_path(tmp_path, step, 1))
    assert went_on(start(tmp_path)) == (1, 10)
    told = [line for line in capsys.readouterr().out.splitlines() if "is damaged and not used" in line]
    assert sorted(step for step in (10, 20, 30) for line in told if f"{step:09}" in line) == [20, 30]


@pytest.mark.parametrize("left", ["damaged", "no manifest", "nothing"])
def test_a_run_that_got_somewhere_does_not_start_anew(left: str, start: Begin, tmp_path: Path) -> None:
    run_dir = tmp_path / "my run"
    run_dir.mkdir()
    note(run_dir, 1, 0)
    final = written(run_dir, 20)
    if left == "damaged":
        truncate(final / "meta.pt")
    elif left == "no manifest":
        (final / on_disk.MANIFEST).unlink()
    else:
        note(run_dir, 2, 20)
        final.rename(tmp_path / "elsewhere")
    rejected = start(run_dir)
    reached = 20 if left == "nothing" else 0
    assert f"The run reached step {reached} or further, and none of its checkpoints is whole" in rejection(rejected)
    os.system(rejected[0].fix.removesuffix(" to start it anew"))
    assert went_on(start(run_dir))[1] is None


def test_a_folder_in_the_place_of_a_link_is_answered_before_anything_is_written(start: Begin, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    shutil.copytree(written(tmp_path, 10), tmp_path / "checkpoints" / on_disk.LAST)
    said = rejection(start(tmp_path))
    assert "last.ckpt" in said and "must be a link" in said and f"rm -r {tmp_path}/checkpoints/last.ckpt" in said


def test_an_attempt_that_ended_before_its_first_checkpoint_may_be_repeated(start: Begin, tmp_path: Path) -> None:
    note(tmp_path, 1, 0)
    on_disk.make_part_folder(on_disk.checkpoint_path(tmp_path, 10, 1))
    assert went_on(start(tmp_path)) == (2, None)


def test_what_a_node_wrote_that_was_cut_off_is_not_used(start: Begin, tmp_path: Path) -> None:
    """Ignore step 20 of attempt 1, published after attempt 2 had resumed from step 10."""
    for attempt, from_step in ((1, 0), (2, 10)):
        note(tmp_path, attempt, from_step)
    for step in (10, 20):
        written(tmp_path, step, attempt=1)
    assert went_on(start(tmp_path)) == (3, 10)
    written(tmp_path, 15, attempt=2)
    assert went_on(start(tmp_path))[1] == 15


def test_one_of_a_newer_version_is_rejected(start: Begin, tmp_path: Path) -> None:
    written(tmp_path, 10)
    edit(written(tmp_path, 20), lambda said: said.update(version=on_disk.VERSION + 1))
    assert "newer version" in rejection(start(tmp_path))


def test_a_directory_that_cannot_be_written_is_rejected_in_one_line(start: Begin, tmp_path: Path) -> None:
    (tmp_path / "claims").write_text("")
    said = rejection(start(tmp_path))
    assert f"run_dir must be a folder that can be written; got {tmp_path} (" in said


@pytest.mark.parametrize("name", ["last.ckpt", "step-500", "epoch=3-step=12.ckpt"])
def test_checkpoints_of_another_program_are_left_alone(name: str, start: Begin, tmp_path: Path) -> None:
    there = tmp_path / "checkpoints" / name
    there.parent.mkdir()
    there.write_text("weights")
    said = rejection(start(tmp_path))
    assert "must not write into checkpoints of another program" in said and name in said and "rm -r" not in said
    note(tmp_path, 1, 0)  # once the run has started, foreign checkpoints are ignored
    assert went_on(start(tmp_path))[1] is None and there.read_text() == "weights"


def test_a_line_that_a_crash_cut_short_is_passed_over(start: Begin, tmp_path: Path) -> None:
    note(tmp_path, 1, 0)
    with (tmp_path / "attempts.jsonl").open("a") as stream:
        stream.write(json.dumps({"event": "start", "attempt": 2, "from_step": 99})[:-5])
    written(tmp_path, 10, attempt=1)
    assert went_on(start(tmp_path))[1] == 10


def test_a_run_that_a_run_starts_is_none_of_its_ranks() -> None:
    """Start a run within a run, as a hook that evaluates a checkpoint does: it inherits all variables."""
    inherited = {
        starting_point.BEGUN_VARIABLE: "1 /run/checkpoints/step-000000001-001",
        directory.RUN_DIR_VARIABLE: "/run",
    }
    for rank, kept in (("0", {}), ("1", inherited)):  # Lightning gives its children ranks from 1 on
        environ = {**inherited, "LOCAL_RANK": rank}
        starting_point.forget_parent_run(placement.read_placement(environ), environ)
        assert environ == {**kept, "LOCAL_RANK": rank}
