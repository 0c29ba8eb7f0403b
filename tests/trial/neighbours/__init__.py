"""Neighbours: in every round one user does several things at once, and none may change, end or see another's files.

Runs train inside each other's directories, in one allocation, on one range of ports, on the same nodes, with one
compile cache, one packed or staged file, one environment, one study; some are struck.
"""

import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import slurm_nodes

from trial import project as projects
from trial.campaign import ALL, Campaign, Control, Outcome
from trial.ground import BYSTANDERS, Ground, adopt
from trial.neighbours import rounds, tools, trains

TRAINS: dict[str, Callable[..., rounds.Scene]] = {
    "nested directories": trains.nested,
    "one directory": trains.one_directory,
    "one resume": trains.one_resume,
    "one name": trains.one_name,
    "one port": trains.ports,
    "two nodes": trains.nodes,
    "one staged file": trains.staged,
}
OTHERS: dict[str, Callable[..., rounds.Scene]] = {
    "one packed file": tools.packed,
    "one compile cache": tools.cached,
    "one environment": tools.installed,
    "one study": tools.studied,
    "one submit directory": tools.submitted,
}
# Patches that remove the protection of a scene.
UNPROTECTED = {"one directory": "no_claim", "one staged file": "no_lock", "one submit directory": "no_exclusive_config"}
TRIES = 6  # rounds within which harm must be found, as not every round has the right timing


class Neighbours(Campaign):
    name, unit = "neighbours", "round"
    GOOD, ACCEPTED = ("right",), ("right",)
    # The share of runs in a training scene that train and are compared; others are rejected, as they must be.
    FLOORS: ClassVar = {ALL: 0.6, "nested directories": 0.5, "one port": 0.9, "two nodes": 0.9, "one staged file": 0.9}

    def __init__(self, folder: Path, project: Path | None = None) -> None:
        super().__init__(folder, project)
        self.stack = ExitStack()
        self.trains, self.others = list(TRAINS), list(OTHERS)

    def __enter__(self) -> "Neighbours":
        projects.warm_project(self.project, self.folder / "cache")
        import optuna.storages.journal  # noqa: F401
        import torch

        import train  # noqa: F401  # imports the project's modules, too

        torch.set_num_threads(1)
        logging.getLogger("tensorboard").setLevel(logging.ERROR)  # resumed runs make it warn
        adopt()
        self.shared = rounds.Rounds(self.folder / "shared", self.project)
        if reason := slurm_nodes.missing():
            print(f"left out: two nodes ({reason})")
            self.trains.remove("two nodes")
        else:
            (self.folder / "slurm").mkdir()
            nodes = slurm_nodes.cluster(self.folder / "slurm", ("n1", "n2"))
            self.shared.slurm = self.stack.enter_context(nodes)
            BYSTANDERS.update(machine.pid for machine in self.shared.slurm.machines.values())
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def draw(self, seed: int, number: int) -> dict[str, Any]:
        """Draw the scenes of a round: the training scene whose turn it is, and two random other scenes."""
        rng = random.Random(f"{seed}/{number}")
        train = self.trains[(seed + number) % len(self.trains)]
        return {"scenes": [train, *rng.sample(self.others, 2)], "seed": f"{seed}/{number}"}

    def kind(self, drawn: dict[str, Any]) -> str:
        return drawn["scenes"][0]

    def attempt(self, drawn: dict[str, Any], place: Path, *, patch: str = "") -> Outcome:
        if not patch:
            return self._round(drawn, place)
        for sort in ("digits", "packed"):
            self.shared.reference(sort)
        return projects.apart(self._unprotected, drawn, place, patch, project=self.project)

    def _unprotected(self, drawn: dict[str, Any], place: Path, patch: str) -> Outcome:
        adopt()
        exec(patch, {"__name__": "patch"})
        return self._round(drawn, place)

    def _round(self, drawn: dict[str, Any], place: Path) -> Outcome:
        ground = Ground(place, self.project)
        ground.stand_by()
        (ground.folder / "node").mkdir()
        left = {}
        for number, name in enumerate(drawn["scenes"]):
            rng = random.Random(f"{drawn['seed']}/{name}")
            scene = (TRAINS | OTHERS)[name]
            left[name] = scene(rng, self.shared, ground, f"{number}-{name.split()[-1]}")
        while left:
            batch = []
            for name, scene in list(left.items()):
                try:
                    batch += next(scene)
                except StopIteration:
                    left.pop(name)
                except Exception as error:  # for example, a run left no files to compare
                    ground.harm("cannot be judged", f"{name}: {type(error).__name__}: {error}")
                    left.pop(name)
            ground.run(*batch)
        ground.close()
        return self._judged(drawn, ground)

    def _judged(self, drawn: dict[str, Any], ground: Ground) -> Outcome:
        trained = ground.counts["compared"] + ground.counts[rounds.NOT_COMPARED]
        accepted = {drawn["scenes"][0]: (ground.counts["compared"], trained)}
        counts = {name: 1 for name in drawn["scenes"]} | dict(ground.counts)
        counts |= {"programs": len(ground.done), "programs struck": sum(one.may_die for one in ground.done)}
        counts |= {"programs rejected": sum(one.code == 2 for one in ground.done)}
        if ground.harmed:
            lines = [*map(str, ground.done), *(f"HARM {line}" for line in ground.harmed)]
            return Outcome("harmed", "\n".join(lines), counts, accepted)
        shutil.rmtree(ground.folder)
        return Outcome("right", "", counts, accepted)

    def controls(self) -> Iterator[Control]:
        for scene, patch in UNPROTECTED.items():
            draws = [{"scenes": [scene], "seed": f"{os.getpid()}/{number}"} for number in range(TRIES)]
            yield Control(scene, projects.patch(patch), draws, "harmed")
