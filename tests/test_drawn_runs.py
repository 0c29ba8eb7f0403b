"""Compare random runs with interrupted twins, a few of them of the day. `make twins COUNT=500 SEED=1` draws more."""

import re

import pytest
from trial import twins
from trial.campaign import failures, summary, today, tried
from trial.twins import draws
from trial.twins.cases import FOUND, PLAIN, REJECTED
from trial.twins.pair import pair

pytestmark = pytest.mark.slow

SEED, COUNT, OF_THE_DAY = 1, 8, 2


@pytest.fixture(scope="module")
def campaign(bake, tmp_path_factory):
    return twins.Twins(tmp_path_factory.mktemp("twins"), bake(cluster="local"))


def test_an_interrupted_run_is_the_one_that_went_through(campaign):
    numbers = [(SEED, number) for number in range(COUNT)] + [(today(), number) for number in range(OF_THE_DAY)]
    print(f"of the day: {campaign.replay(today(), 0)}")
    done = tried(campaign, numbers, jobs=2)
    assert not failures(campaign, done)
    fixed = [one for one in done if one.seed == SEED]
    assert sum(one.outcome.result == "same" for one in fixed) > COUNT / 2, summary(campaign, done, 0)


@pytest.mark.soak
def test_what_is_not_restored_is_found(campaign, tmp_path):
    """Check that the comparison detects state that is not restored: otherwise its success would prove nothing."""
    assert campaign.attempt(PLAIN, tmp_path / "whole").result == "same"
    for control in campaign.controls():
        outcome = campaign.attempt(PLAIN, tmp_path / control.name.replace(" ", "_"), patch=control.patch)
        assert outcome.result == "different", control.name
        assert re.match(control.says, outcome.said), f"{control.name}: {outcome.said}"


@pytest.mark.soak
@pytest.mark.parametrize("what", FOUND)
def test_what_was_found_stays_cured(what, campaign, tmp_path):
    outcome = campaign.attempt(FOUND[what], tmp_path / "found")
    assert outcome.result == "same", outcome.said


@pytest.mark.soak
def test_a_run_that_does_not_end_is_found(campaign, tmp_path):
    patch = "import time; from hpc.data import position; position.start_at = lambda *_: time.sleep(60)"
    assert pair(campaign.project, tmp_path / "run", "hanging", PLAIN, patch, deadline=8.0).kind == "hung"


@pytest.mark.soak
@pytest.mark.parametrize("said", REJECTED)
def test_what_is_rejected_is_told_apart(said, campaign, tmp_path):
    outcome = campaign.attempt(REJECTED[said], tmp_path / "rejected")
    assert outcome.result == "rejected" and said in outcome.said


def test_draws_leave_out_no_end_no_strike_and_no_strategy():
    assert draws.draw(1, 7) == draws.draw(1, 7) != draws.draw(2, 7), "a line that repeats a draw must repeat it"
    drawn = [draws.draw(1, number) for number in range(300)]
    for word in ("limit_train_batches", "val_check_interval", "max_steps", "check_val_every", "reload_dataloaders"):
        assert any(word in " ".join(one["words"]) for one in drawn), word
    deeds = {strike["deed"] for one in drawn for strike in one["strikes"]}
    assert deeds == {"SIGUSR1", "SIGUSR2", "SIGTERM", "SIGINT", "SIGKILL", "raise", "clock"}
    assert {one["strategy"] for one in drawn} >= {"single", "ddp", "fsdp", "deepspeed_zero3"}
