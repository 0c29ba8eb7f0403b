"""Test random concurrent use: python tests/drawn_neighbours.py --rounds 100 --seed 1 [--only 7] [--controls]

In every round one user does several things at once: runs inside each other's directories, in one allocation, on one
range of ports, on the same nodes, with one compile cache, one packed or staged file, one environment, one study; some
are killed. None may change, end or see another's files. The seed and the number of a round determine what it draws.
"""

import argparse
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neighbour_ground import Ground
    from neighbour_rounds import Rounds, Scene

HERE = Path(__file__).resolve().parent
# Code that removes the protection of a scene. Rounds with it must find harm.
CONTROLS = {
    "one directory": """
from hpc.run import claim
claim._wait_for_heartbeat = lambda *_, **__: False
claim.Claim.may_write = lambda _: True
""",
    "one staged file": """
from contextlib import nullcontext
from hpc.packed import staging
staging._lock_folder = nullcontext
""",
    "one submit directory": """
import os, time
from hpc.config.freezing import to_frozen_yaml
from hpc.run import frozen_config
from hpc.system.files import write_atomically

def write_after_both_checks(run_dir, cfg, *, words):
    (run_dir.parent / f"checked-{os.getpid()}").touch()
    limit = time.monotonic() + 20
    while len(list(run_dir.parent.glob("checked-*"))) < 2 and time.monotonic() < limit:
        time.sleep(0.01)
    write_atomically(run_dir / "config.yaml", to_frozen_yaml(cfg))

frozen_config.create_exclusively = write_after_both_checks  # both have found the directory unused
""",
}
TRIES = 6  # rounds within which harm must be found, as not every round has the right timing


def campaign(shared: "Rounds", numbers: list[int], seed: int) -> list[int]:
    """Run rounds, and return the numbers of those that did harm. The last printed lines count what was drawn."""
    counts: Counter[str] = Counter()
    harmed, began = [], time.monotonic()
    for number in numbers:
        begun = time.monotonic()
        found = one_round(shared, number, seed, shared.scenes, counts)
        if found:
            harmed.append(number)
            again = f"again: python tests/drawn_neighbours.py --seed {seed} --only {number}"
            print("\n".join([f"round {number} did harm:", *found, again]), flush=True)
        else:
            print(f"round {number}: {time.monotonic() - begun:.1f} s", flush=True)
    print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))
    minutes = (time.monotonic() - began) / 60
    print(
        f"{len(numbers)} rounds of seed {seed}, {minutes:.1f} minutes on {os.cpu_count()} cores: {len(harmed)} harmed"
    )
    return harmed


def one_round(shared: "Rounds", number: int, seed: int, names: list[str], counts: Counter[str]) -> list[str]:
    """Run one round. If it did harm, return one line per command and per harm; otherwise return no lines."""
    from neighbour_ground import Ground

    known = scenes()
    chosen = draw(random.Random(f"{seed}/{number}"), names, seed + number)
    ground = Ground(shared.rounds / f"round-{number}", shared.project)
    (ground.folder / "node").mkdir()
    left = {
        name: known[name](random.Random(f"{seed}/{number}/{name}"), shared, ground, f"{place}-{name.split()[-1]}")
        for place, name in enumerate(chosen)
    }
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
        ground.run(batch)
    ground.close()
    counts.update(chosen)
    counts["commands"] += len(ground.done)
    counts["commands hit"] += sum(bool(command.hit) for command in ground.done)
    counts["commands rejected"] += sum(command.code == 2 for command in ground.done)
    counts.update(ground.counts)
    if ground.harmed:
        return [*map(str, ground.done), *(f"  HARM {line}" for line in ground.harmed)]
    shutil.rmtree(ground.folder)
    return []


def draw(rng: random.Random, names: list[str], turn: int) -> list[str]:
    """Draw the scenes of a round: the training scene whose turn it is, and two random other scenes."""
    import neighbour_trains

    known = scenes()
    trains = [name for name in names if known[name].__module__ == neighbour_trains.__name__]
    others = [name for name in names if name not in trains]
    return [*(trains[turn % len(trains) :][:1] if trains else []), *rng.sample(others, min(2, len(others)))]


def scenes() -> "dict[str, Callable[[random.Random, Rounds, Ground, str], Scene]]":
    import neighbour_tools
    import neighbour_trains

    return {
        "nested directories": neighbour_trains.nested,
        "one directory": neighbour_trains.one_directory,
        "one resume": neighbour_trains.one_resume,
        "one name": neighbour_trains.one_name,
        "one port": neighbour_trains.ports,
        "two nodes": neighbour_trains.nodes,
        "one staged file": neighbour_trains.staged,
        "one packed file": neighbour_tools.packed,
        "one compile cache": neighbour_tools.cached,
        "one environment": neighbour_tools.installed,
        "one study": neighbour_tools.studied,
        "one submit directory": neighbour_tools.submitted,
    }


def controls(shared: "Rounds", seed: int) -> list[str]:
    """Return the scenes in which no harm was found although their protection was removed."""
    missed = []
    for scene, patch in CONTROLS.items():
        for sort in ("digits", "packed"):
            shared.reference(sort)
        if (pid := os.fork()) == 0:
            code = 1
            try:
                code = found_without(shared, seed, scene, patch)
            finally:
                sys.stdout.flush()
                os._exit(code)
        missed += [scene] if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) else []
    return missed


def found_without(shared: "Rounds", seed: int, scene: str, patch: str) -> int:
    from neighbour_ground import adopt

    adopt()
    exec(patch, {"__name__": "patch"})
    shared.rounds = shared.folder / f"without {scene}"
    for number in range(TRIES):
        if lines := one_round(shared, number, seed, [scene], Counter()):
            harm = next(line for line in lines if line.startswith("  HARM"))
            print(f"control, {scene}: found in round {number}: {harm.strip()[:160]}", flush=True)
            return 0
    print(f"control, {scene}: no harm found in {TRIES} rounds", flush=True)
    return 1


@contextmanager
def prepared(project: Path, folder: Path, wanted: list[str]) -> Iterator["Rounds"]:
    """Import the libraries once, and prepare what the rounds share."""
    os.environ |= {"XDG_CONFIG_HOME": os.devnull, "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    for name in [name for name in os.environ if name.startswith(("SLURM_", "PBS_", "HPC_", "MASTER_"))]:
        del os.environ[name]
    os.environ["HPC_PROJECT"] = str(project)
    sys.path[:0] = [str(project), str(project / "src")]
    import lightning.pytorch.callbacks  # noqa: F401
    import optuna.storages.journal  # noqa: F401
    import slurm_nodes
    import torch
    import torch.distributed.checkpoint
    import torch.utils.tensorboard
    import torchmetrics  # noqa: F401
    from neighbour_ground import BYSTANDERS, adopt
    from neighbour_rounds import Rounds

    import train  # noqa: F401  # imports the project's modules, too

    torch.set_num_threads(1)
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # resumed runs make it warn
    adopt()
    shared = Rounds(folder, project)
    shared.scenes = wanted or list(scenes())
    with ExitStack() as stack:
        if "two nodes" in shared.scenes and (reason := slurm_nodes.missing()):
            print(f"left out: two nodes ({reason})")
            shared.scenes = [name for name in shared.scenes if name != "two nodes"]
        elif "two nodes" in shared.scenes:
            (folder / "slurm").mkdir()
            shared.slurm = stack.enter_context(slurm_nodes.cluster(folder / "slurm", ("n1", "n2")))
            BYSTANDERS.update(machine.pid for machine in shared.slurm.machines.values())
        yield shared


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="the number of one round")
    parser.add_argument("--scene", action="append", default=[], help="draw from these scenes only")
    parser.add_argument("--project", type=Path, help="a baked project; default: one is baked")
    parser.add_argument("--controls", action="store_true", help="see that harm is found where cures are taken away")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # SystemExit removes the nodes
    folder = Path(tempfile.mkdtemp(prefix="neighbours"))
    project = (asked.project or baked(folder)).absolute()
    numbers = [asked.only] if asked.only is not None else list(range(asked.rounds))
    with prepared(project, folder, asked.scene) as shared:
        missed = controls(shared, asked.seed) if asked.controls else []
        harmed = campaign(shared, numbers, asked.seed)
    if harmed or missed:
        print(f"harmed in rounds {harmed}, controls missed {missed}; what the runs left is in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


def baked(folder: Path) -> Path:
    """Bake a project with the default answers."""
    from cookiecutter.main import cookiecutter

    answers = {"cluster": "local"}
    made = cookiecutter(
        str(HERE.parent), no_input=True, default_config=True, extra_context=answers, output_dir=str(folder)
    )
    return Path(made)


if __name__ == "__main__":
    sys.exit(main())
