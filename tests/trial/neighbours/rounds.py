"""Shared parts of the rounds: data, reference runs, allocations, and strikes that end a run."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image
from slurm_nodes import Slurm

from trial import same
from trial.ground import Ground
from trial.program import Program
from trial.strike import OUTSIDE, Strike

# A scene yields programs, which run at the same time as those of other scenes. Then it continues, and reports harm.
Scene = Iterator[list[Program]]
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
FOREIGN = "checkpoints of another program"  # a run rejects a directory that has them
NOT_COMPARED = "rejected for foreign checkpoints"

# What Slurm's commands print: a job's number, and a cluster without limits.
PARTITION = "PartitionName=all Default=YES State=UP MaxTime=UNLIMITED MaxNodes=UNLIMITED MinNodes=0 OverSubscribe=NO"
SCHEDULER = {
    "sbatch": "echo 17",
    "scontrol": f'[[ "$*" = *config ]] && echo AccountingStorageEnforce = none || echo "{PARTITION}"',
    "sinfo": "echo 'all*|1000|128|1:128:1|1000000|gpu:8|x|n1'",
    "sacctmgr": "exit 1",
}


class Rounds:
    """The shared state of all rounds: the project, data, a stub of sbatch, reference runs, nodes."""

    def __init__(self, folder: Path, project: Path) -> None:
        self.folder, self.project, self.data = folder, project, folder / "data"
        self.slurm: Slurm | None = None  # the cluster whose nodes some rounds use
        self._alone: dict[str, Path] = {}
        self.bin = folder / "bin"  # stubs of Slurm, which accepts every job
        self.bin.mkdir(parents=True)
        for name, line in SCHEDULER.items():
            (self.bin / name).write_text(f"#!/bin/bash\n{line}\n")
            (self.bin / name).chmod(0o755)
        self._write_data()
        pack = self._alone_on("packing")
        for name in ("texts", "other texts"):
            words = ["tools/pack.py", f"data.files={self.data / name}", f"out={self.data / name}.npy"]
            pack.run(self.program(pack, name, words))
        words = ["tools/pack.py", f"data.dir={self.data / 'images'}", f"out={self.data}/images.npy"]
        pack.run(self.program(pack, "images", [*words, "data.image_size=8"]))
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

    def _alone_on(self, name: str) -> Ground:
        """Return a ground without neighbours, of this process: each control runs in its own."""
        ground = Ground(self.folder / f"{name}-{os.getpid()}".replace(" ", "-"), self.project)
        ground.stand_by()
        (ground.folder / "node").mkdir()
        return ground

    def words(self, sort: str, ground: Path) -> list[str]:
        places = {"@DATA@": str(self.data), "@NODE@": str(ground / "node")}
        text = "\n".join([*SMALL, *RUNS[sort]])
        for name, place in places.items():
            text = text.replace(name, place)
        return text.split("\n")

    def train(self, sort: str, name: str, ground: Ground, run_dir: Path | None, environ: dict[str, str]) -> Program:
        where = f"run_dir={run_dir}" if run_dir else f"name={ground.folder.name}-{name.rpartition('-')[0]}"
        ranks = 2 if sort == "two ranks" else 1
        words = ["train.py", where, *self.words(sort, ground.folder)]
        return self.program(ground, name, words, ranks=ranks, environ=dict(environ))

    def program(self, ground: Ground, name: str, words: list[str], **options: Any) -> Program:
        """Return a program of the project, whose log is on the ground under this name."""
        return Program(self.project, words, ground.folder / "logs" / f"{name}.log", **options)

    def reference(self, sort: str) -> Path:
        """Return the run directory of the same kind of run without neighbours."""
        if sort not in self._alone:
            ground = self._alone_on(f"alone-{sort}")
            ground.run(self.train(sort, "alone", ground, ground.folder / "run", {}))
            _require_right(ground)
            self._alone[sort] = ground.folder / "run"
        return self._alone[sort]

    def compare(self, sort: str, run_dir: Path, ground: Ground, name: str) -> None:
        """Check that the run is the same as its reference run. Otherwise note harm."""
        try:
            found = same.differences(self.reference(sort), run_dir, others=ground.names_of_others(run_dir))
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        ground.counts["compared"] += 1
        if found:
            ground.harm("other results", f"{name} in {run_dir}: {'; '.join(found[:4])}")


def _require_right(ground: Ground) -> None:
    """Raise `RuntimeError` if programs fail even without neighbours."""
    for program in ground.done:
        ground.expect(program, 0)
    ground.close()
    if ground.harmed:
        raise RuntimeError("wrong without neighbours: " + "\n".join(ground.harmed))


def draw_strike(rng: Random, program: Program, chance: float = 0.25) -> None:
    """Perhaps let a run get a signal in one of its steps, in its last rank."""
    program.late = rng.choice([0.0, 0.0, rng.uniform(0, 1.0)])
    if rng.random() < chance:
        name = rng.choice(["SIGKILL", "SIGTERM", "SIGUSR1", "SIGINT"])
        program.strike = after_step(name, rng.randrange(1, 6), program.ranks)


def after_step(name: str, step: int, ranks: int = 1) -> Strike:
    return Strike("training_step", name, count=step + 1, rank=ranks - 1)


def after_seconds(name: str, seconds: float) -> Strike:
    return Strike(OUTSIDE, name, seconds=seconds)


def allocation(rng: Random) -> dict[str, str]:
    """Return the variables of a shell: on a laptop, in `srun --pty bash`, or in an interactive job of PBS."""
    host = socket.gethostname()
    job = str(rng.randrange(1000, 9999))
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_LOCALID": "0"}
    step |= {"SLURM_JOB_ID": job, "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": host, "SLURMD_NODENAME": host}
    return rng.choice(
        [{}, step | {"SLURM_NODEID": "0"}, {"PBS_JOBID": f"{job}.server", "PBS_ENVIRONMENT": "PBS_INTERACTIVE"}]
    )


def finished(shared: Rounds, ground: Ground, runs: list[tuple[str, Program, Path]]) -> Scene:
    """Resume the interrupted runs, all at once, and compare each run with its reference."""
    foreign = [run for run in runs if FOREIGN in run[1].said()]
    for _, program, _ in foreign:
        ground.expect(program, 2)
    ground.counts[NOT_COMPARED] += len(foreign)
    runs = [run for run in runs if run not in foreign]
    again = []
    for _, program, run_dir in runs:
        if not program.strike or program.code == 0:  # not struck, or finished before the signal
            ground.expect(program, 0)
        else:
            words = [f"resume={run_dir}"] if (run_dir / "config.yaml").exists() else program.words[1:]
            place = {"ranks": program.ranks, "environ": program.environ, "nodes": program.nodes}
            again.append(shared.program(ground, f"{program.name}-again", ["train.py", *words], **place))
    ground.counts["goes on"] += len(again)
    if again:
        yield again
    for program in again:
        ground.expect(program, 0)
    for sort, program, run_dir in runs:
        shared.compare(sort, run_dir, ground, program.name)
