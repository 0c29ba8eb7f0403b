"""A job script requests the nodes, tasks and GPUs of the Trainer, for each file of configs/trainer."""

import re
import subprocess

import pytest
from choices import GROUPS
from conftest import command
from hpc.config.compose import compose_overrides


@pytest.mark.parametrize("trainer", GROUPS["trainer"])
def test_a_job_asks_for_the_nodes_and_tasks_that_the_trainer_has(trainer: str) -> None:
    words = [f"trainer={trainer}", "cluster=slurm"]
    done = subprocess.run(command(*words, "--dry-run", program="submit.py"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", done.stdout, re.MULTILINE))
    cfg = compose_overrides(words).trainer
    assert (asked["nodes"], asked["ntasks-per-node"]) == (str(cfg.num_nodes), str(cfg.devices))
    assert ("gpus-per-node" in asked) == (cfg.accelerator == "gpu")
