"""Test that a job which Slurm can never start is rejected by a sentence before anything is written."""

import os

import impossible_jobs
import pytest
import slurm_accounts
import slurm_nodes
from slurm_project import Desk, made_for_tests

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(slurm_nodes.missing() is not None, reason=f"{slurm_nodes.missing()}"),
    pytest.mark.skipif(slurm_accounts.missing() is not None, reason=f"{slurm_accounts.missing()}"),
]


@pytest.fixture(scope="module")
def project(bake):
    project = made_for_tests(bake(cluster="local"))
    (project / "configs/cluster/asked.yaml").write_text(impossible_jobs.CLUSTER)
    return project


@pytest.fixture(scope="module", params=["ALL", "NO"])
def desk(request, project, tmp_path_factory):
    """Yield a login node. Without EnforcePartLimits, Slurm takes most of these jobs, and they wait for ever."""
    conf = f"EnforcePartLimits={request.param}\n{impossible_jobs.CONF}"
    folder = tmp_path_factory.mktemp("asked")
    with slurm_nodes.controller_only(folder, conf, accounts=impossible_jobs.ACCOUNTS) as slurm:
        yield Desk(slurm, project)


def submit(desk, *words):
    return desk.python("submit.py", "cluster=asked", *impossible_jobs.POSSIBLE, *words)


def queue(desk):
    return desk.slurm.call("squeue", "--noheader").stdout


@pytest.mark.parametrize("what", impossible_jobs.IMPOSSIBLE)
def test_nothing_is_queued_or_written(desk, what):
    words, sentence = impossible_jobs.IMPOSSIBLE[what]
    before = sorted(os.listdir(desk.project)), queue(desk)
    done = submit(desk, *words)
    assert done.returncode == 2, done.stdout + done.stderr
    first, fix, *others = done.stderr.splitlines()
    assert first == f"ConfigError: {sentence}" and fix.startswith("  Try: ")
    assert not [line for line in others if not line.startswith(("ConfigError: ", "  Try: "))], done.stderr
    assert (sorted(os.listdir(desk.project)), queue(desk)) == before


def test_what_can_start_is_queued_and_its_start_is_told(desk):
    done = submit(desk)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "Slurm expects to start it at once"
    assert len(queue(desk).splitlines()) == 1
    desk.slurm.cancel(done.stdout.split()[1])


def test_a_sweep_is_asked_for_as_a_whole(desk):
    done = submit(desk, "--multirun", "seed=1,2", "trainer.num_nodes=8", "data.global_batch_size=64")
    assert done.returncode == 2 and "the most nodes of a job in partition gpu" in done.stderr


def test_a_drained_node_is_no_reason(desk):
    desk.slurm.call("scontrol", "update", "NodeName=g1", "State=DRAIN", "Reason=test")
    try:
        done = submit(desk)
        assert done.returncode == 0, done.stderr
        desk.slurm.cancel(done.stdout.split()[1])
    finally:
        desk.slurm.call("scontrol", "update", "NodeName=g1", "State=RESUME")
