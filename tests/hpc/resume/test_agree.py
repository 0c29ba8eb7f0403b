"""Check that ranks reach the same decision, and agree about once a second however long a step takes."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from hpc.resume import agreement as resume_agreement
from hpc.resume.agreement import Agreement, RankRequest


class Clock:
    """A clock that only steps advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(resume_agreement.time, "monotonic", lambda: self.now)

    def asked(self, seconds_per_step: Callable[[int], float], until: float) -> list[float]:
        """Return the times of a run's agreements, given its step times."""
        agreement, step, times = Agreement(), 0, []
        while self.now < until:
            if agreement.is_due():
                agreement.all_reduce_requests(RankRequest())
                times.append(self.now)
            self.now += seconds_per_step(step)
            step += 1
        return times


@pytest.mark.parametrize("seconds", [1e-4, 0.01, 0.3])
def test_it_is_asked_about_once_a_second(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    times = Clock(monkeypatch).asked(lambda step: seconds, 100)
    assert 95 < len(times) < 115
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert max(gaps) < 1.01 and min(gaps[10:]) > 0.8


def test_of_long_steps_each_is_asked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Clock(monkeypatch).asked(lambda step: 3.0, 30) == list(range(0, 30, 3))


def test_a_slow_first_step_and_a_fast_one_tell_little(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_first = Clock(monkeypatch).asked(lambda step: 60 if step == 0 else 0.01, 100)
    assert len([time for time in slow_first if time > 65]) == pytest.approx(35, abs=3)
    fast_first = Clock(monkeypatch).asked(lambda step: 1e-6 if step < 3 else 1.0, 100)
    assert max(later - earlier for earlier, later in pairwise([*fast_first, 100])) < 10


def test_steps_that_become_slower_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Clock(monkeypatch).asked(lambda step: 0.01 if step < 1000 else 0.1, 60)
    assert [later - earlier for earlier, later in pairwise(times)][-5:] == pytest.approx([1.0] * 5, abs=0.11)


def test_after_an_evaluation_they_agree_at_once_whatever_its_pace_was(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    agreement, agreed = Agreement(), []
    for begins, seconds, num in ((True, 1e-5, 100_000), (False, 2.0, 10), (True, 1e-5, 100_000), (False, 2.0, 10)):
        agreement.restart()
        for number in range(num):
            if agreement.is_due():
                agreement.all_reduce_requests(RankRequest())
                agreed += [] if begins else [number]
            clock.now += seconds
    assert agreed == [*range(10)] * 2


def wishes(rank: int) -> list[object]:
    """Make different requests on each rank, with a different step time."""
    agreement = Agreement()
    clock = iter(range(0, 1000, 1 + 3 * rank))
    resume_agreement.time.monotonic = lambda: next(clock) / 100  # 10, 40 or 70 ms between two readings of the clock
    heard, asked = [], []
    for step in range(200):
        if agreement.is_due():
            asked.append(step)
            heard.append(agreement.all_reduce_requests(RankRequest(stop=rank if step else 0, save=1 - rank)))
    agreement.barrier()
    return [asked, [(wish.stop, wish.save, wish.is_best, wish.is_not_finite) for wish in heard]]


@pytest.mark.slow
def test_all_ranks_hear_the_same_and_ask_at_the_same_steps(together: Callable) -> None:
    first, second, third = together(wishes, 3)
    assert first == second == third
    asked, heard = first
    assert 2 < len(asked) < 200
    assert heard == [[0, 1, 0, 0], *[[2, 1, 0, 0]] * (len(asked) - 1)]


def measured(rank: int) -> list[object]:
    """Let three ranks measure 2 s, 5 s and 3 s of their own; then nothing."""
    agreement, seconds = Agreement(), [(2, 5, 3)[rank], 0]
    assert agreement.rank_times is None
    agreement.take_own_microseconds = lambda: round(seconds.pop(0) * 1e6)
    heard = []
    for _ in range(2):
        assert agreement.is_due(is_needed=True)
        agreement.all_reduce_requests(RankRequest())
        times = agreement.rank_times
        assert times
        heard.append([times.slowest_rank, times.slowest_seconds, times.fastest_seconds])
    return heard


def test_ranks_hear_who_is_slowest(together: Callable) -> None:
    assert together(measured, 3) == [[[1, 5.0, 2.0]] * 2] * 3
