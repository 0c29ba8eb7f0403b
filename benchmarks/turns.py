"""Programs that take turns: each trains some steps while the others wait, so that all see the same machine.

A program calls `turn()` once per optimizer step. Who wants figures calls `taken`.
"""

import cProfile
import os
import pstats
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

STEPS, WARM_UP = int(os.environ.get("TURN_STEPS", 0)), int(os.environ.get("TURN_WARM_UP", 0))
METER = os.environ.get("TURN_METER", "")
STEPS_PER_SECOND = 8  # as ranks see it that agree about once a second, where collectives are counted
_done = -WARM_UP
_counts: list[int] = []  # collectives of each step of a turn, if they are counted
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
    _counts.append(0)
    _done += 1


def begun() -> int:
    """The number of steps that have begun since the end of the warm-up."""
    return _done


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
    """What ranks do together, counted by steps, in the thread that trains."""
    # Not by torch's profiler, which now and then ends the process where it reads what it has recorded.
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented  # it first asks for what its own operation is made of
            exchanges = not func.__name__.startswith(("wait_", "_wrap_"))
            if func.namespace in ("c10d", "_c10d_functional") and exchanges:
                _counts[-1] += 1
            return func(*args, **(kwargs or {}))

    _counts.clear()
    mode = Counted()
    mode.__enter__()

    def end() -> float:
        mode.__exit__(None, None, None)
        return of_steps(_counts)

    return end


METERS: dict[str, Callable[[], Callable[[], float]]] = {
    "seconds": seconds,
    "processor": processor,
    "calls": calls,
    "collectives": partial(collectives, min),  # of a step in which ranks do not also agree
    "collectives, sum": partial(collectives, sum),  # of all steps of a turn
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
