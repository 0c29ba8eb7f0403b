"""Scenes in which several runs train at once."""

import re
from pathlib import Path
from random import Random

from trial.ground import Ground
from trial.neighbours.rounds import Rounds, Scene, after_step, allocation, draw_strike, finished
from trial.program import Program
from trial.project import patch

THEIRS = [
    "notes.txt", "events.out.tfevents.1.other", "other/tensorboard/events.out.tfevents.2.other", "other/x.lock",
    "other/checkpoints/step-000000004/manifest.json", "other/config.yaml.part", "other/.room-other-1",
    "checkpoints/backup/last.ckpt", "checkpoints/notes.txt", "tensorboard/mine/events.out.tfevents.3.other",
]  # fmt: skip


def nested(rng: Random, shared: Rounds, ground: Ground, name: str) -> Scene:
    """Train in nested and neighbouring run directories with other users' files among them."""
    parent, environ = ground.folder / name, allocation(rng)
    ground.protect(parent, THEIRS)
    inside = ["", "a", "a/b", "a b", "tensorboard/x", "checkpoints/x"]
    places = [parent / name for name in rng.sample(inside, 3)]
    ground.protect(parent / "a", THEIRS[:3])
    runs = []
    for number, place in enumerate(places):
        sort = rng.choice(["digits", "seed 2"])
        command = shared.train(sort, f"{name}-{number}", ground, place, environ)
        draw_strike(rng, command, 0.4)
        runs.append((sort, command, place))
    beside = shared.program(ground, f"{name}-report", ["report.py", str(parent)], late=rng.uniform(0.2, 2))
    yield [*[command for _, command, _ in runs], beside]
    ground.expect(beside, 0)
    yield from finished(shared, ground, runs)


def one_directory(rng: Random, shared: Rounds, ground: Ground, name: str) -> Scene:
    """Start several runs, equal or different, in one directory: one trains, the others are rejected."""
    run_dir, environ = ground.folder / name / "run", allocation(rng)
    ground.protect(run_dir.parent, THEIRS)
    runs = []
    for number in range(rng.choice([2, 3])):
        sort = rng.choice(["digits", "digits", "seed 2"])
        command = shared.train(sort, f"{name}-{number}", ground, run_dir, environ)
        command.late = rng.choice([0.0, rng.uniform(0, 1.5)]) if number else 0.0
        runs.append((sort, command))
    yield [command for _, command in runs]
    _one_wins(ground, [command for _, command in runs])
    for sort in {sort for sort, command in runs if command.code == 0}:
        shared.compare(sort, run_dir, ground, name)


def one_resume(rng: Random, shared: Rounds, ground: Ground, name: str) -> Scene:
    """Interrupt a run, and resume it in several processes at once: one succeeds, the others are rejected."""
    run_dir, environ = ground.folder / name / "run", allocation(rng)
    ground.protect(run_dir.parent, THEIRS)
    first = shared.train("digits", f"{name}-first", ground, run_dir, environ)
    first.strike = after_step(rng.choice(["SIGKILL", "SIGUSR1"]), rng.randrange(1, 6))
    yield [first]
    again = [
        shared.program(ground, f"{name}-{k}", ["train.py", f"resume={run_dir}"], environ=environ)
        for k in range(rng.choice([2, 3]))
    ]
    for command in again[1:]:
        command.late = rng.choice([0.0, rng.uniform(0, 1.5)])
    yield again
    _one_wins(ground, again)
    shared.compare("digits", run_dir, ground, name)


def one_name(rng: Random, shared: Rounds, ground: Ground, name: str) -> Scene:
    """Start runs of the same name in the same second: each gets its own directory, or is rejected."""
    environ = allocation(rng)
    commands = [shared.train("digits", f"{name}-{number}", ground, None, environ) for number in range(2)]
    yield commands
    made = [Path(found[1]) for command in commands if (found := re.search(r"(?m)^run directory (.+)$", command.said()))]
    _told(ground, commands)
    if not made or len(set(made)) != len(made):
        ground.harm("two in one directory", f"{made}")
    for run_dir in made:
        shared.compare("digits", run_dir, ground, name)


def _one_wins(ground: Ground, commands: list[Program]) -> None:
    _told(ground, commands)
    codes = [command.code for command in commands]
    if codes.count(0) != 1:
        ground.harm("two in one directory", f"{codes}: {commands[0].said()[-900:]}")


def _told(ground: Ground, commands: list[Program]) -> None:
    """Check that each command succeeded, or was rejected with the reason that the directory is in use."""
    for command in commands:
        told = re.search(r"writes into it|is finished|must stay |has another config", command.said())
        if ground.expect(command, 0, 2) and command.code == 2 and not told:
            ground.harm("ended otherwise", f"{command.name}: {command.said()[-900:]}")


def ports(rng: Random, shared: Rounds, ground: Ground, name: str) -> Scene:
    """Train runs of two ranks in one job. At the port of one, another server listens: it is told, and starts again."""
    job = {"PBS_JOBID": f"{rng.randrange(1000, 9999)}.server"}
    if rng.random() < 0.5:
        port = rng.randrange(10000, 30000)
        ground.occupy(port)
        start = shared.train("two ranks", f"{name}-taken", ground, ground.folder / name / "0", job | _port(port))
        start.words += ["cluster.rendezvous_seconds=5"]
        yield [start]
        if ground.expect(start, 1) and "MASTER_PORT must be free" not in start.said():
            ground.harm("ended otherwise", f"{start.name}: {start.said()[-900:]}")
    yield from two_each(rng, shared, ground, name, job)


def _port(port: int) -> dict[str, str]:
    return {"MASTER_PORT": str(port)}


def nodes(rng: Random, shared: Rounds, ground: Ground, name: str) -> Scene:
    """Train runs of two ranks on the same two nodes in one job."""
    job = {"PBS_JOBID": f"{rng.randrange(1000, 9999)}.server", "MASTER_ADDR": "n1"}
    there = tuple(shared.slurm.machines[node].pid for node in ("n1", "n2"))
    yield from two_each(rng, shared, ground, name, job, there)


def two_each(
    rng: Random, shared: Rounds, ground: Ground, name: str, job: dict[str, str], there: tuple[int, ...] = ()
) -> Scene:
    runs = []
    for number in range(2):
        run_dir = ground.folder / name / str(number)
        drawn = _port(10000 + 10000 * number + rng.randrange(10000))  # as job scripts do
        command = shared.train("two ranks", f"{name}-{number}", ground, run_dir, job | drawn)
        command.nodes = there
        if there:
            command.words += ["trainer.num_nodes=2", "trainer.devices=1"]
        draw_strike(rng, command, 0.2)
        runs.append(("two ranks", command, run_dir))
    yield [command for _, command, _ in runs]
    yield from finished(shared, ground, runs)


def staged(rng: Random, shared: Rounds, ground: Ground, name: str) -> Scene:
    """Train runs that stage the same packed file on one node. One of them may be killed during the copy."""
    ground.protect(ground.folder / "node", ["data-1-other/images.npy", "data-1-other/images.npy.other-1.part"])
    runs = []
    for number in range(rng.choice([2, 3])):
        run_dir = ground.folder / name / str(number)
        command = shared.train("packed", f"{name}-{number}", ground, run_dir, {})
        command.patch = patch("slow_copy")
        draw_strike(rng, command, 0.1)
        runs.append(("packed", command, run_dir))
    killed = shared.train("packed", f"{name}-killed", ground, ground.folder / name / "killed", {})
    killed.patch, killed.is_doomed = patch("killed_in_copy"), True
    yield [*[command for _, command, _ in runs], *rng.choice([[], [killed]])]
    yield from finished(shared, ground, runs)
    for copy in (ground.folder / "node").glob("data-*/images.npy"):
        if "other" not in copy.parent.name and copy.read_bytes() != (shared.data / "images.npy").read_bytes():
            ground.harm("other results", f"{copy} is not what was packed")
    copies = sum(command.said().count("copying ") for _, command, _ in runs) + killed.said().count("copying ")
    if copies > 1 + killed.said().count("copying "):
        ground.harm("copied twice", f"{copies} copies of one file on one node")
