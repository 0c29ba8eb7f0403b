"""Test the Slurm of the other tests: its nodes are isolated, and it leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_nodes

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(slurm_nodes.missing() is not None, reason=f"{slurm_nodes.missing()}"),
]

WHOLE_CLUSTER = ("--nodes=4", "--ntasks-per-node=4", "--gres=gpu:4")
TWO_PARTITIONS = """\
NodeName=gpu[01-16] CPUs=64 RealMemory=500000 Gres=gpu:a100:4 Features=a100
PartitionName=gpu Nodes=ALL Default=YES MaxTime=1-00:00:00 MaxNodes=8
PartitionName=test Nodes=gpu[01-02] MaxTime=30
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[slurm_nodes.Slurm]:
    with slurm_nodes.cluster(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture(scope="module")
def controller(tmp_path_factory) -> Iterator[slurm_nodes.Slurm]:
    with slurm_nodes.controller_only(tmp_path_factory.mktemp("slurm"), TWO_PARTITIONS) as slurm:
        yield slurm


def test_a_job_has_sixteen_ranks_on_four_nodes(slurm, tmp_path):
    script = "srun bash -c 'echo $(hostname) $SLURM_PROCID $CUDA_VISIBLE_DEVICES'"
    job = slurm.wait(slurm.sbatch(*WHOLE_CLUSTER, f"--output={tmp_path}/a log.txt", "--wrap", script))
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "0")
    assert job["StdOut"] == f"{tmp_path}/a log.txt"
    lines = sorted(Path(job["StdOut"]).read_text().splitlines())
    assert lines == sorted(f"n{1 + rank // 4} {rank} 0,1,2,3" for rank in range(16))


def test_srun_from_the_login_node(slurm):
    assert sorted(slurm.call("srun", "--nodes=2", "hostname").stdout.split()) == ["n1", "n2"]


def test_the_exit_code_of_a_job(slurm, tmp_path):
    job = slurm.wait(slurm.sbatch(f"--output={tmp_path}/log.txt", "--wrap", "exit 2"))
    assert (job["JobState"], job["Reason"], job["ExitCode"]) == ("FAILED", "NonZeroExitCode", "2:0")


def test_a_job_without_our_environment_finds_slurm(slurm, tmp_path):
    script = "unset SLURM_EXPORT_ENV; srun hostname; srun hostname"
    job = slurm.wait(slurm.sbatch("--export=NONE", "--nodes=2", f"--output={tmp_path}/log.txt", "--wrap", script))
    assert sorted(Path(job["StdOut"]).read_text().split()) == ["n1", "n1", "n2", "n2"]


def test_an_array_has_ended_when_all_its_elements_have(slurm, tmp_path):
    array = slurm.sbatch("--array=0-2", f"--output={tmp_path}/%a.txt", "--wrap", "sleep $SLURM_ARRAY_TASK_ID")
    slurm.wait(array)
    records = slurm.records(array)
    assert sorted(record["ArrayTaskId"] for record in records) == ["0", "1", "2"]
    assert {record["JobState"] for record in records} == {"COMPLETED"}


def test_a_job_that_does_not_end_in_time_is_cancelled(slurm, tmp_path):
    job = slurm.sbatch(f"--output={tmp_path}/log.txt", "--wrap", "echo here; exec sleep 1000")
    with pytest.raises(TimeoutError, match="here"):
        slurm.wait(job, seconds=2)
    assert slurm.wait(job)["JobState"] == "CANCELLED"


def test_a_requeued_job_starts_again_soon(slurm, tmp_path):
    script = '[ "${SLURM_RESTART_COUNT:-0}" = 1 ] || { scontrol requeue "$SLURM_JOB_ID"; sleep 60; }'
    start = time.monotonic()
    job = slurm.wait(slurm.sbatch(f"--output={tmp_path}/log.txt", "--wrap", script))
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1")
    assert time.monotonic() - start < 20


def test_nodes_reach_each_other_by_name_and_nothing_else(slurm, tmp_path):
    server = "import socket; print(socket.create_server(('', 5000)).accept()[0].recv(9))"
    (tmp_path / "job.sh").write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{server}"\n')
    job = slurm.sbatch("--nodelist=n3", f"--output={tmp_path}/log.txt", tmp_path / "job.sh")
    client = "for _ in {1..50}; do (echo hello >/dev/tcp/n3/5000) && exit; sleep 0.1; done; exit 1"
    slurm.exec("n1", "bash", "-c", client)
    assert slurm.wait(job)["ExitCode"] == "0:0"
    assert "hello" in (tmp_path / "log.txt").read_text()
    outside = slurm.exec("n1", "bash", "-c", "echo >/dev/tcp/192.0.2.1/80", check=False)
    assert "Network is unreachable" in outside.stdout
    assert slurm.exec("n1", "ls", "/sys/class/net").stdout.split() == ["eth0", "lo"]


def test_a_node_may_hold_its_own_name_for_loopback(slurm):
    def address(node: str, name: str) -> str:
        return slurm.exec(node, "getent", "ahostsv4", name).stdout.split()[0]

    right = address("n2", "n1")
    assert address("n1", "n1") == right == slurm.addresses["n1"]
    slurm.hosts("n1", n1="127.0.1.1")
    assert (address("n1", "n1"), address("n2", "n1")) == ("127.0.1.1", right)
    slurm.hosts("n1")
    assert address("n1", "n1") == right


def test_a_process_of_a_job_is_reached_by_its_id_in_its_node(slurm, tmp_path):
    job = slurm.sbatch("--nodelist=n2", f"--output={tmp_path}/log.txt", "--wrap", "echo $$; exec sleep 1000")
    slurm.until(job, lambda records: (tmp_path / "log.txt").exists() and bool((tmp_path / "log.txt").read_text()))
    slurm.exec("n2", "kill", "-9", (tmp_path / "log.txt").read_text().strip())
    assert slurm.wait(job)["ExitCode"] == "0:9"


@pytest.mark.parametrize(
    "options",
    [
        "--nodes=8 --gres=gpu:4",
        "--nodes=2 --gpus-per-node=a100:4 --ntasks-per-node=4 --cpus-per-task=16 --mem=0",
        "--partition=test --nodes=2 --time=30 --constraint=a100",
    ],
)
def test_a_controller_alone_accepts(controller, options):
    answer = controller.call("sbatch", "--test-only", *options.split(), "--wrap", "true")
    assert "to start at" in answer.stdout


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--nodes=9", "Node count specification invalid"),
        ("--gres=gpu:5", "Requested node configuration is not available"),
        ("--gpus-per-node=h100:4", "Requested node configuration is not available"),
        ("--mem=501G", "configuration"),
        ("--ntasks-per-node=4 --cpus-per-task=17", "configuration"),
        ("--partition=test --time=31", "time limit"),
        ("--partition=nowhere", "Invalid partition"),
        ("--constraint=v100", "Invalid feature"),
    ],
)
def test_a_controller_alone_rejects(controller, options, complaint):
    answer = controller.call("sbatch", "--test-only", *options.split(), "--wrap", "true", check=False)
    assert answer.returncode != 0
    assert complaint in answer.stdout


def test_nothing_is_left_behind(tmp_path):
    def traces() -> tuple[str, set[str], set[int]]:
        return Path("/proc/mounts").read_text(), interfaces(os.getpid()), descendants(os.getpid())

    before = traces()
    with slurm_nodes.cluster(tmp_path) as slurm:
        stubborn = "trap '' TERM INT HUP; setsid sleep 1001 & wait"
        job = slurm.sbatch("--nodes=4", "--output=/dev/null", "--wrap", f'srun bash -c "{stubborn}"')
        slurm.until(job, lambda records: slurm.exec("n4", "pgrep", "-x", "sleep", check=False).returncode == 0)
        during = descendants(os.getpid()) - before[2]
        assert len(during) > 20
        start = time.monotonic()
    assert time.monotonic() - start < 5
    assert not [pid for pid in during if Path(f"/proc/{pid}").exists()]
    assert traces() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_is_left_behind_by_a_killed_run(tmp_path, number):
    program = f"""if True:
        import signal, sys, time
        from pathlib import Path
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job would ignore
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import slurm_nodes
        with slurm_nodes.cluster(Path({str(tmp_path)!r})):
            print("up", flush=True)
            time.sleep(1000)
    """
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert run.stdout and run.stdout.readline() == b"up\n"
    during = descendants(run.pid)
    assert during and interfaces(run.pid)
    run.send_signal(number)
    run.communicate(timeout=60)
    limit = time.monotonic() + 5
    while (alive := [pid for pid in during if Path(f"/proc/{pid}").exists()]) or interfaces(run.pid):
        assert time.monotonic() < limit, (alive, interfaces(run.pid))
        time.sleep(0.05)


def test_a_folder_that_slurm_cannot_use(tmp_path):
    with pytest.raises(ValueError, match="too long"), slurm_nodes.cluster(tmp_path / ("x" * 100)):
        pass
    with pytest.raises(ValueError, match="character"), slurm_nodes.cluster(tmp_path / "a b"):
        pass


def descendants(pid: int) -> set[int]:
    """Return the descendants of a process as ids on this machine, with the processes inside nodes."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has just ended
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def interfaces(pid: int) -> set[str]:
    """Return the network interfaces made by a run with this process id."""
    return {path.name for path in Path("/sys/class/net").glob(f"slurm{pid}-*")}
