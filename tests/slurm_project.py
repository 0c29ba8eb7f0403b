"""Additions of the Slurm tests to a baked project: a config of their cluster, and a callback that records and fails."""

import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import slurm_nodes
from conftest import environment
from trial.project import put

# Jobs request GPUs, which Slurm only counts. All tasks share two cores.
FILES = {
    "configs/cluster/test.yaml": """\
defaults: [base]
name: test
scheduler: slurm
partition: main
time: "0:10:00"
accelerator: cpu
gpus_per_node: 4
cores_per_gpu: 2
memory_gb: 12
request: "--gres=gpu:{gpus}"
env: {OMP_NUM_THREADS: "1"}
rendezvous_seconds: 20
""",
    "configs/callbacks/witness.yaml": """\
defaults: [default]
progress: null
witness:
  _target_: my_research.witness.Witness
  run_dir: ${run_dir}
  fault: null
  rank: 1
""",
}
QUIET = ["callbacks=witness", "trainer.precision=32-true", "trainer.log_every_n_steps=1"]


@dataclass(frozen=True)
class Ended:
    """A job that has ended."""

    state: str
    exit_code: int
    log: str
    seconds: float  # from start to end, by this machine's clock
    record: dict[str, str]


class Desk:
    """A baked project on the login node of a cluster."""

    def __init__(self, slurm: slurm_nodes.Slurm, project: Path) -> None:
        self.slurm, self.project = slurm, project
        self.env = environment() | slurm.env | {"VENV": sys.prefix, "XDG_CONFIG_HOME": str(project / "no-config")}
        self.env["PATH"] = f"{Path(sys.executable).parent}:{self.env['PATH']}"

    def python(self, *words: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return subprocess.run(
            command, cwd=cwd or self.project, env=self.env | env, capture_output=True, text=True, timeout=120
        )

    def submit(self, *words: str, cwd: Path | None = None, **env: str) -> tuple[str, Path]:
        """Run `python submit.py ...`, and return the job's id and the run directory."""
        done = self.python(str(self.project / "submit.py"), "--parsable", *words, cwd=cwd, **env)
        assert done.returncode == 0, done.stdout + done.stderr
        job, run_dir = done.stdout.strip().split(" ", 1)
        return job, Path(run_dir)

    def train(self, *words: str, seconds: float = 120) -> tuple[Ended, Path]:
        """Submit a run, and wait until its job has ended."""
        job, run_dir = self.submit("cluster=test", *QUIET, *words)
        return self.ended(job, seconds), run_dir

    def sbatch(self, options: str, body: str, *words: str, seconds: float = 120, **env: str) -> Ended:
        """Submit a hand-written script and wait. In it, `python` is the one of this environment."""
        lines = ["#!/bin/bash", f"#SBATCH {options}", f"#SBATCH --output={self.project}/by-hand-%j.log", body]
        script = self.project / "by-hand.sh"
        script.write_text("\n".join(lines) + "\n")
        done = subprocess.run(
            ["sbatch", "--parsable", *words, str(script)],
            cwd=self.project, env=self.env | env, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return self.ended(done.stdout.strip(), seconds)

    def ended(self, job: str, seconds: float = 120) -> Ended:
        started = self.running(job)
        record = self.slurm.wait(job, seconds)
        log = Path(record["StdOut"])
        text = log.read_text(errors="replace") if log.exists() else ""
        code = int(record["ExitCode"].split(":")[0])
        return Ended(record["JobState"], code, text, time.monotonic() - started, record)

    def running(self, job: str) -> float:
        """Wait until a job has started, and return that time."""
        self.slurm.until(job, lambda records: all(record["JobState"] != "PENDING" for record in records), 60)
        return time.monotonic()


def made_for_tests(project: Path) -> Path:
    """Add the tests' files to a project, and check that env.sh accepts the environment that `make test` has made."""
    add_files(project)
    env = environment() | {"VENV": sys.prefix}
    subprocess.run(["bash", "-c", "source ./env.sh"], cwd=project, env=env, check=True)
    return project


def add_files(project: Path) -> None:
    for name, text in FILES.items():
        (project / name).write_text(text)
    put(project, "strike", "witness")


def rejections(log: str) -> list[str]:
    """Return the messages of rejections in a log, without rank labels."""
    bare = re.sub(r"^\d+: ", "", log, flags=re.MULTILINE)
    return re.findall(r"^ConfigError: .*(?:\n  .*)*", bare, re.MULTILINE)


def wait_for(condition, seconds: float, what: str) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, f"not within {seconds} s: {what}"
        time.sleep(0.1)
