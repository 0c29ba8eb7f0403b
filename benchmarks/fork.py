"""A project as a research group would fork it: with a tiny network, its data, and steps that take turns.

python benchmarks/fork.py FOLDER makes one for a machine that lacks cookiecutter.
"""

import os
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
    \"\"\"One batch of random images, again and again: what training costs where data cost nothing.\"\"\"

    def __init__(self, *, image_size: int, num_classes: int, **shared) -> None:
        super().__init__(**shared)
        self.image_size, self.num_classes = image_size, num_classes

    def dataset(self, split: str) -> Dataset:
        return Images(self.image_size, self.num_classes, 10**7 if split == "train" else self.global_batch_size)

    def prepare_inputs(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.float() / 255


class Images(Dataset):
    draws = False  # random numbers, of those that a run that goes on would have to draw again

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
from hpc.resume import agreement as agree


class Turns(lightning.Callback):
    def __init__(self) -> None:
        if turns.METER.startswith("collectives"):  # how often ranks agree must not depend on how busy the machine is
            agree.time = SimpleNamespace(monotonic=lambda: turns.begun() / turns.STEPS_PER_SECOND)

    def on_train_batch_start(self, *_) -> None:
        turns.turn()
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


def fork(folder: Path) -> Path:
    """A baked project with that in it."""
    from cookiecutter.main import cookiecutter

    project = Path(cookiecutter(str(HERE.parent), no_input=True, default_config=True, output_dir=str(folder)))
    for name, text in FILES.items():
        (project / name).write_text(text.lstrip(), encoding="utf-8")
    return project


def environ(threads: int = 1) -> dict[str, str]:
    """Without what this user has set; the benchmarks' own modules can be imported."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return kept | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(HERE), "XDG_CONFIG_HOME": os.devnull}


def ours(project: Path, run_dir: Path, *words: str, python: str = sys.executable, threads: int = 1) -> Command:
    """train.py with all that a run has by default, and turns; no validation interrupts it."""
    always = ["callbacks=turns", "trainer.max_epochs=-1", "+trainer.limit_val_batches=0"]
    always += ["+trainer.limit_test_batches=1", "checkpoint.monitor=null"]
    command = [python, str(project / "train.py"), *always, f"run_dir={run_dir}", *words]
    return command, environ(threads)


def plain(program: str, *words: str, python: str = sys.executable, threads: int = 1) -> Command:
    return [python, str(HERE / program), *words], environ(threads)


def ranks(command: Command, count: int) -> list[Command]:
    """As processes of one machine that mpiexec has started: what we read and what plain programs read."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

    def placed(rank: int) -> dict[str, str]:
        mpi = {"PMI_RANK": rank, "PMI_SIZE": count, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": count}
        return {**command[1], **there, **{name: str(value) for name, value in mpi.items()}}

    return [(command[0], placed(rank)) for rank in range(count)]


if __name__ == "__main__":
    print(fork(Path(sys.argv[1])))
