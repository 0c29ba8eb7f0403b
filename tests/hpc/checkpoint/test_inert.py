"""Check that no code in a checkpoint is executed, wherever something is unpickled."""

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_weights import Bomb, deepspeed_by_hand, needs_deepspeed
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException

from hpc.checkpoint import safe_unpickle
from hpc.config.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def saved(folder: Path, **more: object) -> Path:
    states = {"state_dict": {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}, "rest": more}
    dcp.save(states, checkpoint_id=folder, no_dist=True)
    return folder


def load(folder: Path, **rest: object) -> dict:
    states = {"state_dict": {"a": torch.zeros(2, 3), "b": torch.zeros(2, dtype=torch.bfloat16)}, "rest": rest}
    with safe_unpickle.convert_unpickling_errors(folder):
        dcp.load(states, storage_reader=safe_unpickle.Reader(folder), no_dist=True)
    return states


def bombs(canary: Path) -> list[Bomb]:
    """Return objects that create `canary` when they are unpickled.

    They use modules that no reader, or only some readers, allow by name.
    """
    return [
        Bomb(os.mkdir, str(canary)),
        Bomb(exec, f"open({str(canary)!r}, 'w')"),
        Bomb(torch.save, 1, str(canary)),
    ]


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    found = load(saved(tmp_path, epoch=3, words=["x"]), epoch=0, words=[""])
    assert found["rest"] == {"epoch": 3, "words": ["x"]}
    assert torch.equal(found["state_dict"]["a"], torch.arange(6.0).view(2, 3))
    assert torch.equal(found["state_dict"]["b"], torch.ones(2, dtype=torch.bfloat16))
    assert safe_unpickle.read_metadata(tmp_path) == pickle.loads((tmp_path / ".metadata").read_bytes())


def test_the_readers_of_torch_execute_both(tmp_path: Path) -> None:
    """Check that the attacks work on torch's own readers; otherwise the tests below would prove nothing."""
    folder = saved(tmp_path / "it", epoch=Bomb(os.mkdir, str(tmp_path / "entry")))
    dcp.load({"rest": {"epoch": 0}}, checkpoint_id=folder, no_dist=True)
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(os.mkdir, str(tmp_path / "metadata"))))
    with pytest.raises(CheckpointException):  # the pickle returns no metadata
        dcp.load({"rest": {"epoch": 0}}, checkpoint_id=folder, no_dist=True)
    assert (tmp_path / "entry").exists() and (tmp_path / "metadata").exists()


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("place", ["metadata", "entry"])
def test_nothing_is_executed(place: str, number: int, tmp_path: Path) -> None:
    bomb = bombs(tmp_path / "canary")[number]
    folder = saved(tmp_path / "it", epoch=bomb if place == "entry" else 3)
    if place == "metadata":
        described = pickle.loads((folder / ".metadata").read_bytes())
        described.planner_data = bomb
        (folder / ".metadata").write_bytes(pickle.dumps(described))
    with pytest.raises(ConfigError, match="nothing in it is executed") as rejected:
        load(folder, epoch=0)
    assert rejected.value.value == folder and "\n" not in rejected.value.rule
    assert not (tmp_path / "canary").exists()
    assert safe_unpickle.FORCE not in os.environ


def test_no_class_is_changed(tmp_path: Path) -> None:
    """Check that a pickle cannot set attributes of a class that it names."""
    kind = metadata.Metadata
    stream = b"\x80\x04c" + f"{kind.__module__}\n{kind.__name__}\n".encode() + b"N}\x8c\x07versionK\x07s\x86b."
    pickle.loads(stream)
    assert kind.version == 7  # torch's pickle does change the class
    kind.version = None
    saved(tmp_path)
    (tmp_path / ".metadata").write_bytes(stream)
    with pytest.raises(pickle.UnpicklingError):
        safe_unpickle.read_metadata(tmp_path)
    assert kind.version is None


def test_files_outside_are_not_read(tmp_path: Path) -> None:
    described = pickle.loads((saved(tmp_path) / ".metadata").read_bytes())
    for place in described.storage_data.values():
        place.relative_path = "../elsewhere"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(described))
    with pytest.raises(ConfigError):
        load(tmp_path)


def test_other_errors_pass(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), safe_unpickle.convert_unpickling_errors(tmp_path):
        _ = 1 // 0
    os.truncate(saved(tmp_path) / "__0_0.distcp", 10)
    with pytest.raises(CheckpointException):
        load(tmp_path)


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"])
def test_nothing_is_executed_where_deepspeed_loads(name: str, number: int, tmp_path: Path) -> None:
    """Load as DeepSpeed's engine does, with `weights_only=False`; nothing may be executed."""
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    file = deepspeed_by_hand(tmp_path / "it") / "checkpoint" / name
    state = torch.load(file)
    state["more"] = [LossScaler(4.0), ZeroStageEnum.weights, fragment_address(1, 2)]
    torch.save(state, file)
    with safe_unpickle.convert_unpickling_errors(file), safe_unpickle.allow_deepspeed_classes():
        more = TorchCheckpointEngine().load(str(file))["more"]
    assert more[0].cur_scale == 4.0 and more[1:] == state["more"][1:]
    torch.save(state | {"more": bombs(tmp_path / "canary")[number]}, file)
    with (
        pytest.raises(ConfigError, match="nothing in it is executed"),
        safe_unpickle.convert_unpickling_errors(file),
        safe_unpickle.allow_deepspeed_classes(),
    ):
        TorchCheckpointEngine().load(str(file))
    assert not (tmp_path / "canary").exists()
