"""Check ranks that raise, die, hang or are stopped, with real processes, signals and a real store."""

import errno
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fork import ENVIRON, PROJECT, free_port, said
from torch._utils import ExceptionWrapper

from hpc.config import errors as config_errors
from hpc.run import causes, signals
from hpc.run.peers import Peers

pytestmark = pytest.mark.slow

STACK = "(most recent call first)"
SOON = 25  # seconds; a rank may take three of them to report its error, and the machine may be busy; a hang takes 60
BEGIN = f"""
import sys
sys.path.insert(0, {str(PROJECT / "src")!r})
from hpc.run import claim, signals, watchdog as watch
claim.BEAT_SECONDS = 0.3
if sys.argv[3] == "1":
    signals.EXIT_SECONDS = watch.EXIT_SECONDS = watch.STEP_END_SECONDS = 1.0
warned = signals.install_signal_handlers()
import ctypes, os, signal, time
from pathlib import Path

run_dir, rank, size, hang_seconds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
held = claim.take_claim(run_dir, dict(host="n1")) if rank == 0 else None
store = None
if size > 1:
    from datetime import timedelta
    from torch import distributed, ones
    port, limit = int(os.environ["MASTER_PORT"]), timedelta(seconds=60)
    store = distributed.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False, timeout=limit)
    store = distributed.PrefixStore("preflight", store)
    store.add("met", 1)
    while store.add("met", 0) < size:
        time.sleep(0.05)
watching = watch.Watchdog(
    run_dir, held, attempt=1, rank=rank, world_size=size, store=store, hang_seconds=hang_seconds, signals=warned
)


def block_in_c():
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    print("blocked", flush=True)
    libc.pthread_mutex_lock(mutex)


class Stays:
    def __del__(self):
        block_in_c()


with watching:
    for step in range(3):
        watching.report_progress(step, "training")
"""

Start = Callable[..., list[subprocess.Popen[str]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start ranks that build, do three steps and then the test's action. Their stderr goes to files `err0`, ..."""
    ranks = []

    def begin(then: str, size: int = 1, hang_seconds: float = 60) -> list[subprocess.Popen[str]]:
        code = BEGIN + "".join(f"    {line}\n" for line in then.strip("\n").splitlines())
        environ = ENVIRON | {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        for rank in range(size):
            command = [sys.executable, "-c", code, str(tmp_path), str(rank), str(size), str(hang_seconds)]
            with (tmp_path / f"err{rank}").open("w") as stream:
                ranks.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=stream, text=True))
        return ranks

    yield begin
    for rank in ranks:
        rank.kill()
        rank.communicate()


def ends(ranks: list[subprocess.Popen[str]], seconds: float) -> list[int]:
    """Return the exit codes of the ranks; none may take longer."""
    limit = time.monotonic() + seconds
    return [rank.wait(max(limit - time.monotonic(), 0.01)) for rank in ranks]


def until(condition: Callable[[], object], seconds: float = 10) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.05)


def first(run_dir: Path, size: int) -> str:
    """Return the first cause as the report shows it."""
    cause = causes.first_cause(causes.read_causes(run_dir, 1), world_size=size, hosts=["here"])
    return cause.line.replace(f" on {os.uname().nodename}", "") if cause else ""


def error_of(run_dir: Path, rank: int) -> list[str]:
    return (run_dir / "errors" / "1" / f"rank-{rank}.txt").read_text().splitlines()


# -- Several ranks --


@pytest.mark.parametrize(
    ("then", "code", "cause"),
    [
        ("raise ValueError('a bad\\nsample')", 1, "rank 1: ValueError: a bad"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, "rank 1 on here ended without an error (killed?)"),
    ],
)
def test_one_fails_and_all_end_soon(start: Start, tmp_path: Path, then: str, code: int, cause: str) -> None:
    gloo = """
distributed.init_process_group("gloo", store=distributed.PrefixStore("gloo", store), rank=rank, world_size=size)
if rank == 1:
    print("now", flush=True)
    {then}
{wait}
"""
    # gloo reports a killed rank in another rank's collective; the others learn of it through the store.
    wait = "distributed.all_reduce(ones(1))" if code == -9 else "store.wait(['never'])"
    size = 3 if code == 1 else 2
    ranks = start(gloo.format(then=then, wait=wait), size)
    assert said(ranks[1]) == "now"
    codes = ends(ranks, SOON)
    assert codes[1] == code and {codes[0], codes[-1]} <= {code, 1, 86}
    assert first(tmp_path, size) == cause
    for rank in range(0, size, 2):
        text = (tmp_path / f"err{rank}").read_text()
        assert STACK in text or "Traceback" in text
        assert error_of(tmp_path, rank)[1] == f"host {os.uname().nodename}"
    if code != -9:
        assert codes == [86, code, 86][:size]
        assert (
            f"{causes.ENDED}: rank 1 on " in error_of(tmp_path, 0)[0] and "store.wait" not in error_of(tmp_path, 0)[0]
        )
        assert any(STACK in line for line in error_of(tmp_path, 0))
    verdict = (tmp_path / "verdict").read_text() if (tmp_path / "verdict").exists() else ""
    failed = "attempt 1\nstep 2\noutcome failed\nwhy rank 1: ValueError: a bad\n"
    assert verdict == (failed if "ValueError" in then else "")


def test_rank_0_is_killed_and_all_end_soon(start: Start, tmp_path: Path) -> None:
    ranks = start("print('now', flush=True)\ntime.sleep(60)", size=2)
    assert [said(rank) for rank in ranks] == ["now", "now"]
    ranks[0].kill()
    assert ends(ranks, SOON) == [-9, 86]
    assert "Ended: rank 0 is gone" in error_of(tmp_path, 1)[0]
    assert first(tmp_path, 2) == "rank 0 on here ended without an error (killed?)"


def test_the_rank_that_hangs_is_named_not_those_that_wait_for_it(start: Start, tmp_path: Path) -> None:
    then = """
distributed.init_process_group("gloo", store=distributed.PrefixStore("gloo", store), rank=rank, world_size=size)
def load():
    print("now", flush=True)
    time.sleep(60)
for step in range(3, 10**6):
    watching.report_progress(step, "training")
    if rank == 1 and step == 9:
        load()
    distributed.all_reduce(ones(1))
"""
    ranks = start(then, size=3, hang_seconds=2)
    assert said(ranks[1]) == "now"
    assert ends(ranks, 4 + SOON) == [86, 86, 86]
    assert re.fullmatch(
        r"rank 1: Hang: no step for \d s since step 9 \(training\); stuck in .* load.*", first(tmp_path, 3)
    )
    for rank in (0, 2):
        assert "; waits for other ranks" in error_of(tmp_path, rank)[0]
        assert any("in all_reduce" in line for line in error_of(tmp_path, rank))


def test_an_orderly_stop_is_no_error_and_rank_0_leaves_last(start: Start, tmp_path: Path) -> None:
    ranks = start("if rank:\n    time.sleep(2.5)\nraise watch.Stopped(2, 'SIGUSR1')", size=2)
    ends(ranks, 60)  # which includes importing torch on a busy machine
    assert [(tmp_path / f"err{rank}").read_text().splitlines()[-1] for rank in (0, 1)] == [
        "hpc.run.watchdog.Stopped: step 2: SIGUSR1"
    ] * 2
    assert not (tmp_path / "errors").exists() and not (tmp_path / "verdict").exists()
    assert '"released": true' in (tmp_path / "claims" / "000001.json").read_text()


def test_rank_0_waits_for_a_rank_that_has_only_just_begun() -> None:
    """Check that rank 0 stays until all have joined: it hosts the store.

    A late rank would report the lost store as the first cause.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    first, late = Peers(store, 2), Peers(store, 2)
    leaving = threading.Thread(target=first.wait_for_all, args=[30])
    leaving.start()
    leaving.join(1)
    assert leaving.is_alive()
    late.wait_for_all(30)
    leaving.join(5)
    assert not leaving.is_alive()


# -- One process --


def test_it_ends_although_something_on_the_way_up_waits_for_ever(start: Start, tmp_path: Path) -> None:
    (raises,) = start(
        "watching.report_failure(OSError('stale file handle'))\nblock_in_c()  # as Lightning's teardown may"
    )
    assert said(raises) == "blocked"
    assert ends([raises], 4) == [1]
    assert "OSError: stale file handle" in error_of(tmp_path, 0)[0]
    assert not (tmp_path / "verdict").exists(), "the next start may do better"


def test_it_ends_although_a_destructor_waits_for_ever(start: Start) -> None:
    (ends_well,) = start("stays = Stays()")
    assert said(ends_well) == "blocked"
    assert ends([ends_well], 4) == [1]


def test_after_a_checkpoint_no_error_is_final(start: Start, tmp_path: Path) -> None:
    assert ends(start("watching.has_saved = True\nraise ValueError('x')"), 10) == [1]
    assert "ValueError: x" in error_of(tmp_path, 0)[0] and not (tmp_path / "verdict").exists()


def test_leaving_is_no_crash_but_is_told(start: Start, tmp_path: Path) -> None:
    assert ends(start("sys.exit(3)"), 10) == [3]
    assert "SystemExit: 3" in error_of(tmp_path, 0)[0] and not (tmp_path / "verdict").exists()


def test_a_rank_that_is_fenced_ends(start: Start, tmp_path: Path) -> None:
    (zombie,) = start("print('now', flush=True)\ntime.sleep(60)")
    assert said(zombie) == "now"
    (tmp_path / "claims" / "000002.json").write_text("{}")
    assert ends([zombie], 4) == [86]
    assert "Fenced: attempt 2 has taken over, attempt 1 writes no more" in (tmp_path / "err0").read_text()


def test_the_verdict_is_left_to_the_newest_attempt(start: Start, tmp_path: Path) -> None:
    assert ends(start("(run_dir / 'claims' / '000002.json').touch()\nraise ValueError('x')"), 10) == [1]
    assert "ValueError: x" in error_of(tmp_path, 0)[0] and not (tmp_path / "verdict").exists()


def test_a_thread_that_keeps_the_interpreters_lock_does_not_keep_the_job(start: Start, tmp_path: Path) -> None:
    (stuck,) = start("import re\nprint('now', flush=True)\nre.match('(a+)+$', 'a' * 64 + 'b')", hang_seconds=1)
    assert said(stuck) == "now"
    assert ends([stuck], 20) == [-signal.SIGKILL]
    told = (tmp_path / "err0").read_text()
    assert "no thread of process" in told and "in match" in told.partition("no thread of process")[2]


def test_time_in_which_a_process_is_stopped_is_no_hang(start: Start, tmp_path: Path) -> None:
    """Check that a rank goes on that was stopped for longer than its limits, alone or with its guard, as by Ctrl-Z."""
    then = """
watching.report_progress(3)
print(Path(f"/proc/self/task/{os.getpid()}/children").read_text(), flush=True)
while not (run_dir / "go").exists():
    watching.report_progress(len(list(run_dir.glob("stop*"))))
    time.sleep(0.02)
"""
    (rank,) = start(then, hang_seconds=2)
    guard = map(int, said(rank).split())
    for number, pids in enumerate(([rank.pid], [rank.pid, *guard])):
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(5)  # the rank's limit is 2 s, its guard's one second more
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        (tmp_path / f"stop{number}").touch()
    (tmp_path / "go").touch()
    assert ends([rank], 20) == [0]
    assert (tmp_path / "err0").read_text() == "" and not (tmp_path / "errors").exists()


def test_no_guard_is_left_behind(start: Start) -> None:
    (process,) = start("print(Path(f'/proc/self/task/{os.getpid()}/children').read_text(), flush=True)\ntime.sleep(60)")
    (guard,) = map(int, said(process).split())
    assert Path(f"/proc/{guard}/cmdline").read_bytes().endswith(b"guard.py\0")
    process.kill()
    until(lambda: not Path(f"/proc/{guard}").exists())


def test_the_lock_of_an_extension_whose_builder_was_killed_is_named(start: Start, tmp_path: Path) -> None:
    lock = tmp_path / "extensions" / "lock"
    lock.parent.mkdir()
    lock.touch()
    waits = f"""
        from importlib import util
        folder = util.find_spec("torch").submodule_search_locations[0]  # torch itself takes seconds
        spec = util.spec_from_file_location("file_baton", folder + "/utils/file_baton.py")
        baton = util.module_from_spec(spec)
        spec.loader.exec_module(baton)
        baton.FileBaton({str(lock)!r}).wait()
    """
    (waiting,) = start(textwrap.dedent(waits), hang_seconds=1)
    assert ends([waiting], 20) == [86]
    assert f"rm {lock}" in error_of(tmp_path, 0)[0] and "file_baton.py" in error_of(tmp_path, 0)[0]


def test_sigterm_while_it_is_blocked_shows_where(start: Start, tmp_path: Path) -> None:
    (blocked,) = start("block_in_c()")
    assert said(blocked) == "blocked"
    blocked.send_signal(signal.SIGTERM)
    until(lambda: "no step has ended in the 1 s since SIGTERM; stuck in" in (tmp_path / "err0").read_text())
    until(lambda: "in block_in_c" in (tmp_path / "err0").read_text())
    assert blocked.poll() is None, "it may still come to the end of the step"
    stacks = (tmp_path / "err0").read_text().count("in block_in_c")
    blocked.send_signal(signal.SIGQUIT)
    until(lambda: (tmp_path / "err0").read_text().count("in block_in_c") > stacks)
    assert blocked.poll() is None


def test_sigterm_at_a_step_shows_nothing(start: Start, tmp_path: Path) -> None:
    then = """
print("now", flush=True)
for step in range(25):
    watching.report_progress(step)
    time.sleep(0.1)
print(warned.signal)
"""
    (trains,) = start(then)
    assert said(trains) == "now"
    trains.send_signal(signal.SIGTERM)
    assert said(trains) == "SIGTERM"
    assert ends([trains], 5) == [0]
    assert (tmp_path / "err0").read_text() == ""


def test_only_the_first_warning_counts_and_children_have_none(start: Start) -> None:
    then = """
print(warned.signal, flush=True)
while warned.signal is None:
    time.sleep(0.05)
for number in (signal.SIGTERM, signal.SIGUSR2):
    os.kill(os.getpid(), number)
warned.signal, noted = None, warned.signal
child = os.fork()
if not child:
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        os.kill(os.getpid(), number)
    os.write(1, f"child {warned.signal}\\n".encode())
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), noted, flush=True)
child = os.fork()
if not child:
    signals.block_signals_in_worker(0)
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
reads, writes = os.pipe()
child = os.fork()
if not child:
    signals.block_signals_in_worker(0)
    os.write(writes, b"deaf")
    time.sleep(5)
    os._exit(7)
os.read(reads, 4)
os.kill(child, signal.SIGTERM)  # by the rank itself, which ends its workers so
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    (process,) = start(then)
    assert said(process) == "None"
    process.send_signal(signal.SIGUSR1)
    assert [said(process) for _ in range(4)] == ["child None", "-15 SIGUSR1", "7", "0"]
    assert ends([process], 5) == [0]


@pytest.mark.parametrize(
    ("wrapper", "expected"), [([], "SIGHUP"), (["sh", "-c", "trap '' HUP; exec \"$@\"", "sh"], None)]
)
def test_a_closed_terminal_is_a_warning_unless_it_is_ignored(
    tmp_path: Path, wrapper: list[str], expected: str | None
) -> None:
    code = f"""
import os, sys
from contextlib import suppress
sys.path.insert(0, {str(PROJECT / "src")!r})
from hpc.run import signals
warned = signals.install_signal_handlers()
worker = os.fork()
while not worker:  # a handler ends each pause
    signals.signal.pause()
os.mkdir(sys.argv[1] + "/ready")
with suppress(OSError):
    os.read(0, 1)  # until the terminal is closed
if warned.signal:
    print("nobody reads this", flush=True)
is_alive = os.waitpid(worker, os.WNOHANG) == (0, 0)
os.kill(worker, 9)
with open(sys.argv[1] + "/told", "w") as stream:
    stream.write(f"{{warned.signal}} {{is_alive}}")
"""
    pid, terminal = pty.fork()
    if not pid:
        command = [*wrapper, sys.executable, "-c", code, str(tmp_path)]
        os.execvp(command[0], command)
    until((tmp_path / "ready").exists)
    os.close(terminal)
    os.waitpid(pid, 0)
    assert (tmp_path / "told").read_text() == f"{expected} True"


def test_the_first_interrupt_is_a_warning_and_the_second_ends_what_is_blocked(start: Start, tmp_path: Path) -> None:
    then = """
warned.set_interruptible(True)
warned.install_handlers()  # as at the beginning of each phase
warned.is_reporting_rank = True
child = os.fork()
if not child:
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
while warned.signal is None:
    time.sleep(0.05)
print(warned.signal, flush=True)
block_in_c()
"""
    (process,) = start(then)
    assert said(process) == "3"
    process.send_signal(signal.SIGINT)
    assert [said(process), said(process)] == ["Ctrl-C", "blocked"]
    assert "again ends it at once" in (tmp_path / "err0").read_text()
    process.send_signal(signal.SIGINT)
    assert ends([process], 2) == [-signal.SIGINT]


def test_outside_of_training_an_interrupt_is_what_it_is_to_python(start: Start) -> None:
    then = """
warned.set_interruptible(True)
warned.set_interruptible(False)
print("now", flush=True)
for _ in range(600):
    time.sleep(0.1)  # Python sees a signal that comes just before a sleep only after it
"""
    (process,) = start(then)
    assert said(process) == "now"
    process.send_signal(signal.SIGINT)
    assert ends([process], 4) == [-signal.SIGINT] and process.stdout


def errors() -> Iterator[tuple[BaseException, bool]]:
    import torch
    from torch import distributed

    yield ValueError("connection closed"), True
    yield config_errors.ConfigError("a", 1, "no", "a=2"), True
    yield torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True
    yield RuntimeError("mat1 and mat2 shapes cannot be multiplied"), True
    yield OSError(errno.EIO, "Input/output error"), False
    yield ConnectionResetError(), False
    yield MemoryError(), False
    yield torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False
    yield RuntimeError("CUDA error: uncorrectable ECC error encountered"), False
    yield RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), False
    yield RuntimeError("DataLoader worker (pid 17) is killed by signal: Killed."), False
    yield RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [n1]:1"), False
    yield RuntimeError("NCCL communicator was aborted on rank 3."), False
    yield distributed.DistBackendError("x"), False
    yield distributed.DistStoreError("wait timeout"), False
    yield KeyboardInterrupt(), False


def test_what_would_fail_again() -> None:
    judged = [(repr(error), causes.is_deterministic(error)) for error, _ in errors()]
    assert judged == [(repr(error), expected) for error, expected in errors()]


@pytest.mark.parametrize("note", ["", "\nin sample 17 of Points"])
def test_the_error_of_a_worker_is_told_with_all_lines_of_its_message(note: str) -> None:
    try:
        raise OSError(f"cannot open:\n  unable to lock file{note}")
    except OSError:
        wrapper = ExceptionWrapper(where="in DataLoader worker process 0")
    error = RuntimeError(f"Caught OSError {wrapper.where}.\nOriginal {wrapper.exc_msg}")
    rest = note.replace("\n", ", ")
    assert causes.describe_error(error) == f"OSError: cannot open: unable to lock file{rest}"


def test_the_end_of_the_launcher_is_a_warning_and_writing_to_its_pipe_no_error() -> None:
    orphan = f"""
import os, sys, time
sys.path.insert(0, {str(PROJECT / "src")!r})
from hpc.run import signals
warned = signals.SignalState(launcher_pid=os.getppid())
warned.handle_launcher_exit()
assert warned.signal is None
os.write(2, b"here")
limit = time.monotonic() + 30
while not warned.signal and time.monotonic() < limit:
    warned.handle_launcher_exit()
    time.sleep(0.01)
print("nobody reads this", flush=True)
open(sys.argv[1], "w").write(str(warned.signal))
"""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        launcher = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {orphan!r}, {str(out)!r}]).wait()"
        with subprocess.Popen([sys.executable, "-c", launcher], stderr=subprocess.PIPE) as process:
            assert process.stderr and process.stderr.read(4) == b"here"
            process.kill()
            process.stderr.close()
        limit = time.monotonic() + 30
        while not (out.exists() and out.read_text()) and time.monotonic() < limit:
            time.sleep(0.02)
        assert out.read_text() == signals.ORPHANED
