"""Test a fork that adds a network, a dataset, a cluster and an experiment as new files only.

They must train with fsdp on two processes. The fork's own tests must pass and include them.
"""

from pathlib import Path

import pytest
from conftest import AWKWARD
from test_generated import run_tests

FILES = {
    "src/my_research/models/mlp.py": '''
"""A residual MLP."""

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    """Vectors (batch, inputs) → logits (batch, num_classes)."""

    def __init__(self, inputs: int, width: int, depth: int, num_classes: int) -> None:
        super().__init__()
        self.inputs = inputs
        self.stem = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(depth))
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(x)

    def example_input(self, batch_size: int) -> Tensor:
        return torch.zeros(batch_size, self.inputs)
''',
    "configs/model/mlp.yaml": """
defaults: [base]
network:
  _target_: my_research.models.mlp.MLP
  inputs: 64
  width: 32
  depth: 2
  num_classes: ${data.num_classes}
""",
    "src/my_research/data/parity.py": '''
"""Handwritten digits as 1797 samples of 64 numbers, even or odd."""

from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from hpc.data.data_module import DataModule
from my_research.data.digits import read_digits


class Parity(DataModule):
    """Inputs float32 (64,) of zero mean; two classes."""

    def __init__(self, num_classes: int = 2, **loading: Any) -> None:
        super().__init__(**loading)
        self.num_classes = num_classes

    def dataset(self, split: str) -> Dataset:
        pixels, digits = (torch.as_tensor(column) for column in read_digits())
        inputs, classes = ((pixels - pixels.mean(0)) / 16).float(), digits % 2
        fifths = {"train": (0, 1, 2), "val": (3,), "test": (4,)}[split]
        chosen = [i for i in range(len(inputs)) if i % 5 in fifths]
        return TensorDataset(inputs[chosen], classes[chosen])
''',
    "configs/data/parity.yaml": """
_target_: my_research.data.parity.Parity
num_classes: 2
global_batch_size: 32
seed: ${seed}
""",
    "configs/cluster/mine.yaml": """
defaults: [base]
name: mine
scheduler: slurm
gpus_per_node: 2
request: "--gres=gpu:{gpus}"
""",
    "configs/experiment/parity.yaml": """
# @package _global_
defaults:
  - override /data: parity
  - override /model: mlp
name: parity
trainer:
  max_epochs: 10
""",
}
TESTED = [
    "test_configs.py::test_a_choice_is_accepted_and_all_that_it_names_can_be_imported[cluster=mine]",
    "test_configs.py::test_a_choice_is_accepted_and_all_that_it_names_can_be_imported[data=parity]",
    "test_configs.py::test_a_choice_is_accepted_and_all_that_it_names_can_be_imported[experiment=parity]",
    "test_configs.py::test_a_choice_is_accepted_and_all_that_it_names_can_be_imported[model=mlp]",
    "test_data.py::test_no_sample_is_in_two_splits[parity]",
    "test_learning.py::test_one_batch_is_learned_by_heart[experiment=parity]",
    "test_models.py::test_each_sample_has_an_output_and_each_parameter_a_gradient[mlp]",
    "test_training.py::test_two_processes_learn_what_one_does[experiment=parity-fsdp]",
]

pytestmark = pytest.mark.slow


def add_files(project: Path, package: str = "my_research") -> None:
    for name, text in FILES.items():
        file = project / name.replace("my_research", package)
        assert not file.exists()
        file.write_text(text.lstrip().replace("my_research", package))


@pytest.mark.soak
@pytest.mark.parametrize("which", ["added", "all"])
def test_the_tests_of_a_fork_pass_and_test_what_was_added(which, bake, tmp_path, capfd):
    """Run tests of a project that was baked with awkward answers, in a folder with an awkward name."""
    folder = tmp_path / "Ein Ordner für 'alles' "
    folder.mkdir()
    project: Path = bake(folder, **AWKWARD)
    add_files(project, AWKWARD["package_name"])
    with capfd.disabled():
        lines = run_tests(project, "-rap", *(["-k", "mine or parity or mlp"] if which == "added" else []))
    assert not [path for path in folder.rglob("*") if path.name == "canary"]
    passed = {line.removeprefix("PASSED tests/") for line in lines}
    assert [test for test in TESTED if test not in passed] == []


def test_a_fork_adds_files_only(bake, run, tmp_path):
    project: Path = bake(tmp_path)
    before = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    add_files(project)

    choices = "model=mlp data=parity cluster=mine trainer=fsdp name=fork"
    trained = run(f"python train.py {choices} trainer.accelerator=cpu trainer.precision=32-true", project)
    assert trained.returncode == 0, trained.stdout
    name, accuracy = trained.stdout.strip().splitlines()[-1].split()
    assert name == "test/accuracy" and float(accuracy) > 0.9

    (run_dir,) = (project / "runs").iterdir()
    assert list((run_dir / "checkpoints" / "last.ckpt").glob("__1_*.distcp")), "the second process wrote its shard"
    assert "devices: 2" in (run_dir / "config.yaml").read_text()  # the cluster's GPUs per node
    assert {path: path.read_bytes() for path in before} == before

    script = run(f"python submit.py {choices} trainer.num_nodes=8 --dry-run", project).stdout
    assert "#SBATCH --nodes=8\n#SBATCH --ntasks-per-node=2\n#SBATCH --gres=gpu:2\n" in script
    rejected = run(f"python train.py {choices} trainer.devices=3", project)
    assert rejected.returncode == 2 and "at most 2, the GPUs of a node of cluster=mine" in rejected.stdout
