"""What a start costs, over what importing torch and lightning costs: python benchmarks/startup.py [--out results.json]

Processes take turns, and each ends itself at the moment that counts. Bytecode is there, as after any start before.
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
from rows import report, row

TEMPLATE = Path(__file__).resolve().parents[1]
ROUNDS, COLD_ROUNDS = 7, 3
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
IMPORTS = "import json, os, sys, torch, lightning"
# What a fork would add: a callback that ends the process when the first step is done.
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
    parser.add_argument("--out", type=Path, help="a list of rows, in JSON")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        project = Path(cookiecutter(str(TEMPLATE), no_input=True, default_config=True, output_dir=folder))
        (project / "src/my_research/first_step.py").write_text(CALLBACK)
        (project / "configs/callbacks/first_step.yaml").write_text(CHOICE)
        report([*times(project), *cold(project), *counts(project)], asked.out)


def times(project: Path) -> list[dict[str, Any]]:
    for name in PROGRAMS:
        run(project, name)  # compiles what is new here
    taken: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    busy: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(ROUNDS):
        for name in PROGRAMS:
            before = processor()
            taken[name].append(run(project, name))
            busy[name].append(processor() - before)
    return [
        row("start to first step, over import torch, lightning", over(taken), "x", 1.25),
        row("the same, in processor time, which other programs disturb less", over(busy), "x"),
        row("start to first step", taken["first step"], "s"),
        row("import torch, lightning", taken["imports"], "s"),
        row("submit.py --dry-run", taken["dry run"], "s", 0.4),
        row("train.py --cfg job", taken["config"], "s", 0.4),
        row("plan.py, of a network that it has traced before", taken["plan"], "s", 0.4),
    ]


def cold(project: Path) -> list[dict[str, Any]]:
    """The same after the kernel has forgotten what it had read; nothing where this is no root."""
    if not os.access(DROP_CACHES, os.W_OK):
        return []
    taken: dict[str, list[float]] = {"imports": [], "first step": []}
    for _ in range(COLD_ROUNDS):
        for name, seconds in taken.items():
            os.sync()
            DROP_CACHES.write_text("3")
            seconds.append(run(project, name))
    return [
        row("start to first step, over import torch, lightning, cold disk", over(taken), "x"),
        row("start to first step, cold disk", taken["first step"], "s"),
    ]


def over(taken: dict[str, list[float]]) -> list[float]:
    return [step / imports for step, imports in zip(taken["first step"], taken["imports"], strict=True)]


def processor() -> float:
    """Seconds of processor time that the processes started here and ended have used, all their threads together."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def counts(project: Path) -> list[dict[str, Any]]:
    """Modules, and system calls that name a file: what a parallel file system's server is asked by every rank."""
    rows = [
        row("modules at the first step", [float(said(project, "first step"))], ""),
        row("modules after import torch, lightning", [float(said(project, "imports"))], ""),
    ]
    if not shutil.which("strace"):
        return rows
    names = {"first step": "to the first step", "imports": "of import torch, lightning"}
    names |= {"dry run": "of submit.py --dry-run", "config": "of train.py --cfg job"}
    return [*rows, *(row(f"file-system calls {words}", [calls(project, name)], "") for name, words in names.items())]


def calls(project: Path, name: str) -> float:
    """How many system calls with a file's name in it a program makes, all its threads and children included."""
    table = project / "strace.txt"
    run(project, name, before=["strace", "-f", "-c", "-e", "trace=%file", "-o", str(table)])
    found = re.search(r"(?m)^100\.00\s+[\d.]+\s+(?:\d+\s+)?(\d+)\s+\d*\s*total$", table.read_text())
    assert found, table.read_text()
    return float(found[1])


def said(project: Path, name: str) -> str:
    """The last line that a program prints."""
    return _done(project, PROGRAMS[name], []).stdout.splitlines()[-1]


def run(project: Path, name: str, before: Sequence[str] = ()) -> float:
    """Seconds from start to end of a program's process."""
    began = time.perf_counter()
    _done(project, PROGRAMS[name], before)
    return time.perf_counter() - began


def _done(project: Path, arguments: Sequence[str], before: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environ["XDG_CONFIG_HOME"] = os.devnull  # this user's own accounts stay out of it
    command = [*before, sys.executable, *arguments]
    return subprocess.run(command, cwd=project, env=environ, capture_output=True, text=True, check=True)


if __name__ == "__main__":
    main()
