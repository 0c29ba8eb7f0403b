"""Shared parts of the rounds of drawn_neighbours.py: data, reference runs, allocations, and signals that end a run."""

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from random import Random

import same_run
from neighbour_ground import Command, Ground
from PIL import Image
from slurm_nodes import Slurm

# A scene yields commands, which run at the same time as those of other scenes. Then it continues, and reports harm.
Scene = Iterator[list[Command]]
SMALL = [
    "trainer.max_steps=6", "trainer.log_every_n_steps=1", "+trainer.val_check_interval=3", "checkpoint.every_n_steps=2",
    "+trainer.limit_val_batches=1", "+trainer.limit_test_batches=1", "callbacks.progress=null",
    "model.network.depths=[1]", "model.network.widths=[8]",
]  # fmt: skip
# The kinds of runs. Each is compared with a reference run without neighbours.
RUNS = {
    "digits": ["callbacks.samples=null"],
    "seed 2": ["callbacks.samples=null", "seed=2"],
    "two ranks": ["callbacks.samples=null", "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2",
                  "trainer.precision=32-true"],
    "packed": ["callbacks.samples=null", "data=packed", "data.file=@DATA@/images.npy", "data.global_batch_size=4",
               "model=resnet18", "data.stage=true", "cluster.node_local=@NODE@"],
}  # fmt: skip


class Rounds:
    """The shared state of all rounds: the project, data, a stub of sbatch, reference runs, nodes."""

    def __init__(self, folder: Path, project: Path) -> None:
        self.folder, self.project, self.data = folder, project, folder / "data"
        self.scenes: list[str] = []
        self.slurm: Slurm | None = None  # the cluster whose nodes some rounds use
        self._alone: dict[str, Path] = {}
        self.rounds = folder / "rounds"
        self.bin = folder / "bin"  # a stub of sbatch that accepts every job
        self.bin.mkdir()
        (self.bin / "sbatch").write_text("#!/bin/bash\necho 17\n")
        (self.bin / "sbatch").chmod(0o755)
        self._write_data()
        pack = Ground(folder / "packing", project)
        for name in ("texts", "other texts"):
            words = [f"data.files={self.data / name}", f"out={self.data / name}.npy"]
            pack.run([Command(f"pack {name}", ["tools/pack.py", *words])])
        words = [f"data.dir={self.data / 'images'}", f"out={self.data}/images.npy", "data.image_size=8"]
        pack.run([Command("pack images", ["tools/pack.py", *words])])
        _require_right(pack)

    def _write_data(self) -> None:
        rng = Random(0)
        for number in range(36):
            place = self.data / "images" / f"class{number % 3}"
            place.mkdir(parents=True, exist_ok=True)
            color = (rng.randrange(256), rng.randrange(256), rng.randrange(256))
            Image.new("RGB", (8, 8), color).save(place / f"{number}.png")
        for name in ("texts", "other texts"):
            (self.data / name).mkdir()
            for number in range(3):
                (self.data / name / f"{number}.txt").write_text(f"{name} {number}\n" * 400)

    def words(self, sort: str, ground: Path) -> list[str]:
        places = {"@DATA@": str(self.data), "@NODE@": str(ground / "node")}
        text = "\n".join([*SMALL, *RUNS[sort]])
        for name, place in places.items():
            text = text.replace(name, place)
        return text.split("\n")

    def train(self, sort: str, name: str, ground: Ground, run_dir: Path | None, environ: dict[str, str]) -> Command:
        where = [f"run_dir={run_dir}"] if run_dir else [f"name={name}"]
        ranks = 2 if sort == "two ranks" else 1
        return Command(name, ["train.py", *where, *self.words(sort, ground.folder)], ranks, dict(environ))

    def reference(self, sort: str) -> Path:
        """Return the run directory of the same kind of run without neighbours."""
        if sort not in self._alone:
            name = f"alone-{sort}-{os.getpid()}".replace(" ", "-")  # each control runs in its own process
            ground = Ground(self.folder / name, self.project)
            (ground.folder / "node").mkdir()
            ground.run([self.train(sort, "alone", ground, ground.folder / "run", {})])
            _require_right(ground)
            self._alone[sort] = ground.folder / "run"
        return self._alone[sort]

    def compare(self, sort: str, run_dir: Path, ground: Ground, name: str) -> None:
        """Check that the run equals its reference run. Otherwise note harm."""
        try:
            found = same_run.differences(self.reference(sort), run_dir)
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        if found:
            ground.harm("other results", f"{name} in {run_dir}: {'; '.join(found[:4])}")


def _require_right(ground: Ground) -> None:
    """Raise `RuntimeError` if commands fail even without neighbours."""
    for command in ground.done:
        ground.expect(command, 0)
    ground.close()
    if ground.harmed:
        raise RuntimeError("wrong without neighbours: " + "\n".join(ground.harmed))


def draw_hit(rng: Random, command: Command, chance: float = 0.25) -> None:
    command.late = rng.choice([0.0, 0.0, rng.uniform(0, 1.0)])
    if rng.random() < chance:
        command.hit = rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
        command.at = rng.randrange(1, 6)


def allocation(rng: Random) -> dict[str, str]:
    """Return the variables of a shell: on a laptop, in `srun --pty bash`, or in an interactive job of PBS."""
    host = socket.gethostname()
    job = str(rng.randrange(1000, 9999))
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_LOCALID": "0"}
    step |= {"SLURM_JOB_ID": job, "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": host, "SLURMD_NODENAME": host}
    return rng.choice(
        [{}, step | {"SLURM_NODEID": "0"}, {"PBS_JOBID": f"{job}.server", "PBS_ENVIRONMENT": "PBS_INTERACTIVE"}]
    )


def finished(shared: Rounds, ground: Ground, runs: list[tuple[str, Command, Path]]) -> Scene:
    """Resume the interrupted runs, all at once, and compare each run with its reference."""
    again = []
    # A run rejects a directory with checkpoints of another program.
    runs = [run for run in runs if "checkpoints of another program" not in run[1].said()]
    for _, command, run_dir in runs:
        if not command.hit or command.code == 0:  # not hit, or finished before the signal
            ground.expect(command, 0)
        else:
            words = [f"resume={run_dir}"] if (run_dir / "config.yaml").exists() else command.words[1:]
            name = f"{command.name}-again"
            again.append(Command(name, ["train.py", *words], command.ranks, command.environ, nodes=command.nodes))
    ground.counts["goes on"] += len(again)
    if again:
        yield again
    for command in again:
        ground.expect(command, 0)
    for sort, command, run_dir in runs:
        shared.compare(sort, run_dir, ground, command.name)
