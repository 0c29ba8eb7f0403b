"""Check that a run directory has one writer, with processes that really die, stop and race."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fork import said

from hpc.config.errors import ConfigError
from hpc.config.project import PROJECT
from hpc.run import attempt_log, claim
from hpc.system import files

pytestmark = pytest.mark.slow

LONG = 60.0  # seconds: a time that nobody waits for
HERE = {"job": "42", "host": "n1", "pid": 1, "restart": 0}
# Takes the claim when told to, prints the result, and then prints whether the claim is still its own.
PROCESS = """
import json, os, sys, time
from pathlib import Path
sys.path.insert(0, {src!r})
from hpc.config import errors
from hpc.run import claim
claim.BEAT_SECONDS = float(sys.argv[4])
run_dir, who = Path(sys.argv[1]), json.loads(sys.argv[2]) | dict(pid=os.getpid())
print("ready", flush=True)
sys.stdin.readline()
try:
    mine = claim.take_claim(run_dir, who, watch_seconds=float(sys.argv[3]))
except errors.ConfigError as rejected:
    print("rejected", str(rejected).replace(os.linesep, " "), flush=True)
    sys.exit(2)
print("attempt", mine.attempt, flush=True)
for line in sys.stdin:
    print(mine.may_write(), flush=True)
mine.release()
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a process, which claims the run once it is told to go."""
    processes = []

    def begin(watch_seconds: float = 2, beat: float = 0.3, **who: object) -> subprocess.Popen[str]:
        code = PROCESS.format(src=str(PROJECT / "src"))
        command = [sys.executable, "-c", code, str(tmp_path), json.dumps(HERE | who), str(watch_seconds), str(beat)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert said(process) == "ready"
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def go(*processes: subprocess.Popen[str]) -> list[str]:
    for process in processes:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    return [said(process) for process in processes]


def test_a_holder_that_lives_is_named_and_keeps_the_directory(start: Start, tmp_path: Path) -> None:
    holder = start(beat=claim.BEAT_SECONDS)
    assert go(holder) == ["attempt 1"]
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=r"Job 42 on n1 writes into it, .*\n.*scancel 42") as rejected:
        claim.take_claim(tmp_path, HERE | {"job": "43", "host": "n2"}, watch_seconds=LONG)
    assert time.monotonic() - begun < LONG, "the first heartbeat tells it"
    assert rejected.value.key == "run_dir"
    assert go(holder) == ["True"]
    assert sorted(path.name for path in (tmp_path / "claims").iterdir()) == ["000001.beat", "000001.json"]


@pytest.mark.parametrize(("host", "at_once"), [("n1", True), ("n2", False)])
def test_a_holder_that_was_killed_is_followed(start: Start, tmp_path: Path, host: str, at_once: bool) -> None:
    holder = start()
    go(holder)
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # now a zombie: its parent has not reaped it yet
    begun = time.monotonic()
    watched = LONG if at_once else 1.5
    mine = claim.take_claim(tmp_path, HERE | {"job": "43", "host": host}, watch_seconds=watched)
    assert (mine.attempt, mine.may_write()) == (2, True)
    assert (time.monotonic() - begun < watched) is at_once, "on another host it has to be watched"
    mine.release()


def test_one_that_was_cut_off_finds_itself_fenced(start: Start, tmp_path: Path) -> None:
    holder = start()
    go(holder)
    assert go(holder) == ["True"]
    holder.send_signal(signal.SIGSTOP)
    mine = claim.take_claim(tmp_path, HERE | {"job": "43"}, watch_seconds=1.5)
    holder.send_signal(signal.SIGCONT)
    assert go(holder) == ["False"]
    assert go(holder) == ["False"]
    assert mine.may_write(), "and leaves the other alone"
    mine.release()


def test_of_two_that_start_together_one_wins(start: Start) -> None:
    for number in range(1, 4):
        both = [start(job=job, host=job) for job in ("7", "8")]
        told = sorted(go(*both))
        assert told[0] == f"attempt {number}"
        assert "writes into it" in told[1] and told[1].startswith("rejected run_dir=")
        for process in both:
            process.communicate()  # the owner releases its claim


def test_the_next_start_of_the_same_job_does_not_wait(start: Start, tmp_path: Path) -> None:
    zombie = start(restart="0")
    go(zombie)
    begun = time.monotonic()
    mine = claim.take_claim(tmp_path, HERE | {"host": "n2", "restart": "1"}, watch_seconds=LONG)
    assert time.monotonic() - begun < LONG
    assert (mine.attempt, mine.may_write(), go(zombie)) == (2, True, ["False"])
    with pytest.raises(ConfigError):
        claim.take_claim(tmp_path, HERE | {"host": "n3", "restart": 0})
    mine.release()


def test_a_job_that_pbs_starts_again_does_not_wait_for_its_lost_host(start: Start, tmp_path: Path) -> None:
    job = {"PBS_JOBID": "53.server", "PBS_ENVIRONMENT": "PBS_BATCH"}
    first, again = (job | {"PBS_JOBCOOKIE": f"{letter * 32}"} for letter in "AB")
    zombie = start(**claim.claimant_record(first) | {"host": "p1"})
    assert go(zombie) == ["attempt 1"]
    with pytest.raises(ConfigError, match="Job 53 on p1 writes into it"):
        claim.take_claim(tmp_path, claim.claimant_record(first) | {"host": "p2"})  # another command of this start
    with pytest.raises(ConfigError, match="Job 53 on p1 writes into it"):
        claim.take_claim(tmp_path, claim.claimant_record(again | {"PBS_JOBID": "54.server"}))
    begun = time.monotonic()
    mine = claim.take_claim(tmp_path, claim.claimant_record(again) | {"host": "p2"}, watch_seconds=LONG)
    assert time.monotonic() - begun < LONG
    assert (mine.attempt, mine.may_write(), go(zombie)) == (2, True, ["False"])
    mine.release()
    broken = claim.claimant_record({"PBS_JOBID": "53.server", "SLURM_RESTART_COUNT": "x"})
    assert not claim.is_claim_before_requeue(tmp_path, broken)
    assert claim.is_claim_before_requeue(tmp_path, claim.claimant_record(job | {"PBS_JOBCOOKIE": "\udcff"}))
    written = "".join(path.read_text() for path in (tmp_path / "claims").iterdir())
    assert "A" * 32 not in written and "B" * 32 not in written, "PBS lets whoever knows the cookie into the job"


@pytest.mark.parametrize("goodbye", ["release", "end"])
def test_after_a_goodbye_nobody_waits(tmp_path: Path, goodbye: str) -> None:
    mine = claim.take_claim(tmp_path, HERE)
    if goodbye == "end":
        attempt_log.record_start(tmp_path, mine.attempt, environ={})
        attempt_log.record_end(tmp_path, mine, attempt=mine.attempt, step=5, outcome="continue", why="SIGTERM")
    else:
        mine.release()
    begun = time.monotonic()
    following = claim.take_claim(tmp_path, HERE | {"job": None}, watch_seconds=LONG)
    assert time.monotonic() - begun < LONG
    assert (following.attempt, mine.may_write()) == (2, False)
    with pytest.raises(PermissionError):
        attempt_log.record_end(tmp_path, mine, attempt=mine.attempt, step=6, outcome="finished")
    for each in (mine, following):
        each.release()


@pytest.mark.parametrize("text", ["", "[]", '{"job"', '{"process": 3, "host": "n1"}', '{"restart": "x"}', "\xff\x00"])
def test_a_damaged_claim_counts_and_is_watched(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "000004.json").write_text(text, encoding="latin-1")
    (tmp_path / "claims" / "stray").touch()
    mine = claim.take_claim(tmp_path, HERE, watch_seconds=0.3)
    assert mine.attempt == 5
    (tmp_path / "claims" / "000005.json").write_text(text, encoding="latin-1")
    assert not mine.may_write()
    monkeypatch.setattr(claim, "_read_text", lambda path, read=claim._read_text: mine.beat() or read(path))
    with pytest.raises(ConfigError, match=r"(Another process|n1) writes into it"):
        claim.take_claim(tmp_path, HERE)  # its heartbeat continues
    mine.release()


def test_the_count_goes_on_where_claims_were_deleted(tmp_path: Path) -> None:
    attempt_log.record_start(tmp_path, 6, environ={})
    mine = claim.take_claim(tmp_path, HERE)
    assert mine.attempt == 7
    for path in (tmp_path / "claims").iterdir():
        path.unlink()
    assert not mine.may_write()
    mine.release()


def test_a_full_disk_does_not_stop_the_heart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = claim.take_claim(tmp_path, HERE)
    mine.beat()
    before = (tmp_path / "claims" / "000001.beat").read_text()

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_atomically", full)
    mine.beat()
    assert (tmp_path / "claims" / "000001.beat").read_text() > before
    assert mine.may_write()
    mine.release()


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    mine = claim.take_claim(tmp_path, HERE)
    assert (mine.attempt, mine.may_write()) == (1, True)
    monkeypatch.setattr(claim, "newest_attempt", lambda run_dir: 0)  # it looks before the other process has claimed
    with pytest.raises(ConfigError, match="Job 42 on n1 writes into it"):
        claim.take_claim(tmp_path, HERE)
    mine.release()


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "claims").write_text("a file")
    for path in (tmp_path, Path("/proc/self")):  # which even root cannot write
        with pytest.raises(ConfigError, match=r"must be a folder that can be written; got .*\(\w.*\)"):
            claim.take_claim(path, HERE)
