"""The scripts of slurm/ on a real Slurm: given to sbatch, and run by bash in an allocation."""

import shutil
import subprocess

import pytest
from slurm_project import FILES, QUIET, Desk
from test_stage import small_environment

pytestmark = pytest.mark.slow

SALLOC = "salloc --nodes=4 --ntasks-per-node=1 --gres=gpu:1 --cpus-per-task=2 bash"


@pytest.fixture(scope="module")
def desk(slurm, project, tmp_path_factory) -> Desk:
    """A project whose scripts are rendered for the cluster that there is."""
    folder = tmp_path_factory.mktemp("scripts")
    shutil.copytree(project, folder / "project")
    for name, text in FILES.items():
        (folder / "project" / name).write_text(text)
    small_environment(folder / "project", folder / "venv")
    desk = Desk(slurm, folder / "project")
    desk.env["VENV"] = str(folder / "venv")
    words = ["cluster=test", *QUIET, "trainer.devices=1", "trainer.max_steps=2"]
    done = desk.python("submit.py", "--render", "slurm", *words)
    assert done.returncode == 0, done.stderr
    return desk


@pytest.mark.parametrize("command", ["sbatch --wait", SALLOC], ids=["sbatch", "salloc"])
def test_a_script_of_slurm(command, desk):
    before = set((desk.project / "runs").glob("*"))
    done = subprocess.run(
        [*command.split(), "slurm/ddp_4node.sbatch"],
        cwd=desk.project,
        env=desk.env,
        capture_output=True,
        text=True,
        timeout=180,
    )
    logs = "".join(log.read_text() for log in desk.project.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    (run_dir,) = set((desk.project / "runs").glob("*")) - before
    assert "outcome finished" in (run_dir / "verdict").read_text()
    assert sorted(path.name for path in run_dir.glob("rank-*.json")) == [f"rank-{rank}.json" for rank in range(4)]
    assert run_dir.stat().st_mode & 0o777 == 0o700
