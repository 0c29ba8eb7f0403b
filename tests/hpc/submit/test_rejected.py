"""Check that a submission that a scheduler rejects changes no file, and neither does one that is interrupted."""

import itertools
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from desk import RECORDS, TELLS_NO_LIMIT, Desk
from omegaconf import DictConfig

from hpc.config import project
from hpc.run import command_line
from hpc.submit import resubmit
from hpc.submit.options import SubmitOptions

CHANGED = ["resume=mine", "trainer.num_nodes=2", "trainer.max_epochs=40"]
COMMANDS = {
    "a new run": ["trainer=ddp", "name=new"],
    "a new run in a folder with notes": ["trainer=ddp", "run_dir=paper"],
    "a sweep": ["trainer=ddp", "seed=1,2", "--multirun"],
    "a search": ["seed=choice(1,2)", "--search", "random", "--trials", "2"],
    "a resume": ["resume=mine"],
    "a resume with other resources": CHANGED,
    "a resume with a permission": ["resume=mine", "model.optimizer.lr=0.5", "resume_allow=[model.optimizer.lr]"],
    "a member of a sweep": ["resume=swept/0_seed=1", "trainer.num_nodes=2"],
}
REJECTIONS = {
    "says no": 'echo "error: invalid account" >&2; exit 1',
    "is killed": "kill -9 $$",
    "hangs": "exec sleep 60",
}
WAYS = {"slurm": ["says no"] * 8, "pbs": ["hangs", "", "is killed", "", "", "is killed", "hangs", ""]}


def files(*folders: Path) -> dict[str, Any]:
    """Return mode and content of everything in these folders."""
    found = {}
    for path in sorted(path for folder in folders for path in [folder, *folder.rglob("*")]):
        content = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path)] = path.lstat().st_mode, content
    return found


@pytest.fixture(params=["slurm", "pbs"])
def busy(request: pytest.FixtureRequest, desk: Desk) -> Desk:
    """Return a desk with a finished run, a sweep, and a folder with notes."""
    shutil.copytree(project.CONFIGS, desk.project / "configs", dirs_exist_ok=True)
    desk.set.setenv("CLUSTER_OF_TEST", request.param)
    assert desk.type(f"cluster={request.param}", "trainer=ddp", "run_dir=mine") == 0, desk.err
    assert desk.type(f"cluster={request.param}", "trainer=ddp", "seed=1,2", "--multirun") == 0, desk.err
    desk.runs()[0].rename("swept")
    for member in Path("swept").iterdir():
        if member.is_dir() and member.name != "code":
            (member / "code").unlink()
            (member / "code").symlink_to(Path("swept/code").absolute())
    Path("mine/attempts.jsonl").touch()
    Path("paper").mkdir()
    Path("paper/notes.txt").write_text("mine")
    return desk


def interrupt(desk: Desk, words: Sequence[str]) -> int:
    """Type a command and, once the scheduler's command runs, Ctrl-C. Return the exit code."""
    calls = sum(len(desk.noted(f"{name}.argv")) for name in ("sbatch", "qsub"))
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
        try:
            os._exit(desk.type(*words))
        except KeyboardInterrupt:
            os._exit(130)
    limit = time.monotonic() + 60
    while sum(len(desk.noted(f"{name}.argv")) for name in ("sbatch", "qsub")) == calls:
        assert time.monotonic() < limit
        time.sleep(0.02)
    os.kill(child, signal.SIGINT)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.slow
def test_a_rejection_changes_nothing(busy: Desk, subtests: Any) -> None:
    """Try each command with sbatch, and some of them with a qsub that hangs or is killed."""
    cluster = os.environ["CLUSTER_OF_TEST"]
    folders = [busy.project, Path("mine"), Path("swept"), Path("paper")]
    Path("mine/verdict").write_text("attempt 1\nstep 9\noutcome failed\nwhy x\n")
    before = files(*folders)
    for (name, words), way in zip(COMMANDS.items(), WAYS[cluster], strict=True):
        if not way:
            continue
        with subtests.test(f"{name} {way}"):
            busy.scheduler(REJECTIONS[way])
            typed = words if words[0].startswith("resume=") else [f"cluster={cluster}", *words]
            assert (interrupt(busy, typed) == 130) if way == "hangs" else busy.type(*typed) == 2
            assert files(*folders) == before
    assert not any(busy.noted(f"{name}.argv") for name in ("scontrol", "qrls")), "no job was released"


@pytest.mark.slow
def test_a_changed_run_is_held_until_its_files_are_there(busy: Desk) -> None:
    is_slurm = os.environ["CLUSTER_OF_TEST"] == "slurm"
    seen = [busy.bin / f"config at {moment}" for moment in ("submission", "release")]
    busy.scheduler(f"cp mine/config.yaml '{seen[0]}'; echo 18")
    release = f"{TELLS_NO_LIMIT}{RECORDS}; cp mine/config.yaml '{seen[1]}'"
    busy.command("scontrol" if is_slurm else "qrls", release)
    before = Path("mine/config.yaml").read_text()
    assert busy.type(*CHANGED) == 0
    assert busy.noted("scontrol.argv" if is_slurm else "qrls.argv") == ("release 18\n" if is_slurm else "18\n")
    assert ("--hold" if is_slurm else "-h") in busy.noted("sbatch.argv" if is_slurm else "qsub.argv").splitlines()
    assert [file.read_text() for file in seen] == [before, Path("mine/config.yaml").read_text()]
    assert not list(Path("mine").glob(".submission-*"))
    busy.command("scontrol" if is_slurm else "qrls", "echo down >&2; exit 1")
    assert busy.type("resume=mine", "trainer.num_nodes=1") == 0
    assert f"warning: this failed (down). Try: {'scontrol release' if is_slurm else 'qrls'} 18" in busy.err


@pytest.mark.slow
def test_a_run_that_does_not_change_is_not_held(busy: Desk) -> None:
    assert busy.type("resume=mine") == 0 and not busy.noted("scontrol.argv") and not busy.noted("qrls.argv")


@pytest.mark.slow
@pytest.mark.parametrize("busy", ["slurm"], indirect=True)
def test_killed_at_each_moment_a_run_is_as_before_or_can_go_on(busy: Desk) -> None:
    """Kill submit.py before each change of a file, and before each command that it starts."""
    Path("mine/verdict").write_text("attempt 1\nstep 9\noutcome failed\nwhy x\n")
    names = ["overrides.json", "job.sh", "config.yaml", "verdict"]
    shutil.copytree("mine", "old", symlinks=True)
    cfg = command_line.compose_resumed(Path("mine").absolute(), CHANGED[1:])
    assert busy.type(*CHANGED) == 0
    old, new = ({name: Path(folder, name) for name in names} for folder in ("old", "new"))
    Path("mine").rename("new")
    states = []
    for moment in itertools.count():
        shutil.rmtree("mine", ignore_errors=True)
        shutil.copytree("old", "mine", symlinks=True)
        (busy.bin / "scontrol.argv").unlink(missing_ok=True)
        (busy.bin / "sbatch.argv").unlink(missing_ok=True)
        is_killed = resubmit_until(moment, cfg)
        state = {name: changed(Path("mine", name), old[name], new[name]) for name in names}
        if not busy.noted("sbatch.argv"):
            assert not any(state.values()), moment
        if busy.noted("scontrol.argv"):
            assert all(state.values()), moment
        if state["config.yaml"]:
            assert all(state.values()), "of a run whose config is new, the same words change nothing any more"
        states.append(state)
        if not is_killed:
            break
    assert len(states) > 10 and any(any(state.values()) and not all(state.values()) for state in states)
    shutil.rmtree("mine")
    shutil.copytree("old", "mine", symlinks=True)
    shutil.copy(new["job.sh"], "mine/job.sh")  # cut off after the first file
    assert busy.type(*CHANGED) == 0
    assert all(changed(Path("mine", name), old[name], new[name]) for name in names)


def resubmit_until(moment: int, cfg: DictConfig) -> bool:
    """Submit the run again, and be killed before change number `moment`. Return whether it got so far."""
    if (child := os.fork()) == 0:
        count = itertools.count()

        def watch(event: str, arguments: Any) -> None:
            is_written = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            is_changed = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "subprocess.Popen")
            if (is_written or is_changed) and next(count) == moment:
                os._exit(99)

        sys.addaudithook(watch)
        run_dir = Path("mine").absolute()
        resubmit.resubmit(cfg, run_dir, words=CHANGED, options=SubmitOptions())
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 99)
    return code == 99


def changed(file: Path, old: Path, new: Path) -> bool:
    """Return whether a file is as the change makes it; it must be that, or as before."""
    content, before, after = (path.read_bytes() if path.exists() else None for path in (file, old, new))
    assert content in (before, after), file
    return content == after


@pytest.mark.slow
@pytest.mark.parametrize(
    ("message", "fix"),
    [
        ("Invalid account or account/partition combination specified", "cluster.account=<not p_1234>, or cluster.par"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "cluster.time=<not 1:00:00>\n"),
        ("Invalid qos specification", "cluster.qos=<not null>\n"),
        ("Invalid feature specification", "cluster.constraint=<not null>\n"),
        ("Unknown queue", "cluster.partition=<not null>\n"),
        ("Node count specification invalid", "trainer.num_nodes=<not 1>\n"),
        ("Socket timed out on send/recv operation", "the same again, in some minutes\n"),
        ("No.", "another value of cluster.account, cluster.partition, "),
    ],
)
def test_the_key_that_a_rejection_is_about_is_named(message: str, fix: str, desk: Desk) -> None:
    desk.scheduler(f'echo "sbatch: error: {message}" >&2; exit 1')
    assert desk.type("cluster=slurm", "cluster.account=p_1234") == 2
    assert f"  Try: {fix}" in desk.err


@pytest.mark.slow
def test_the_environment_is_renewed_where_the_one_of_the_script_is_gone(desk: Desk, tmp_path: Path) -> None:
    """Check a run whose project was moved, with its environment, after it was queued; its code is its own."""
    for cluster in ("slurm", "pbs"):
        (tmp_path / "venv" / "bin").mkdir(parents=True, exist_ok=True)
        (tmp_path / "venv" / "bin" / "python").touch()
        desk.set.setattr(sys, "prefix", str(tmp_path / "venv"))
        assert desk.type(f"cluster={cluster}", f"run_dir={cluster}") == 0
        script = Path(cluster, "job.sh")
        before = script.read_text()
        desk.set.setattr(sys, "prefix", str(tmp_path / "a new one"))
        assert desk.type(f"resume={cluster}") == 0 and script.read_text() == before, "it is still there"
        shutil.rmtree(tmp_path / "venv" / "bin")
        desk.write("src/hpc/jobs/slurm.bash", "# of a newer template\n")
        assert desk.type(f"resume={cluster}") == 0
        assert script.read_text() == before.replace(f"VENV={tmp_path}/venv", f"VENV='{tmp_path}/a new one'")
        assert f"{script.name} gets the environment {tmp_path}/a new one, as {tmp_path}/venv is gone" in desk.out
