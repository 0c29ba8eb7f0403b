"""Measure the cost of sampling the nodes of a run: python benchmarks/monitor.py [--out results.json]

The processor time of a sampler, as the kernel counts it: of one that ends at once, and of one that takes many samples.
The machine has no GPUs, so the time of their driver is not included.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import steps
from bench_project import clean_environ, make_project, project_command
from result_rows import make_row, print_and_save
from turns import measure_turns

ROUNDS, SAMPLES, TURNS = 7, 500, 15
INTERVAL_SECONDS, RUN_SECONDS = 10, 3600  # between two samples by default, of a run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="the JSON file of results, which is updated")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        project = make_project(Path(name))
        print_and_save([*measure_sampler(project, Path(name)), *measure_step(project, Path(name))], arguments.out)


def measure_sampler(project: Path, folder: Path) -> list[dict[str, Any]]:
    starts, samples = [], []
    for number in range(ROUNDS):
        short, long = folder / f"short-{number}", folder / f"long-{number}"
        start, _ = sampler_seconds(project, short, interval_seconds=INTERVAL_SECONDS, num_samples=1)
        total, count = sampler_seconds(project, long, interval_seconds=0.001, num_samples=SAMPLES)
        starts.append(start)
        samples.append((total - start) / (count - 1))
    share = [
        100 * (start / RUN_SECONDS + sample / INTERVAL_SECONDS) for start, sample in zip(starts, samples, strict=True)
    ]
    return [
        make_row("sampling a node every 10 s, its start included, of a core over an hour (no GPUs)", share, "%", 0.5),
        make_row("processor time of a node's sample (no GPUs)", [1e3 * value for value in samples], "ms"),
        make_row(
            "processor time until a node's sampler is there, and its first sample", [1e3 * v for v in starts], "ms"
        ),
    ]


def sampler_seconds(project: Path, run_dir: Path, *, interval_seconds: float, num_samples: int) -> tuple[float, int]:
    """Return the processor time of a sampler, and how many samples it wrote, the last one at its end."""
    command = [sys.executable, "-P", "-m", "hpc.monitor.sampler", str(run_dir), "1", str(interval_seconds), "0"]
    settings = clean_environ() | {"PYTHONPATH": str(project / "src")}
    process = subprocess.Popen([*command, str(os.getpid())], env=settings, stdin=subprocess.PIPE)
    assert process.stdin
    while num_written(run_dir) < num_samples - 1:
        assert process.poll() is None, "the sampler has ended"
        time.sleep(0.05)
    process.stdin.write(b"\n")
    process.stdin.close()
    _, code, usage = os.wait4(process.pid, 0)
    assert code == 0
    return usage.ru_utime + usage.ru_stime, num_written(run_dir)


def num_written(run_dir: Path) -> int:
    return sum(len(path.read_bytes().splitlines()) - 1 for path in run_dir.glob("monitor/*.csv"))


def measure_step(project: Path, folder: Path) -> list[dict[str, Any]]:
    """Measure a step of a tiny network, which hides no overhead. The sampler has its own core."""
    words: dict[str, Sequence[str]] = {"with": [], "without": ["callbacks.monitor=null"]}
    programs = {name: [project_command(project, folder / name, *steps.TINY, *more)] for name, more in words.items()}
    seconds = measure_turns(programs, folder, steps=400, turns=TURNS, warm_up=100)
    calls = measure_turns(programs, folder, steps=300, turns=1, meter="calls", warm_up=100)
    ratios = [sampled / bare for sampled, bare in zip(seconds["with"], seconds["without"], strict=True)]
    return [
        make_row("step where nodes are sampled, over one where they are not", ratios, "x"),
        make_row("function calls per step more where nodes are sampled", [calls["with"][0] - calls["without"][0]], ""),
    ]


if __name__ == "__main__":
    main()
