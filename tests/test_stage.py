"""Test cluster.stage_env=true on a real Slurm: the environment must be packed once, and unpacked once per node."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from conftest import REPO, environment
from slurm_project import FILES

# Each rank writes its node and its Python's environment; then rank 0 writes the verdict that ends the job.
TRAIN = """
import os, socket, sys
from pathlib import Path

run_dir = Path(sys.argv[1].removeprefix("resume="))
rank = os.environ["SLURM_PROCID"]
(run_dir / f"rank-{rank}").write_text(f"{socket.gethostname()} {sys.prefix}")
if rank == "0":
    (run_dir / "verdict").write_text("attempt 1\\nstep 1\\noutcome finished\\n")
"""
TAR = """#!/bin/bash
echo "$SLURMD_NODENAME" >>{log}
exec {tar} "$@"
"""


def small_environment(project: Path, venv: Path, library: Path = REPO) -> None:
    """Make a small virtual environment that env.sh accepts as complete. It uses the libraries of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    installed = Path(sysconfig.get_path("purelib"))
    (venv / installed.relative_to(sys.prefix) / "borrowed.pth").write_text(f"{installed}\n{library / 'src'}\n")
    places = (project / "constraints.txt", project / "pyproject.toml", library / "pyproject.toml")
    files = [place.read_text().rstrip() for place in places]
    (venv / ".complete-my-research").write_text("\n".join(["pinned", *files]))


@pytest.fixture
def staging(project, tmp_path) -> Path:
    """Make a project that stages its environment, which is in `venv` beside it."""
    copy = tmp_path / "project"
    shutil.copytree(project, copy)
    (copy / "train.py").write_text(TRAIN)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tar").write_text(TAR.format(log=tmp_path / "unpacked", tar=shutil.which("tar")))
    (tmp_path / "bin" / "tar").chmod(0o755)
    keys = f"""\
node_local: {tmp_path}/local/$SLURMD_NODENAME
stage_env: true
"""
    (copy / "configs" / "cluster" / "test.sh").write_text(f"PATH={tmp_path}/bin:$PATH\n")
    (copy / "configs" / "cluster" / "test.yaml").write_text(FILES["configs/cluster/test.yaml"] + keys)

    small_environment(copy, tmp_path / "venv")
    return copy


@pytest.mark.slow
def test_one_unpacking_per_node_serves_all_its_ranks(staging, slurm):
    folder = staging.parent
    job, run_dir, said = submit(staging, slurm)
    assert f"packing {folder}/venv" in said
    ended = slurm.wait(job)
    assert ended["JobState"] == "COMPLETED", Path(ended["StdOut"]).read_text()
    assert sorted((folder / "unpacked").read_text().split()) == ["n1", "n2"]
    ranks = [(run_dir / f"rank-{rank}").read_text() for rank in range(4)]
    assert ranks == [f"{node} {folder}/local/{node}/env-{job}" for node in ("n1", "n1", "n2", "n2")]


@pytest.mark.slow
def test_packs_again_only_after_a_change(staging, slurm):
    def packs() -> bool:
        job, _, said = submit(staging, slurm)
        slurm.cancel(job)
        return "packing" in said

    folder = staging.parent
    assert (packs(), packs()) == (True, False)
    later = (folder / "venv.tar").stat().st_mtime + 1
    os.utime(folder / "venv" / ".complete-my-research", (later, later))
    assert packs()
    assert [path.name for path in folder.glob("venv.tar*")] == ["venv.tar"]


def submit(project: Path, slurm) -> tuple[str, Path, str]:
    """Submit a run, and return the job's id, the run directory and the other output."""
    env = environment() | slurm.env | {"XDG_CONFIG_HOME": str(project.parent)}
    words = ["--parsable", "cluster=test", "trainer=ddp", "trainer.num_nodes=2", "trainer.devices=2"]
    command = [str(project.parent / "venv/bin/python"), "submit.py", *words]
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    job, run_dir = done.stdout.split()
    return job, Path(run_dir), done.stderr
