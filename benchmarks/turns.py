"""Programs that take turns: each trains some steps while the others wait, so that all see the same machine.

A program calls `turn()` once per optimizer step. Who wants figures calls `taken`.
"""

import cProfile
import os
import pstats
import statistics
import subprocess
import sys
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

STEPS, WARM_UP = int(os.environ.get("TURN_STEPS", 0)), int(os.environ.get("TURN_WARM_UP", 0))
METER = os.environ.get("TURN_METER", "")
STEP = "a step begins"
_done = -WARM_UP
_end: Callable[[], float] | None = None


def turn() -> None:
    """A step is about to begin. At the end of a turn: say what it took, and wait for the next."""
    global _done, _end
    if not STEPS:
        return
    if _done >= 0 and _done % STEPS == 0:
        _settle()
        _say(f"{_end()}" if _end else "ready")
        if not os.read(int(os.environ["TURN_GO"]), 1):
            os._exit(0)
        _end = METERS[METER]()
    if "collectives" in METER and _done >= 0:
        _mark()
    _done += 1


# Each begins to measure, and returns what ends it and says the figure of one step.


def seconds() -> Callable[[], float]:
    began = time.perf_counter()
    return lambda: (time.perf_counter() - began) / STEPS


def processor() -> Callable[[], float]:
    """Seconds of processor time, all threads of the process together."""
    began = time.process_time()
    return lambda: (time.process_time() - began) / STEPS


def calls() -> Callable[[], float]:
    """Calls of functions, Python's and built-in ones."""
    profile = cProfile.Profile()
    profile.enable()

    def end() -> float:
        profile.disable()
        return pstats.Stats(profile).total_calls / STEPS

    return end


def collectives(of_steps: Callable[[list[int]], float]) -> Callable[[], float]:
    """What ranks do together, counted by steps."""
    import torch

    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    profile.start()

    def end() -> float:
        profile.stop()
        events = sorted(profile.events(), key=lambda event: event.time_range.start)
        begins = [event.time_range.start for event in events if event.name == STEP]
        made = Counter(bisect(begins, event.time_range.start) for event in events if event.name.startswith("c10d::"))
        return of_steps([made[step] for step in range(1, STEPS + 1)])

    return end


def _mark() -> None:
    import torch

    with torch.profiler.record_function(STEP):
        pass


METERS: dict[str, Callable[[], Callable[[], float]]] = {
    "seconds": seconds,
    "processor": processor,
    "calls": calls,
    "collectives": partial(collectives, statistics.median),
    "collectives, mean": partial(collectives, statistics.fmean),
}


def _say(word: str) -> None:
    os.write(int(os.environ["TURN_SAY"]), f"{word}\n".encode())


def _settle() -> None:
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_available():
        torch.cuda.synchronize()


class Program:
    """The ranks of a program, which wait for their turn."""

    def __init__(self, ranks: Sequence[tuple[Sequence[str], Mapping[str, str]]], cwd: Path, log: Path) -> None:
        self.log, self.processes, self.go, self.said = log, [], [], []
        with log.open("w") as stream:
            for command, environ in ranks:
                (wait, go), (heard, say) = os.pipe(), os.pipe()
                self.processes.append(
                    subprocess.Popen(
                        command, cwd=cwd, env={**environ, "TURN_GO": str(wait), "TURN_SAY": str(say)},
                        pass_fds=(wait, say), stdout=stream, stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip
                os.close(wait), os.close(say)
                self.go.append(go)
                self.said.append(os.fdopen(heard))

    def answer(self) -> float:
        """What the slowest rank says; 0.0 for "ready". RuntimeError with the end of its log if one has ended."""
        words = [said.readline().strip() for said in self.said]
        if not all(words):
            raise RuntimeError(self.log.read_text(errors="replace")[-3000:])
        return 0.0 if "ready" in words else max(map(float, words))

    def turn(self) -> float:
        """What a step of one turn took."""
        for go in self.go:
            os.write(go, b"g")
        return self.answer()

    def end(self, finish: bool = False) -> None:
        """Nothing more is wanted of it; `finish`: it may train to its end, in at most a hundred turns."""
        for go in self.go:
            os.write(go, b"g" * 100 * finish)
            os.close(go)
        for process in self.processes:
            try:
                process.wait(120 if finish else 30)
            except subprocess.TimeoutExpired:
                process.kill()


def taken(
    programs: Mapping[str, Sequence[tuple[Sequence[str], Mapping[str, str]]]],
    folder: Path,
    *,
    steps: int,
    turns: int,
    meter: str = "seconds",
    warm_up: int = 50,
) -> dict[str, list[float]]:
    """What a step took, of each turn of each program; turn i of all of them lies close together.

    Args:
        programs: name → (command, environment) of each rank.
        meter: a name in METERS. Of several ranks the highest figure counts.
    """
    settings = {"TURN_STEPS": str(steps), "TURN_WARM_UP": str(warm_up), "TURN_METER": meter}
    started: dict[str, Program] = {}
    try:
        for name, ranks in programs.items():
            with_settings = [(command, {**environ, **settings}) for command, environ in ranks]
            started[name] = Program(with_settings, folder, folder / f"{name}.log")
            started[name].answer()
        figures: dict[str, list[float]] = {name: [] for name in started}
        for _ in range(turns):
            for name, program in started.items():
                figures[name].append(program.turn())
        return figures
    finally:
        for program in started.values():
            program.end()
