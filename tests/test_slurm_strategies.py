"""Test every strategy on one, two and four real nodes: the losses must equal those of one process."""

import json
from pathlib import Path

import pytest
from slurm_project import QUIET, Desk, made_for_tests

pytestmark = pytest.mark.slow

EPOCHS = "trainer.max_epochs=2"
CLASSES = {"ddp": "DDP", "fsdp": "FSDP", "deepspeed": "DeepSpeed"}
# preset, nodes, devices per node. The last run uses all GPUs of the four nodes.
FOUR_NODES = [(f"{name}_4node", 4, 1) for name in CLASSES]
FEWER_NODES = [(f"{name}{end}", nodes, 1) for name in CLASSES for end, nodes in (("", 1), ("_4node", 2))]
RUNS = [*FOUR_NODES, *(pytest.param(*run, marks=pytest.mark.soak) for run in [*FEWER_NODES, ("ddp_4node", 4, 4)])]


@pytest.fixture(scope="module")
def desk(slurm, bake) -> Desk:
    return Desk(slurm, made_for_tests(bake(cluster="local")))


@pytest.fixture(scope="module")
def alone(desk) -> list[float]:
    """Return the losses of one process."""
    run_dir = desk.project / "runs" / "alone"
    done = desk.python("train.py", "trainer=cpu", EPOCHS, *QUIET, f"run_dir={run_dir}")
    assert done.returncode == 0, done.stderr
    return losses(run_dir)


@pytest.mark.parametrize(("preset", "nodes", "devices"), RUNS)
def test_a_strategy_on_nodes(desk, alone, preset, nodes, devices):
    words = [f"trainer={preset}", f"trainer.num_nodes={nodes}", f"trainer.devices={devices}", EPOCHS]
    ended, run_dir = desk.train(*words, seconds=300)
    assert ended.state == "COMPLETED", ended.log
    followed = losses(run_dir)
    assert len(followed) == len(alone) == 38
    assert followed == pytest.approx(alone, abs=1e-4)

    # The requested resources, those that the ranks see, and the Trainer's settings must agree.
    assert (ended.record["NumNodes"], ended.record["TresPerNode"]) == (str(nodes), f"gres:gpu:{devices}")
    ranks = [json.loads((run_dir / f"rank-{rank}.json").read_text()) for rank in range(nodes * devices)]
    assert [seen["host"] for seen in ranks] == [f"n{1 + rank // devices}" for rank in range(nodes * devices)]
    for rank, seen in enumerate(ranks):
        assert seen["strategy"] == CLASSES[preset.removesuffix("_4node")]
        assert (seen["world_size"], seen["local_rank"]) == (nodes * devices, rank % devices)
        assert seen["SLURM_CPUS_PER_TASK"] == "2"  # set for the step, too: Slurm 22.05 does not inherit it
        assert len(seen["CUDA_VISIBLE_DEVICES"].split(",")) == devices  # each task sees all GPUs of its node
        assert seen["cwd"] == str(desk.project)
    start, end = (json.loads(line) for line in (run_dir / "attempts.jsonl").read_text().splitlines())
    assert start["hosts"] == [f"n{1 + node}" for node in range(nodes)]
    assert (end["outcome"], end["step"]) == ("finished", 38)


def test_a_fresh_project_runs_on_four_nodes(slurm, bake):
    """Check that a fresh project runs as the README says, after adding only the cluster's file."""
    desk = Desk(slurm, made_for_tests(bake()))
    job, run_dir = desk.submit("trainer=ddp_4node", "trainer.devices=1", "cluster=test")
    ended = desk.ended(job, 300)
    assert ended.state == "COMPLETED", ended.log
    end = json.loads((run_dir / "attempts.jsonl").read_text().splitlines()[-1])
    assert end["metrics"]["test/accuracy"] > 0.95
    said = desk.python("report.py").stdout
    assert run_dir.name in said and "finished" in said.lower(), said


def losses(run_dir: Path) -> list[float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [event.value for event in events.Scalars("step/loss")]
