"""Make a project for the benchmarks: a baked one with a tiny network, its data, and steps that take turns.

For a machine without cookiecutter, make one elsewhere and copy it: python benchmarks/bench_project.py FOLDER
"""

import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
Command = tuple[Sequence[str], Mapping[str, str]]
FILES = {
    "src/my_research/models/tiny.py": '''
import torch
from torch import Tensor, nn


class Tiny(nn.Module):
    """Vectors (batch, 32) → logits (batch, 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(32, 32), nn.ReLU())])

    def forward(self, vectors: Tensor) -> Tensor:
        return self.blocks[0](vectors)

    def example_input(self, batch_size: int) -> Tensor:
        return torch.zeros(batch_size, 32)
''',
    "src/my_research/data/tiny.py": """
import torch
from torch.utils.data import TensorDataset

from hpc.data.data_module import DataModule


class Tiny(DataModule):
    def dataset(self, split: str) -> TensorDataset:
        count = 8000 if split == "train" else 800
        return TensorDataset(torch.randn(count, 32), torch.randint(0, 32, (count,)))
""",
    "src/my_research/data/constant.py": """
import torch
from torch.utils.data import Dataset

from hpc.data.data_module import DataModule


class Constant(DataModule):
    \"\"\"The same batch of random images at every step, so that data cost no time.\"\"\"

    def __init__(self, *, image_size: int, num_classes: int, **shared) -> None:
        super().__init__(**shared)
        self.image_size, self.num_classes = image_size, num_classes

    def dataset(self, split: str) -> Dataset:
        return Images(self.image_size, self.num_classes, 10**7 if split == "train" else self.global_batch_size)

    def prepare_inputs(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.float() / 255


class Images(Dataset):
    draws = False  # no random numbers that a resumed run would have to draw again

    def __init__(self, size: int, num_classes: int, count: int) -> None:
        self.size, self.num_classes, self.count = size, num_classes, count
        self.batch: tuple[torch.Tensor, torch.Tensor] | None = None

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, indices) -> tuple[torch.Tensor, torch.Tensor]:
        if self.batch is None or len(self.batch[0]) != len(indices):
            images = torch.randint(0, 256, (len(indices), 3, self.size, self.size), dtype=torch.uint8)
            self.batch = images, torch.randint(0, self.num_classes, (len(indices),))
        return self.batch
""",
    "src/my_research/turns.py": """
from types import SimpleNamespace

import lightning
import turns
from hpc.resume import agreement


class Turns(lightning.Callback):
    def __init__(self) -> None:
        if turns.METER.startswith("collectives"):  # how often ranks agree must not depend on how busy the machine is
            agreement.time = SimpleNamespace(monotonic=lambda: turns.num_started_steps() / turns.STEPS_PER_SECOND)

    def on_train_batch_start(self, *_) -> None:
        turns.wait_for_turn()
""",
    "configs/model/tiny.yaml": """
defaults: [base]
network:
  _target_: my_research.models.tiny.Tiny
""",
    "configs/data/tiny.yaml": """
_target_: my_research.data.tiny.Tiny
global_batch_size: 8
seed: ${seed}
""",
    "configs/data/constant.yaml": """
_target_: my_research.data.constant.Constant
image_size: 224
num_classes: 1000
global_batch_size: 256
seed: ${seed}
""",
    "configs/callbacks/turns.yaml": """
defaults: [default]
turns:
  _target_: my_research.turns.Turns
""",
}


def make_project(folder: Path) -> Path:
    """Bake a project in a folder, add the files above, and return its path."""
    from cookiecutter.main import cookiecutter

    project = Path(cookiecutter(str(HERE.parent), no_input=True, default_config=True, output_dir=str(folder)))
    for name, text in FILES.items():
        (project / name).write_text(text.lstrip(), encoding="utf-8")
    return project


def use_project(project: Path) -> None:
    """Make a project's modules importable, and the library for it: here, and in child processes of multiprocessing."""
    sys.path.insert(0, str(project / "src"))
    os.environ["HPC_PROJECT"] = str(project)


def clean_environ(threads: int = 1) -> dict[str, str]:
    """Return the environment without this user's settings for Python; the benchmarks' modules can be imported in it."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(HERE), "XDG_CONFIG_HOME": os.devnull}


def project_command(
    project: Path, run_dir: Path, *words: str, python: str = sys.executable, threads: int = 1
) -> Command:
    """Return the command of train.py with all defaults of a run, with turns and without validation."""
    overrides = ["callbacks=turns", "trainer.max_epochs=-1", "+trainer.limit_val_batches=0"]
    overrides += ["+trainer.limit_test_batches=1", "checkpoint.monitor=null"]
    command = [python, str(project / "train.py"), *overrides, f"run_dir={run_dir}", *words]
    return command, clean_environ(threads)


def plain_command(program: str, *words: str, python: str = sys.executable, threads: int = 1) -> Command:
    """Return the command of one of the hand-written programs in this folder."""
    return [python, str(HERE / program), *words], clean_environ(threads)


def rank_commands(command: Command, num_ranks: int) -> list[Command]:
    """Return the command of each rank, with the variables that mpiexec sets for the processes of one machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

    def rank_environ(rank: int) -> dict[str, str]:
        mpi = {"PMI_RANK": rank, "PMI_SIZE": num_ranks, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": num_ranks}
        return {**command[1], **address, **{name: str(value) for name, value in mpi.items()}}

    return [(command[0], rank_environ(rank)) for rank in range(num_ranks)]


if __name__ == "__main__":
    made = make_project(Path(sys.argv[1]))
    shutil.copytree(HERE.parent / "src" / "hpc", made / "src" / "hpc")  # elsewhere the library is not installed
    print(made)
