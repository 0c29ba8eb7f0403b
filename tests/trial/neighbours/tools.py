"""Scenes that run tools at the same time: pack, install, compile, submit, ask a study."""

import json
import os
import shlex
import shutil
import signal
import sys
import sysconfig
from itertools import chain
from pathlib import Path
from random import Random

from trial.ground import Ground
from trial.neighbours.rounds import Rounds, Scene, after_seconds
from trial.neighbours.trains import THEIRS
from trial.program import BASH
from trial.project import MODULES, patch

OURS = "from hpc.run import environment; environment.reject_unsuitable_environment = lambda: None"


def packed(rng: Random, shared: Rounds, ground: Ground, name: str) -> Scene:
    """Pack text into one file with several processes: one succeeds, the others are rejected, the file is complete."""
    folder = ground.folder / name
    ground.protect(folder, ["text.npy.part", "other.npy", ".other.npy.part"])
    out = folder / "text.npy"
    commands = []
    for number in range(rng.choice([2, 3])):
        texts = shared.data / rng.choice(["texts", "texts", "other texts"])
        words = ["tools/pack.py", f"data.files={texts}", f"out={out}"]
        command = shared.program(ground, f"{name}-{number}", words)
        command.late = rng.choice([0.0, rng.uniform(0, 0.3)])
        commands.append(command)
    if rng.random() < 0.4:
        commands[0].strike = after_seconds(rng.choice(["SIGKILL", "SIGINT", "SIGTERM"]), rng.uniform(0, 0.4))
    yield commands
    for command in commands:
        ended = [-signal.Signals[command.strike.deed], 1, 130] if command.strike else []
        ground.expect(command, 0, 2, *ended)
    right = [command for command in commands if command.code == 0]
    if not right and not commands[0].strike:
        ground.harm("ended otherwise", f"nobody packed: {commands[0].said()[-900:]}")
    if len(right) > 1:
        ground.harm("two in one directory", f"{len(right)} packed into {out}: {right[1].said()[-900:]}")
    if not right:
        again = shared.program(ground, f"{name}-again", [*commands[0].words])
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
        command = shared.program(ground, f"{name}-{number}", ["train.py"], late=rng.uniform(0, 0.2))
        command.patch = patch("compiles", FOLDER=str(folder), IS_KILLED=False)
        commands.append(command)
    if rng.random() < 0.4:
        commands[0].patch, commands[0].is_doomed = patch("compiles", FOLDER=str(folder), IS_KILLED=True), True
    yield commands
    for command in commands:
        ground.expect(command, -signal.SIGKILL if command.is_doomed else 0)
    again = shared.program(ground, f"{name}-again", ["train.py"])
    again.patch = patch("compiles", FOLDER=str(folder), IS_KILLED=False)
    yield [again]
    if ground.expect(again, 0) and "kernels 8" not in again.said():
        ground.harm("other results", f"the cache is lost: {again.said()}")


def installed(rng: Random, shared: Rounds, ground: Ground, name: str) -> Scene:
    """Source env.sh in several shells and kill an installer: the environment must be complete and installed once."""
    folder = ground.folder / name
    folder.mkdir(parents=True)
    stub, written, venv = folder / "python", folder / "log", folder / "venv"
    shutil.copy(MODULES / "python_stub.bash", stub)
    stub.chmod(0o755)
    ground.protect(folder, ["other.lock", "venv-other/pyvenv.cfg"])
    script = f"source {shlex.quote(str(shared.project))}/env.sh && type -P python"
    base = os.path.realpath(sys.executable)
    environ = {"PYTHON": str(stub), "VENV": str(venv), "STUB": str(stub), "LOG": str(written), "BASE_PYTHON": base}
    packages = Path(sysconfig.get_path("purelib"))
    environ |= {"PACKAGES": str(packages.relative_to(sys.prefix)), "LIBRARY": str(*packages.glob("hpc_ml-*.dist-info"))}
    words = [BASH, "--norc", "-c", script]
    commands = [shared.program(ground, f"{name}-{n}", words, environ=environ) for n in range(4)]
    for command in commands[1:]:
        command.late = rng.uniform(0, 0.5)
    if rng.random() < 0.5:
        commands[0].strike = after_seconds(rng.choice(["SIGKILL", "SIGTERM"]), rng.uniform(0.1, 1.0))
        commands[0].words = [BASH, "--norc", "-c", "source " + shlex.quote(str(shared.project)) + "/env.sh"]
    yield commands
    for command in commands[1:]:
        if ground.expect(command, 0) and command.said().splitlines()[-1:] != [f"{venv}/bin/python"]:
            ground.harm("ended otherwise", f"{command.name}: {command.said()[-900:]}")
    lines = written.read_text().splitlines() if written.exists() else []
    if "two at once" in lines:
        ground.harm("two in one directory", f"two installed at once into {venv}")
    if (whole := lines.count("installed")) != 1 and not commands[0].strike:
        ground.harm("copied twice", f"installed {whole} times")
    if left := list(venv.glob("*.part")):
        ground.harm("left a file", f"{left}")


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
    start = shared.program(
        ground, f"{name}-submit", [*words, "--trials", "4", "--parsable", f"name={name}"], environ=environ, patch=OURS
    )
    yield [start]
    if not ground.expect(start, 0):
        return
    folder = Path(start.said().split(" ", 1)[1].strip().splitlines()[-1])
    members = [folder / f"{number:03}" for number in range(4)]
    asks = [shared.program(ground, f"{name}-{member.name}", ["submit.py", "--draw", str(member)]) for member in members]
    if rng.random() < 0.3:
        asks[0].strike = after_seconds("SIGKILL", rng.uniform(0, 0.5))
    look = shared.program(ground, f"{name}-look", ["report.py", str(folder)], late=rng.uniform(0, 0.5))
    yield [*asks, look]
    again = (
        [shared.program(ground, f"{name}-again", ["submit.py", "--draw", str(members[0])])] if asks[0].strike else []
    )
    if again:
        yield again
    for command in [*asks, look, *again]:
        ground.expect(command, 0, *([-signal.SIGKILL] if command.strike else []))
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
        shared.program(ground, f"{name}-sweep-{k}", [*common, "seed=1,2", "--multirun"], environ=environ, patch=OURS)
        for k in (0, 1)
    ]
    both = [
        shared.program(
            ground, f"{name}-{seed}", [*common, f"run_dir={run_dir}", f"seed={seed}"], environ=environ, patch=OURS
        )
        for seed in (1, 2)
    ]
    dry = shared.program(ground, f"{name}-dry", [*common[:3], "--dry-run"], environ=environ, late=rng.uniform(0, 0.3))
    plan = shared.program(ground, f"{name}-plan", ["plan.py", "cluster=slurm", "trainer=ddp"], late=rng.uniform(0, 0.3))
    chosen = rng.sample([sweeps, both], rng.choice([1, 2]))
    yield [*chain(*chosen), dry, *rng.choice([[], [plan]])]
    ground.expect(dry, 0)
    if plan in ground.done:
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
