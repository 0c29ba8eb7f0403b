"""Check what campaigns of trials are judged by: floors, strikes, the line that repeats a draw, and its reduction."""

import os
import signal
from pathlib import Path

import pytest
from trial import campaign as campaigns
from trial import program
from trial.campaign import Campaign, Control, Outcome
from trial.strike import WRITER, Strike, Struck, Watch, do


class Drawn(Campaign):
    """Numbers, of which the program rejects those in `rejected`, and fails on those in `failed`."""

    name, unit = "drawn", "number"
    GOOD, ACCEPTED = ("right", "rejected"), ("right",)
    FLOORS = {"even": 0.5}  # noqa: RUF012

    def __init__(self, folder: Path, *, rejected: set[int] = frozenset(), failed: set[int] = frozenset()) -> None:
        super().__init__(folder, folder)
        self.rejected, self.failed = rejected, failed

    def draw(self, seed, number):
        return [number, *range(number)]

    def kind(self, drawn):
        return "odd" if drawn[0] % 2 else "even"

    def attempt(self, drawn, place, *, patch=""):
        if drawn[0] in self.failed or patch:
            return Outcome("wrong", f"{drawn[0]} fails")
        return Outcome("rejected" if drawn[0] in self.rejected else "right")

    def simpler(self, drawn):
        yield from (drawn[:index] + drawn[index + 1 :] for index in range(1, len(drawn)))

    def controls(self):
        yield Control("patched", "x", [[2]], "wrong")
        yield Control("blind", "", [[2], [4]], "wrong")


def failures(drawn: Campaign, count: int) -> list[str]:
    return campaigns.failures(drawn, campaigns.tried(drawn, [(1, number) for number in range(count)]))


def test_a_campaign_in_which_nothing_is_accepted_fails(tmp_path):
    assert failures(Drawn(tmp_path), 100) == []
    (line,) = failures(Drawn(tmp_path, rejected=set(range(100))), 100)
    assert line == "too few accepted: 0 of 50 even, and at least 9 must be"
    assert failures(Drawn(tmp_path, rejected=set(range(0, 100, 4))), 100) == []  # half of them, as is usual


def test_a_failed_draw_is_told_with_the_line_that_repeats_it(tmp_path, capsys):
    assert failures(Drawn(tmp_path, failed={3}), 5) == ["wrong: python tests/trial drawn --seed 1 --only 3"]
    said = capsys.readouterr().out
    assert "3: odd: wrong" in said and "3 fails" in said and "[3, 0, 1, 2]" in said


@pytest.mark.parametrize(("drawn", "share", "least"), [(0, 1.0, 0), (3, 1.0, 3), (3, 0.5, 0), (40, 0.5, 6)])
def test_a_floor_is_what_chance_does_not_explain(drawn, share, least):
    assert campaigns.floor(drawn, share) == least


def test_controls_that_find_nothing_are_named(tmp_path):
    assert campaigns.missed(Drawn(tmp_path)) == ["blind"]


def test_a_draw_is_reduced_to_what_it_fails_by(tmp_path):
    assert campaigns.shrunk(Drawn(tmp_path, failed={3}), [3, 0, 1, 2]) == [3]


def ends(deed: str, folder: Path, **more: float) -> int:
    """Return the exit code of a process that is struck on its second passage."""

    def body() -> None:
        watch = Watch(Strike(WRITER, deed, count=2, **more), folder / "struck")
        for _ in range(3):
            watch.passes()
            with (folder / "passed").open("a") as file:
                file.write(".")

    pid = program.fork(body, folder / "said")
    code = program.ended(pid, 60)
    assert (folder / "struck").exists()
    return code


@pytest.mark.parametrize(("deed", "code", "passed"), [
    ("SIGTERM", -signal.SIGTERM, "."), ("SIGKILL", -signal.SIGKILL, "."), ("raise", 1, "."), ("exit", 0, "."),
    ("slow", 0, "..."),
])  # fmt: skip
def test_a_strike_does_what_it_says_on_the_passage_that_it_says(deed, code, passed, tmp_path):
    assert ends(deed, tmp_path, seconds=0.2) == code
    assert (tmp_path / "passed").read_text() == passed
    assert (Struck.__name__ in (tmp_path / "said").read_text()) == (deed == "raise")


def test_a_rank_that_holds_goes_on_when_it_may(tmp_path):
    pid = program.fork(lambda: do(Strike("", "hold"), tmp_path), tmp_path / "said")
    assert program.ended(program.fork(lambda: do(Strike("", "hold"), tmp_path), tmp_path / "said"), 1.0) is None
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    (tmp_path / "go").touch()
    assert program.ended(pid, 60) == 0
