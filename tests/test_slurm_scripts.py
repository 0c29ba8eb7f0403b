"""Test the scripts of slurm/ on a real Slurm: with sbatch, and with bash in an allocation."""

import json
import re
import shlex
import shutil
import subprocess

import pytest
from slurm_project import QUIET, Desk, add_files, wait_for
from test_stage import small_environment

pytestmark = pytest.mark.soak

SUBMIT = ["sbatch", "--parsable"]
SALLOC = ["salloc", "--nodes=4", "--ntasks-per-node=1", "--gres=gpu:1", "--cpus-per-task=2", "bash"]


@pytest.fixture(scope="module")
def desk(slurm, project, tmp_path_factory) -> Desk:
    """Make a project with scripts rendered for the tests' cluster."""
    folder = tmp_path_factory.mktemp("scripts")
    shutil.copytree(project, folder / "project")
    add_files(folder / "project")
    small_environment(folder / "project", folder / "venv")
    desk = Desk(slurm, folder / "project")
    # The default place of an environment, which a requeued job must find from its copy of the code.
    (folder / "project" / ".venv").symlink_to(folder / "venv")
    del desk.env["VENV"]
    words = ["cluster=test", *QUIET, "trainer.devices=1", "trainer.max_steps=2"]
    done = desk.python("submit.py", "--render", "slurm", *words)
    assert done.returncode == 0, done.stderr
    return desk


@pytest.mark.parametrize("command", [SUBMIT, SALLOC], ids=["sbatch", "salloc"])
def test_a_script_of_slurm(command, desk):
    before = set((desk.project / "runs").glob("*"))
    done = subprocess.run(
        [*command, "slurm/ddp_4node.sbatch"],
        cwd=desk.project,
        env=desk.env,
        capture_output=True,
        text=True,
        timeout=180,
        umask=0o027,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if command == SUBMIT:  # sbatch --wait would check only every half minute
        ended = desk.ended(done.stdout.strip())
        assert (ended.state, ended.exit_code) == ("COMPLETED", 0), ended.log
        assert ended.record["Restarts"] == "0"
    (run_dir,) = set((desk.project / "runs").glob("*")) - before
    assert "outcome finished" in (run_dir / "verdict").read_text()
    assert sorted(path.name for path in run_dir.glob("rank-*.json")) == [f"rank-{rank}.json" for rank in range(4)]
    assert run_dir.stat().st_mode & 0o777 == 0o750, "the umask of who submits it"


def test_a_job_that_no_node_can_ever_run_is_told(desk):
    done = desk.python("submit.py", "cluster=test", *QUIET, "run_dir=runs/large", "cluster.cores_per_gpu=512")
    assert done.returncode == 2 and "cluster.cores_per_gpu must be at most 8" in done.stderr, done.stderr
    assert not (desk.project / "runs" / "large").exists()


def test_what_a_script_says_goes_on(desk):
    """Check that the printed command resumes a killed run. It requeues the same job, as there is no job.sh."""
    text = (desk.project / "slurm" / "ddp.sbatch").read_text().replace("retries=3", "retries=1")
    script = desk.project / "slurm" / "killed.sbatch"
    script.write_text(text.replace('train.py"', 'train.py" callbacks.witness.fault=hold callbacks.witness.rank=0'))
    done = subprocess.run([*SUBMIT, str(script)], cwd=desk.project, env=desk.env, capture_output=True, text=True)
    job = done.stdout.strip()
    run_dir = desk.project / "runs" / f"digits_resnet_{job}"
    wait_for(lambda: (run_dir / "rank-0.json").exists(), 120, "it trains")
    seen = json.loads((run_dir / "rank-0.json").read_text())
    desk.slurm.exec(seen["host"], "kill", "-9", str(seen["pid"]))
    ended = desk.ended(job)
    typed = re.search("1 starts in a row .*; to continue: (.*)", ended.log)
    assert ended.state == "FAILED" and typed, ended.log
    (run_dir / "go").touch()
    desk.slurm.call(*shlex.split(typed[1]))
    ended = desk.ended(job)
    assert ended.state == "COMPLETED", ended.log
    assert "outcome finished" in (run_dir / "verdict").read_text()
