"""Check that a prediction holds every sample once, in order, on any number of ranks and whatever stopped them."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fork import QUIET
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from tiers import soak_all_but
from torch.utils.data import DataLoader

from hpc.config.errors import ConfigError
from hpc.predict import join, prediction_writer
from hpc.predict.parts import PartWriter, copy_to_host, read_done
from hpc.predict.rest_of_loader import RestOfBatches, leave_out_first, sample_indices

# `predict_step` writes down each batch that it computes, and returns numbers and strings.
RECORDED = """
import os, signal
from pathlib import Path
import torch
from hpc.run.signals import SignalState
from my_research.module import Classifier
from my_research.data.digits import Digits
from hpc.predict import parts

parts.CHUNK_SECONDS = 0  # a part for each batch
rank, calls = int(os.environ.get("PMI_RANK", 0)), 0

def predict_step(self, batch, batch_idx, dataloader_idx=0):
    global calls
    calls += 1
    interrupt(calls)
    images = batch[0] if isinstance(batch, (tuple, list)) else batch
    logits = self(images)
    with open(Path(self.trainer.default_root_dir) / f"calls-{rank}", "a") as file:
        print(dataloader_idx, len(images), file=file)
    words = [f"digit {k}" for k in logits.argmax(-1).tolist()]
    return {"logits": logits, "more": (words, images.mean((1, 2, 3)))}

Classifier.predict_step = predict_step
interrupt = lambda call: None
"""
KILLED = RECORDED + "interrupt = lambda call: os.kill(os.getpid(), signal.SIGKILL) if call == CALL else None\n"
SIGNALLED = RECORDED + "interrupt = lambda call: os.kill(os.getpid(), signal.SIGUSR1) if call == 3 else None\n"
# The second loader is an ordinary one over part of the images, in an order of its own.
TWO_LOADERS = """
from torch.utils.data import DataLoader, Subset

class Images(torch.utils.data.Dataset):
    def __init__(self, images): self.images = images
    def __len__(self): return len(self.images)
    def __getitem__(self, i): return self.images[i]

def predict_dataloader(self):
    images = torch.stack([self.dataset("test")[i][0] for i in range(60)])
    return [DataLoader(Images(images[:10]), batch_size=4), DataLoader(Images(images), batch_size=8, shuffle=True)]

Digits.predict_dataloader = predict_dataloader
Digits.on_after_batch_transfer = lambda self, batch, number: batch
"""
STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __init__(self, images): self.images = images
    def __iter__(self): return iter(self.images)

def predict_dataloader(self):
    images = torch.stack([self.dataset("test")[i][0] for i in range(60)])
    return torch.utils.data.DataLoader(Stream(images), batch_size=8)

Digits.predict_dataloader = predict_dataloader
Digits.on_after_batch_transfer = lambda self, batch, number: batch
"""
OBJECTS = RECORDED + "Classifier.predict_step = lambda self, batch, batch_idx: {'paths': [Path('x')]}\n"
TWO = ["trainer.accelerator=cpu", "trainer.devices=2"]
NUM_SAMPLES, NUM_BATCHES = 358, 12  # of the test split; in one process, or on each of two with half the batch


@pytest.fixture(scope="module")
def predict(start: Callable, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Start a prediction or let it go on, as the fixture `start` does."""
    trained = tmp_path_factory.mktemp("trained") / "run"
    common = ["trainer.precision=32-true", "callbacks=default", "callbacks.monitor=null", QUIET]
    start(trained, 1, [*common, "trainer.max_steps=3", "+trainer.limit_val_batches=0", "checkpoint.monitor=null"])
    words = [*common, f"ckpt={trained}/checkpoints/last.ckpt", "task=predict", "data.global_batch_size=32"]

    def run(run_dir: Path, ranks: int, strategy: str = "single", patch: str = RECORDED, **options: Any) -> str:
        layout = [f"strategy={strategy}", *(TWO if ranks == 2 else ["trainer.devices=1"])]
        return start(run_dir, ranks, [*([] if run_dir.exists() else words), *layout], patch=patch, **options)

    return run


@pytest.fixture(scope="module")
def reference(predict: Callable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Predict in one process without an interruption."""
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    assert f"predictions in {run_dir}/predictions.pt\n" in predict(run_dir, 1)
    return run_dir


def read(run_dir: Path, name: str = "predictions.pt") -> dict[str, Any]:
    return torch.load(run_dir / name, weights_only=True)


def calls(run_dir: Path) -> list[list[int]]:
    """Return loader and number of samples of each batch that was computed."""
    return [[*map(int, line.split())] for file in run_dir.glob("calls-*") for line in file.read_text().splitlines()]


def assert_same(run_dir: Path, reference: Path, name: str = "predictions.pt") -> None:
    own, expected = read(run_dir, name), read(reference, name)
    assert torch.equal(own["indices"], expected["indices"])
    for value, other in ((own["outputs"], expected["outputs"]),):
        torch.testing.assert_close(value["logits"], other["logits"])
        assert value["more"][0] == other["more"][0]
        torch.testing.assert_close(value["more"][1], other["more"][1])
    assert not (run_dir / "predictions").exists(), "the parts are joined, and gone"


@pytest.mark.slow
def test_the_outputs_are_in_the_order_of_the_dataset(reference: Path) -> None:
    found = read(reference)
    assert found["indices"].dtype == torch.int64 and found["indices"].tolist() == [*range(NUM_SAMPLES)]
    assert found["outputs"]["logits"].shape == (NUM_SAMPLES, 10)
    words = [f"digit {k}" for k in found["outputs"]["logits"].argmax(-1).tolist()]
    assert found["outputs"]["more"][0] == words and len(calls(reference)) == NUM_BATCHES
    assert re.search("(?m)^outcome finished$", (reference / "verdict").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", soak_all_but(["ddp", "fsdp", "deepspeed_zero3"], "fsdp"))
def test_killed_processes_go_on_without_computing_again_what_all_have_written(
    strategy: str, predict: Callable, reference: Path, tmp_path: Path
) -> None:
    """Kill two ranks, one of which has written less: ranks that wait for each other must get equally many batches."""
    run_dir = tmp_path / "run"
    slow = KILLED.replace("CALL", "4") + "parts.CHUNK_BYTES = 1500 if rank else 1\n"
    predict(run_dir, 2, strategy, slow + "parts.CHUNK_SECONDS = 1e9\n", code=-9)
    assert [len([*(run_dir / "predictions").glob(f"part-*-0000{rank}-*.pt")]) for rank in range(2)] == [3, 1]
    for file in run_dir.glob("calls-*"):
        file.unlink()
    assert "batches that all ranks have predicted already are passed over" in predict(run_dir, 2, strategy)
    assert_same(run_dir, reference)
    lengths = [len((run_dir / f"calls-{rank}").read_text().splitlines()) for rank in range(2)]
    assert lengths == [10, 10]  # of 12 batches each; the third of rank 0 is computed again


@pytest.mark.slow
def test_a_stopped_prediction_goes_on_and_then_says_that_it_is_finished(
    predict: Callable, reference: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    said = predict(run_dir, 2, "ddp", SIGNALLED + "parts.CHUNK_SECONDS = 1e9\n", code=85)
    assert "96 samples are predicted so far" in said and "stopped: SIGUSR1" in said
    assert re.search("(?m)^outcome continue$", (run_dir / "verdict").read_text())
    said = predict(run_dir, 1, code=2)
    assert "must go on with as many ranks as it began with (2)" in said and "a new run_dir=" in said
    predict(run_dir, 2, "ddp")
    assert_same(run_dir, reference)
    assert sum(count for _, count in calls(run_dir)) == NUM_SAMPLES, "no sample is computed twice"
    said = predict(run_dir, 2, "ddp", code=2)
    assert "The run is finished" in said and "max_epochs" not in said
    assert len(calls(run_dir)) == 2 * NUM_BATCHES


@pytest.mark.slow
def test_each_of_two_loaders_gets_a_file(predict: Callable, tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    predict(killed, 1, patch=KILLED.replace("CALL", "7") + TWO_LOADERS, code=-9)
    predict(killed, 1, patch=RECORDED + TWO_LOADERS)
    assert calls(killed).count([0, 4]) == 2, "a loader that is done is passed over"
    assert sum(count for _, count in calls(killed)) == 10 + 60
    predict(whole, 2, "ddp", RECORDED + TWO_LOADERS)
    for name, num in (("predictions-0.pt", 10), ("predictions-1.pt", 60)):
        assert read(killed, name)["indices"].tolist() == [*range(num)]
        assert_same(killed, whole, name)


@pytest.mark.slow
def test_a_stream_goes_on_at_its_batch(predict: Callable, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    predict(run_dir, 1, patch=KILLED.replace("CALL", "4") + STREAM, code=-9)
    predict(run_dir, 1, patch=RECORDED + STREAM)
    found = read(run_dir)
    assert found["indices"] is None and len(calls(run_dir)) == 8
    predict(tmp_path / "whole", 1, patch=RECORDED + STREAM)
    assert torch.equal(found["outputs"]["logits"], read(tmp_path / "whole")["outputs"]["logits"])


@pytest.mark.slow
def test_objects_are_rejected_at_the_first_batch(predict: Callable, tmp_path: Path) -> None:
    said = predict(tmp_path / "run", 1, patch=OBJECTS, code=2)
    assert "predict_step must return plain data, which a file can hold; it holds a pathlib.PosixPath" in said
    assert "Traceback" not in said and not [*(tmp_path / "run").glob("predictions/part-*")]


@pytest.mark.slow
def test_a_prediction_goes_on_with_the_data_and_the_weights_that_it_began_with(
    predict: Callable, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    predict(run_dir, 1, patch=KILLED.replace("CALL", "4") + TWO_LOADERS, code=-9)
    said = predict(run_dir, 1, patch=RECORDED + TWO_LOADERS.replace("images[:10]", "images[:11]"), code=2)
    assert "of [10, 60] samples; there are [11, 60]" in said
    first, second = (tmp_path / name for name in ("first", "second"))
    first.touch()
    (tmp_path / "last.ckpt").symlink_to(first)
    (tmp_path / "new").mkdir()
    assert prediction_writer.checkpoint_to_load(tmp_path / "new", str(tmp_path / "last.ckpt")) == str(first)
    begun = prediction_writer.checkpoint_to_load(run_dir, str(second))
    assert re.search(r"/checkpoints/step-\d+-\d+$", begun), "not the link"


@pytest.mark.soak
@pytest.mark.slow
def test_ranks_that_followed_a_link_to_different_weights_are_rejected(predict: Callable, tmp_path: Path) -> None:
    moved = "from hpc.predict import prediction_writer; resolved = prediction_writer.checkpoint_to_load\n"
    moved += "prediction_writer.checkpoint_to_load = lambda *words: resolved(*words) + rank * '/.'\n"
    said = predict(tmp_path / "run", 2, "ddp", RECORDED + moved, code=2)
    assert "ckpt must be the same on all ranks, but it was a link that changed" in said


@pytest.mark.slow
@pytest.mark.parametrize("step", ["before the join", "after it"])
def test_a_prediction_that_was_killed_at_its_end_is_joined(step: str, predict: Callable, tmp_path: Path) -> None:
    kill = "def kill(*args, **options):\n    os.kill(os.getpid(), signal.SIGKILL)\n\n"
    killed = f"{kill}from hpc.predict import join\njoin.join = kill\n"
    if step == "after it":
        killed = (
            f"{kill}import hpc.resume.trainer as trainer\ntrainer.finish = kill\nimport train\ntrain.finish = kill\n"
        )
    predict(tmp_path / "run", 1, patch=RECORDED + killed, code=-9)
    assert (tmp_path / "run" / "predictions").exists() == (step == "before the join")
    predict(tmp_path / "run", 1)
    assert read(tmp_path / "run")["indices"].tolist() == [*range(NUM_SAMPLES)]
    assert len(calls(tmp_path / "run")) == NUM_BATCHES, "nothing is computed again"


def write_parts(
    folder: Path, *batches: tuple[list[int] | None, Any], rank: int = 0, attempt: int = 1
) -> dict[int, int]:
    folder.mkdir(parents=True, exist_ok=True)
    writer = PartWriter(folder, attempt=attempt, rank=rank)
    for number, (indices, outputs) in enumerate(batches):
        writer.add(outputs, loader=0, number=number, indices=indices)
        writer.write()
    return {0: len(batches)}


def joined(run_dir: Path, *counts: dict[int, int]) -> dict[str, Any]:
    join.join(run_dir, counts, num_loaders=1, report_progress=lambda: None)
    return read(run_dir)


def test_outputs_of_any_form_are_joined(tmp_path: Path) -> None:
    texts = [([2, 3], torch.ones(2, 4)), ([0, 1], torch.zeros(2, 5))]
    found = joined(tmp_path / "a", write_parts(tmp_path / "a" / "predictions", *texts))
    assert [tuple(row.shape) for row in found["outputs"]] == [(5,), (5,), (4,), (4,)]
    scalars = [([2, 3], {"loss": 0.5}), ([0, 1], {"loss": torch.tensor(1.0)})]
    found = joined(tmp_path / "b", write_parts(tmp_path / "b" / "predictions", *scalars))
    assert [index.tolist() for index in found["indices"]] == [[0, 1], [2, 3]]
    assert found["outputs"] == [{"loss": torch.tensor(1.0)}, {"loss": 0.5}]
    twice = [([1, 1], torch.tensor([5, 6])), ([0, 1], torch.tensor([7, 8]))]
    found = joined(tmp_path / "c", write_parts(tmp_path / "c" / "predictions", *twice))
    assert found["indices"].tolist() == [0, 1] and found["outputs"].tolist() == [7, 5]
    one = write_parts(tmp_path / "d" / "predictions", (None, [1, 2]), (None, [3]), rank=1)
    zero = write_parts(tmp_path / "d" / "predictions", (None, [4]))
    assert joined(tmp_path / "d", zero, one) == {"indices": None, "outputs": [4, 1, 2, 3]}
    mean = [(None, torch.tensor(1.0)), (None, torch.tensor(2.0))]
    found = joined(tmp_path / "e", write_parts(tmp_path / "e" / "predictions", *mean))
    assert found == {"indices": None, "outputs": [torch.tensor(1.0), torch.tensor(2.0)]}


def test_of_a_batch_that_was_computed_twice_the_later_one_counts(tmp_path: Path) -> None:
    parts = tmp_path / "predictions"
    write_parts(parts, ([0, 1], torch.zeros(2)), ([2, 3], torch.zeros(2)), ([4], torch.zeros(1)))
    counts = write_parts(parts, ([0, 1], torch.ones(2)), ([2, 3], torch.ones(2)), attempt=2)
    found = joined(tmp_path, counts)
    assert found["indices"].tolist() == [0, 1, 2, 3] and found["outputs"].tolist() == [1, 1, 1, 1]


def test_missing_batches_are_counted(tmp_path: Path) -> None:
    counts = write_parts(tmp_path / "predictions", ([0, 1, 2], torch.zeros(3)), ([3, 4], torch.zeros(2)))
    os.unlink(max((tmp_path / "predictions").iterdir()))
    with pytest.raises(ConfigError, match="1 of 2 predicted batches are missing"):
        joined(tmp_path, counts)
    assert not (tmp_path / "predictions.pt").exists()


def test_a_damaged_part_is_named_and_what_is_whole_is_kept(tmp_path: Path) -> None:
    write_parts(tmp_path, ([0, 3], torch.zeros(2)), ([1], torch.zeros(1)), ([2], torch.zeros(1)))
    damaged = sorted(tmp_path.iterdir())[1]
    damaged.write_bytes(b"PK damaged")
    with pytest.raises(ConfigError, match=f"{damaged} is damaged") as raised:
        read_done(tmp_path, rank=0)
    assert f"rm {damaged}" in str(raised.value)
    damaged.unlink()
    assert read_done(tmp_path, rank=0) == {0: [[0, 3]]}, "those before the first that is gone"
    assert read_done(tmp_path, rank=1) == {}


@pytest.mark.parametrize(("limit", "expected"), [(1.0, [2, 3, 4]), (4, [2, 3]), (0.8, [2, 3]), (1, []), (9, [2, 3, 4])])
def test_the_rest_of_a_loader_keeps_its_numbers(limit: Any, expected: list[int]) -> None:
    fetched: list[int] = []

    class Numbers(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> int:
            fetched.append(index)
            return index

    done: list[Any] = [[0, 1], [2, 3]]
    loader = DataLoader(Numbers(), batch_size=2)
    rest = leave_out_first(loader, done, limit=limit, report_progress=lambda: None)
    batches = [batch.tolist() for batch in rest]
    assert batches == [[2 * number, 2 * number + 1] for number in expected] and len(rest) == len(expected)
    assert fetched == [index for batch in batches for index in batch], "what is passed over is not fetched"
    stop = limit if isinstance(limit, int) else None if limit == 1.0 else 4
    stream = RestOfBatches(list(range(5)), [None, None], stop=stop, report_progress=lambda: None)
    assert list(stream) == expected and len(stream) == len(expected)


def test_samples_of_a_batch_are_known_by_its_number(tmp_path: Path) -> None:
    loader: Any = DataLoader(range(6), batch_size=2)  # type: ignore[arg-type]
    vars(loader)["batch_sampler"] = _IndexBatchSamplerWrapper(loader.batch_sampler)  # as Lightning does
    rest = leave_out_first(loader, [[0, 1]], limit=1.0, report_progress=lambda: None)
    assert [sample_indices(rest, number) for number, _ in enumerate(rest, start=1)] == [[2, 3], [4, 5]]


def test_another_order_is_told() -> None:
    with pytest.raises(ConfigError, match="batch 1 has other samples now"):
        list(RestOfBatches([[0, 1], [3, 2], [4]], [[0, 1], [2, 3]], stop=None, report_progress=lambda: None))
    assert list(RestOfBatches([[0, 1], [3, 2], [4]], [[0, 1], None], stop=None, report_progress=lambda: None)) == [[4]]


def test_outputs_are_copied() -> None:
    buffer = torch.zeros(3)
    copied = copy_to_host([buffer[:2], "text"])
    buffer += 1
    assert copied[0].tolist() == [0, 0] and copied[0].untyped_storage().nbytes() == 8
    for foreign in (np.float64(1), {"a": [np.zeros(1)]}, object()):
        with pytest.raises(ConfigError, match=r"it holds a (numpy\.|builtins\.object)"):
            copy_to_host(foreign)
