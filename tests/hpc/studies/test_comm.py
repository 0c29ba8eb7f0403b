"""Check tools/comm.py: the job that it submits, a measurement on this machine, and rejected measurements."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import typed_fixes
from desk import Desk
from fork import ENVIRON

from hpc.config import compose, project
from hpc.config import errors as config_errors
from hpc.config.project import PROJECT
from hpc.launch import bandwidth, placement
from hpc.programs import comm
from hpc.run import signals
from hpc.studies import network_check

TOOL = str(PROJECT / "tools" / "comm.py")
HERE = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]


def typed(desk: Desk, *words: str) -> int:
    """Run `python tools/comm.py ...` on a login node; return its exit code."""
    desk.set.setattr(sys, "argv", ["tools/comm.py", *words])
    code = 0
    try:
        with config_errors.exit_on_config_error():
            comm.main(placement.read_placement({}), signals.SignalState())
    except SystemExit as end:
        code = int(end.code or 0)
    desk.out, desk.err = desk.capfd.readouterr()
    return code


def test_it_submits_the_nodes_of_a_run_for_a_short_time(desk: Desk) -> None:
    assert typed(desk, "trainer=ddp_4node", "trainer.num_nodes=3", "cluster=slurm") == 0, desk.err
    run_dir = desk.runs()[0]
    script = desk.noted("sbatch.script")
    assert "#SBATCH --nodes=3\n" in script and "#SBATCH --ntasks-per-node=4\n" in script
    assert "#SBATCH --job-name=comm\n" in script and "#SBATCH --time=00:15:00\n" in script
    assert 'python "$code/tools/comm.py" resume="$run_dir"' in script and "train.py" not in script
    assert "retries=1\n" in script  # a failed measurement is not repeated
    assert desk.submitted()["job"] == "17" and (run_dir / "config.yaml").exists()


def test_what_is_typed_counts_more_than_its_defaults(desk: Desk) -> None:
    words = ["trainer=ddp", "cluster=pbs", "name=link", "cluster.time=0:05:00", "--dry-run"]
    assert typed(desk, *words) == 0, desk.err
    assert "#PBS -N link\n" in desk.out and "#PBS -l walltime=00:05:00\n" in desk.out
    assert not (desk.project / "runs" / "link").exists() and len(desk.runs()) == 0


def test_a_job_of_pbs_runs_it_on_each_rank(desk: Desk) -> None:
    desk.scheduler("echo 17.server")
    assert typed(desk, "trainer=ddp_4node", "cluster=pbs") == 0, desk.err
    assert '"$code/tools/comm.py" resume="$run_dir"' in (desk.runs()[0] / "job.sh").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["slurm", "pbs"])
def test_it_runs_again_as_it_was_and_never_as_training(cluster: str, desk: Desk) -> None:
    shutil.copytree(project.CONFIGS, desk.project / "configs", dirs_exist_ok=True)
    assert typed(desk, "trainer=ddp_4node", f"cluster={cluster}", "run_dir=link") == 0
    before = Path("link/job.sh").read_text()
    assert desk.type("resume=link", "trainer.num_nodes=2") == 2
    assert "Only a run of train" in desk.err and desk.err.count("ConfigError:") == 1
    assert desk.type("resume=link") == 0 and Path("link/job.sh").read_text() == before


def test_wait_prints_the_table_of_the_job(desk: Desk) -> None:
    desk.scheduler('echo 17; job=${!#}; echo "the table" >"${job%/*}/network.txt"')
    assert typed(desk, "trainer=ddp", "cluster=slurm", "--wait") == 0, desk.err
    assert desk.out.endswith("the table\n")
    desk.scheduler("echo 17; exit 3")
    assert typed(desk, "trainer=ddp", "cluster=slurm", "--wait", "run_dir=another") == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "must be at least 2 if trainer.num_nodes=1"),
        (["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=1"], "must be at least 2 if trainer.num_nodes=1"),
        (["trainer=ddp_4node", "trainer.devices=2"], "has no scheduler that could start ranks on other nodes"),
        (["trainer=ddp"], "must be given, as cluster.gpus_per_node is null"),
        (["trainer=ddp_4node", "cluster=juwels_booster", "cluster.account=null"], "must have a value for a job on"),
        (["resume=/nowhere"], "resume must be an existing directory; got /nowhere."),
    ],
)
def test_what_cannot_be_measured_is_told_at_once(words: list[str], said: str, desk: Desk) -> None:
    where = [] if any(word.startswith(("cluster=", "resume=")) for word in words) else ["cluster=local"]
    assert typed(desk, *words, *where) == 2
    assert said in desk.err and desk.err.count("ConfigError:") == 1
    assert desk.runs() == []
    desk.set.setattr("torch.distributed.run.main", lambda _: None)  # which would ask for GPUs

    def type_again(accepted: list[str]) -> None:
        if typed(desk, *accepted):
            raise typed_fixes.printed(desk.err)

    typed_fixes.follow(type_again, [*words, *where], typed_fixes.printed(desk.err))


def test_sockets_and_slow_nodes_are_warned_of() -> None:
    cfg = compose.compose_overrides(["cluster=slurm", "trainer=ddp_4node", "trainer.num_nodes=2"])
    points = [
        bandwidth.summarize_repeats("across", "all_reduce", num_ranks=2, size_bytes=1 << 20, seconds=[1e-3, 1e-3])
    ]
    n1 = "n1:1:1 [0] NCCL INFO NET/IB : No device found.\nn1:1:1 [0] NCCL INFO C : 0 -> 1 [send] via NET/Socket/0\n"
    n2 = "n2:1:1 [0] NCCL INFO C : 1 -> 0 [send] via NET/IB/0/GDRDMA\n"
    report = network_check.make_report(
        cfg, ["n1", "n2"], points=points, seconds={"within": [1.0, 1.6]}, logs={"n1": n1, "n2": n2}
    )
    assert report["warnings"] == [
        "NCCL uses sockets (TCP) on n1 instead of the fast network between nodes",
        "  NCCL's log: NET/IB : No device found",
        "n2 is slow: with its own ranks it takes 1.6 times as long as other nodes",
    ]
    assert report["transports"] == {"n1": ["Socket"], "n2": ["IB with GPUDirect"]}
    assert report["backend"] == "nccl" and report["links"]["within"] is None
    well = network_check.make_report(cfg, ["n1", "n2"], points=points, seconds={"within": [1.0, 1.1]}, logs={"n2": n2})
    assert well["warnings"] == []


@pytest.fixture
def here(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a measurement by two processes of this machine."""
    command = [sys.executable, TOOL, *HERE, f"run_dir={tmp_path}/run"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, env=ENVIRON, **pipes)  # type: ignore[call-overload]
    yield process
    process.kill()
    process.communicate()


@pytest.mark.soak
@pytest.mark.slow
def test_two_processes_of_this_machine(here: subprocess.Popen[str], tmp_path: Path) -> None:
    said, errors = here.communicate(timeout=120)
    assert here.returncode == 0, errors
    assert said == (tmp_path / "run" / "network.txt").read_text()
    assert "inside a node, 2 ranks" in said and "across nodes: not measured" in said
    report = json.loads((tmp_path / "run" / "network.json").read_text())
    reduced = {p["size"]: p for p in report["points"] if p["collective"] == "all_reduce"}
    for size, point in reduced.items():
        assert point["bus_gbs"] == pytest.approx(size / point["seconds"] / 1e9), "of two ranks: size / time"
    assert reduced[max(reduced)]["seconds"] > reduced[min(reduced)]["seconds"]
    assert (tmp_path / "run" / "verdict").read_text().splitlines()[2] == "outcome finished"


@pytest.mark.soak
@pytest.mark.slow
def test_a_rank_that_dies_takes_the_others_along(here: subprocess.Popen[str], tmp_path: Path) -> None:
    limit = time.monotonic() + 60
    while not (tmp_path / "run" / "attempts.jsonl").exists():
        assert here.poll() is None and time.monotonic() < limit
        time.sleep(0.05)
    children = Path(f"/proc/{here.pid}/task/{here.pid}/children").read_text().split()
    ranks = [pid for pid in children if "comm.py" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(ranks) == 2
    os.kill(int(ranks[1]), 9)
    said, errors = here.communicate(timeout=60)
    assert here.returncode == 1 and "ended with exit code" in errors, errors
    assert not (tmp_path / "run" / "network.json").exists() and "all_reduce" not in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
