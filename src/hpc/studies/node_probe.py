"""Look at a compute node in one short job: its GPU, network adapters and architecture."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from hpc.config.errors import ConfigError
from hpc.submit.scheduler import submit_environ

MINUTES = 5
# Each line is a word and what it is about. What a node does not have prints nothing.
SCRIPT = """\
uname -m | sed 's/^/machine /'
{ nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | sed 's/^/gpu /'; } 2>/dev/null
{ rocm-smi --showproductname | sed -n 's/.*Card [Ss]eries:[[:space:]]*/gpu /p' | head -n 1; } 2>/dev/null
for port in /sys/class/infiniband/*/ports/*; do
    { ! grep -q ACTIVE "$port/state" || sed 's/^/adapter /' "$port/rate"; } 2>/dev/null
done
for file in /sys/class/net/hsn*/speed; do [ ! -e "$file" ] || sed 's/^/megabits /' "$file"; done
ip -brief -4 address 2>/dev/null | sed 's/^/interface /'
"""


@dataclass(frozen=True)
class ProbedNode:
    """What a job has seen on a node; None where it saw nothing.

    Attributes:
        gpu: the name that the driver reports.
        network_gbs: nominal GB/s of all adapters together.
        interface: of the fast network, if there is one.
        machine: architecture: x86_64, aarch64.
    """

    gpu: str | None = None
    network_gbs: float | None = None
    interface: str | None = None
    machine: str | None = None


def probe(scheduler: str, *, options: Sequence[str]) -> ProbedNode:
    """Run the script in a job of one node and wait for it. Raise `ConfigError` if it does not run.

    Args:
        options: of srun or qsub: partition, account, the request for a GPU.
    """
    print(f"waiting for a job of one node and at most {MINUTES} minutes (Ctrl-C gives up) ...", file=sys.stderr)
    output = _run_with_srun(options) if scheduler == "slurm" else _run_with_qsub(options)
    return parse(output)


def _run_with_srun(options: Sequence[str]) -> str:
    sizes = ["--job-name=look", "--nodes=1", "--ntasks=1", f"--time={MINUTES}"]
    return _call(["srun", *sizes, *options, "bash", "-c", SCRIPT])


def _run_with_qsub(options: Sequence[str]) -> str:
    """Run the script on PBS. It writes to a file itself: PBS delivers a job's output some time after its end."""
    with TemporaryDirectory(dir=Path.cwd(), prefix=".look-") as folder:  # in a folder that nodes see, too
        script, output = Path(folder, "look.sh"), Path(folder, "output")
        script.write_text(f"#!/bin/bash\nexec >{shlex.quote(str(output))}\n{SCRIPT}", encoding="utf-8")
        sizes = ["-W", "block=true", "-N", "look", "-j", "oe", "-o", os.devnull, "-l", f"walltime=00:0{MINUTES}:00"]
        _call(["qsub", *sizes, *options, str(script)])
        if not output.exists():
            rule = f"The job must see {folder}, and write its output there"
            raise ConfigError("--job", None, rule, "leave --job out, or a project on a file system that nodes share")
        return output.read_text(encoding="utf-8", errors="replace")


def _call(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, env=submit_environ() | {"LC_ALL": "C"}, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    except OSError as error:
        raise ConfigError("--job", None, f"cannot run {command[0]}: {error}", "leave --job out") from None
    if done.returncode:
        message = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ConfigError("--job", None, f"The job did not run: {message}", "leave --job out, or --account NAME")
    return done.stdout


def parse(output: str) -> ProbedNode:
    """Return what the script has printed."""
    lines = [line.split(maxsplit=1) for line in output.splitlines()]
    seen: dict[str, list[str]] = {}
    for word, *text in filter(None, lines):
        seen.setdefault(word, []).extend(text)
    adapters = [float(match[1]) for line in seen.get("adapter", []) if (match := re.match(r"(\d+) Gb/sec", line))]
    adapters += [int(line) / 1000 for line in seen.get("megabits", []) if line.isdecimal()]
    names = [line.split()[0].partition("@")[0] for line in seen.get("interface", [])]
    fast = sorted(name for name in names if re.match(r"(hsn|ib)[a-z]*\d", name))
    return ProbedNode(
        gpu=next(iter(seen.get("gpu", [])), None),
        network_gbs=sum(adapters) / 8 or None,
        interface=fast[0] if fast else None,
        machine=next(iter(seen.get("machine", [])), None),
    )


def is_other_machine(node: ProbedNode) -> bool:
    """Return whether a program that is installed here cannot run on the node."""
    return node.machine is not None and node.machine != os.uname().machine
