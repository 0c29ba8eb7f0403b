"""The sampler of a node: a thread of its first rank that writes what the node does, every few seconds.

A sample is a line of monitor/node-<host>.jsonl and a point of TensorBoard's curves. The report reads the lines, as
TensorBoard's loader takes seconds for a day of a node. The reason why a value is unknown is printed once. No sample is
taken while the training holds Python's lock.
"""

import atexit
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from hpc.monitor import counters, gpus, node_usage
from hpc.run import attempt_log

MAX_STOP_SECONDS = 2.0  # that the end of a run waits for the last sample


class NodeSampler:
    """Take samples of a node: rates since the sample before, and the present state of memory and GPUs.

    No error of it and no driver or file system that hangs ends or delays the run. A forked process has no such thread,
    and nothing to write.

    Args:
        num_gpus: that the training uses on this node; with 0, no GPU is sampled.
    """

    def __init__(self, run_dir: Path, attempt: int, *, every_seconds: float, num_gpus: int) -> None:
        self.host, self.attempt = socket.gethostname(), attempt
        self.file = node_usage.samples_file(run_dir, self.host)
        self._curves_folder = run_dir / "tensorboard" / f"node-{self.host}"
        self._every_seconds, self._num_gpus = every_seconds, num_gpus
        self._printed: set[str] = set()
        self._first_time = node_usage.first_sample_time(self.file)
        self._curves: EventFileWriter | None = None
        # Here and not in the thread: a process that is forked while a thread imports modules can never import them.
        with suppress(OSError):
            self._open_curves()
        self._cores = counters.allocated_cores()
        self._counters, self._seconds = counters.read_counters(self._cores), time.monotonic()
        self._is_over = threading.Event()
        # A daemon: the interpreter waits for all other threads, and this one may hang in a driver.
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def start(self) -> None:
        """Sample in a thread until `stop`, or the end of this process."""
        atexit.register(self.stop)
        try:
            self._thread.start()
        except RuntimeError as error:  # the limit of threads
            self._print_once("the node is not sampled", str(error))

    def stop(self) -> None:
        """Let the thread take its last sample and end, and wait for it a little."""
        atexit.unregister(self.stop)
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join(MAX_STOP_SECONDS)

    def sample(self) -> None:
        """Take a sample, and write it."""
        totals, seconds = counters.read_counters(self._cores), time.monotonic()
        rates = counters.compute_rates(self._counters, totals, seconds=seconds - self._seconds)
        self._counters, self._seconds = totals, seconds
        figures, errors = gpus.read_gpus(self._num_gpus)
        for error, columns in errors.items():
            if names := [name for name in columns if name not in self._printed]:
                self._printed.update(names)
                print(f"monitor of {self.host}: {', '.join(names)} cannot be read: {error}", flush=True)
        self.write(time.time(), rates | {"memory_gb": counters.used_memory_gb()} | figures)

    def write(self, unix_time: float, values: Mapping[str, float | None]) -> None:
        """Write a sample. A step of the curves is a second since the first sample of the run.

        Raises:
            OSError: nothing can be written, or no curve.
        """
        cells = {name: None if value is None else round(value, 3) for name, value in values.items()}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        attempt_log.append_json_line(self.file, {"time": round(unix_time, 3), "attempt": self.attempt, **cells})
        self._first_time = unix_time if self._first_time is None else self._first_time
        known = [(name, value) for name, value in cells.items() if value is not None]
        points = [Summary.Value(tag=f"node/{name}", simple_value=value) for name, value in known]
        event = Event(wall_time=unix_time, step=int(unix_time - self._first_time), summary=Summary(value=points))
        curves = self._curves or self._open_curves()
        try:
            curves.add_event(event)
            curves.flush()
        except OSError:
            self._curves = None  # TensorBoard's writer writes nothing after an error; the next sample opens another one
            raise

    def _open_curves(self) -> EventFileWriter:
        self._curves = EventFileWriter(str(self._curves_folder))
        return self._curves

    def _run(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(self._every_seconds)
            try:
                self.sample()  # also at the end, since a run may be shorter than one interval
            except Exception as error:  # whatever a library raises: the training goes on
                self._print_once("samples are lost", f"{type(error).__name__}: {error}")
        if self._curves:
            with suppress(OSError):
                self._curves.close()

    def _print_once(self, problem: str, reason: str) -> None:
        if problem not in self._printed:
            self._printed.add(problem)
            with suppress(OSError):
                print(f"monitor of {self.host}: {problem}: {reason}", flush=True)
