"""A fork for the tests of `hpc`, which is tested in place: a freshly baked project.

Each process of pytest makes one, as a test may write into it while those of another worker train; what it starts finds
it in the environment.
"""

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import extra_packages

extra_packages.use()
REPO = Path(__file__).resolve().parents[2]
VARIABLE = "HPC_PROJECT"  # as hpc reads it
MAKER = "HPC_TESTS_FORK_MAKER"  # the worker of pytest whose fork VARIABLE names
# A valid path with special characters, so that missing quotes make a test fail.
ANSWERS = {
    "project_name": """Über "x" \\ $(touch canary) `touch canary`; touch canary # 'q' 100 % <b> 😀""",
    "project_slug": "wild-2_thing",
    "package_name": "my_research",
    "description": '''"""It's: - {a} \\n [b] & "c" \\''',
    "author": 'Ada "The Countess" O\'Łoś \\ <ada@example.org>',
    "account": "p_1234@a+b.c-d",
}
HELPERS = ("cases.py", "ranks.py")  # programs that tests start, from the fork's own tests/


def make() -> Path:
    """Bake a project that uses the library in this repository."""
    folder = Path(tempfile.mkdtemp(prefix="Ein Ordner für 'alles' "))
    atexit.register(remove, folder, os.getpid())
    settings = folder / "config.yaml"
    settings.write_text(f'replay_dir: "{folder}/replay"\ncookiecutters_dir: "{folder}/clones"\n')
    options = ["--no-input", "--config-file", str(settings), "--output-dir", str(folder)]
    words = [f"{key}={value}" for key, value in ANSWERS.items()]
    command = [sys.executable, "-m", "cookiecutter", str(REPO), *options, *words]
    environ = os.environ | {"HPC_ML_FOLDER": str(REPO)}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environ)
    project = folder / ANSWERS["project_slug"]
    (project / "tests").mkdir(exist_ok=True)
    for name in HELPERS:
        (project / "tests" / name).symlink_to(Path(__file__).with_name(name))
    return project


def remove(folder: Path, pid: int) -> None:
    """Remove the fork when the process that made it exits, but not when its forked children exit."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


# Without bytecode each process would compile hpc anew.
sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(REPO / "build" / "pycache")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["XDG_CONFIG_HOME"] = os.devnull  # before hpc is imported: tests must not read this user's own cluster values
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "the only one")
PROJECT = Path(os.environ[VARIABLE]) if os.environ.get(MAKER) == WORKER else make()
os.environ |= {VARIABLE: str(PROJECT), MAKER: WORKER}
sys.path[:0] = [place for place in (str(PROJECT), str(PROJECT / "src"), str(REPO / "src")) if place not in sys.path]
sys.path += [str(room) for room in Path(__file__).parent.iterdir() if room.is_dir()]  # tests share helpers

from hpc.submit.scheduler import LEAKED_VARIABLES  # noqa: E402

# Remove the variables of schedulers, so that a test gives the same result inside a job and on a laptop.
ENVIRON = {key: value for key, value in os.environ.items() if not LEAKED_VARIABLES.match(key)}
PACKAGE = ANSWERS["package_name"]
QUIET = "callbacks.progress.refresh_rate=0"


def place(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Return the environment variables that mpiexec sets for a rank, with all ranks on this machine."""
    mpich = {"PMI_RANK": rank, "PMI_SIZE": num_ranks, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": num_ranks}
    return {key: str(value) for key, value in mpich.items()} | {"MASTER_PORT": str(port)}


def said(process: subprocess.Popen[str]) -> str:
    """Return the next line that a process has printed."""
    assert process.stdout
    return process.stdout.readline().strip()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def scalars(run_dir: Path, tag: str) -> list[float]:
    """Return the values of one TensorBoard scalar, in order of steps."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [event.value for event in events.Scalars(tag)]
