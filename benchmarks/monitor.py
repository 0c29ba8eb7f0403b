"""What it costs that a run's nodes are sampled: python benchmarks/monitor.py [--out results.json]

The sampler's processor time, as the kernel counts it at its end: of one that ends at once, and of one that has taken
many samples. A machine without GPUs: what their driver takes to answer is not in it.
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
from fork import environ, fork, ours
from rows import report, row
from turns import taken

ROUNDS, SAMPLES, TURNS = 7, 500, 15
EVERY, HOUR = 10, 3600  # seconds: from one sample to the next by default, of a run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a list of rows, in JSON")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        project = fork(Path(name))
        report([*sampler(project, Path(name)), *step(project, Path(name))], asked.out)


def sampler(project: Path, folder: Path) -> list[dict[str, Any]]:
    starts, samples = [], []
    for number in range(ROUNDS):
        short, long = folder / f"short-{number}", folder / f"long-{number}"
        start, _ = cost(project, short, EVERY, 1)
        whole, count = cost(project, long, 0.001, SAMPLES)
        starts.append(start)
        samples.append((whole - start) / (count - 1))
    share = [100 * (start / HOUR + one / EVERY) for start, one in zip(starts, samples, strict=True)]
    return [
        row("sampling a node every 10 s, its start included, of a core over an hour (no GPUs)", share, "%", 0.5),
        row("processor time of a node's sample (no GPUs)", [1e3 * value for value in samples], "ms"),
        row("processor time until a node's sampler is there, and its first sample", [1e3 * v for v in starts], "ms"),
    ]


def cost(project: Path, run_dir: Path, seconds: float, samples: int) -> tuple[float, int]:
    """Seconds of processor time that a sampler took, and how many samples it wrote: the last one at its end."""
    command = [sys.executable, "-P", "-m", "hpc.monitor.sampler", str(run_dir), "1", str(seconds), "0"]
    settings = environ() | {"PYTHONPATH": str(project / "src")}
    process = subprocess.Popen([*command, str(os.getpid())], env=settings, stdin=subprocess.PIPE)
    assert process.stdin
    while written(run_dir) < samples - 1:
        assert process.poll() is None, "the sampler has ended"
        time.sleep(0.05)
    process.stdin.write(b"\n")
    process.stdin.close()
    _, code, used = os.wait4(process.pid, 0)
    assert code == 0
    return used.ru_utime + used.ru_stime, written(run_dir)


def written(run_dir: Path) -> int:
    return sum(len(path.read_bytes().splitlines()) - 1 for path in run_dir.glob("monitor/*.csv"))


def step(project: Path, folder: Path) -> list[dict[str, Any]]:
    """Of a tiny network, where nothing hides what is around it; the sampler has a core of its own beside it."""
    words: dict[str, Sequence[str]] = {"with": [], "without": ["callbacks.monitor=null"]}
    programs = {name: [ours(project, folder / name, *steps.TINY, *more)] for name, more in words.items()}
    took = taken(programs, folder, steps=400, turns=TURNS, warm_up=100)
    calls = taken(programs, folder, steps=300, turns=1, meter="calls", warm_up=100)
    ratios = [mine / bare for mine, bare in zip(took["with"], took["without"], strict=True)]
    return [
        row("step where nodes are sampled, over one where they are not", ratios, "x"),
        row("function calls per step more where nodes are sampled", [calls["with"][0] - calls["without"][0]], ""),
    ]


if __name__ == "__main__":
    main()
