"""A simulated login node for submit.py: stand-ins for sbatch and qsub record their arguments."""

import json
import os
import pwd
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import fork
import pytest

from hpc.config import errors, project
from hpc.programs import submit
from hpc.run import directory, environment, snapshot
from hpc.submit import scheduler, scripts

TOOLS = ["bash", "cat", "cp", "env", "git", "sleep"]
STUB = '[ "$1" != --test-only ] || exit 0; '
STUB += 'printf "%s\\n" "$@" >>"$0.argv"; env >"$0.env"; cat >"$0.stdin"; cp "${!#}" "$0.script"; '
# What submit.py asks before it writes anything.
TELLS_NO_LIMIT = """\
case $* in
*"show partition")
    echo "PartitionName=all Default=YES State=UP MaxTime=UNLIMITED MaxNodes=UNLIMITED MinNodes=0 OverSubscribe=NO"
    exit ;;
*"show config") echo "AccountingStorageEnforce = none"; exit ;;
esac
"""
RECORDS = 'echo "$@" >>"$0.argv"'
# Files that job scripts source, copied unchanged. The project has a library of its own, which is no more than these.
SOURCED = [f"src/hpc/jobs/{name}.bash" for name in ("job", "pbs", "pbs_successor", "shared_node", "slurm")]
FILES = [
    *("train.py", "env.sh", "pyproject.toml", "constraints.txt", "configs/train.yaml", "src/p/build/runs/a.py"),
    "src/hpc/__init__.py",  # a copy of the library
    *SOURCED,
]
JUNK = [".gitignore", "runs/old/last.ckpt", "src/p/__pycache__/a.pyc", "outputs/x"]

# As OpenPBS 23.06 and newer (src/cmds/qstat.c): of several jobs, JSON shows only the first and dsv shows all. An
# unknown job makes the exit code 153. Ended jobs are shown with -x only, and never if the history is disabled.
QSTAT = """
import json, sys
*options, form = sys.argv[1 : sys.argv.index("-F") + 2]
code, told = 0, []
for asked in sys.argv[sys.argv.index("-F") + 2 :]:
    number = asked.split(".")[0]
    parts = number[:-1] if number.endswith("[]") and "-t" in options else None
    jobs = {name: job for name, job in JOBS.items() if name.split(".")[0] == number or parts and name.startswith(parts)}
    if "-x" in options and not HISTORY:
        print(f"qstat: PBS is not configured to maintain job history {asked}", file=sys.stderr)
    elif not jobs:
        print(f"qstat: Unknown Job Id {asked}", file=sys.stderr)
        code = 153
    elif "-x" not in options and all(job["job_state"] in "FX" for job in jobs.values()):
        print(f"qstat: {asked} Job has finished, use -x or -H to obtain historical job information", file=sys.stderr)
        code = 35
    else:
        told.append(jobs)
if form == "json":
    print(json.dumps({"timestamp": 1} | ({"Jobs": told[0]} if told else {})))
else:
    for name, job in [pair for jobs in told for pair in jobs.items()]:
        flat = {}
        for key, value in job.items():
            inner = value if isinstance(value, dict) else {}
            flat |= {f"{key}.{under}": one for under, one in inner.items()} or {key: value}
        escaped = {key: str(value).replace("\\\\", "\\\\" * 2).replace("|", "\\\\|") for key, value in flat.items()}
        print("|".join([f"Job Id: {name}", *(f"{key}={value}" for key, value in escaped.items())]) + "\\n")
sys.exit(code)
"""


def qstat(jobs: dict[str, dict], history: bool = True) -> str:
    """Return a stand-in for qstat, in bash. Jobs without `Job_Owner` belong to this user."""
    owner = {"Job_Owner": f"{pwd.getpwuid(os.getuid()).pw_name}@login1.cluster"}
    known = {name: owner | job for name, job in jobs.items()}
    source = f"JOBS, HISTORY = {known!r}, {history}{QSTAT}"
    return f'exec {shlex.quote(sys.executable)} -I -S -c {shlex.quote(source)} "$@"'


class Desk:
    """A login node with a project, a complete environment, and a scheduler that accepts every job."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.bin, self.project, self.venv = folder / "bin", folder / "my project", folder / "venv"
        self.set, self.capfd = monkeypatch, capfd
        for made in (self.bin, self.venv, self.project):
            made.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(next(p for f in os.get_exec_path() if (p := Path(f) / tool).exists()))
        for name in FILES + JUNK:
            self.write(name, (fork.REPO / name).read_text() if name in SOURCED else f"# {name}\n")
        self.write(".gitignore", "/runs/\n/outputs/\n__pycache__/\n")
        self.write("pyproject.toml", '[project]\nname = "my-project"\n')
        self.scheduler("echo 17")
        for name in ("scontrol", "scancel", "qrls", "qdel"):
            self.command(name, TELLS_NO_LIMIT + RECORDS if name == "scontrol" else RECORDS)
        self.command("sinfo", "echo 'all*|1000|128|1:128:1|1000000|gpu:8|x|n1'")
        for name in [name for name in os.environ if scheduler.LEAKED_VARIABLES.match(name)]:
            monkeypatch.delenv(name)
        monkeypatch.delenv("PYTHONPATH", raising=False)
        monkeypatch.setenv("HPC_RUN_DIR", "")  # so that monkeypatch restores it afterwards
        monkeypatch.delenv("HPC_RUN_DIR")
        monkeypatch.setenv("PATH", str(self.bin))
        monkeypatch.setattr(sys, "prefix", str(self.venv))
        for module in (project, directory, environment, snapshot):
            monkeypatch.setattr(module, "PROJECT", self.project)
        monkeypatch.setattr(scripts, "LIBRARY", self.project / "src" / "hpc")
        monkeypatch.setattr(snapshot, "distributions", lambda: [])
        monkeypatch.chdir(folder)
        self.complete()

    def write(self, name: str, text: str) -> None:
        (self.project / name).parent.mkdir(parents=True, exist_ok=True)
        (self.project / name).write_text(text)

    def complete(self) -> None:
        """Mark the environment as complete, as env.sh does."""
        texts = [(self.project / name).read_text().rstrip() for name in ("constraints.txt", "pyproject.toml")]
        (self.venv / f".complete-{project.project_name()}").write_text("\n".join(["pinned", *texts]))

    def scheduler(self, behaviour: str) -> None:
        for name in ("sbatch", "qsub"):
            self.command(name, STUB + behaviour)

    def command(self, name: str, behaviour: str) -> None:
        """Make a command of the scheduler."""
        (self.bin / name).unlink(missing_ok=True)
        (self.bin / name).write_text(f"#!{self.bin / 'bash'}\n{behaviour}\n")
        (self.bin / name).chmod(0o755)

    def type(self, *arguments: str) -> int:
        """Run `python submit.py ...` and return its exit code; `out` and `err` hold its output."""
        self.set.setattr(sys, "argv", ["submit.py", *arguments])
        code = 0
        try:
            with errors.exit_on_config_error():
                submit.main()
        except SystemExit as end:
            code = int(end.code or 0)
        self.out, self.err = self.capfd.readouterr()
        return code

    def noted(self, name: str) -> str:
        path = self.bin / name
        return path.read_text() if path.exists() else ""

    def runs(self) -> list[Path]:
        """Return all run directories but the old one."""
        return [path for path in (self.project / "runs").iterdir() if path.name != "old"]

    def submitted(self) -> dict:
        return json.loads((self.runs()[0] / "submitted.json").read_text())


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Desk]:
    umask = os.umask(0o022)
    yield Desk(tmp_path, monkeypatch, capfd)
    os.umask(umask)
