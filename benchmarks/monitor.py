"""Measure the cost of sampling the nodes of a run: python benchmarks/monitor.py [--out results.json]

The processor time of a node's samples, as the kernel counts it. The machine has no GPUs, so the time of their driver is
not included.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import steps
from bench_project import clean_environ, make_project, project_command
from result_rows import make_row, print_and_save
from turns import measure_turns

ROUNDS, SAMPLES, TURNS = 7, 500, 15
INTERVAL_SECONDS = 10  # between two samples by default
PROGRAM = """
import sys, time
from pathlib import Path
from hpc.monitor.sampler import NodeSampler
sampler = NodeSampler(Path(sys.argv[1]), 1, every_seconds=3600, num_gpus=0)
sampler.sample()
begin = time.process_time()
for _ in range(int(sys.argv[2])):
    sampler.sample()
print((time.process_time() - begin) / int(sys.argv[2]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="the JSON file of results, which is updated")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        project = make_project(Path(name))
        print_and_save([*measure_sampler(project, Path(name)), *measure_step(project, Path(name))], arguments.out)


def measure_sampler(project: Path, folder: Path) -> list[dict[str, Any]]:
    environ = clean_environ() | {"PYTHONPATH": str(project / "src")}
    seconds = []
    for number in range(ROUNDS):
        command = [sys.executable, "-c", PROGRAM, str(folder / f"run-{number}"), str(SAMPLES)]
        seconds.append(float(subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout))
    share = [100 * value / INTERVAL_SECONDS for value in seconds]
    return [
        make_row("sampling a node every 10 s, of a core (no GPUs)", share, "%", 0.5),
        make_row("processor time of a node's sample (no GPUs)", [1e3 * value for value in seconds], "ms"),
    ]


def measure_step(project: Path, folder: Path) -> list[dict[str, Any]]:
    """Measure a step of a tiny network, which hides no overhead. The sampler is a thread of it."""
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
