"""Test ranks that a real mpiexec starts, as on clusters whose scheduler has no launcher."""

import shutil
from pathlib import Path

import pytest
from slurm_project import QUIET, made_for_tests, rejections

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not shutil.which("mpiexec"), reason="not installed: mpiexec (apt install mpich)"),
]
TRAIN = "python train.py trainer=ddp trainer.accelerator=cpu trainer.devices=2 trainer.max_steps=2 " + " ".join(QUIET)


@pytest.fixture(scope="module")
def project(bake) -> Path:
    return made_for_tests(bake())


def test_two_runs_at_once(project, run):
    """Check that two runs of two ranks form separate process groups and use different ports."""
    one = "(mpiexec -n 2 {train} run_dir=runs/{name} >{name}.log 2>&1; echo {name} $?) &"
    done = run(" ".join(one.format(train=TRAIN, name=name) for name in "ab") + " wait", project)
    assert sorted(done.stdout.split("\n")) == ["", "a 0", "b 0"], (project / "a.log").read_text()
    for name in "ab":
        assert '"launcher": "mpiexec (MPICH)"' in (project / "runs" / name / "attempts.jsonl").read_text()
        assert '"world_size": 2' in (project / "runs" / name / "rank-1.json").read_text()


def test_other_numbers_than_configured(project, run):
    done = run(f"mpiexec -n 3 {TRAIN}", project)
    assert done.returncode == 2
    (message,) = rejections(done.stdout)
    assert "mpiexec (MPICH) started 3 in all, 3 on a node" in message
