"""Check an account without home or name, as in a container started with a numeric user id."""

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest
from fork import ENVIRON, PROJECT

from hpc.system import home

# Every program, run as that account: without a passwd entry, and without HOME and USER.
NAMELESS = """
import os, pwd, runpy, sys
def getpwuid(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = getpwuid
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def nameless(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)

    def getpwuid(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", getpwuid)


def test_a_home_is_what_it_was() -> None:
    assert home.expand("~/x") == Path.home() / "x" and home.expand("x/~") == Path("x/~")
    assert home.expand("~no-such-user/x") == Path("/dev/null/~no-such-user/x")


def test_without_a_home_nothing_lies_there_and_nothing_can_be_made(nameless: None) -> None:
    assert home.user_name() == "USER"
    path = home.expand("~/.cache")
    assert not path.exists()
    with pytest.raises(NotADirectoryError):
        path.mkdir(parents=True)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["train.py", "run_dir=RUN", "trainer.max_steps=1", "data.global_batch_size=8"], 0),
        (["train.py", "run_dir=~no-such-user/runs"], 2),
        (["submit.py", "cluster=slurm", "--dry-run"], 0),
        (["plan.py", "cluster=perlmutter", "trainer=ddp", "cluster.account=x"], 0),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else None,
)
def test_every_verb_works_for_such_an_account(words: list[str], code: int, tmp_path: Path) -> None:
    words = [word.replace("RUN", str(tmp_path / "run")) for word in words]
    kept = {name: value for name, value in ENVIRON.items() if name not in ("HOME", "USER", "LOGNAME")}
    command = [sys.executable, "-c", NAMELESS, *words]
    environ = {name: value for name, value in kept.items() if not name.startswith("XDG_")}
    done = subprocess.run(command, cwd=PROJECT, env=environ, capture_output=True, text=True, timeout=300)
    assert "Traceback" not in done.stderr and done.returncode == code, done.stderr
    assert not os.path.lexists(PROJECT / "~")
