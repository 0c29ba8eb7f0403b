"""Short fault runs: three faults each, one after another. `make chaos` injects every kind, into every strategy."""

import json

import pytest
import slurm_nodes
from slurm_project import Desk
from tiers import soak_all_but
from trial import chaos
from trial.campaign import failures, tried
from trial.chaos.endure import LAYOUTS, WORDS
from trial.chaos.faults import KINDS

pytestmark = pytest.mark.slow

FAULTS = 3
# 509: a full disk, kill -9 during a save, kill -9 of a rank
DRAWS = {509: ["ddp"], 2: list(LAYOUTS)}


@pytest.mark.parametrize("seed", soak_all_but(DRAWS, 509))
def test_no_run_is_lost_or_other_than_one_that_nothing_happened_to(seed, bake, tmp_path):
    if reason := slurm_nodes.missing():
        pytest.skip(reason)
    with chaos.Chaos(tmp_path, bake(cluster="local"), DRAWS[seed]) as campaign:
        done = tried(campaign, [(seed, number) for number in campaign.numbers(seed, FAULTS)])
        assert not failures(campaign, done)
    assert len({one.kind for one in campaign.struck}) == len(campaign.struck) == FAULTS


@pytest.mark.soak
def test_a_run_outlives_its_time_limit(slurm, bake):
    """Check that a run longer than its wall time saves, is requeued and finishes. Then resume it on fewer nodes."""
    desk = Desk(slurm, chaos.prepare(bake(cluster="local")))
    words = [*WORDS, *LAYOUTS["ddp"], "cluster.time=0:02:00", "trainer.max_steps=40"]
    job, run_dir = desk.submit(*words, "checkpoint.every_n_steps=null")
    (run_dir / "pace").write_text("3")  # seconds: forty steps take the whole limit, and some fit after any start
    record = slurm.wait(job, 600)
    events = [json.loads(line) for line in (run_dir / "attempts.jsonl").read_text().splitlines()]
    assert record["JobState"] == "COMPLETED", record
    ends = [(event["outcome"], event["why"]) for event in events if event["event"] == "end"]
    # Slurm may send its signal up to a minute early, before the job's own clock reports the end.
    assert ends[0] in [("continue", "SIGUSR2"), ("continue", "the end of the job's time")]
    assert ends[-1] == ("finished", "")
    steps = [int(line.split()[1]) for line in (run_dir / "steps").read_text().splitlines()]
    assert steps == list(range(1, 41))  # no step is repeated

    (run_dir / "pace").write_text("0")
    # With a limit that is no end for twenty quick steps, however slowly two nodes start.
    job, _ = desk.submit(f"resume={run_dir}", "trainer.num_nodes=2", "trainer.max_steps=60", "cluster.time=0:10:00")
    assert slurm.wait(job, 300)["JobState"] == "COMPLETED"
    events = map(json.loads, (run_dir / "attempts.jsonl").read_text().splitlines())
    last = [event for event in events if event["event"] == "start"][-1]
    assert (last["from_step"], last["world_size"], len(last["hosts"])) == (40, 2, 2)
    assert [int(line.split()[1]) for line in (run_dir / "steps").read_text().splitlines()] == list(range(1, 61))


def test_a_plan_is_made_by_its_seed_and_leaves_out_no_kind_and_no_strategy():
    assert chaos.plan(25, 1) == chaos.plan(25, 1) != chaos.plan(25, 2)
    for count in (len(KINDS), 25, 100):
        runs = chaos.plan(count, 3)
        kinds = [fault.kind for _, faults in runs for fault in faults]
        assert len(kinds) == count and set(kinds) == set(KINDS)
        assert {strategy for strategy, _ in runs} == set(LAYOUTS)
