"""Check that state a checkpoint cannot hold is named before the first step.

Hyperparameters that it cannot hold do not end a run.
"""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from hpc.checkpoint import on_disk, plain_data
from hpc.config.errors import ConfigError

pytestmark = pytest.mark.slow

WORDS = ["trainer=cpu", "trainer.max_steps=2", "+trainer.limit_val_batches=0", "+trainer.limit_test_batches=1"]
WORDS += ["checkpoint.monitor=null", "callbacks.progress=null", "callbacks.monitor=null"]
NOT_PLAIN = {
    "callbacks (Throughput": """
from hpc.monitor.throughput import Throughput
Throughput.state_dict = lambda self: {"where": __import__("pathlib").Path("x")}
""",
    "on_save_checkpoint or state_dict (where": """
from my_research.module import Classifier
Classifier.on_save_checkpoint = lambda self, checkpoint: checkpoint.update(where=__import__("pathlib").Path("x"))
""",
}
HYPERPARAMETERS = """
from my_research.module import Classifier

before = Classifier.__init__

def __init__(self, network, optimizer, **more):
    before(self, network, optimizer, **more)
    self.save_hyperparameters({"network": network, "width": 7})

Classifier.__init__ = __init__
"""


@pytest.mark.parametrize("who", NOT_PLAIN)
def test_it_is_said_before_the_first_step(who: str, start: Callable, tmp_path: Path) -> None:
    said = start(tmp_path / "run", 1, WORDS, patch=NOT_PLAIN[who], code=2)
    assert who in said and "must put only plain data" in said and "Traceback" not in said
    assert not on_disk.list_checkpoints(tmp_path / "run")
    assert "it must not hold a pathlib" in said


def test_hyperparameters_are_left_out_where_they_are_no_data(start: Callable, tmp_path: Path) -> None:
    said = start(tmp_path / "run", 1, WORDS, 1, HYPERPARAMETERS)
    assert "hyperparameters that are no plain data are not saved: network" in said
    start(tmp_path / "run", 1, [], patch=HYPERPARAMETERS)


def test_the_state_of_a_schedule_is_no_data(tmp_path: Path) -> None:
    """Check that the rehearsed save before the first step includes the state of schedules."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    trainer: Any = SimpleNamespace(callbacks=[], lr_scheduler_configs=[SimpleNamespace(scheduler=schedule)])
    plain_data.rehearse_save(trainer, L.LightningModule())
    vars(schedule)["seen"] = deque([1.0])
    with pytest.raises(ConfigError, match=r"(?s)lr_schedulers.*collections\.deque"):
        plain_data.rehearse_save(trainer, L.LightningModule())


def sharded(rank: int) -> str:
    own = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)])
    plain_data.reject_sharded_tensors({"state": torch.ones(2), "this": [own.full_tensor()]})
    with pytest.raises(ConfigError) as rejected:
        plain_data.reject_sharded_tensors({"state": torch.ones(2), "average": [{"weight": own}]})
    return str(rejected.value)


@pytest.mark.soak
def test_a_part_of_a_tensor_is_not_saved_for_all_ranks(together: Callable) -> None:
    (said,) = together(sharded, 1)
    assert "on_save_checkpoint or state_dict (average)" in said and "must put whole tensors" in said
