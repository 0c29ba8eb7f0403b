"""Provoke common failures of clusters on a real Slurm: each job must end soon, with one helpful message.

The numbers F.. are those of a catalogue of failures, such as a forgotten srun (F09) or a wrong MASTER_ADDR (F15).
"""

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slurm_project import QUIET, Desk, made_for_tests, rejections, wait_for
from tiers import soak_all_but

pytestmark = pytest.mark.slow

TRAIN = "python train.py cluster=test trainer.max_steps=2 " + " ".join(QUIET)
TWO = f"{TRAIN} trainer=ddp trainer.devices=2"
TWO_NODES = f"{TRAIN} trainer=ddp trainer.num_nodes=2 trainer.devices=1"
ON_NODE_2 = "[ $SLURM_NODEID = 0 ] || "

# name: options of sbatch, body, words of the message, most seconds from start to end on a machine that is also busy
REJECTED = {
    "F09 srun forgotten": (
        "--nodes=2 --ntasks-per-node=1 --gres=gpu:1",
        TWO_NODES,
        ["trainer.num_nodes must be 1", "alone", "got 2", "srun --nodes=2 --ntasks-per-node=1"],
    ),
    "F10 independent runs": (
        "--ntasks-per-node=2 --gres=gpu:2",
        f"srun {TRAIN} trainer=cpu",
        ["must be launched as 1 ranks", "srun started 2 in all", "srun --nodes=1 --ntasks-per-node=1"],
    ),
    "F11 fewer tasks": (
        "--ntasks=1 --ntasks-per-node=2 --gres=gpu:2",
        f"srun {TWO}",
        ["trainer.num_nodes=1 trainer.devices=2", "srun started 1 in all"],
    ),
    "F11c other nodes": (
        "--nodes=2 --ntasks-per-node=2 --gres=gpu:2",
        f"srun {TWO}",
        ["trainer.num_nodes=1 trainer.devices=2", "srun started 4 in all, 2 on a node"],
    ),
    "F11d uneven tasks": (
        "--nodes=2 --ntasks=3 --gres=gpu:2",
        f"srun {TRAIN} trainer=ddp trainer.num_nodes=3 trainer.devices=1 data.global_batch_size=66",
        ["not equally many on a node"],
    ),
    "F13 one GPU per task": (
        "--ntasks-per-node=2 --gpus-per-task=1",
        f"srun {TWO}",
        ["trainer.devices must be at most 1", "got 2", "no --gpus-per-task"],
    ),
    "a node with fewer GPUs": (
        "--nodes=2 --ntasks-per-node=2 --gres=gpu:2",
        f"srun bash -c '{ON_NODE_2} export CUDA_VISIBLE_DEVICES=0; exec {TWO} trainer.num_nodes=2'",
        ["trainer.devices must be at most 1", "(on n2)", "got 2"],
    ),
    "F15 leaked MASTER_ADDR": (
        "--nodes=2 --ntasks-per-node=1 --gres=gpu:1",
        f"export MASTER_ADDR=10.255.255.1\nsrun {TWO_NODES}",
        ["MASTER_ADDR must be an address of n1, where rank 0 runs", "got 10.255.255.1", "unset MASTER_ADDR"],
    ),
    "a rank that does not come": (
        "--nodes=2 --ntasks-per-node=1 --gres=gpu:1",
        f"srun bash -c '{ON_NODE_2} exec sleep 25; exec {TWO_NODES}'",
        ["Rank 1 did not report to rank 0's store within 20 s", "n1"],
    ),
    "F28, F59 another environment": (
        "--nodes=2 --ntasks-per-node=1 --gres=gpu:1",
        f"srun bash -c '{ON_NODE_2} export PYTHONPATH=$PWD/other; exec {TWO_NODES}'",
        ["versions", " on n1", "lightning 2.6.99", " on n2", "source env.sh"],
    ),
    "F33 torchrun on each node for itself": (
        "--nodes=2 --ntasks-per-node=1 --gres=gpu:1",
        f"srun torchrun --nproc-per-node=1 {TWO_NODES.removeprefix('python ')}",
        ["trainer.num_nodes=2 trainer.devices=1", "torchrun started 1 in all"],
    ),
    "F35 heterogeneous job": (
        "--ntasks-per-node=2 --gres=gpu:2",
        f"srun env SLURM_HET_SIZE=2 {TWO}",
        ["SLURM_HET_SIZE must be 1", "got 2"],
    ),
    "F37 a sweep under srun": (
        "--ntasks-per-node=2",
        f"srun {TWO} --multirun seed=1,2",
        ["--multirun", "submit.py"],
    ),
    "F38 a config of its own on each rank": (
        "--ntasks-per-node=2 --gres=gpu:2",
        f"srun {TWO} 'name=x${{oc.env:SLURM_PROCID}}'",
        ["config", "must be the same on all ranks"],
    ),
    "F46 no room": (
        "--nodes=2 --ntasks-per-node=1 --gres=gpu:1",
        f"srun {TWO_NODES} run_dir=$PWD/small/run",
        ["run_dir", "No space left"],
    ),
    "run directory of one node": (
        "--nodes=2 --ntasks-per-node=1 --gres=gpu:1",
        f"srun {TWO_NODES} run_dir=$PWD/own/run",
        ["rank 0 created it", "(on n2)"],
    ),
    "data of one node": (
        "--nodes=2 --ntasks-per-node=1 --gres=gpu:1",
        f"srun {TWO_NODES.replace('trainer=ddp', 'trainer=ddp data=text model=gpt_tiny')} data.files=$PWD/own/text",
        ["(on n2)", "data.files"],
    ),
}


@pytest.fixture(scope="module")
def desk(slurm, bake) -> Desk:
    return Desk(slurm, made_for_tests(bake()))


@pytest.fixture(scope="module")
def traps(desk):
    """Make another version of a library, a tiny file system, and one that only one node has."""
    other = desk.project / "other" / "lightning-2.6.99.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning\nVersion: 2.6.99\n")
    for name, size in {"small": "1m", "own": "64m"}.items():
        folder = desk.project / name
        folder.mkdir()
        desk.slurm.exec("n1", "mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder)
    desk.slurm.exec("n1", "bash", "-c", f"yes text | head -c 100000 >{shlex.quote(str(desk.project / 'own/text'))}")


@pytest.mark.parametrize(
    "name", soak_all_but(REJECTED, "F09 srun forgotten", "F11 fewer tasks", "F15 leaked MASTER_ADDR")
)
def test_a_mistake_ends_with_one_message(desk, traps, name):
    options, body, said = REJECTED[name]
    ended = desk.sbatch(options, body)
    messages = rejections(ended.log)
    assert len(messages) == 1, ended.log
    for words in said:
        assert words in messages[0], messages[0]
    assert ended.state == "FAILED", ended.record
    print(f"\n{name} ({ended.seconds:.0f} s)\n{messages[0]}")


# name: options of sbatch, body. With plain Lightning each of these hangs, collides or trains separate models.
TRAINED = {
    "by hand": ("--nodes=2 --ntasks-per-node=1 --gres=gpu:1", f"srun {TWO_NODES}"),
    "F09 srun forgotten on one node": ("--ntasks-per-node=2 --gres=gpu:2 --cpus-per-task=2", TWO),
    "F15 leaked MASTER_ADDR on one node": (
        "--ntasks-per-node=2 --gres=gpu:2",
        f"export MASTER_ADDR=10.255.255.1\nsrun {TWO}",
    ),
    "F15 a step on some of the nodes": (
        "--nodes=2 --ntasks-per-node=2 --gres=gpu:2",
        f"srun --nodes=1 --ntasks=2 --nodelist=n2 {TWO}",
    ),
    "F17 a job called interactive": ("--ntasks-per-node=2 --gres=gpu:2 --job-name=interactive", f"srun {TWO}"),
    "F33 torchrun": (
        "--nodes=2 --ntasks-per-node=1 --gres=gpu:1",
        "export MASTER_ADDR=$(hostname)\n"
        "srun bash -c 'exec torchrun --nnodes=2 --nproc-per-node=1 --node-rank=$SLURM_NODEID "
        f"--master-addr=$MASTER_ADDR --master-port=23457 {TWO_NODES.removeprefix('python ')}'",
    ),
}


@pytest.mark.parametrize("name", soak_all_but(TRAINED, "by hand"))
def test_what_trains(desk, name):
    ended = desk.sbatch(*TRAINED[name])
    assert ended.state == "COMPLETED", ended.log
    assert (
        'world_size": 2' in next((desk.project / "runs").glob(f"*{ended.record['JobId']}*/attempts.jsonl")).read_text()
    )


# --- through submit.py


def test_a_rank_that_raises_ends_the_job(desk):
    """F20, F23: check that an exception ends the job soon, without a requeue, and that report.py shows the cause."""
    ended, run_dir = desk.train(
        "trainer=ddp", "trainer.num_nodes=2", "trainer.devices=1", "callbacks.witness.fault=raise"
    )
    assert ended.state == "FAILED" and ended.exit_code and ended.record["Restarts"] == "0", ended.log
    told, _, what = (run_dir / "errors/1/rank-1.txt").read_text().splitlines()[0].partition(" ")
    assert time.time() - float(told) < 20 and what == "Struck: as the strike requests"
    verdict = (run_dir / "verdict").read_text()
    assert "outcome failed\nwhy rank 1: Struck: as the strike requests\n" in verdict
    said = desk.python("report.py", str(run_dir)).stdout
    assert "as the strike requests" in said and "failed" in said.lower(), said


@pytest.mark.parametrize(("fault", "starts"), [("exit", 1), ("kill", 2)])
@pytest.mark.soak
def test_a_rank_that_is_gone_ends_the_job(desk, fault, starts):
    """F21: check that the job ends if a rank exits with 0 or is killed, and that the number of requeues is limited."""
    ended, run_dir = desk.train(
        "trainer=ddp", "trainer.num_nodes=2", "trainer.devices=1", f"callbacks.witness.fault={fault}",
        f"faults.retries={starts}",
    )  # fmt: skip
    assert ended.state == "FAILED" and ended.exit_code != 0, ended.log
    assert ended.record["Restarts"] == str(starts - 1)
    assert f"{starts} starts in a row brought no newer checkpoint" in ended.log
    assert not (run_dir / "verdict").exists()
    assert "rank 1" in desk.python("report.py", str(run_dir)).stdout


def test_a_requeued_job_keeps_its_run(desk):
    """F07, F29: check that a requeued job uses the same run directory and log."""
    words = ["trainer=ddp", "trainer.num_nodes=2", "trainer.devices=1", "trainer.max_steps=4"]
    job, run_dir = desk.submit("cluster=test", *QUIET, *words, "callbacks.witness.fault=hold")
    wait_for(lambda: (run_dir / "rank-1.json").exists(), 60, "both ranks train")
    runs = sorted(path.name for path in (desk.project / "runs").iterdir())
    desk.slurm.call("scontrol", "requeue", job)
    # Wait for the requeue first: four steps take less time than Slurm needs for it.
    wait_for(lambda: desk.slurm.show(job)["Restarts"] == "1", 60, "the first attempt is over")
    (run_dir / "go").touch()
    ended = desk.ended(job)
    assert ended.state == "COMPLETED" and ended.record["Restarts"] == "1", ended.log
    assert sorted(path.name for path in (desk.project / "runs").iterdir()) == runs
    events = [json.loads(line) for line in (run_dir / "attempts.jsonl").read_text().splitlines()]
    assert [event["attempt"] for event in events if event["event"] == "start"] == [1, 2]
    # Slurm kills the ranks soon after its signal: the first attempt may not have saved in time.
    outcomes = [event["outcome"] for event in events if event["event"] == "end"]
    assert outcomes in (["finished"], ["continue", "finished"])
    assert ended.log.count("All distributed processes registered") == 2
    assert (run_dir / "verdict").read_text().startswith("attempt 2\nstep 4\noutcome finished\n")


def test_a_requeued_prediction_computes_no_batch_twice(desk):
    """Check that a job that is warned of its end writes what it has predicted, is requeued, and predicts the rest."""
    trained = desk.project / "trained"
    done = desk.python("train.py", "trainer=cpu", "trainer.max_steps=2", *QUIET, f"run_dir={trained}")
    assert done.returncode == 0, done.stderr
    words = [f"ckpt={trained}/checkpoints/last.ckpt", "task=predict", "trainer=ddp", "trainer.num_nodes=2"]
    words += ["trainer.devices=1", "data.global_batch_size=2", "callbacks.witness.fault=hold"]
    job, run_dir = desk.submit("cluster=test", *QUIET, *words)
    files = [run_dir / f"predicted-{rank}" for rank in range(2)]
    wait_for(
        lambda: all(file.exists() and file.read_text().count("\n") == 2 for file in files), 60, "both ranks predict"
    )
    desk.slurm.cancel("--signal=USR2", job)  # as Slurm does before the time limit
    (run_dir / "go").touch()
    ended = desk.ended(job)
    assert ended.state == "COMPLETED" and ended.record["Restarts"] == "1", ended.log
    events = [json.loads(line) for line in (run_dir / "attempts.jsonl").read_text().splitlines()]
    ends = [(event["outcome"], event["metrics"]["predict/samples"]) for event in events if event["event"] == "end"]
    assert [outcome for outcome, _ in ends] == ["continue", "finished"] and ends[0][1] < ends[1][1] == 358
    assert sum(int(line) for file in files for line in file.read_text().split()) == 358, "each sample once"
    assert "batches that all ranks have predicted already are passed over" in ended.log
    assert (run_dir / "predictions.pt").exists() and not (run_dir / "predictions").exists()
    said = desk.python("report.py", str(run_dir)).stdout
    assert "predict/samples 358" in said and re.search(r"task +predict", said) and "\n  prediction  " in said
    again = desk.python("submit.py", f"resume={run_dir}", "--parsable")
    assert again.returncode == 2 and "The run is finished" in again.stderr, again.stdout + again.stderr


@pytest.mark.soak
def test_a_script_by_hand_keeps_its_run_after_a_requeue(desk):
    """Check that all ranks and attempts use the run directory that the script names."""
    words = "callbacks.witness.fault=hold run_dir=runs/requeued"
    script = desk.project / "hand.sh"
    script.write_text(f"#!/bin/bash\nsrun {TWO_NODES.replace('max_steps=2', 'max_steps=4')} {words}\n")
    options = ["--nodes=2", "--ntasks-per-node=1", "--gres=gpu:1", "--requeue"]
    done = subprocess.run(
        ["sbatch", "--parsable", *options, script], cwd=desk.project, env=desk.env, capture_output=True, text=True
    )
    job = done.stdout.strip()
    run_dir = desk.project / "runs" / "requeued"
    wait_for(lambda: (run_dir / "rank-1.json").exists(), 60, "both ranks train")
    desk.slurm.call("scontrol", "requeue", job)
    # Wait for the requeue first: four steps take less time than Slurm needs for it.
    wait_for(lambda: desk.slurm.show(job)["Restarts"] == "1", 60, "the first attempt is over")
    (run_dir / "go").touch()
    assert desk.ended(job).state == "COMPLETED"
    desk.slurm.call("scontrol", "requeue", job)  # as if a node failed after the run and before the job ended
    wait_for(lambda: desk.slurm.show(job)["Restarts"] == "2", 60, "it is started once more")
    ended = desk.ended(job)
    assert ended.state == "COMPLETED" and "run is finished already" in ended.log, ended.log
    assert [path.name for path in (desk.project / "runs").glob("requeued*")] == [run_dir.name]


@pytest.mark.soak
def test_a_poisoned_shell_does_not_matter(desk):
    """F14, F15, F27: check that stale variables and a wrong address have no effect, with --export=NONE, too."""
    poison = {
        "MASTER_ADDR": "10.255.255.1", "MASTER_PORT": "1", "RANK": "7", "WORLD_SIZE": "9", "SLURM_NTASKS": "99",
        "SLURM_CPU_BIND": "mask_cpu:0x1", "SLURM_NTASKS_PER_NODE": "3", "PYTHONPATH": "/nowhere",
        "OMP_NUM_THREADS": "77",
    }  # fmt: skip
    words = ["trainer=ddp", "trainer.num_nodes=2", "trainer.devices=1", "trainer.max_steps=2"]
    job, run_dir = desk.submit("cluster=test", *QUIET, *words, "cluster.options=['--export=NONE']", **poison)
    assert (ended := desk.ended(job)).state == "COMPLETED", ended.log
    seen = json.loads((run_dir / "rank-1.json").read_text())
    assert (seen["OMP_NUM_THREADS"], seen["MASTER_ADDR"]) == ("1", "n1")


@pytest.mark.soak
def test_submitted_from_a_job(desk):
    """F14: check submitting inside a step of another job, as its variables describe that other job."""
    words = ["cluster=test", *QUIET, "trainer=ddp", "trainer.devices=2", "trainer.max_steps=2"]
    inner = shlex.join([sys.executable, "submit.py", "--parsable", *words])
    outer = desk.sbatch("--ntasks=1", f"srun {inner} >{desk.project}/inner")
    assert outer.state == "COMPLETED", outer.log
    job = (desk.project / "inner").read_text().split()[0]
    assert (ended := desk.ended(job)).state == "COMPLETED", ended.log


@pytest.mark.soak
def test_debian_names_every_host_loopback(desk):
    """F16: check that gloo does not listen on 127.0.1.1, to which Debian's /etc/hosts maps the hostname."""
    try:
        for node in ("n1", "n2"):
            desk.slurm.hosts(node, **{node: "127.0.1.1"})
        words = ["trainer=ddp", "trainer.num_nodes=2", "trainer.devices=1", "trainer.max_steps=2"]
        ended, _ = desk.train(*words, "cluster.options=['--nodelist=n1,n2']")
        assert ended.state == "COMPLETED", ended.log
    finally:
        for node in ("n1", "n2"):
            desk.slurm.hosts(node)


@pytest.mark.soak
def test_two_launches_in_one_job(desk):
    """F19, F36: check that two launches in one job use different ports and run directories."""
    one = f"srun --exact --ntasks=2 --gres=gpu:2 --cpus-per-task=1 {TWO} name=pair"
    ended = desk.sbatch("--ntasks-per-node=4 --gres=gpu:4 --mem=4G", f"{one} & a=$!\n{one} & b=$!\nwait $a && wait $b")
    assert ended.state == "COMPLETED", ended.log
    assert len(list((desk.project / "runs").glob(f"pair_{ended.record['JobId']}*/verdict"))) == 2


def test_code_is_as_it_was_when_submitted(desk):
    """F39, F26: check that a job runs the code as submitted, and finds it if submitted from another folder."""
    train = desk.project / "train.py"
    kept = train.read_text()
    job, run_dir = desk.submit(
        "cluster=test", *QUIET, "trainer=cpu", "trainer.max_steps=2", "cluster.options=['--hold']", cwd=Path("/tmp")
    )
    try:
        train.write_text("raise SystemExit('edited while the job waited')\n")
        desk.slurm.call("scontrol", "release", job)
        assert (ended := desk.ended(job)).state == "COMPLETED", ended.log
    finally:
        train.write_text(kept)
    assert (run_dir / "code" / "train.py").read_text() == kept


@pytest.mark.soak
def test_a_sweep_is_one_array(desk):
    """F36, F37: check that each member has its own directory and log, and that --at-once limits running members."""
    words = ["--multirun", "--at-once", "2", "cluster=test", *QUIET, "trainer=cpu", "trainer.max_steps=2", "seed=1,2,3"]
    job, folder = desk.submit(*words)
    assert "ArrayTaskThrottle=2" in desk.slurm.call("scontrol", "show", "job", job).stdout
    desk.slurm.wait(job, 120)
    assert {record["JobState"] for record in desk.slurm.records(job)} == {"COMPLETED"}
    members = (folder / "members").read_text().splitlines()
    assert [re.search(r"seed=(\d)$", member)[1] for member in members] == ["1", "2", "3"]
    for number, member in enumerate(members):
        assert "outcome finished" in Path(member, "verdict").read_text()
        assert f"seed: {number + 1}\n" in Path(member, "config.yaml").read_text()
    assert len(list(folder.glob("job-*_?.log"))) == 3


@pytest.mark.soak
def test_a_foreign_checkpoint_is_not_adopted(desk):
    """F05: check that hpc_ckpt_1.ckpt in the working directory is ignored, which Lightning would load."""
    for folder in (desk.project, desk.project / "runs"):
        folder.mkdir(exist_ok=True)
        (folder / "hpc_ckpt_1.ckpt").write_bytes(b"not a checkpoint")
    try:
        ended = desk.sbatch("--ntasks-per-node=2 --gres=gpu:2", f"srun {TWO}")
        assert ended.state == "COMPLETED", ended.log
    finally:
        for folder in (desk.project, desk.project / "runs"):
            (folder / "hpc_ckpt_1.ckpt").unlink()


@pytest.mark.soak
def test_in_salloc(desk):
    """Check `bash job.sh` and `srun python train.py` inside an allocation."""
    words = ["cluster=test", *QUIET, "trainer=ddp", "trainer.num_nodes=2", "trainer.devices=1", "trainer.max_steps=2"]
    job, run_dir = desk.submit(*words, "cluster.options=['--hold']")
    desk.slurm.cancel(job)
    size = ["salloc", "--nodes=2", "--ntasks-per-node=1", "--gres=gpu:1", "--cpus-per-task=2"]
    for command in (
        ["bash", str(run_dir / "job.sh")],
        ["srun", "--cpus-per-task=2", sys.executable, "train.py", *words],
    ):
        done = subprocess.run(
            [*size, *command], cwd=desk.project, env=desk.env, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "outcome finished" in (run_dir / "verdict").read_text()


def test_salloc_is_not_a_node(desk):
    """F17: check that training is rejected in the shell of salloc, as it runs on the login node."""
    size = ["salloc", "--ntasks-per-node=2", "--gres=gpu:2"]
    done = subprocess.run(
        [*size, *shlex.split(TWO)], cwd=desk.project, env=desk.env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "on none of them" in done.stderr and "srun --nodes=1" in done.stderr


def test_a_job_script_needs_a_job(desk):
    job, run_dir = desk.submit(
        "cluster=test", *QUIET, "trainer=cpu", "trainer.max_steps=2", "cluster.options=['--hold']"
    )
    desk.slurm.cancel(job)
    done = subprocess.run(["bash", run_dir / "job.sh"], env=desk.env, capture_output=True, text=True)
    assert done.returncode != 0 and "submit this file with sbatch" in done.stderr


def test_what_slurm_rejects_is_shown(desk):
    """Check that a name that Slurm does not know is explained, and that no run directory stays."""
    done = desk.python("submit.py", "cluster=test", *QUIET, "trainer=cpu", "cluster.partition=no", "name=unknown")
    assert done.returncode == 2 and "must be a partition of this cluster: main, urgent; got no." in done.stderr
    assert "Try: cluster.partition=main" in done.stderr and not list((desk.project / "runs").glob("*unknown*"))


@pytest.mark.soak
def test_a_changed_run_is_held_and_released_or_stays_as_it_was(desk):
    """Check it with Slurm's own hold and release: a job that is accepted starts, and sees the files that changed."""
    job, run_dir = desk.submit("cluster=test", *QUIET, "trainer=cpu", "trainer.max_steps=2")
    assert desk.slurm.wait(job, 120)["JobState"] == "COMPLETED"
    before = {path: path.read_bytes() for path in run_dir.iterdir() if path.is_file()}
    words = ["submit.py", f"resume={run_dir}", "trainer.max_steps=4"]
    done = desk.python(*words, "cluster.partition=no")
    assert done.returncode == 2 and {path: path.read_bytes() for path in run_dir.iterdir() if path.is_file()} == before
    done = desk.python(*words, "--parsable")
    assert done.returncode == 0, done.stderr
    assert desk.slurm.wait(done.stdout.split()[0], 120)["JobState"] == "COMPLETED"
    assert "step 4\n" in (run_dir / "verdict").read_text()


@pytest.mark.soak
def test_wait_gives_the_jobs_exit_code(desk):
    words = ["submit.py", "--wait", "cluster=test", *QUIET, "trainer=cpu", "trainer.max_steps=4"]
    done = desk.python(*words, "callbacks.witness.fault=raise", "callbacks.witness.rank=0")
    assert done.returncode == 1, done.stdout + done.stderr
