"""From seconds of a step to a whole run: jobs, GPU-hours, checkpoints."""

from math import exp, sqrt

import pytest

from hpc.plan import campaign
from hpc.plan.campaign import START, WARNING, checkpoint, finish, interval, kept
from hpc.plan.setup import Setup
from hpc.plan.trace_types import Linear, Part, Trace

FOUR_NODES = Setup(4, 8, 1, precision="bf16-mixed")
PART = Part(
    name="before", parameters=10**9, trained=10**9, whole=10**9, tensors=1, buffer_bytes=8, kept=Linear(),
    output=Linear(), forward_peak=(), backward_peak=(), left=Linear(), forward=(), backward=(), reduced=(),
)  # fmt: skip
BILLION = Trace((PART,), "tokens", 1024)


def test_without_a_limit_it_is_one_job() -> None:
    found = finish(2.0, 1000, FOUR_NODES, None)
    assert found and (found.seconds, found.requeues) == (2000 + START, 0)
    assert found.gpu_hours == pytest.approx(32 * (2000 + START) / 3600)


def test_each_job_starts_anew_and_ends_before_the_limit() -> None:
    """Of two hours, what is left between start and warning holds whole steps only."""
    limit, seconds = 7200.0, 7.0
    fit = int((limit - START - WARNING) // seconds)
    for steps, requeues in ((fit, 0), (fit + 1, 1), (3 * fit, 2)):
        found = finish(seconds, steps, FOUR_NODES, limit)
        assert found and found.requeues == requeues
        assert found.seconds == pytest.approx(steps * seconds + START * (requeues + 1))
        assert found.seconds <= (requeues + 1) * limit


def test_a_step_longer_than_a_job_never_ends() -> None:
    assert finish(7200.0, 1, FOUR_NODES, 3600.0) is None


@pytest.mark.parametrize(
    ("precision", "sharding", "each"),
    [("32-true", "none", 12), ("bf16-mixed", "fsdp", 12), ("bf16-true", "none", 6), ("bf16-mixed", "zero3", 14)],
)
def test_a_checkpoint_holds_parameters_and_both_of_adams_averages(precision: str, sharding: str, each: int) -> None:
    assert kept(BILLION, Setup(4, 8, 1, precision=precision, sharding=sharding)) == each * 10**9 + 8


def test_more_nodes_write_sooner_and_fail_more_often() -> None:
    few, many = (checkpoint(BILLION, Setup(nodes, 8, 1)) for nodes in (1, 64))
    assert many.bytes == few.bytes and many.seconds == pytest.approx(few.seconds / 64)
    assert many.every_seconds == pytest.approx(few.every_seconds / 64, rel=0.01)


def test_where_failures_are_rare_it_is_youngs_formula() -> None:
    assert interval(10.0, 1e9) == pytest.approx(sqrt(2 * 10 * 1e9), rel=1e-3)


@pytest.mark.parametrize("fails", [600.0, 3600.0, 86400.0])
def test_no_other_interval_costs_less(fails: float) -> None:
    """Daly's cost of a run (2006, equation 20): what is written, what is lost, and done again."""
    write = 60.0

    def cost(every: float) -> float:
        return (exp((every + write) / fails) - 1) / every

    best = min(cost(every) for every in range(1, int(2 * fails)))
    assert cost(interval(write, fails)) <= best * 1.01


def test_a_checkpoint_that_takes_longer_than_nodes_live_is_written_all_the_time() -> None:
    assert interval(100.0, 10.0) == 10.0


def test_large_jobs_fail_every_few_hours() -> None:
    """As published: 16,384 GPUs for 54 days, 419 times."""
    hours = campaign.NODE_FAILS / 2048 / 3600
    assert hours == pytest.approx(3.1, rel=0.01)
