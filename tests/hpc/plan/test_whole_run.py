"""Check the estimate of a whole run from seconds per step: jobs, GPU-hours, checkpoints."""

from math import exp, sqrt

import pytest

from hpc.plan.setup import ParallelLayout
from hpc.plan.trace_types import ParameterGroup, Trace
from hpc.plan.whole_run import (
    MAX_WARNING_SECONDS,
    START_SECONDS,
    best_interval_seconds,
    checkpoint_bytes,
    predict_checkpoint_cost,
    predict_finish,
)

FOUR_NODES = ParallelLayout(4, 8, 1, precision="bf16-mixed")
BILLION = Trace((ParameterGroup("all", 10**9, 10**9, 10**9, num_tensors=1, buffer_bytes=8),), "tokens", 1024)


def test_without_a_limit_the_run_is_one_job() -> None:
    finish = predict_finish(2.0, 1000, num_gpus=32, limit_seconds=None)
    assert finish and (finish.seconds, finish.requeues) == (2000 + START_SECONDS, 0)
    assert finish.gpu_hours == pytest.approx(32 * (2000 + START_SECONDS) / 3600)


def test_each_job_starts_anew_and_ends_before_the_limit() -> None:
    """Check that a job of two hours does only complete steps between its start and the warning."""
    limit, seconds = 7200.0, 7.0
    fit = int((limit - START_SECONDS - MAX_WARNING_SECONDS) // seconds)
    for steps, requeues in ((fit, 0), (fit + 1, 1), (3 * fit, 2)):
        finish = predict_finish(seconds, steps, num_gpus=32, limit_seconds=limit)
        assert finish and finish.requeues == requeues
        assert finish.seconds == pytest.approx(steps * seconds + START_SECONDS * (requeues + 1))
        assert finish.seconds <= (requeues + 1) * limit


def test_a_step_longer_than_a_job_never_ends() -> None:
    assert predict_finish(7200.0, 1, num_gpus=32, limit_seconds=3600.0) is None


@pytest.mark.parametrize(
    ("precision", "sharding", "each"),
    [("32-true", "none", 12), ("bf16-mixed", "fsdp", 12), ("bf16-true", "none", 6), ("bf16-mixed", "zero3", 14)],
)
def test_a_checkpoint_contains_parameters_and_both_averages_of_adam(precision: str, sharding: str, each: int) -> None:
    assert (
        checkpoint_bytes(BILLION, ParallelLayout(4, 8, 1, precision=precision, sharding=sharding)) == each * 10**9 + 8
    )


def test_more_nodes_write_sooner_and_fail_more_often() -> None:
    few, many = (predict_checkpoint_cost(BILLION, ParallelLayout(nodes, 8, 1)) for nodes in (1, 64))
    assert many.bytes == few.bytes and many.seconds == pytest.approx(few.seconds / 64)
    assert many.every_seconds == pytest.approx(few.every_seconds / 64, rel=0.01)


def test_with_rare_failures_the_interval_is_youngs() -> None:
    assert best_interval_seconds(10.0, 1e9) == pytest.approx(sqrt(2 * 10 * 1e9), rel=1e-3)


@pytest.mark.parametrize("failure_seconds", [600.0, 3600.0, 86400.0])
def test_no_other_interval_costs_less(failure_seconds: float) -> None:
    """Check the interval by Daly's cost of a run (2006, equation 20): writing, lost work, and restarts."""
    write_seconds = 60.0

    def cost(every: float) -> float:
        return (exp((every + write_seconds) / failure_seconds) - 1) / every

    best = min(cost(every) for every in range(1, int(2 * failure_seconds)))
    assert cost(best_interval_seconds(write_seconds, failure_seconds)) <= best * 1.01


def test_the_interval_is_never_longer_than_the_time_between_failures() -> None:
    assert best_interval_seconds(100.0, 10.0) == 10.0
