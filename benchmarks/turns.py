"""Programs that take turns: each trains some steps while the others wait, so that all see the same machine.

A program calls `turn()` once per optimizer step. Who wants figures calls `taken`.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

STEPS, WARM_UP = int(os.environ.get("TURN_STEPS", 0)), int(os.environ.get("TURN_WARM_UP", 0))
_state = {"done": -WARM_UP, "began": 0.0}


def turn() -> None:
    """A step is about to begin. At the end of a turn: say how long it took, and wait for the next."""
    if not STEPS:
        return
    if _state["done"] >= 0 and _state["done"] % STEPS == 0:
        _settle()
        clock = time.process_time if os.environ["TURN_CLOCK"] == "cpu" else time.perf_counter
        if _state["done"]:
            _say(f"{(clock() - _state['began']) / STEPS}")
        else:
            _say("ready")
        if not os.read(int(os.environ["TURN_GO"]), 1):
            os._exit(0)
        _state["began"] = clock()
    _state["done"] += 1


def _say(word: str) -> None:
    os.write(int(os.environ["TURN_SAY"]), f"{word}\n".encode())


def _settle() -> None:
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_available():
        torch.cuda.synchronize()


class Program:
    """Ranks of one program: processes that wait for their turn."""

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
        """Seconds per step of one turn."""
        for go in self.go:
            os.write(go, b"g")
        return self.answer()

    def end(self) -> None:
        for go in self.go:
            os.close(go)
        for process in self.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def taken(
    programs: Mapping[str, Sequence[tuple[Sequence[str], Mapping[str, str]]]],
    folder: Path,
    *,
    steps: int,
    turns: int,
    clock: str = "wall",
    warm_up: int = 50,
) -> dict[str, list[float]]:
    """Seconds per step of each turn of each program; turn i of all of them lies close together.

    Args:
        programs: name → (command, environment) of each rank.
        clock: "wall", or "cpu" for the processor time of a rank's threads.
    """
    settings = {"TURN_STEPS": str(steps), "TURN_WARM_UP": str(warm_up), "TURN_CLOCK": clock}
    started: dict[str, Program] = {}
    try:
        for name, ranks in programs.items():
            with_settings = [(command, {**environ, **settings}) for command, environ in ranks]
            started[name] = Program(with_settings, folder, folder / f"{name}.log")
            started[name].answer()
        seconds: dict[str, list[float]] = {name: [] for name in started}
        for _ in range(turns):
            for name, program in started.items():
                seconds[name].append(program.turn())
        return seconds
    finally:
        for program in started.values():
            program.end()


def median(values: Sequence[float]) -> tuple[float, list[float]]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return middle, [low, high]
