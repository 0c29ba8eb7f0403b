"""Measure a start, relative to importing torch and lightning: python benchmarks/startup.py [--out results.json]

Processes take turns, and each ends itself at the moment that is measured. Bytecode exists, as after any earlier start.
"""

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cookiecutter.main import cookiecutter
from result_rows import make_row, print_and_save

TEMPLATE = Path(__file__).resolve().parents[1]
ROUNDS, COLD_ROUNDS = 7, 3
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
IMPORTS = "import json, os, sys, torch, lightning"
# Added to the project: a callback that ends the process after the first step.
CALLBACK = """
import json, os, sys
import lightning

class FirstStep(lightning.Callback):
    def on_train_batch_end(self, *_):
        sys.stdout.write("\\n" + json.dumps(len(sys.modules)))
        sys.stdout.flush()
        os._exit(0)
"""
CHOICE = "defaults: [default]\nfirst_step:\n  _target_: my_research.first_step.FirstStep\n"
PROGRAMS = {
    "imports": ["-c", f"{IMPORTS}; print(len(sys.modules), flush=True); os._exit(0)"],
    "first step": ["train.py", "callbacks=first_step"],
    "dry run": ["submit.py", "trainer=ddp_4node", "cluster=slurm", "--dry-run"],
    "config": ["train.py", "--cfg", "job"],
    "plan": ["plan.py", "trainer=ddp_4node", "cluster=lumi_g", "data.global_batch_size=256"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="the JSON file of results, which is updated")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        project = Path(cookiecutter(str(TEMPLATE), no_input=True, default_config=True, output_dir=folder))
        (project / "src/my_research/first_step.py").write_text(CALLBACK)
        (project / "configs/callbacks/first_step.yaml").write_text(CHOICE)
        print_and_save(
            [*measure_starts(project), *measure_cold_starts(project), *count_modules_and_calls(project)], arguments.out
        )


def measure_starts(project: Path) -> list[dict[str, Any]]:
    for name in PROGRAMS:
        run_seconds(project, name)  # compiles new modules to bytecode
    seconds: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    processor: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(ROUNDS):
        for name in PROGRAMS:
            before = processor_seconds()
            seconds[name].append(run_seconds(project, name))
            processor[name].append(processor_seconds() - before)
    return [
        make_row("start to first step, over import torch, lightning", relative_starts(seconds), "x", 1.25),
        make_row("the same, in processor time, which other programs disturb less", relative_starts(processor), "x"),
        make_row("start to first step", seconds["first step"], "s"),
        make_row("import torch, lightning", seconds["imports"], "s"),
        make_row("submit.py --dry-run", seconds["dry run"], "s", 0.4),
        make_row("train.py --cfg job", seconds["config"], "s", 0.4),
        make_row("plan.py, of a network that it has traced before", seconds["plan"], "s", 0.4),
    ]


def measure_cold_starts(project: Path) -> list[dict[str, Any]]:
    """Measure the same with an empty page cache; return no rows without root rights."""
    if not os.access(DROP_CACHES, os.W_OK):
        return []
    seconds: dict[str, list[float]] = {"imports": [], "first step": []}
    for _ in range(COLD_ROUNDS):
        for name, starts in seconds.items():
            os.sync()
            DROP_CACHES.write_text("3")
            starts.append(run_seconds(project, name))
    return [
        make_row("start to first step, over import torch, lightning, cold disk", relative_starts(seconds), "x"),
        make_row("start to first step, cold disk", seconds["first step"], "s"),
    ]


def relative_starts(seconds: dict[str, list[float]]) -> list[float]:
    return [step / imports for step, imports in zip(seconds["first step"], seconds["imports"], strict=True)]


def processor_seconds() -> float:
    """Return the processor time of all ended child processes, with all their threads."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def count_modules_and_calls(project: Path) -> list[dict[str, Any]]:
    """Count modules, and system calls that name a file: a parallel file system gets each of them from every rank."""
    rows = [
        make_row("modules at the first step", [float(last_line(project, "first step"))], ""),
        make_row("modules after import torch, lightning", [float(last_line(project, "imports"))], ""),
    ]
    if not shutil.which("strace"):
        return rows
    names = {"first step": "to the first step", "imports": "of import torch, lightning"}
    names |= {"dry run": "of submit.py --dry-run", "config": "of train.py --cfg job"}
    return [
        *rows,
        *(make_row(f"file-system calls {words}", [num_file_calls(project, name)], "") for name, words in names.items()),
    ]


def num_file_calls(project: Path, name: str) -> float:
    """Return how many system calls with a file's name a program makes, with all its threads and children."""
    table = project / "strace.txt"
    run_seconds(project, name, prefix=["strace", "-f", "-c", "-e", "trace=%file", "-o", str(table)])
    total = re.search(r"(?m)^100\.00\s+[\d.]+\s+(?:\d+\s+)?(\d+)\s+\d*\s*total$", table.read_text())
    assert total, table.read_text()
    return float(total[1])


def last_line(project: Path, name: str) -> str:
    """Return the last line that a program prints."""
    return _run(project, PROGRAMS[name], []).stdout.splitlines()[-1]


def run_seconds(project: Path, name: str, prefix: Sequence[str] = ()) -> float:
    """Run a program, and return the seconds from the start to the end of its process."""
    start_time = time.perf_counter()
    _run(project, PROGRAMS[name], prefix)
    return time.perf_counter() - start_time


def _run(project: Path, arguments: Sequence[str], prefix: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environ["XDG_CONFIG_HOME"] = os.devnull  # without this user's clusters.yaml
    command = [*prefix, sys.executable, *arguments]
    return subprocess.run(command, cwd=project, env=environ, capture_output=True, text=True, check=True)


if __name__ == "__main__":
    main()
