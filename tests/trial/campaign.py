"""A campaign: draws by seed and number, each tried and judged, a line that repeats each, controls, and a floor.

The floor: a program that rejects everything would pass every trial. So each kind of draws has a share that is accepted
by right programs, and a campaign fails in which less are accepted than chance explains.
"""

import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar

from trial.program import die_with_parent
from trial.project import bake

ALL = "of all kinds"  # what a floor for all draws together is called
UNLIKELY = 1e-6  # a share of accepted draws that comes about by chance less often than this fails a campaign


@dataclass(frozen=True)
class Outcome:
    """What became of a draw.

    Attributes:
        result: what the trial says, as "same" or "rejected".
        said: the first difference, the message, or the end of the output.
        counts: what the draw had in it, for the summary.
        accepted: for each kind of draw in it, how many were accepted and how many there were; {}: by `result`.
    """

    result: str
    said: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)
    accepted: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Control:
    """A patch under which one of some draws must have this result: else the trial's success would prove nothing."""

    name: str
    patch: str
    draws: Sequence[Any]
    result: str
    says: str = ""  # a part of what is said


class Campaign:
    """A table of draws, and how each is tried. Used within `with`."""

    name: ClassVar[str]
    unit: ClassVar[str]  # what a draw is called
    GOOD: ClassVar[tuple[str, ...]]  # results that are no failure
    ACCEPTED: ClassVar[tuple[str, ...]]  # results by which a program has done what was asked
    FLOORS: ClassVar[Mapping[str, float]] = {}  # for each kind of draw the share that is accepted, rather too small
    JOBS: ClassVar[int] = 1  # draws at a time

    def __init__(self, folder: Path, project: Path | None = None) -> None:
        self.folder = folder
        self.project = (project or bake(folder)).absolute()

    def __enter__(self) -> "Campaign":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def numbers(self, seed: int, count: int) -> Sequence[int]:
        """Return the numbers of the draws of a seed in which there is so much to try."""
        return range(count)

    def draw(self, seed: int, number: int) -> Any:
        """Return a draw, as plain data: the same one for the same seed and number."""
        raise NotImplementedError

    def kind(self, drawn: Any) -> str:
        raise NotImplementedError

    def attempt(self, drawn: Any, place: Path, *, patch: str = "") -> Outcome:
        """Try a draw in a folder of its own."""
        raise NotImplementedError

    def controls(self) -> Iterator[Control]:
        yield from ()

    def simpler(self, drawn: Any) -> Iterator[Any]:
        """Yield draws that lack one element."""
        yield from ()

    def show(self, drawn: Any) -> str:
        """Return a failed draw for the reader."""
        return str(drawn)

    def replay(self, seed: int, number: int) -> str:
        """Return the command line that repeats a draw."""
        return f"python tests/trial {self.name} --seed {seed} --only {number}"

    def publish(self, done: "Sequence[Tried]", asked: Any) -> None:
        """Print a table of the results, and put it into a page if that is asked for."""


@dataclass
class Tried:
    """A draw and its outcome."""

    seed: int
    number: int
    kind: str
    outcome: Outcome


def today() -> int:
    """Return the seed of the day."""
    return int(date.today().strftime("%Y%m%d"))


def tried(
    campaign: Campaign, draws: Sequence[tuple[int, int]], *, jobs: int = 1, seconds: float = math.inf
) -> list[Tried]:
    """Try these draws, (seed, number) each, and print a line of each when it ends. After `seconds` none is begun."""
    until, done = time.monotonic() + seconds, []
    for one in _each(campaign, draws, jobs, until):
        done.append(one)
        print(f"{one.number}: {one.kind}: {one.outcome.result} {one.outcome.seconds:.1f} s", end="", flush=True)
        if one.outcome.result in campaign.GOOD:
            print(f" {one.outcome.said.splitlines()[0][:160]}" if one.outcome.said else "", flush=True)
        else:
            said = "".join(f"\n  {line}" for line in one.outcome.said.splitlines())
            shown = campaign.show(campaign.draw(one.seed, one.number))
            print(f"{said}\n  again: {campaign.replay(one.seed, one.number)}\n  {shown}", flush=True)
    return sorted(done, key=lambda one: (one.seed, one.number))


def _each(campaign: Campaign, draws: Sequence[tuple[int, int]], jobs: int, until: float) -> Iterator[Tried]:
    if jobs == 1:
        yield from (_one(campaign, *draw) for draw in draws if time.monotonic() < until)
        return
    with ProcessPoolExecutor(jobs, get_context("fork"), die_with_parent) as pool:
        for future in as_completed([pool.submit(_one, campaign, *draw) for draw in draws]):
            yield future.result()


def _one(campaign: Campaign, seed: int, number: int) -> Tried:
    drawn, began = campaign.draw(seed, number), time.monotonic()
    outcome = campaign.attempt(drawn, campaign.folder / f"{campaign.name}-{seed}-{number}")
    took = time.monotonic() - began
    outcome = Outcome(outcome.result, outcome.said, outcome.counts, outcome.accepted, took)
    return Tried(seed, number, campaign.kind(drawn), outcome)


def failures(campaign: Campaign, done: Sequence[Tried]) -> list[str]:
    """Return a line for each draw that failed, and for each kind of which too few were accepted."""
    lines = [
        f"{one.outcome.result}: {campaign.replay(one.seed, one.number)}"
        for one in done
        if one.outcome.result not in campaign.GOOD
    ]
    for kind, (accepted, drawn) in accepted_of(campaign, done).items():
        least = floor(drawn, campaign.FLOORS[kind]) if kind in campaign.FLOORS else 0
        if accepted < least:
            lines.append(f"too few accepted: {accepted} of {drawn} {kind}, and at least {least} must be")
    return lines


def accepted_of(campaign: Campaign, done: Sequence[Tried]) -> dict[str, tuple[int, int]]:
    """Return how many draws of each kind were accepted, and how many there were."""
    accepted: Counter[str] = Counter()
    drawn: Counter[str] = Counter()
    for one in done:
        by_kind = one.outcome.accepted or {one.kind: (int(one.outcome.result in campaign.ACCEPTED), 1)}
        for kind, (good, total) in by_kind.items():
            for name in (kind, ALL):
                accepted[name] += good
                drawn[name] += total
    return {kind: (accepted[kind], drawn[kind]) for kind in sorted(drawn)}


def floor(drawn: int, share: float) -> int:
    """Return how many of so many draws are accepted but for a chance of `UNLIKELY`, if each is with this share."""
    chance, least = 0.0, 0
    while least < drawn:
        chance += math.comb(drawn, least) * share**least * (1 - share) ** (drawn - least)
        if chance > UNLIKELY:
            break
        least += 1
    return least


def summary(campaign: Campaign, done: Sequence[Tried], seconds: float) -> str:
    """Return the count of each result, of the kinds of draws that were accepted, and of what was in the draws."""
    results = Counter(one.outcome.result for one in done)
    seeds = ", ".join(map(str, sorted({one.seed for one in done})))
    head = f"{len(done)} {campaign.unit}s: " + ", ".join(f"{count} {result}" for result, count in results.items())
    lines = [f"  accepted: {good} of {total} {kind}" for kind, (good, total) in accepted_of(campaign, done).items()]
    messages = Counter(
        one.outcome.said.splitlines()[0] for one in done if one.outcome.result == "rejected" and one.outcome.said
    )
    lines += [f"  rejected {count} times: {said[:200]}" for said, count in messages.most_common(20)]
    if counts := sum((Counter(one.outcome.counts) for one in done), Counter()):
        lines.append("  " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    took = f"  seed {seeds}, {seconds / 60:.1f} minutes on {os.cpu_count()} cores; in {campaign.folder}"
    return "\n".join([head, *lines, took])


def missed(campaign: Campaign) -> list[str]:
    """Return the controls that found nothing."""
    names = []
    for control in campaign.controls():
        for number, drawn in enumerate(control.draws):
            place = campaign.folder / f"control-{control.name.replace(' ', '-')}-{number}"
            outcome = campaign.attempt(drawn, place, patch=control.patch)
            if outcome.result == control.result and control.says in outcome.said:
                print(f"control, {control.name}: {outcome.result}, as it must be", flush=True)
                break
        else:
            print(f"control, {control.name}: {outcome.result} instead of {control.result}\n{outcome.said}", flush=True)
            names.append(control.name)
    return names


def shrunk(campaign: Campaign, drawn: Any) -> Any:
    """Return the smallest draw that still has the same result, and print each on the way."""
    with tempfile.TemporaryDirectory(prefix="shrunk", dir=campaign.folder) as place:
        result = campaign.attempt(drawn, Path(place, "first")).result
        smaller = True
        while smaller:
            smaller = False
            for number, candidate in enumerate(campaign.simpler(drawn)):
                if campaign.attempt(candidate, Path(place, str(number))).result == result:
                    print(campaign.show(candidate), flush=True)
                    drawn, smaller = candidate, True
                    break
    return drawn
