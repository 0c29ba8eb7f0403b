"""Test the network check on real nodes over gloo: as a user submits it, and with a faulty node or rank."""

import json
import shlex
from pathlib import Path

import pytest
from slurm_project import Desk, made_for_tests, wait_for

pytestmark = pytest.mark.soak

COMM = ["tools/comm.py", "cluster=test", "trainer=ddp_4node"]


@pytest.fixture(scope="module")
def desk(slurm, bake, tmp_path_factory) -> Desk:
    desk = Desk(slurm, made_for_tests(bake(cluster="local")))
    desk.env["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    return desk


def begun(desk: Desk, *words: str) -> tuple[str, Path]:
    """Submit a job, wait until its ranks have met, and return it with its run directory."""
    done = desk.python(*COMM, *words)
    assert done.returncode == 0, done.stderr
    job, run_dir = (line.split(" ", 2)[-1] for line in done.stdout.splitlines()[:2])
    wait_for((Path(run_dir.removeprefix("directory ")) / "attempts.jsonl").exists, 90, "the ranks meet")
    return job.removeprefix("job "), Path(run_dir.removeprefix("directory "))


def test_two_nodes_are_measured_inside_and_across(desk):
    done = desk.python(*COMM, "trainer.num_nodes=2", "trainer.devices=2", "cluster.network_gbs=10", "--wait")
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = Path(done.stdout.split("run directory ")[1].splitlines()[0])
    table = (run_dir / "network.txt").read_text()
    assert done.stdout.endswith(table) and "inside a node, 2 ranks" in table and "across nodes, 2 ranks" in table
    report = json.loads((run_dir / "network.json").read_text())
    assert (report["backend"], report["nodes"], report["ranks_per_node"]) == ("gloo", ["n1", "n2"], 2)
    asked = {(p["scope"], p["collective"]) for p in report["points"]}
    collectives = ("all_reduce", "all_gather")
    assert asked == {(scope, name) for scope in ("within", "across") for name in collectives}
    assert all(p["seconds"] > 0 and p["bus_gbs"] > 0 for p in report["points"])
    across = report["links"]["across"]
    assert f"{2 * across['gbs'] / 10:.0%} of cluster.network_gbs=10" in table
    assert "cluster.gpu_link_gbs is null" in table

    assert (across["nodes"], report["links"]["within"]["ranks"]) == (["n1", "n2"], 2)
    assert "plan.py" not in table  # what CPUs do over TCP is not what GPUs do
    assert any(run_dir.name in line and "finished" in line for line in desk.python("report.py").stdout.splitlines())
    assert 'code/tools/comm.py" resume=' in (run_dir / "job.sh").read_text()


def test_a_slow_node_is_named(desk):
    desk.slurm.exec("n3", *shlex.split("tc qdisc add dev eth0 root tbf rate 100mbit burst 64kb latency 50ms"))
    try:
        done = desk.python(*COMM, "trainer.num_nodes=4", "trainer.devices=1", "--wait")
    finally:
        desk.slurm.exec("n3", *shlex.split("tc qdisc del dev eth0 root"))
    assert done.returncode == 0, done.stdout + done.stderr
    warned = [line for line in done.stdout.splitlines() if "is slow" in line]
    assert warned and warned[0].startswith("warning: n3 is slow: with its neighbours"), done.stdout  # the slowest first
    assert "inside a node: not measured" in done.stdout
    run_dir = Path(done.stdout.split("run directory ")[1].splitlines()[0])
    measured = json.loads((run_dir / "network.json").read_text())["links"]["across"]["gbs"]
    assert 0.009 < measured < 0.013, done.stdout  # 100 Mbit/s are 0.0125 GB/s


def test_a_rank_that_dies_ends_the_job_for_good(desk):
    job, run_dir = begun(desk, "trainer.num_nodes=2", "trainer.devices=1")
    pids = desk.slurm.exec("n2", "pgrep", "-f", f"comm.py resume={run_dir}").stdout.split()
    desk.slurm.exec("n2", "kill", "-9", pids[-1])
    ended = desk.ended(job)
    assert (ended.state, ended.record["Restarts"]) == ("FAILED", "0"), ended.log
    assert ended.seconds < 60 and "1 starts in a row" in ended.log
    assert not (run_dir / "network.json").exists()
    said = [line for line in desk.python("report.py").stdout.splitlines() if run_dir.name in line]
    assert said and "finished" not in said[0]
