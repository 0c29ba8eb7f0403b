"""Check on a real Slurm that queued and requeued jobs keep the library that they were submitted with."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import REPO
from cookiecutter.main import cookiecutter
from slurm_project import QUIET, Desk, add_files, wait_for
from test_stage import small_environment

pytestmark = pytest.mark.slow


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Copy the library, as a clone has it, whose runs say so."""
    folder = tmp_path / "clone"
    shutil.copytree(REPO / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(REPO / name, folder)
    file = folder / "src" / "hpc" / "training" / "attempt.py"
    said = 'print("of the clone")\n        print(f"run directory'
    file.write_text(file.read_text().replace('print(f"run directory', said, 1))
    return folder


@pytest.fixture
def desk(slurm, project: Path, clone: Path, tmp_path: Path) -> Desk:
    """Make a project that uses the library of that clone."""
    copy = Path(shutil.copytree(project, tmp_path / "project"))
    add_files(copy)
    pin(copy, clone.as_uri())
    small_environment(copy, tmp_path / "venv", library=clone)
    desk = Desk(slurm, copy)
    desk.env |= {"VENV": str(tmp_path / "venv"), "PATH": f"{tmp_path}/venv/bin:{desk.env['PATH']}"}
    return desk


def pin(project: Path, address: str) -> None:
    file = project / "pyproject.toml"
    file.write_text(re.sub(r'(hpc-ml\[.*\] @ )[^"]+', rf"\g<1>{address}", file.read_text()))


def test_a_queued_job_survives_an_update_another_library_and_the_deletion_of_the_clone(desk, clone, tmp_path):
    job, run_dir = submitted(desk, "cluster.options=[--hold]")
    borrowed = next((tmp_path / "venv").glob("lib/python3*/site-packages/borrowed.pth"))
    borrowed.write_text(borrowed.read_text().replace(f"{clone}/src", f"{REPO}/src"))  # as source env.sh leaves it
    shutil.rmtree(clone)
    pin(desk.project, REPO.as_uri())  # as cruft update does
    (desk.project / "train.py").write_text("raise SystemExit('of newer code')\n")
    desk.slurm.call("scontrol", "release", job)
    ended = desk.ended(job)
    assert ended.state == "COMPLETED" and "of the clone" in ended.log, ended.log
    made_by = json.loads((run_dir / "made_by.json").read_text())
    assert made_by["hpc"] == "0.3.0+unknown" and made_by["hpc_origin"] == f"the clone {clone}"
    assert "hpc-ml 0.3.0+unknown, the copy of this job" in ended.log


def test_a_job_whose_environment_no_longer_has_what_its_library_needs_stops_before_its_ranks(desk):
    job, run_dir = submitted(desk, "cluster.options=[--hold]")
    (metadata,) = (run_dir / "code" / "src").glob("hpc_ml-*.dist-info/METADATA")
    metadata.write_text(metadata.read_text().replace("tqdm>=4.66", "tqdm>=99"))
    desk.slurm.call("scontrol", "release", job)
    ended = desk.ended(job)
    assert ended.state == "FAILED" and "does not meet tqdm>=99, which this code needs" in ended.log, ended.log
    assert not (run_dir / "attempts.jsonl").exists()


@pytest.mark.soak
def test_runs_of_the_last_version_with_a_copy_of_the_library_go_on_after_an_update(
    last_with_a_copy, slurm, project, tmp_path
):
    """Let one be queued and one be stopped. Their copies of the code have the library in src/."""
    template, venv = tmp_path / "template", tmp_path / "venv"
    template.mkdir()
    archive = subprocess.run(["git", "archive", last_with_a_copy], cwd=REPO, capture_output=True, check=True)
    subprocess.run(["tar", "-x"], cwd=template, input=archive.stdout, check=True)
    copy = Path(cookiecutter(str(template), no_input=True, default_config=True, output_dir=str(tmp_path / "old")))
    add_files(copy)
    # It read the digits of scikit-learn, which its environment has and this one only seems to have.
    for name in ("digits.py", "digits.npz"):
        shutil.copy(project / "src/my_research/data" / name, copy / "src/my_research/data" / name)
    small_environment(project, venv)
    (scikit_learn,) = (folder / "scikit_learn-1.9.1.dist-info" for folder in venv.glob("lib/python*/site-packages"))
    scikit_learn.mkdir()
    (scikit_learn / "METADATA").write_text("Metadata-Version: 2.1\nName: scikit-learn\nVersion: 1.9.1\n")
    texts = [(copy / name).read_text().rstrip() for name in ("pyproject.toml", "constraints.txt")]
    (venv / ".complete-my-research").write_text("\n".join([str(venv), "pinned", *texts]))
    desk = Desk(slurm, copy)
    desk.env |= {"VENV": str(venv), "PATH": f"{venv}/bin:{desk.env['PATH']}"}
    held, queued = submitted(desk, "cluster.options=[--hold]")
    stopped, run_dir = submitted(desk, "callbacks.witness.fault=hold", "checkpoint.every_n_steps=1")
    wait_for(lambda: any((run_dir / "checkpoints").glob("step-*")), 60, "a checkpoint")
    desk.slurm.call("scancel", stopped)
    assert desk.ended(stopped).state == "CANCELLED"

    shutil.rmtree(copy / "src" / "hpc")  # as cruft update does, and source env.sh
    shutil.copytree(project, copy, dirs_exist_ok=True)
    small_environment(copy, venv)
    (run_dir / "go").touch()
    desk.slurm.call("scontrol", "release", held)
    assert desk.ended(held).state == "COMPLETED"
    assert "outcome finished" in (queued / "verdict").read_text()
    command = [str(venv / "bin" / "python"), "submit.py", "--parsable", f"resume={run_dir}"]
    done = subprocess.run(command, cwd=copy, env=desk.env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    ended = desk.ended(done.stdout.split()[0])
    assert ended.state == "COMPLETED" and "Restored all states from the checkpoint" in ended.log, ended.log


def submitted(desk: Desk, *words: str) -> tuple[str, Path]:
    sizes = ["trainer=ddp", "trainer.devices=2", "trainer.max_steps=2"]
    python = f"{desk.env['VENV']}/bin/python"
    command = [python, "submit.py", "--parsable", "cluster=test", *QUIET, *sizes, *words]
    done = subprocess.run(command, cwd=desk.project, env=desk.env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    job, run_dir = done.stdout.strip().split(" ", 1)
    return job, Path(run_dir)
