"""Scenes of drawn_neighbours.py that run tools at the same time: pack, install, compile, submit, ask a study."""

import json
import os
import shlex
import signal
import sys
from itertools import chain
from pathlib import Path
from random import Random

from neighbour_ground import Command, Ground
from neighbour_rounds import Rounds, Scene
from neighbour_trains import THEIRS

OURS = "from hpc.run import environment; environment.reject_unsuitable_environment = lambda: None"


def packed(rng: Random, shared: Rounds, ground: Ground, name: str) -> Scene:
    """Pack text into one file with several processes: one succeeds, the others are rejected, the file is complete."""
    folder = ground.folder / name
    ground.protect(folder, ["text.npy.part", "other.npy", ".other.npy.part"])
    out = folder / "text.npy"
    commands = []
    for number in range(rng.choice([2, 3])):
        texts = shared.data / rng.choice(["texts", "texts", "other texts"])
        command = Command(f"{name}-{number}", ["tools/pack.py", f"data.files={texts}", f"out={out}"])
        command.late = rng.choice([0.0, rng.uniform(0, 0.3)])
        commands.append(command)
    if rng.random() < 0.4:
        commands[0].hit, commands[0].at = (
            rng.choice([signal.SIGKILL, signal.SIGINT, signal.SIGTERM]),
            rng.uniform(0, 0.4),
        )
    yield commands
    for command in commands:
        ground.expect(command, 0, 2, *([-command.hit, 1, 130] if command.hit else []))
    right = [command for command in commands if command.code == 0]
    if not right and not commands[0].hit:
        ground.harm("ended otherwise", f"nobody packed: {commands[0].said()[-900:]}")
    if len(right) > 1:
        ground.harm("two in one directory", f"{len(right)} packed into {out}: {right[1].said()[-900:]}")
    if not right:
        again = Command(f"{name}-again", [*commands[0].words])
        yield [again]
        ground.expect(again, 0)
        right = [again]
    texts = right[0].words[1].partition("=")[2]
    wanted = shared.data / f"{Path(texts).name}.npy"
    if out.read_bytes() != wanted.read_bytes():
        ground.harm("other results", f"{out} is not what {texts} gives")
    if left := [path.name for path in folder.glob(".text.npy.*")]:
        ground.harm("left a file", f"{left} beside {out}")


def cached(rng: Random, shared: Rounds, ground: Ground, name: str) -> Scene:
    """Compile in several processes, which share a cache on the node and the archive that it is saved in."""
    folder = ground.folder / name
    ground.protect(folder / "shared", ["other.bin"])
    ground.protect(folder / "node" / f"compiled-{os.getuid()}", ["other/kernel.so"])
    commands = []
    for number in range(rng.choice([3, 4])):
        command = Command(
            f"{name}-{number}", ["train.py"], late=rng.uniform(0, 0.2), patch=COMPILES.format(folder=folder)
        )
        commands.append(command)
    if rng.random() < 0.4:
        commands[0].hit, commands[0].at = signal.SIGKILL, 99
        commands[0].patch = commands[0].patch.replace("KILLED = False", "KILLED = True")
    yield commands
    for command in commands:
        ground.expect(command, *([-command.hit] if command.hit else [0]))
    again = Command(f"{name}-again", ["train.py"], patch=COMPILES.format(folder=folder))
    yield [again]
    if ground.expect(again, 0) and "kernels 8" not in again.said():
        ground.harm("other results", f"the cache is lost: {again.said()}")


# Handle the compile cache as a run does, but without a compiler.
COMPILES = """
import os, random, sys, time
from pathlib import Path
from types import SimpleNamespace
import torch
from torch import nn
from hpc.strategies.compile_cache import CompileCache
KILLED = False
folder, made, loaded = Path("{folder}"), dict(), set()
def save():
    text = "\\n".join([*made.values(), "end"])
    return text.encode(), SimpleNamespace(artifacts=dict(kernels=list(made)))
def load(content):
    *kernels, end = content.decode().split("\\n")
    assert end == "end" and all(len(kernel) == 2000 for kernel in kernels), "half an archive"
    loaded.update(kernel[:8] for kernel in kernels)
    return SimpleNamespace(artifacts=dict(kernels=[kernel[:8] for kernel in kernels]))
torch.compiler.save_cache_artifacts, torch.compiler.load_cache_artifacts = save, load
cache = CompileCache(str(folder / "shared"), enabled=True, node_local=str(folder / "node"))
strategy = SimpleNamespace(root_device=torch.device("cpu"))
trainer = SimpleNamespace(
    strategy=strategy, precision="32-true", default_root_dir=str(folder), local_rank=0, node_rank=0
)
cache.setup(trainer, nn.Sequential(nn.Linear(2, 2)), "fit")
for number in range(8):
    made[f"kernel-{{number}}"] = (f"kernel-{{number}}" * 250)[:2000]
    time.sleep(random.random() / 100)
    if KILLED and number == 4:
        os.kill(os.getpid(), 9)
cache.on_train_end(trainer, None)
print("kernels", len(loaded))
sys.exit(0)
"""


def installed(rng: Random, shared: Rounds, ground: Ground, name: str) -> Scene:
    """Source env.sh in several shells and kill an installer: the environment must be complete and installed once."""
    folder = ground.folder / name
    folder.mkdir(parents=True)
    stub, log, venv = folder / "python", folder / "log", folder / "venv"
    base = os.path.realpath(sys.executable)
    stub.write_text(PYTHON.format(log=log, python=shlex.quote(base), home=os.path.dirname(base), stub=stub))
    stub.chmod(0o755)
    ground.protect(folder, ["other.lock", "venv-other/pyvenv.cfg"])
    script = f"source {shlex.quote(str(shared.project))}/env.sh && type -P python"
    environ = {"PYTHON": str(stub), "VENV": str(venv)}
    commands = [Command(f"{name}-{number}", ["bash", "--norc", "-c", script], environ=environ) for number in range(4)]
    for command in commands[1:]:
        command.late = rng.uniform(0, 0.5)
    if rng.random() < 0.5:
        commands[0].hit, commands[0].at = rng.choice([signal.SIGKILL, signal.SIGTERM]), rng.uniform(0.1, 1.0)
        commands[0].words = ["bash", "--norc", "-c", "source " + shlex.quote(str(shared.project)) + "/env.sh"]
        commands[0].patch = ""
    yield commands
    for command in commands[1:]:
        if ground.expect(command, 0) and command.said().splitlines()[-1:] != [f"{venv}/bin/python"]:
            ground.harm("ended otherwise", f"{command.name}: {command.said()[-900:]}")
    lines = log.read_text().splitlines() if log.exists() else []
    if "two at once" in lines:
        ground.harm("two in one directory", f"two installed at once into {venv}")
    if (whole := lines.count("installed")) != 1 and not commands[0].hit:
        ground.harm("copied twice", f"installed {whole} times")
    if left := list(venv.glob("*.part")):
        ground.harm("left a file", f"{left}")


# A stub of Python, as in test_env.py. Its pip takes a moment, and detects another pip at the same time.
PYTHON = """#!/bin/bash
case "$*" in
  *version_info*) exit 0 ;;
  "-m venv "*) mkdir -p "$3/bin" && echo "home = {home}" >"$3/pyvenv.cfg" && cp "$0" "$3/bin/python" &&
      printf 'VIRTUAL_ENV=%s; PATH=%s/bin:$PATH' "$3" "$3" >"$3/bin/activate" ;;
  "-m pip --version") [ "$0" != {stub} ] ;;
  "-Im pip install"*)
    mkdir {log}.busy 2>/dev/null || echo "two at once" >>{log}
    trap 'rmdir {log}.busy' EXIT
    sleep 0.4
    echo installed >>{log} ;;
  *signatures) exit 0 ;;
  *) exec -a "$0" {python} "$@" ;;
esac
"""


def studied(rng: Random, shared: Rounds, ground: Ground, name: str) -> Scene:
    """Ask one study from all members of a search at once; one member is killed. Each must get its own trial."""
    environ = {"PATH": f"{shared.bin}:/usr/bin:/bin"}
    words = [
        "submit.py",
        "cluster=slurm",
        "trainer=ddp",
        "model.optimizer.lr=interval(0.001,0.1)",
        "--search",
        "random",
    ]
    start = Command(
        f"{name}-submit", [*words, "--trials", "4", "--parsable", f"name={name}"], environ=environ, patch=OURS
    )
    yield [start]
    if not ground.expect(start, 0):
        return
    folder = Path(start.said().split(" ", 1)[1].strip().splitlines()[-1])
    members = [folder / f"{number:03}" for number in range(4)]
    asks = [Command(f"{name}-{member.name}", ["submit.py", "--draw", str(member)]) for member in members]
    if rng.random() < 0.3:
        asks[0].hit, asks[0].at = signal.SIGKILL, rng.uniform(0, 0.5)
    look = Command(f"{name}-look", ["report.py", str(folder)], late=rng.uniform(0, 0.5))
    yield [*asks, look]
    again = [Command(f"{name}-again", ["submit.py", "--draw", str(members[0])])] if asks[0].hit else []
    if again:
        yield again
    for command in [*asks, look, *again]:
        ground.expect(command, 0, *([-signal.SIGKILL] if command.hit else []))
    lines = (folder / "journal.jsonl").read_bytes().splitlines()
    trials = [json.loads(line) for line in lines]
    named = [trial["user_attrs"]["run"] for trial in trials if trial.get("user_attrs")]
    if sorted(named) != [member.name for member in members]:
        ground.harm("other results", f"trials of {named} in {folder}")
    rates = {(member / "overrides.json").read_text() for member in members}
    if len(rates) != len(members):
        ground.harm("other results", f"{len(rates)} values for {len(members)} members of {folder}")


def submitted(rng: Random, shared: Rounds, ground: Ground, name: str) -> Scene:
    """Submit sweeps and runs at once. Of two runs in the same directory one must be rejected."""
    environ = {"PATH": f"{shared.bin}:/usr/bin:/bin"}
    run_dir = ground.folder / name / "run"
    ground.protect(run_dir.parent, THEIRS)
    common = ["submit.py", "cluster=slurm", "trainer=ddp", f"name={name}", "--parsable"]
    sweeps = [
        Command(f"{name}-sweep-{k}", [*common, "seed=1,2", "--multirun"], environ=environ, patch=OURS) for k in (0, 1)
    ]
    both = [
        Command(f"{name}-{seed}", [*common, f"run_dir={run_dir}", f"seed={seed}"], environ=environ, patch=OURS)
        for seed in (1, 2)
    ]
    dry = Command(f"{name}-dry", [*common[:3], "--dry-run"], environ=environ, late=rng.uniform(0, 0.3))
    plan = Command(f"{name}-plan", ["plan.py", "cluster=slurm", "trainer=ddp"], late=rng.uniform(0, 0.3))
    chosen = rng.sample([sweeps, both], rng.choice([1, 2]))
    yield [*chain(*chosen), dry, *rng.choice([[], [plan]])]
    ground.expect(dry, 0)
    if plan.codes:
        ground.expect(plan, 0, 2)
    if sweeps in chosen:
        folders = {command.said().split(" ", 1)[-1].strip() for command in sweeps if ground.expect(command, 0)}
        if len(folders) != 2 or not all((Path(folder) / "members").exists() for folder in folders):
            ground.harm("two in one directory", f"sweeps in {folders}")
    if both in chosen:
        codes = sorted(command.code for command in both)
        if codes != [0, 2]:
            ground.harm("two in one directory", f"submitted twice into {run_dir}: {codes}: {both[1].said()[-600:]}")
        for winner in (command for command in both if command.code == 0):
            seed, config = winner.words[-1].partition("=")[2], run_dir / "config.yaml"
            if f"\nseed: {seed}\n" not in (config.read_text() if config.exists() else ""):
                ground.harm("other results", f"{run_dir} has no config.yaml, or another's")
