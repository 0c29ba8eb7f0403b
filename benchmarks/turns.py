"""Programs that take turns: each trains some steps while the others wait, so that all see the same machine.

A program calls `wait_for_turn()` before each optimizer step. A benchmark calls `measure_turns` for the figures.
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
STEPS_PER_SECOND = 8  # the rate that ranks, which agree about once a second, see while collectives are counted
_num_started = -WARM_UP
_collectives_per_step: list[int] = []  # of a turn, if they are counted
_end: Callable[[], float] | None = None


def wait_for_turn() -> None:
    """Note that a step starts. At the end of a turn, report its figure and wait for the next turn."""
    global _num_started, _end
    if not STEPS:
        return
    if _num_started >= 0 and _num_started % STEPS == 0:
        _synchronize_gpu()
        _report(f"{_end()}" if _end else "ready")
        if not os.read(int(os.environ["TURN_GO"]), 1):
            os._exit(0)
        _end = METERS[METER]()
    _collectives_per_step.append(0)
    _num_started += 1


def num_started_steps() -> int:
    """Return the number of steps that have started since the end of the warm-up."""
    return _num_started


# Each starts a measurement, and returns a function that ends it and returns the figure of one step.


def measure_seconds() -> Callable[[], float]:
    start_time = time.perf_counter()
    return lambda: (time.perf_counter() - start_time) / STEPS


def measure_processor() -> Callable[[], float]:
    """Measure seconds of processor time, of all threads of the process together."""
    start_time = time.process_time()
    return lambda: (time.process_time() - start_time) / STEPS


def count_calls() -> Callable[[], float]:
    """Count calls of functions, Python's and built-in ones."""
    profile = cProfile.Profile()
    profile.enable()

    def end() -> float:
        profile.disable()
        return pstats.Stats(profile).total_calls / STEPS  # type: ignore[attr-defined]

    return end


def count_collectives(reduce_steps: Callable[[list[int]], float]) -> Callable[[], float]:
    """Count the collectives of each step in the thread that trains.

    Args:
        reduce_steps: makes one figure of the counts of a turn's steps.
    """
    # Not with torch's profiler, which sometimes crashes the process when it reads its records.
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class CollectiveCounter(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented  # DTensor first dispatches the operations that it consists of
            is_exchange = not func.__name__.startswith(("wait_", "_wrap_"))
            if func.namespace in ("c10d", "_c10d_functional") and is_exchange:
                _collectives_per_step[-1] += 1
            return func(*args, **(kwargs or {}))

    _collectives_per_step.clear()
    mode = CollectiveCounter()
    mode.__enter__()

    def end() -> float:
        mode.__exit__(None, None, None)
        return reduce_steps(_collectives_per_step)

    return end


METERS: dict[str, Callable[[], Callable[[], float]]] = {
    "seconds": measure_seconds,
    "processor": measure_processor,
    "calls": count_calls,
    "collectives": partial(count_collectives, min),  # of a step without an agreement of the ranks
    "collectives, sum": partial(count_collectives, sum),  # of all steps of a turn
}


def _report(word: str) -> None:
    os.write(int(os.environ["TURN_SAY"]), f"{word}\n".encode())


def _synchronize_gpu() -> None:
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_available():
        torch.cuda.synchronize()


class Program:
    """The processes of a program's ranks, which wait for their turn."""

    def __init__(self, ranks: Sequence[tuple[Sequence[str], Mapping[str, str]]], cwd: Path, log: Path) -> None:
        self.log, self.processes, self._go_pipes, self._figure_streams = log, [], [], []
        with log.open("w") as stream:
            for command, environ in ranks:
                (go_read, go_write), (figure_read, figure_write) = os.pipe(), os.pipe()
                self.processes.append(
                    subprocess.Popen(
                        command, cwd=cwd, env={**environ, "TURN_GO": str(go_read), "TURN_SAY": str(figure_write)},
                        pass_fds=(go_read, figure_write), stdout=stream, stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip
                os.close(go_read), os.close(figure_write)
                self._go_pipes.append(go_write)
                self._figure_streams.append(os.fdopen(figure_read))

    def read_figure(self) -> float:
        """Return the highest figure of the ranks; 0.0 for "ready".

        Raises:
            RuntimeError: a rank has ended. The message is the end of the log.
        """
        words = [stream.readline().strip() for stream in self._figure_streams]
        if not all(words):
            raise RuntimeError(self.log.read_text(errors="replace")[-3000:])
        return 0.0 if "ready" in words else max(map(float, words))

    def run_turn(self) -> float:
        """Run one turn, and return the figure of its steps."""
        for pipe in self._go_pipes:
            os.write(pipe, b"g")
        return self.read_figure()

    def end(self, finish: bool = False) -> None:
        """End the program; with `finish` it may train to its end before, in at most a hundred turns."""
        for pipe in self._go_pipes:
            os.write(pipe, b"g" * 100 * finish)
            os.close(pipe)
        for process in self.processes:
            try:
                process.wait(120 if finish else 30)
            except subprocess.TimeoutExpired:
                process.kill()


def measure_turns(
    programs: Mapping[str, Sequence[tuple[Sequence[str], Mapping[str, str]]]],
    folder: Path,
    *,
    steps: int,
    turns: int,
    meter: str = "seconds",
    warm_up: int = 50,
) -> dict[str, list[float]]:
    """Return the figure of a step for each turn of each program. Turn i of all programs is at about the same time.

    Args:
        programs: by name, (command, environment) of each rank.
        meter: a name in METERS. The highest figure of the ranks counts.
    """
    settings = {"TURN_STEPS": str(steps), "TURN_WARM_UP": str(warm_up), "TURN_METER": meter}
    started: dict[str, Program] = {}
    try:
        for name, ranks in programs.items():
            with_settings = [(command, {**environ, **settings}) for command, environ in ranks]
            started[name] = Program(with_settings, folder, folder / f"{name}.log")
            started[name].read_figure()
        figures: dict[str, list[float]] = {name: [] for name in started}
        for _ in range(turns):
            for name, program in started.items():
                figures[name].append(program.run_turn())
        return figures
    finally:
        for program in started.values():
            program.end()
