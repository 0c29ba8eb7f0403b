"""Measure how soon submit.py rejects what Slurm can never start: python benchmarks/rejections.py [--out results.json]

On a Slurm of the tests, as root: a controller with two partitions, a QoS with limits, and a database of accounts. The
kinds of such jobs take turns. Their table goes into docs/reference.md.
"""

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_project import make_project
from result_rows import make_row, print_and_save

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "tests"))

import impossible_jobs  # noqa: E402
import slurm_accounts  # noqa: E402
import slurm_nodes  # noqa: E402
from slurm_project import Desk  # noqa: E402

ROUNDS = 5
PAGE = REPO / "docs" / "reference.md"
MARKS = re.compile(r"(<!-- impossible -->\n).*?(<!-- end of impossible -->)", re.DOTALL)
# What submit.py asks, all at once.
COMMANDS = [
    "sbatch --test-only --wrap=true",
    "scontrol --all --oneliner show partition",
    "scontrol show config",
    "sinfo --all --exact",
    "sacctmgr --parsable2 show qos",
    "sacctmgr --parsable2 show associations where user=root",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="the JSON file of results, which is updated")
    arguments = parser.parse_args()
    if reason := slurm_nodes.missing() or slurm_accounts.missing():
        print(f"not measured: {reason}")
        return
    with tempfile.TemporaryDirectory() as folder:
        project = make_project(Path(folder))
        (project / "configs/cluster/asked.yaml").write_text(impossible_jobs.CLUSTER)
        (slurm_folder := Path(folder, "slurm")).mkdir()
        with slurm_nodes.controller_only(
            slurm_folder, f"EnforcePartLimits=NO\n{impossible_jobs.CONF}", accounts=impossible_jobs.ACCOUNTS
        ) as slurm:
            seconds, shares = measure(Desk(slurm, project))
    PAGE.write_text(MARKS.sub(lambda marks: marks[1] + make_table(seconds) + marks[2], PAGE.read_text()))
    slowest = max(seconds.values(), key=statistics.median)
    rows = [
        make_row("submit.py, a job that Slurm can never start, the slowest kind", slowest, "s", 2.0),
        make_row("of it the commands of Slurm, all at once", shares, "s"),
    ]
    print_and_save(rows, arguments.out)


def measure(desk: Desk) -> tuple[dict[str, list[float]], list[float]]:
    """Return the seconds of each kind of job, and those of the scheduler's commands alone."""
    seconds: dict[str, list[float]] = {what: [] for what in impossible_jobs.IMPOSSIBLE}
    shares = []
    for _ in range(ROUNDS):
        for what, (words, sentence) in impossible_jobs.IMPOSSIBLE.items():
            start = time.perf_counter()
            done = desk.python("submit.py", "cluster=asked", *impossible_jobs.POSSIBLE, *words)
            seconds[what].append(time.perf_counter() - start)
            assert done.returncode == 2 and sentence in done.stderr, done.stderr
        shares.append(time_commands(desk.env))
    return seconds, shares


def time_commands(env: dict[str, str]) -> float:
    """Return the seconds of the scheduler's commands, which run at the same time."""
    start = time.perf_counter()
    options: dict[str, Any] = {"env": env, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    for process in [subprocess.Popen(command.split(), **options) for command in COMMANDS]:
        process.wait()
    return time.perf_counter() - start


def make_table(seconds: dict[str, list[float]]) -> str:
    """Return the table of jobs that can never start, the answer to each, and the median of its seconds."""
    lines = ["| request | message | seconds |", "|---|---|---:|"]
    for what, (_, sentence) in impossible_jobs.IMPOSSIBLE.items():
        lines.append(f"| {what} | `{sentence}` | {statistics.median(seconds[what]):.1f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
