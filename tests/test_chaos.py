"""The fault run, a short one: every kind of fault once, over all strategies. `make chaos` makes longer ones."""

import chaos
import pytest
import slurm_nodes
from faults import KINDS

pytestmark = pytest.mark.slow

SEED = 1


def test_no_run_is_lost_or_other_than_one_that_nothing_happened_to(bake, tmp_path):
    if reason := slurm_nodes.missing():
        pytest.skip(reason)
    with chaos.ground(tmp_path, lambda: bake(cluster="local")) as (desk, disk):
        struck, wrong = chaos.campaign(desk, disk, len(KINDS), SEED)
    assert not wrong, "\n".join(wrong)
    assert sorted(one.kind for one in struck) == sorted(KINDS)
    assert {one.strategy for one in struck} == set(chaos.LAYOUTS)


def test_a_plan_is_made_by_its_seed_and_leaves_out_no_kind_and_no_strategy():
    assert chaos.plan(25, 1) == chaos.plan(25, 1) != chaos.plan(25, 2)
    for faults in (len(KINDS), 25, 100):
        runs = chaos.plan(faults, 3)
        kinds = [strike.kind for _, strikes in runs for strike in strikes]
        assert len(kinds) == faults and set(kinds) == set(KINDS)
        assert {strategy for strategy, _ in runs} == set(chaos.LAYOUTS)
