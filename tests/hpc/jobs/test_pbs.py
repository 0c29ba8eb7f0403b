"""Check the scripts for PBS, and what they do with stand-ins for PBS, its launchers and the ranks."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from fork import REPO

from hpc.config import project
from hpc.config.errors import ExitCode
from hpc.jobs import pbs
from hpc.jobs.job import Job
from hpc.jobs.print_bash import SOURCED_FILES
from hpc.launch import placement
from hpc.run import history, job_logs

pytestmark = pytest.mark.slow

RECORDED = Path(__file__).parent / "recorded"
SOURCED = [project.LIBRARY / "jobs" / file for file in SOURCED_FILES["pbs"]]
WORK = Path("/home/ana")
JOB = Job(
    name="digits", nodes=2, tasks_per_node=4, gpus_per_node=4, cores_per_task=8, memory_gb=256, walltime_seconds=5400,
    is_exclusive=True, account="proj-7", partition="gpu", qos=None, constraint=None, mail=None, mail_on=(),
    request="ncpus=32:ngpus=4:mpiprocs=1", options=("-l filesystems=home:eagle", "-m n"), launcher="pbs_tmrsh",
    container=None, cluster="pbs", env={"NCCL_DEBUG": "WARN"}, interface=None, node_local=None,
    stage_env=False, chain=1, retries=3, arguments=(), run_dir=WORK / "runs/digits",
    code=WORK / "runs/digits/code", work_dir=WORK, venv=WORK / ".venv",
)  # fmt: skip
SUPEK = replace(
    JOB, tasks_per_node=1, memory_gb=None, is_exclusive=False, request="ncpus=4:ngpus=1:mpiprocs=1", options=(),
    account=None, launcher="mpiexec -n 2 --ppn 1 --cpu-bind none", container='apptainer exec --nv "$IMAGE_PATH"',
    cluster="supek", env={}, interface="hsn0",
)  # fmt: skip
ARRAY = replace(JOB, run_dir=None, members_file=WORK / "runs/sweep/members", num_members=16, at_once=4)
SHIPPED = {"default": JOB, "supek": SUPEK, "array": ARRAY}
ODD = [WORK / "with space", WORK / "größe", WORK / "it's", WORK / 'a "b" $HOME `id` ; c', WORK / "50%: #1"]


# -- Text of the scripts --


@pytest.mark.parametrize("name", SHIPPED)
def test_texts_are_as_recorded(name: str) -> None:
    said = pbs.render_job_script(SHIPPED[name])
    path = RECORDED / f"{name}.pbs"
    if os.environ.get("RECORD"):
        path.write_text(said, encoding="utf-8")
        pytest.fail(f"{path.name} is recorded: look at the difference, and test again without RECORD")
    assert said == path.read_text(encoding="utf-8"), "if this is meant: RECORD=1 pytest tests/hpc/jobs -k recorded"


def directives(text: str) -> list[list[str]]:
    """Return each option that qsub reads, with its value: those before the first command, quoted as in a shell."""
    shebang, *lines = text.split("\n")
    assert shebang == "#!/bin/bash"
    top = lines[: next(i for i, line in enumerate(lines) if not line.startswith("#PBS "))]
    assert text.count("#PBS -") == len(top), "qsub reads the #PBS lines before the first command only"
    assert not any(re.search(r"\$(?!HOME)|\\$", line) for line in top), "nothing is expanded in a directive"
    return [shlex.split(line)[1:] for line in top]


def test_mail_is_sent_at_the_moments_that_are_named() -> None:
    assert not {"-M", "-m"} & {option for option, *_ in directives(pbs.render_job_script(SUPEK))}
    words = directives(pbs.render_job_script(replace(SUPEK, mail="ana@uni.hr", mail_on=("end", "fail", "begin"))))
    assert ["-M", "ana@uni.hr"] in words and ["-m", "eab"] in words


def test_directives_follow_from_the_fields() -> None:
    assert directives(pbs.render_job_script(JOB)) == [
        ["-N", "digits"], ["-A", "proj-7"], ["-q", "gpu"],
        ["-l", "select=2:ncpus=32:ngpus=4:mpiprocs=1:mem=256gb"], ["-l", "place=scatter:excl"],
        ["-l", "walltime=01:30:00"], ["-r", "y"], ["-j", "oe"], ["-k", "oed"], ["-o", "/home/ana/runs/digits/"],
        ["-l", "filesystems=home:eagle"], ["-m", "n"],
    ]  # fmt: skip
    shared = replace(SUPEK, qos="high", constraint="system=polaris", partition=None, walltime_seconds=100 * 3600)
    said = directives(pbs.render_job_script(shared))
    assert ["-l", "select=2:ncpus=4:ngpus=1:mpiprocs=1:system=polaris"] in said and ["-l", "place=scatter"] in said
    assert ["-l", "qos=high"] in said and ["-l", "walltime=100:00:00"] in said
    assert not {"-q", "-A", "-J"} & {option for option, _ in said}


def test_an_array_has_as_many_jobs_as_members() -> None:
    assert ["-J", "0-15%4"] in directives(pbs.render_job_script(ARRAY))
    assert ["-J", "0-15"] in directives(pbs.render_job_script(replace(ARRAY, at_once=None)))
    assert ["-o", "/home/ana/runs/sweep/"] in directives(pbs.render_job_script(ARRAY))
    # qsub: "illegal -J value" for 0-0
    assert "-J" not in {option for option, _ in directives(pbs.render_job_script(replace(ARRAY, num_members=1)))}


@pytest.mark.parametrize("path", ODD, ids=str)
def test_odd_paths_reach_qsub_and_bash_whole(path: Path) -> None:
    job = replace(JOB, run_dir=path, work_dir=path, venv=path, name="Größe 2", account="a b")
    said = directives(pbs.render_job_script(job))
    assert ["-N", "Gr__e_2"] in said and ["-A", "a b"] in said
    # qsub takes printable ASCII only
    assert (["-o", f"{path}/"] in said) == str(path).isascii()
    names = ("run_dir", "work_dir")
    lines = [line for line in pbs.render_job_script(job).split("\n") if line.startswith(("run_dir=", "work_dir="))]
    shown = [f'printf "%s\\n" "${name}"' for name in names]
    assert bash("\n".join([*lines, *shown])) == f"{path}\n" * len(names)


def test_values_of_the_environment_may_name_variables() -> None:
    job = replace(JOB, env={"A": "$HOME/x", "B": "say 'hi' ;"})
    lines = [line for line in pbs.render_job_script(job).split("\n") if line.startswith(("export A=", "export B="))]
    assert bash("\n".join(["HOME=/h", *lines, 'printf "%s|" "$A" "$B"'])) == "/h/x|say 'hi' ;|"


def test_the_launcher_of_a_site_is_called_with_the_command_of_a_rank() -> None:
    assert "launch_ranks" not in pbs.render_job_script(JOB), "pbs_tmrsh is called by pbs.bash"
    assert '\nlaunch_ranks() { exec mpiexec -n 2 --ppn 1 --cpu-bind none "$@"; }\n' in pbs.render_job_script(SUPEK)


@pytest.mark.soak
@pytest.mark.parametrize("name", [*SHIPPED, "by hand", "staged"])
def test_bash_and_shellcheck_find_nothing(name: str, tmp_path: Path) -> None:
    by_hand = replace(JOB, run_dir=None, code=None, work_dir=None, venv=None, arguments=("trainer=ddp", "name=a b"))
    staged = replace(JOB, node_local="$TMPDIR", stage_env=True)
    job = (SHIPPED | {"by hand": by_hand, "staged": staged})[name]
    text = pbs.render_job_script(job)
    assert text.isascii() and "\r" not in text and text.endswith("\n")
    path = tmp_path / "job.sh"
    path.write_text(text)
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck"):
        # SC1090, SC2034, SC2154: it sources what cat or Python print.
        check = ["shellcheck", "-x", f"--source-path={REPO}", f"--source-path={project.PROJECT}"]
        found = subprocess.run(
            [*check, "--exclude=SC1090,SC2034,SC2154", *SOURCED, path], capture_output=True, text=True
        )
        assert found.returncode == 0, found.stdout


def bash(script: str) -> str:
    return subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True).stdout


# -- Behaviour of the scripts, with stand-ins for PBS, its launchers, and the ranks --

# As the real ones (OpenPBS 23.06; PALS): pbs_tmrsh starts a task on a host of the job, in $HOME and in a session of its
# own, with PBS's own variables only, and returns its exit code; it passes no signal on. mpiexec starts one per rank,
# with the whole environment, passes TERM on, and returns the worst code.
TASK = """
import os, signal, subprocess, sys
lines = open(os.environ["PBS_NODEFILE"]).read().split()
hosts = list(dict.fromkeys(lines))

def start(host, command, environ, cwd):
    def listen():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

    task = subprocess.Popen(command, env=environ, cwd=cwd, start_new_session=True, preexec_fn=listen)
    with open(os.environ["HOME"] + "/tasks", "a") as noted:
        noted.write(f"{host} {task.pid}\\n")
    return task

def ended(task):
    code = task.wait()
    return code if code >= 0 else 128 - code
"""
TMRSH = f"""{TASK}
host, *command = sys.argv[1:]
if host not in hosts:
    sys.exit(f"{{host}}: not a node in job")
number = hosts.index(host)
environ = {{k: v for k, v in os.environ.items() if k.startswith("PBS_") and (number or k != "PBS_NODEFILE")}}
environ |= {{"PBS_NODENUM": str(number), "PATH": "/bin:/usr/bin", "HOME": os.environ["HOME"]}}
sys.exit(ended(start(host, command, environ, os.environ["HOME"])))
"""
MPIEXEC = f"""{TASK}
size, per_node = int(sys.argv[2]), int(sys.argv[4])
command = sys.argv[sys.argv.index("/bin/bash"):]
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
tasks = []
for rank in range(size):
    place = {{"PALS_RANKID": rank, "PMI_SIZE": size, "PALS_LOCAL_RANKID": rank % per_node, "PALS_LOCAL_SIZE": per_node}}
    environ = os.environ | {{key: str(value) for key, value in place.items()}} | {{"PBS_NODENUM": "0"}}
    tasks.append(start(hosts[rank // per_node], command, environ, None))
signal.signal(signal.SIGTERM, lambda *_: [os.kill(task.pid, signal.SIGTERM) for task in tasks if task.poll() is None])
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
sys.exit(max([ended(task) for task in tasks]))
"""

# As qsub: copies the script, which must exist, and numbers jobs. `away`: how often the server is unreachable.
QSUB = """
import os, sys
home, script = os.environ["HOME"], sys.argv[-1]
with open(home + "/qsub", "a+") as noted:
    noted.write("\\0".join([os.getcwd(), *sys.argv[1:]]) + "\\n")
    noted.seek(0)
    count = len(noted.readlines())
if not os.path.exists(script):
    sys.exit("qsub: script file:: No such file or directory")
if os.path.exists(home + "/away") and count <= int(open(home + "/away").read()):
    sys.exit("Connection refused\\nqsub: cannot connect to server pbsctl (errno=15010)")
print(f"{17 + count}.server")
"""
# Replaces python: records its arguments, then does what the test says.
PYTHON = """
import json, os, shutil, signal, sys, time
from pathlib import Path
if sys.argv[2:3] == ["hpc.jobs.print_bash"]:
    sys.exit(print("".join(Path(os.environ["PYTHONPATH"], "hpc/jobs", file).read_text() for file in SOURCED_FILES)))
if sys.argv[2:3] == ["hpc.run.snapshot"]:
    shutil.copytree(".", Path(sys.argv[3], "code"), ignore=shutil.ignore_patterns("runs"))
    sys.exit()
rank, run_dir = int(os.environ.get("HPC_RANK") or os.environ["PALS_RANKID"]), Path(os.environ["HPC_RUN_DIR"])

def note(name, text):
    (run_dir / (name + ".part")).write_text(text)
    (run_dir / (name + ".part")).rename(run_dir / name)

def outcome(word, attempt=1):
    note("verdict", f"attempt {attempt}\\nstep 5\\noutcome {word}\\n")

facts = dict(argv=sys.argv[1:], environ=dict(os.environ), pid=os.getpid(), parent=os.getppid())
note(f"seen-{rank}", json.dumps(facts | {"cwd": os.getcwd()}))
print("said by", rank, flush=True)
exec((Path(__file__).parents[1] / "behaviour").read_text(), globals())
"""
RANKS = range(4)
WAIT = "while True: time.sleep(0.02)\n"
FINISH = "rank or outcome('finished')\n"
COUNT_TERM = """
def term(*_):
    with open(run_dir / f"term-{rank}", "a") as stream:
        stream.write("x")
signal.signal(signal.SIGTERM, term)
note(f"ready-{rank}", "")
"""
# Ranks agree to stop: one of them has got TERM.
SAVE = """
while not list(run_dir.glob("term-*")): time.sleep(0.02)
time.sleep(0.5)
note(f"saved-{rank}", "")
rank or outcome("continue")
sys.exit(85)
"""


class Pbs:
    """A simulated PBS with an ordinary user's home, project and run directory."""

    def __init__(self, folder: Path) -> None:
        self.home, self.bin, self.work = folder / "home", folder / "bin", folder / "my work"
        self.run_dir = self.work / "runs" / "it's 1"
        self.code, self.venv, self.nodefile = self.run_dir / "code", folder / "the venv", folder / "nodefile"
        for made in (self.home, self.bin, self.code, self.venv / "bin"):
            made.mkdir(parents=True)
        self.program(self.bin / "pbs_tmrsh", TMRSH)
        self.program(self.bin / "mpiexec", MPIEXEC)
        self.program(self.bin / "qsub", QSUB)
        self.program(self.venv / "bin" / "python", f"SOURCED_FILES = {SOURCED_FILES['pbs']}\n{PYTHON}")
        (self.code / "env.sh").write_text('export PATH="$VENV/bin:$PATH"\n')
        self.behaviour(FINISH)
        self.job = replace(
            JOB, run_dir=self.run_dir, code=self.code, work_dir=self.work, venv=self.venv, tasks_per_node=2
        )
        self.started: list[subprocess.Popen[bytes]] = []

    def program(self, path: Path, text: str) -> None:
        path.write_text(f"#!{sys.executable}\n{text}")
        path.chmod(0o755)

    def load(self, line: str) -> None:
        """Write the cluster's .sh file, which env.sh sources, too."""
        file = self.code / "configs" / "cluster" / "pbs.sh"
        file.parent.mkdir(parents=True)
        file.write_text(f"{line}\n")
        (self.code / "env.sh").write_text(f'{line}\nexport PATH="$VENV/bin:$PATH"\n')

    def behaviour(self, text: str) -> None:
        (self.venv / "behaviour").write_text(text)

    def start(
        self, job: Job | None = None, hosts: str = "p1 p2", tick: float = 0.05, **environ: str
    ) -> subprocess.Popen[bytes]:
        """Submit a job and start it; `tick` sets the seconds between two polls, instead of one second."""
        job = job or self.job
        folder = job.members_file.parent if job.members_file else self.run_dir
        (folder / "job.sh").write_text(pbs.render_job_script(job))
        members = [Path(line) for line in job.members_file.read_text().splitlines()] if job.members_file else []
        for code in [self.code, self.work, *(place / "code" for place in [folder, *members])]:
            self.share(code, tick)
        self.nodefile.write_text("".join(f"{host}\n" for host in hosts.split()))
        command, environ = ["/bin/bash", str(folder / "job.sh")], self.environ() | environ
        self.started += [subprocess.Popen(command, cwd=self.home, env=environ, start_new_session=True)]
        return self.started[-1]

    def share(self, code: Path, tick: float) -> None:
        """Put the files that the scripts source where they look for them."""
        (code / "src/hpc/jobs").mkdir(parents=True, exist_ok=True)
        texts = {file.name: file.read_text() for file in SOURCED}
        assert sum(text.count("sleep 1\n") for text in texts.values()) == 1
        for name, text in texts.items():
            (code / "src/hpc/jobs" / name).write_text(re.sub("sleep 15?\n", f"sleep {tick}\n", text))

    def environ(self) -> dict[str, str]:
        """Return the environment of job 17 on its first host."""
        environ = {"PBS_JOBID": "17.server", "PBS_NODEFILE": str(self.nodefile), "PBS_NODENUM": "0"}
        environ |= {"PBS_O_WORKDIR": str(self.work), "PBS_ENVIRONMENT": "PBS_BATCH", "HOME": str(self.home)}
        return environ | {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "OMP_NUM_THREADS": "32",
        }

    def run(
        self, job: Job | None = None, hosts: str = "p1 p2", seconds: int = 30, tick: float = 0.05, **environ: str
    ) -> int:
        return self.start(job, hosts, tick, **environ).wait(timeout=seconds)

    def seen(self, rank: int, run_dir: Path | None = None) -> dict:
        return json.loads(((run_dir or self.run_dir) / f"seen-{rank}").read_text())

    def log(self, name: str = "job-17.log") -> str:
        return (self.run_dir / name).read_text()

    def submitted(self) -> list[list[str]]:
        """Return the directory and the arguments of each qsub."""
        noted = self.home / "qsub"
        return [line.split("\0") for line in noted.read_text().splitlines()] if noted.exists() else []

    def checkpoint(self, step: int) -> None:
        (self.run_dir / "checkpoints" / f"step-{step:09}").mkdir(parents=True)

    def tasks(self) -> list[int]:
        """Return the process ids of the ranks."""
        return [int(line.split()[1]) for line in (self.home / "tasks").read_text().splitlines()]

    def end_as_pbs_does(self, job: subprocess.Popen[bytes]) -> None:
        """Send TERM to what PBS's daemon on the first host knows there: the job's script, and tasks of this host."""
        self.end_tasks_of_the_first_host()
        os.killpg(job.pid, signal.SIGTERM)

    def end_tasks_of_the_first_host(self) -> None:
        first = self.nodefile.read_text().split()[0]
        for line in (self.home / "tasks").read_text().splitlines():
            host, pid = line.split()
            if host == first:
                os.killpg(int(pid), signal.SIGTERM)

    def wait_for(self, name: str) -> None:
        """Wait until each rank has made this file."""
        wait_until(lambda: all((self.run_dir / f"{name}-{rank}").exists() for rank in RANKS))

    def end(self) -> None:
        for job in self.started:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        for pid in self.tasks() if (self.home / "tasks").exists() else []:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Pbs]:
    made = Pbs(tmp_path)
    yield made
    made.end()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the process ended before the file was opened or read
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_each_rank_is_started_as_told(cluster: Pbs) -> None:
    assert cluster.run() == 0, cluster.log()
    seen = [cluster.seen(rank) for rank in RANKS]
    for rank, one in enumerate(seen):
        environ = one["environ"]
        assert one["argv"] == [str(cluster.code / "train.py"), f"resume={cluster.run_dir}"]
        assert one["cwd"] == str(cluster.work)
        place = placement.read_placement(environ)
        assert place == placement.Placement("pbs_tmrsh", rank, 4, rank % 2, 2, "p1") and environ["MASTER_ADDR"] == "p1"
        assert environ["OMP_NUM_THREADS"] == "8" and environ["PYTHONUNBUFFERED"] == environ["PYTHONFAULTHANDLER"] == "1"
        assert environ["PYTHONDONTWRITEBYTECODE"] == "1" and environ["PYTHONHASHSEED"] == "0"
        assert environ["NCCL_DEBUG"] == "WARN" and environ["VENV"] == str(cluster.venv) and environ["USER"]
        assert environ["PATH"].startswith(f"{cluster.venv}/bin:") and str(cluster.bin) not in environ["PATH"]
        assert "CUDA_VISIBLE_DEVICES" not in environ
        assert abs(int(environ["HPC_JOB_END"]) - time.time() - 5400) < 30
        assert f"said by {rank}\n" in cluster.log(f"node-{rank // 2}-17.log")
    (port,) = {one["environ"]["MASTER_PORT"] for one in seen}
    assert 10000 <= int(port) < 30000
    assert "finished" in cluster.log()


def test_variables_of_the_shell_reach_no_rank(cluster: Pbs) -> None:
    leaked = {
        "RANK": "7",
        "MASTER_ADDR": "old",
        "MASTER_PORT": "1",
        "PYTHONPATH": "/old",
        "rank": "3",
    }
    assert cluster.run(replace(cluster.job, launcher="mpiexec -n 4 --ppn 2"), **leaked) == 0, cluster.log()
    environ = cluster.seen(3)["environ"]
    assert (
        not {"RANK", "PYTHONPATH"} & set(environ) and environ["MASTER_ADDR"] == "p1" and environ["MASTER_PORT"] != "1"
    )


def test_the_first_failure_ends_the_job(cluster: Pbs) -> None:
    """Let the others wait for the rank that has failed: they have a minute to note it."""
    cluster.behaviour("if rank == 3: raise SystemExit(3)\n" + WAIT)
    assert cluster.run(tick=0.01) == 3, "not that of a launcher which was killed"
    assert "the worst with code 3" in cluster.log()


def test_the_code_of_a_failure_comes_through(cluster: Pbs) -> None:
    cluster.behaviour("raise SystemExit(3 * (rank == 3))")
    assert cluster.run() == 3


def test_without_a_verdict_nothing_is_a_success(cluster: Pbs) -> None:
    cluster.behaviour("pass")
    (cluster.run_dir / "verdict").write_text("attempt 1\nstep 5\noutcome continue\n")  # left by the previous attempt
    assert cluster.run() == 1


@pytest.mark.parametrize(("word", "code"), [("continue", 85), ("failed", 1), ("finished", 0)])
def test_the_verdict_decides(cluster: Pbs, word: str, code: int) -> None:
    cluster.behaviour(f"rank or outcome({word!r})")
    assert cluster.run() == code
    assert word in cluster.log()
    assert len(cluster.submitted()) == (word == "continue")


@pytest.mark.parametrize(
    ("word", "code", "chain", "after"),
    [("finished", 0, 1, ""), ("finished", 0, 2, ""), ("failed", 2, 2, ""), ("failed", 2, 1, "16")],
)
def test_what_is_queued_ends_with_its_run(cluster: Pbs, word: str, code: int, chain: int, after: str) -> None:
    """Check that further jobs of a finished run end at once.

    They come from `qsub job.sh`, from a chain, or from the job before.
    """
    (cluster.run_dir / "verdict").write_text(f"attempt 2\nstep 9\noutcome {word}\n")
    assert cluster.run(replace(cluster.job, chain=chain), HPC_AFTER=after) == code
    assert word in cluster.log() and not (cluster.home / "tasks").exists() and (cluster.run_dir / "verdict").exists()
    assert not cluster.submitted()


def test_a_finished_chain_says_what_becomes_of_its_other_jobs(cluster: Pbs) -> None:
    cluster.behaviour(FINISH)
    assert cluster.run(replace(cluster.job, chain=3)) == 0
    assert "PBS deletes the jobs of the chain that are left, as the run is finished" in cluster.log()


@pytest.mark.parametrize("earlier", ["continue", "failed"])
def test_a_start_that_is_rejected_leaves_the_verdict(cluster: Pbs, earlier: str) -> None:
    """Check that only an attempt that has started removes the verdict.

    Neither a second job of the run nor a failed start may do so.
    """
    said = f"attempt 4\nstep 9\noutcome {earlier}\n"
    (cluster.run_dir / "verdict").write_text(said)
    cluster.behaviour("raise SystemExit(2)")
    assert cluster.run() == 2 and not cluster.submitted()
    assert cluster.run(hosts="p3 p3") == 2
    assert cluster.run(replace(cluster.job, interface="hsn7")) == 2
    assert (cluster.run_dir / "verdict").read_text() == said
    cluster.behaviour("raise SystemExit(9)")  # fails before the attempt has started
    assert cluster.run() == 9 and len(cluster.submitted()) == 1
    assert (cluster.run_dir / "verdict").read_text() == said
    words = dict(word.split("=") for word in cluster.submitted()[0][2].split(","))
    assert cluster.run(**words) == 9, "the job that goes on is meant to try again, too"
    assert len(cluster.submitted()) == 2


def test_a_second_job_does_not_take_the_first_ones_verdict_for_its_own(cluster: Pbs) -> None:
    cluster.behaviour(
        "rank or outcome('continue')\nraise SystemExit(2)"
    )  # the first job ends while this one is rejected
    assert cluster.run() == 2 and not cluster.submitted() and "rejected" in cluster.log()


# -- The next job --


def test_a_run_that_failed_can_be_submitted_again(cluster: Pbs) -> None:
    (cluster.run_dir / "verdict").write_text("attempt 2\nstep 9\noutcome failed\n")
    assert cluster.run() == 0 and cluster.seen(0)


@pytest.mark.parametrize("job", ["17.server", "17[3].server"])
def test_a_job_submits_the_next(cluster: Pbs, job: str) -> None:
    cluster.behaviour("rank or outcome('continue')")
    assert cluster.run(PBS_JOBID=job) == 85
    (submitted,) = cluster.submitted()
    *said, option, value, script = submitted
    assert [*said, script] == [str(cluster.work), "-v", "HPC_AFTER=17", str(cluster.run_dir / "job.sh")]
    if "[" in job:  # a dependency on one member is not possible: the next job waits long enough for the ranks to end
        assert option == "-a" and 60 < time.mktime(time.strptime(value, "%Y%m%d%H%M.%S")) - time.time() < 121
    else:
        assert (option, value) == ("-W", "depend=afterany:17.server")
    assert "continues as job 18.server" in cluster.log()


def test_a_run_goes_on_from_job_to_job(cluster: Pbs) -> None:
    """Start each job as PBS does: with the variables of -v, after the job before has ended, and unattended."""
    saved = "(run_dir / 'checkpoints/step-000000005').mkdir(exist_ok=True, parents=True)\nrank or outcome('continue')\n"
    starts = {f"{saved}raise SystemExit(85)": 85, "raise SystemExit(9)": 9, "rank or outcome('finished', 3)": 0}
    told: dict[str, str] = {}
    for number, (behaviour, code) in enumerate(starts.items(), 17):
        cluster.behaviour(behaviour)
        assert cluster.run(PBS_JOBID=f"{number}.server", **told) == code, cluster.log(f"job-{number}.log")
        if code:
            assert history.read_run(cluster.run_dir, "digits").job == f"{number + 1}", "it waits"
            told = dict(word.split("=") for word in cluster.submitted()[-1][2].split(","))
            assert told["HPC_AFTER"] == f"{number}"
    assert "the run's verdict is: \n" in cluster.log("job-18.log"), "the verdict of the job before is not its own"
    assert len(cluster.submitted()) == 2 and "the run's verdict is: finished" in cluster.log("job-19.log")


def test_the_next_job_is_noted_where_report_reads_it(cluster: Pbs) -> None:
    cluster.behaviour("rank or outcome('continue')")
    (cluster.code.parent / "config.yaml").touch()
    (cluster.code.parent / "submitted.json").write_text('{"time": 1, "scheduler": "pbs", "jobs": ["17.server"]}')
    assert cluster.run() == 85
    run = history.read_run(cluster.run_dir, "digits")
    assert (run.jobs, run.job) == (["17", "18"], "18")


def answer_qstat(cluster: Pbs, first: str, later: str) -> None:
    """Let qstat answer once as at the start of a job, and another way after that."""
    asked = f"asked = os.environ['HOME'] + '/asked'\nsaid = {later!r} if os.path.exists(asked) else {first!r}\n"
    answer = "print(said) if said.startswith('Job Id') else sys.exit('qstat: ' + said)\n"
    cluster.program(cluster.bin / "qstat", f"import os, sys\n{asked}open(asked, 'w').close()\n{answer}")


def qstat_of(state: str, count: int) -> str:
    return f"Job Id: 17.server\n    job_state = {state}\n    exec_host = p1/0+p2/0\n    run_count = {count}\n    x = y"


AWAY = "cannot connect to server pbsctl (errno=15010)"


@pytest.mark.parametrize(
    ("later", "jobs"),
    [
        (qstat_of("R", 1), 1), (AWAY, 1), (qstat_of("R", 2), 0), (qstat_of("R", 10), 0), (qstat_of("Q", 1), 0),
        ("Unknown Job Id 17.server", 0), ("17.server Job has finished, use -x or -H", 0),
    ],
    ids=["runs", "away", "again", "tenth", "queued", "unknown", "finished"],
)  # fmt: skip
def test_a_script_that_outlived_its_job_submits_no_other(cluster: Pbs, later: str, jobs: int) -> None:
    """Check that only one next job is queued: PBS starts a job again when it has lost its first host."""
    answer_qstat(cluster, qstat_of("R", 1), later)
    cluster.behaviour("rank or outcome('continue')\nraise SystemExit(85)")
    assert cluster.run() == 85 and len(cluster.submitted()) == jobs
    assert ("which is still here, submits no job" in cluster.log()) == (not jobs) and "could not" not in cluster.log()


def test_starts_of_one_job_are_counted_like_those_of_several(cluster: Pbs) -> None:
    (cluster.run_dir / "stalled").write_text("1\n")
    for count, stalled in ((1, "1\n"), (2, "2\n"), (3, "3\n")):
        answer_qstat(cluster, qstat_of("R", count), qstat_of("R", count))
        cluster.behaviour("raise SystemExit(9)")
        assert cluster.run() == 9 and (cluster.run_dir / "stalled").read_text() == stalled
    assert len(cluster.submitted()) == 2 and "3 starts in a row brought no newer checkpoint" in cluster.log()


def test_a_host_that_is_cut_off_for_a_while_submits_later(cluster: Pbs) -> None:
    """Check that only a missing script or program counts as permanent, not a missing file of the network's."""
    cluster.behaviour("rank or outcome('continue')")
    (cluster.home / "away").write_text("1")
    cluster.program(cluster.bin / "qsub", QSUB.replace("Connection refused", "No such file or directory"))
    assert cluster.run() == 85 and len(cluster.submitted()) == 2 and "continues as job 19.server" in cluster.log()


@pytest.mark.parametrize(("away", "tries"), [(3, 4), (99, 20)])
def test_a_server_that_is_away_is_asked_again(cluster: Pbs, away: int, tries: int) -> None:
    cluster.behaviour("rank or outcome('continue')")
    (cluster.home / "away").write_text(f"{away}")
    assert cluster.run() == 85
    assert len(cluster.submitted()) == tries and "cannot connect to server" in cluster.log()
    assert ("continues as job 21.server" in cluster.log()) == (away == 3)
    assert ("could not submit the next job from here; to continue: qsub " in cluster.log()) == (away == 99)


def test_at_the_end_of_its_time_too_the_server_is_asked_again(cluster: Pbs) -> None:
    cluster.behaviour(COUNT_TERM + WAIT)
    (cluster.home / "away").write_text("2")
    job = cluster.start(replace(cluster.job, walltime_seconds=1))
    cluster.wait_for("ready")
    job.terminate()
    wait_until(lambda: len(cluster.submitted()) == 3)
    said = cluster.log()
    assert job.wait(timeout=20) == 1 and len(cluster.submitted()) == 3
    assert "the ranks ended" not in said, "PBS kills this script when its ranks do not end"


def test_a_job_of_a_chain_leaves_that_to_the_chain(cluster: Pbs) -> None:
    cluster.behaviour("rank or outcome('continue')")
    assert cluster.run(replace(cluster.job, chain=2)) == 85 and not cluster.submitted()


@pytest.mark.parametrize("qsub", ["missing", "rejects"])
def test_where_a_node_cannot_submit_it_says_what_to_type(cluster: Pbs, qsub: str) -> None:
    cluster.behaviour("rank or outcome('continue')")
    (cluster.bin / "qsub").unlink()
    if qsub == "rejects":
        cluster.program(cluster.bin / "qsub", "raise SystemExit('Bad UID for job execution')")
    assert cluster.run() == 85
    found = re.search("could not submit .* to continue: (.*)", cluster.log())
    assert found and shlex.split(found[1]) == ["qsub", str(cluster.run_dir / "job.sh")]


def test_crashes_without_progress_end_the_run(cluster: Pbs) -> None:
    cluster.behaviour("raise SystemExit(9)")
    for count, after in ((1, ""), (2, "16"), (3, "17")):
        assert cluster.run(HPC_AFTER=after) == 9
        assert (cluster.run_dir / "stalled").read_text() == f"{count}\n"
        assert len(cluster.submitted()) == min(count, 2)
    assert "3 starts in a row brought no newer checkpoint" in cluster.log() and "to continue: qsub " in cluster.log()
    assert cluster.run() == 9 and len(cluster.submitted()) == 3, "somebody who submits it again means it"


def test_a_damaged_count_of_starts_counts_from_none_and_is_not_executed(cluster: Pbs) -> None:
    cluster.behaviour("raise SystemExit(9)")
    (cluster.run_dir / "stalled").write_text("a[$(touch executed)]\n")
    assert cluster.run(HPC_AFTER="16") == 9
    assert (cluster.run_dir / "stalled").read_text() == "1\n"
    assert not list(cluster.work.rglob("executed"))


def test_progress_counts_anew(cluster: Pbs) -> None:
    (cluster.run_dir / "stalled").write_text("2\n")
    (cluster.work / "scratch").mkdir()
    (cluster.run_dir / "checkpoints").symlink_to(cluster.work / "scratch")  # they may lie on another disk
    cluster.checkpoint(5)
    for name, count in [("step-000000009.part", 3), ("step-000000010", 0)]:
        cluster.behaviour(f"(run_dir / 'checkpoints/{name}').mkdir(exist_ok=True); raise SystemExit(9)")
        assert cluster.run(HPC_AFTER="16") == 9
        assert (cluster.run_dir / "stalled").read_text() == f"{count}\n"
    name = "part-002-00000-000000.pt"  # of a prediction
    (cluster.run_dir / "stalled").write_text("2\n")
    cluster.behaviour(
        f"(run_dir / 'predictions').mkdir(); (run_dir / 'predictions/{name}').touch(); raise SystemExit(9)"
    )
    assert cluster.run(HPC_AFTER="16") == 9
    assert (cluster.run_dir / "stalled").read_text() == "0\n"
    assert len(cluster.submitted()) == 2


def test_a_rejection_is_not_submitted_again(cluster: Pbs) -> None:
    cluster.behaviour("raise SystemExit(2)")
    assert cluster.run() == 2
    assert "rejected" in cluster.log() and not cluster.submitted()


def test_a_rank_that_was_killed_is_a_crash(cluster: Pbs) -> None:
    cluster.behaviour("os.kill(os.getpid(), signal.SIGKILL)")
    assert cluster.run() == 137 and len(cluster.submitted()) == 1


@pytest.mark.parametrize(
    ("seconds", "jobs"), [(5400, 0), (45, 0), (1, 1)], ids=["by qdel", "late by qdel", "at the end of its time"]
)
@pytest.mark.parametrize(("ranks", "code"), [(WAIT, 143), (SAVE, 85)], ids=["deaf", "save"])
def test_a_job_that_is_told_to_end(cluster: Pbs, ranks: str, code: int, seconds: int, jobs: int) -> None:
    """Check that a deleted job is not resubmitted.

    At the walltime limit a job is resubmitted once, without waiting for its ranks.
    """
    cluster.behaviour(COUNT_TERM + ranks)
    job = cluster.start(replace(cluster.job, walltime_seconds=seconds))
    cluster.wait_for("ready")
    cluster.end_as_pbs_does(job)
    wait_until(lambda: all((cluster.run_dir / f"term-{rank}").exists() for rank in (0, 1)))
    assert job.wait(timeout=20) == code
    assert len(cluster.submitted()) == jobs
    said = cluster.log()
    assert not jobs or said.index("continues as job") < said.index("the ranks ended"), (
        "it may be killed in a few seconds"
    )
    # PBS also kills a job that has lost a node (exit code 271), which looks the same.
    assert jobs or re.search("by qdel, or by PBS, which lost a node .* submit it again; to continue: qsub ", said)


def test_nodes_that_are_one_host_are_rejected(cluster: Pbs) -> None:
    assert cluster.run(hosts="p3 p3") == 2
    assert "asked for 2 nodes, PBS gave p3" in cluster.log() and "place=scatter" in cluster.log()
    assert not (cluster.home / "tasks").exists()


def test_several_lines_of_a_host_are_one_node(cluster: Pbs) -> None:
    assert cluster.run(hosts="p2 p2 p1 p1") == 0, cluster.log()
    assert len(cluster.tasks()) == 4
    assert {cluster.seen(rank)["environ"]["MASTER_ADDR"] for rank in RANKS} == {"p2"}
    assert cluster.log("node-0-17.log").count("said by 0") == 1


def test_outside_of_a_job_it_says_so(cluster: Pbs) -> None:
    cluster.share(cluster.code, 1)
    (cluster.run_dir / "job.sh").write_text(pbs.render_job_script(cluster.job))
    command = ["bash", str(cluster.run_dir / "job.sh")]
    ran = subprocess.run(command, env={"PATH": "/usr/bin:/bin"}, cwd=cluster.home, capture_output=True, text=True)
    assert ran.returncode == 2 and "qsub" in ran.stderr


@pytest.mark.parametrize("launcher", ["pbs_tmrsh", "mpiexec -n 4 --ppn 2"])
def test_term_reaches_the_ranks_and_is_waited_for(cluster: Pbs, launcher: str) -> None:
    """Check it with a launcher that ranks get TERM from, too, after that of PBS's daemon on the first host."""
    terms = "x" if launcher == "pbs_tmrsh" else "xx"
    all_have_come = f"while rank == 0 and (run_dir / 'term-0').read_text() != '{terms}': time.sleep(0.02)\n"
    cluster.behaviour(COUNT_TERM + SAVE.replace("time.sleep(0.5)\n", "time.sleep(0.5)\n" + all_have_come))
    job = cluster.start(replace(cluster.job, launcher=launcher))
    cluster.wait_for("ready")
    cluster.end_tasks_of_the_first_host()
    wait_until((cluster.run_dir / "term-0").exists)  # or the next one would be the same: signals are not counted
    os.killpg(job.pid, signal.SIGTERM)
    assert job.wait(timeout=20) == 85, cluster.log()
    assert cluster.log("term-0") == terms
    assert all((cluster.run_dir / f"saved-{rank}").exists() for rank in RANKS)
    assert re.search("the ranks ended.*; .* continue", cluster.log())


def test_the_verdict_is_waited_for_where_a_launcher_outlives_its_ranks(cluster: Pbs) -> None:
    """Let launchers wait for ever after TERM, as a real pbs_tmrsh that ignores it does."""
    waits = "import time\nsignal.signal(signal.SIGTERM, lambda *_: time.sleep(600))\nsys.exit(ended("
    cluster.program(cluster.bin / "pbs_tmrsh", TMRSH.replace("sys.exit(ended(", waits))
    cluster.behaviour(COUNT_TERM + SAVE)
    job = cluster.start(tick=1)
    cluster.wait_for("ready")
    cluster.end_as_pbs_does(job)
    assert job.wait(timeout=20) == 85, "not for a minute"


def test_the_exit_code_of_what_is_to_be_continued_is_the_ranks_own() -> None:
    assert re.findall(r"to_be_continued=(\d+)", SOURCED[1].read_text()) == [str(int(ExitCode.CONTINUE))]


def test_a_normal_stop_is_no_error(cluster: Pbs) -> None:
    """Check that ranks exit with 85 once they have saved, also on the other nodes without a signal."""
    cluster.behaviour(COUNT_TERM + "time.sleep(0.3 * rank)\nrank or outcome('continue')\nraise SystemExit(85)")
    assert cluster.run() == 85 and len(cluster.submitted()) == 1
    assert "worst" not in cluster.log()
    assert not list(cluster.run_dir.glob("term-*"))


@pytest.mark.parametrize("launcher", ["no-such-launcher", "mpiexec --ppn 1", "pbs_tmrsh"])
def test_a_launcher_that_starts_nothing_is_noticed(cluster: Pbs, launcher: str) -> None:
    """Check that a failed launcher is reported within seconds, in its own words.

    It is retried only if the run has started before.
    """
    for name in ("mpiexec", "pbs_tmrsh"):
        cluster.program(cluster.bin / name, "raise SystemExit('mpiexec: unknown option --ppn')")
    job = replace(cluster.job, launcher=launcher)
    code = 127 if launcher == "no-such-launcher" else 1
    assert cluster.run(job, tick=1, seconds=20) == 1, "it need not be waited for"
    assert not cluster.submitted()
    said = "no-such-launcher: " if launcher.startswith("no") else "mpiexec: unknown option --ppn"
    assert said in job_logs.first_logged_error(cluster.run_dir, "17") and "the launcher" in job_logs.first_logged_error(
        cluster.run_dir, "17"
    )
    (cluster.run_dir / "attempts.jsonl").touch()
    assert cluster.run(job) == code and len(cluster.submitted()) == 1, "it may be this node"


def test_an_environment_that_fails_is_told(cluster: Pbs) -> None:
    (cluster.code / "env.sh").write_text("echo no python here; return 1\n")
    assert cluster.run() == 2  # another job would fail like this one, so none is queued
    assert "no python here" in cluster.log() and not cluster.submitted() and not (cluster.home / "tasks").exists()
    (cluster.code / "env.sh").write_text('[ -z "$rank" ] || { echo no python there; return 1; }\n')
    assert cluster.run() == 2 and "rejected" in cluster.log() and not cluster.submitted()
    assert "no python there" in cluster.log("node-1-17.log")


def test_an_environment_is_unpacked_once_on_a_node(cluster: Pbs) -> None:
    (cluster.venv / "bin" / "mine").touch()
    subprocess.run(["tar", "-cf", f"{cluster.venv}.tar", "-C", cluster.venv, "."], check=True)
    cluster.program(
        cluster.bin / "tar", f"import os, sys; print('unpacked'); os.execv('{shutil.which('tar')}', sys.argv)"
    )
    cluster.load(f"export PATH={shlex.quote(str(cluster.bin))}:$PATH")
    assert cluster.run(replace(cluster.job, node_local="$HOME", stage_env=True)) == 0, cluster.log()
    assert all(cluster.seen(rank)["environ"]["PATH"].startswith(f"{cluster.home}/env-17/bin:") for rank in RANKS)
    said = [cluster.log(f"node-{node}-17.log").count("unpacked") for node in (0, 1)]
    assert sum(said) == 1, "the nodes are one machine here"


def test_an_array_member_runs_in_its_directory(cluster: Pbs) -> None:
    folder = cluster.work / "runs" / "the sweep"
    members = [folder / "0", folder / "ü 1"]
    for member in members:
        (member / "code").mkdir(parents=True)
        shutil.copy(cluster.code / "env.sh", member / "code")
    (folder / "members").write_text("".join(f"{member}\n" for member in members))
    job = replace(cluster.job, run_dir=None, members_file=folder / "members", num_members=2)
    assert cluster.run(job, PBS_JOBID="29[1].server", PBS_ARRAY_INDEX="1") == 0
    assert cluster.seen(3, members[1])["argv"] == [f"{members[1]}/code/train.py", f"resume={members[1]}"]
    assert (members[1] / "job-29.log").exists() and (members[1] / "node-0-29.log").exists()
    assert not list(members[0].glob("*-29.log"))


ASKED = """
python() {
    [ "$1" = "$run_dir/code/submit.py" ] && [ "$2 $3" = "--draw $run_dir" ] || return 1
    echo asked >>"$run_dir/asked"
    [ ! -e "$run_dir/rejects" ] && touch "$run_dir/config.yaml"
}
"""


def test_a_run_of_a_search_asks_once_before_its_ranks(cluster: Pbs) -> None:
    with (cluster.code / "env.sh").open("a") as stream:
        stream.write(ASKED)
    job = replace(cluster.job, is_search_trial=True)
    (cluster.run_dir / "rejects").touch()
    assert cluster.run(job) == 2 and not (cluster.run_dir / "seen-0").exists(), cluster.log()
    (cluster.run_dir / "rejects").unlink()
    assert cluster.run(job) == 0, cluster.log()
    (cluster.run_dir / "verdict").unlink()
    assert cluster.run(job) == 0, cluster.log()
    assert (cluster.run_dir / "asked").read_text() == "asked\n" * 2


def test_a_script_submitted_by_hand_makes_its_directory(cluster: Pbs) -> None:
    (cluster.work / "env.sh").write_text(f"export PATH={shlex.quote(str(cluster.venv / 'bin'))}:$PATH\n")
    given = ("trainer=ddp", "name=a b $HOME")
    job = replace(cluster.job, run_dir=None, code=None, work_dir=None, arguments=given)
    assert cluster.run(job) == 0
    run_dir = cluster.work / "runs" / "digits_17"
    seen = cluster.seen(1, run_dir)
    assert seen["argv"][-3:] == [f"{run_dir}/code/train.py", *given] and seen["cwd"] == str(cluster.work)
    (run_dir / "seen-1").unlink()
    assert cluster.run(job, PBS_ENVIRONMENT="PBS_INTERACTIVE") == 2 and not (run_dir / "seen-1").exists()


def test_a_script_submitted_by_hand_goes_on_by_itself(cluster: Pbs) -> None:
    """Check that it resumes in the first job's directory, wherever qsub is typed later."""
    (cluster.work / "env.sh").write_text(f"export PATH={shlex.quote(str(cluster.venv / 'bin'))}:$PATH\n")
    cluster.behaviour("rank or outcome('continue')")
    job = replace(cluster.job, run_dir=None, code=None, work_dir=None)
    assert cluster.run(job, VENV="/of the first qsub") == 85
    run_dir = cluster.work / "runs" / "digits_17"
    (*_, script) = cluster.submitted()[0]
    assert script == str(run_dir / "job.sh") and "continues as job 18.server" in (run_dir / "job-17.log").read_text()
    (run_dir / "seen-1").unlink()
    cluster.behaviour(FINISH)
    go_on = ["/bin/bash", script]
    environ = cluster.environ() | {"PBS_JOBID": "18.server", "PBS_O_WORKDIR": str(cluster.home), "HPC_AFTER": "17"}
    assert subprocess.run(go_on, cwd=cluster.home, env=environ, timeout=30).returncode == 0
    seen = cluster.seen(1, run_dir)
    assert seen["cwd"] == str(cluster.work) and seen["argv"][-1] == f"{run_dir}/code/train.py"
    assert seen["environ"]["VENV"] == "/of the first qsub"
    assert [path.name for path in (cluster.work / "runs").iterdir() if path.name != "it's 1"] == ["digits_17"]


NVIDIA_SMI = """
import os
for number in range(4):
    uuid = f"GPU-{int(os.environ['PALS_RANKID']) // 2}000000{number}-aaaa-bbbb-cccc-000000000000"
    print(f"GPU {number}: NVIDIA A100-SXM4-40GB (UUID: {uuid})")
"""
GPUS = {(node, gpu): f"GPU-{node}000000{gpu}-aaaa-bbbb-cccc-000000000000" for node in (0, 1) for gpu in range(4)}


def test_mpiexec_a_container_an_interface_and_uuids(cluster: Pbs) -> None:
    """Launch as on Supek: all ranks get the first node's GPUs in their environment; a file lists every node's."""
    cluster.program(cluster.bin / "nvidia-smi", NVIDIA_SMI)
    first = f"{GPUS[0, 1]},{GPUS[0, 3]}"
    Path(f"{cluster.nodefile}.env").write_text(f"p1 {first}\np2 CUDA_VISIBLE_DEVICES={GPUS[1, 0]},{GPUS[1, 2]}\n")
    cluster.load(f"export PATH={shlex.quote(str(cluster.bin))}:/usr/bin:/bin")
    container = f"env IN_CONTAINER=1 PATH={shlex.quote(str(cluster.venv / 'bin'))}:/usr/bin:/bin"
    job = replace(cluster.job, launcher="mpiexec -n 4 --ppn 2 --cpu-bind none", container=container, interface="lo")
    assert cluster.run(job, CUDA_VISIBLE_DEVICES=first) == 0, cluster.log()
    for rank, numbers in enumerate(("1,3", "1,3", "0,2", "0,2")):
        environ = cluster.seen(rank)["environ"]
        assert environ["CUDA_VISIBLE_DEVICES"] == numbers
        assert environ["IN_CONTAINER"] == "1" and "VENV" not in environ
        assert environ["NCCL_SOCKET_IFNAME"] == environ["GLOO_SOCKET_IFNAME"] == "lo"
        assert environ["MASTER_ADDR"] == "127.0.0.1"
        assert placement.read_placement(environ).launcher == "mpiexec (PALS)" and environ["PALS_RANKID"] == str(rank)


def test_gpus_that_are_elsewhere_are_told(cluster: Pbs) -> None:
    cluster.program(cluster.bin / "nvidia-smi", NVIDIA_SMI)
    cluster.load(f"export PATH={shlex.quote(str(cluster.bin))}:$PATH")
    job = replace(cluster.job, launcher="mpiexec -n 4 --ppn 2")
    assert cluster.run(job, CUDA_VISIBLE_DEVICES=GPUS[0, 1]) == 0, "rank 0 alone has a verdict here"
    assert f"none of the GPUs {GPUS[0, 1]}" in cluster.log("node-1-17.log")


def test_an_interface_that_is_not_there_is_told(cluster: Pbs) -> None:
    assert cluster.run(replace(cluster.job, interface="hsn7")) == 2
    assert "interface hsn7 (ip addr)" in cluster.log() and "cluster.interface" in cluster.log()


# -- With real ranks --

TRAIN = """
import os, signal, sys, time
from pathlib import Path
run_dir, told = Path(sys.argv[1].removeprefix("resume=")), []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
import torch
import torch.distributed as dist
from hpc.launch import placement, rendezvous
place = placement.read_placement(os.environ)
placement.export_rank_variables(place, os.environ, host_suffix="")
store = rendezvous.open_store(place, os.environ, timeout_seconds=60)
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
rank = dist.get_rank()
(run_dir / f"sum-{rank}").write_text(f"{int(total)} {place.node_rank} {place.local_rank}")
while (run_dir / "wait").exists():
    stop = torch.tensor(float(bool(told)))
    dist.all_reduce(stop)
    if stop:
        break
    time.sleep(0.05)
outcome = "continue" if (run_dir / "wait").exists() else "finished"
time.sleep(2 if outcome == "continue" else 0)
(run_dir / f"saved-{rank}").touch()
dist.barrier()
if rank == 0:
    (run_dir / "verdict").write_text(f"attempt 1\\nstep 5\\noutcome {outcome}\\n")
    time.sleep(1)  # it serves the store
"""


@pytest.mark.slow
@pytest.mark.parametrize("told", [False, True], ids=["to the end", "told to end"])
def test_real_ranks_meet_and_save_when_told(cluster: Pbs, told: bool) -> None:
    python = f'#!/bin/bash\nexport PYTHONPATH={shlex.quote(str(project.LIBRARY.parent))}\nexec {sys.executable} "$@"\n'
    (cluster.venv / "bin" / "python").write_text(python)
    (cluster.code / "train.py").write_text(TRAIN)
    if told:
        (cluster.run_dir / "wait").touch()
    job = cluster.start(replace(cluster.job, interface="lo"), hosts="localhost 127.0.0.1", tick=1)
    sums = [cluster.run_dir / f"sum-{rank}" for rank in RANKS]
    wait_until(lambda: all(path.exists() for path in sums) or job.poll() is not None, seconds=120)
    if told:
        cluster.end_as_pbs_does(job)
    assert job.wait(timeout=60) == (85 if told else 0), "".join(
        path.read_text() for path in cluster.run_dir.glob("*.log")
    )
    assert [path.read_text() for path in sums] == ["4 0 0", "4 0 1", "4 1 0", "4 1 1"]
    assert len(list(cluster.run_dir.glob("saved-*"))) == 4
