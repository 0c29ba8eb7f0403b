"""Train a stranger's module and data with a fault in them: one sentence says so, nothing hangs, nothing is lost."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tiers import soak_all_but

from hpc.checkpoint import on_disk, weights
from hpc.run import causes

pytestmark = pytest.mark.slow

# Replaces the shipped module and data; without a line for this project.
STRANGER = """
import lightning as L, torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class Points(Dataset):
    def __init__(self, num=48):
        self.num = num

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        return torch.tensor([index % 7.0]), torch.tensor([index % 5.0])

class Line(L.LightningModule):
    def __init__(self, **options):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def compute_loss(self, batch):
        return (self.layer(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch, batch_idx):
        return self.compute_loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.001)

class Data(L.LightningDataModule):
    def __init__(self, **options):
        super().__init__()

    def train_dataloader(self):
        return DataLoader(Points(), batch_size=4, shuffle=True)

from my_research import module
from my_research.data import digits

module.Classifier, digits.Digits = Line, Data
"""
WORDS = ["trainer.accelerator=cpu", "trainer.precision=32-true", "trainer.max_epochs=2", "checkpoint.every_n_steps=1"]
WORDS += ["trainer.gradient_clip_val=null", "checkpoint.monitor=null", "checkpoint.keep=50"]
WORDS += ["+trainer.enable_progress_bar=false"]
WORDS += ["callbacks.progress=null", "callbacks.monitor=null", "callbacks.samples=null"]
RANKS = {1: ["trainer.devices=1"], 2: ["trainer.devices=2", "strategy=ddp"]}


def words(num_ranks: int, *more: str) -> list[str]:
    return [*WORDS, *RANKS[num_ranks], *more]


def steps(run_dir: Path) -> list[int]:
    """Return the steps of the checkpoints that are whole."""
    return sorted(checkpoint.step for checkpoint in on_disk.list_checkpoints(run_dir))


# Data


NAMED = "Data.fingerprint = lambda self: {'train': {'files': ['FILE.h5', 'other.h5']}}"
CHANGED = {
    "length": ("", "Points.__init__ = lambda self, num=44: setattr(self, 'num', num)", "train: samples 48 -> 44"),
    "files": (NAMED.replace("FILE", "june"), NAMED.replace("FILE", "july"), "train: files june.h5 -> july.h5"),
}


@pytest.mark.parametrize("what", soak_all_but(CHANGED, "length"))
def test_a_run_goes_on_with_the_data_that_it_started_with(what: str, start: Callable[..., str], tmp_path: Path) -> None:
    before, after, difference = CHANGED[what]
    start(tmp_path / "run", 1, words(1), stop_at=3, patch=STRANGER + before)
    said = start(tmp_path / "run", 1, [], patch=STRANGER + after, code=2)
    assert f"must continue with the data that it started with; changed are {difference}." in said
    assert steps(tmp_path / "run") == [1, 2, 3] and "Traceback" not in said
    start(tmp_path / "run", 1, [], patch=STRANGER + before)
    assert steps(tmp_path / "run")[-1] == 24


OWN_SAMPLER = """
class Own(DistributedSampler):
    def __iter__(self):
        return iter(range(len(self)))

    def __len__(self):
        return 20 if self.rank else 32

def train_dataloader(self):
    sampler = Own(Points(), num_replicas=2, rank=self.trainer.global_rank)
    return DataLoader(Points(), batch_size=4, sampler=sampler)

Data.train_dataloader = train_dataloader
"""
OWN_DATASET = "Data.train_dataloader = lambda self: DataLoader(Points(48 - 8 * self.trainer.global_rank), batch_size=4)"
# As many batches on each rank, but the last one is another.
SHORTER = "Data.train_dataloader = lambda self: DataLoader(Points(48 - self.trainer.global_rank), batch_size=4)"
OWN_STREAM = """
class Batches:
    stream_splits = "ranks"

    def __init__(self, num):
        self.num = num

    def __iter__(self):
        return iter([(torch.ones(4, 1), torch.ones(4, 1))] * self.num)

Data.train_dataloader = lambda self: Batches(5 if self.trainer.global_rank else 8)
"""
UNEVEN = {
    "sampler": (OWN_SAMPLER, 2, "must have equally many batches on all ranks", "it has 5 on one and 8 on another"),
    "dataset": (OWN_DATASET, 2, "must have equally many batches on all ranks", "it has 5 on one and 6 on another"),
    "shorter": (SHORTER, 2, "SequentialSampler must give all ranks the same order of samples", "different orders"),
    "stream": (OWN_STREAM, 0, "note: rank 0 has batches left after 5", "all ranks end the epoch there"),
}


@pytest.mark.parametrize("what", soak_all_but(UNEVEN, "sampler"))
def test_ranks_with_unequally_many_batches_do_not_wait(what: str, start: Callable[..., str], tmp_path: Path) -> None:
    patch, code, *sentences = UNEVEN[what]
    said = start(tmp_path / "run", 2, words(2), patch=STRANGER + patch, code=code)
    assert all(said.count(sentence) == 1 for sentence in sentences) and "Traceback" not in said
    assert steps(tmp_path / "run") == (list(range(1, 11)) if code == 0 else [])


VALIDATION = """
Line.validation_step = lambda self, batch, batch_idx: self.log("val/loss", self.compute_loss(batch), sync_dist=True)
Data.val_dataloader = lambda self: LOADER
"""
OWN_VALIDATION = {
    "fewer": (40, "(val): The loader must have equally many batches on all ranks"),
    "fewer than ranks": (1, "SequentialSampler must give all ranks the same order of samples"),
}


@pytest.mark.parametrize("what", OWN_VALIDATION)
def test_ranks_with_different_validation_data_do_not_wait(what: str, start: Callable[..., str], tmp_path: Path) -> None:
    num, sentence = OWN_VALIDATION[what]
    patch = VALIDATION.replace("LOADER", f"DataLoader(Points({num} if self.trainer.global_rank else 48), batch_size=4)")
    said = start(tmp_path / "run", 2, words(2), patch=STRANGER + patch, code=2)
    assert said.count(sentence) == 1 and "(train)" not in said and "Traceback" not in said


EMPTY = "Points.__len__ = lambda self: 0\n"
IN_ORDER = "Data.train_dataloader = lambda self: DataLoader(Points(), batch_size=4)\n"
FEW = {
    "empty and shuffled": (1, EMPTY, 2, "A dataset that is shuffled must have a sample; this one is empty."),
    "empty": (2, EMPTY + IN_ORDER, 2, "Each of the 2 ranks must get a batch; the number of samples is 0."),
    "shorter than a batch": (2, "Points.__len__ = lambda self: 3", 0, "train: 3 samples are shared out among 2 ranks"),
}


@pytest.mark.parametrize("what", FEW)
def test_a_dataset_that_is_empty_or_shorter_than_a_batch(what: str, start: Callable[..., str], tmp_path: Path) -> None:
    num_ranks, patch, code, sentence = FEW[what]
    said = start(tmp_path / "run", num_ranks, words(num_ranks), patch=STRANGER + patch, code=code)
    assert said.count(sentence) == 1 and "Traceback" not in said
    assert steps(tmp_path / "run") == ([1, 2] if code == 0 else [])


BROKEN = """
whole = Points.__getitem__

def __getitem__(self, index):
    if index == 17:
        raise KeyError("no such label")
    return whole(self, index)

Points.__getitem__ = __getitem__
Data.train_dataloader = lambda self: DataLoader(Points(), batch_size=4, shuffle=True, num_workers=WORKERS)
"""


@pytest.mark.parametrize(
    ("num_ranks", "workers", "codes"),
    [(1, 1, [1]), (2, 1, [86, 1]), pytest.param(1, 0, [1], marks=pytest.mark.soak)],
)
def test_an_error_in_a_sample_names_its_index(
    num_ranks: int, workers: int, codes: list[int], start: Callable[..., str], tmp_path: Path
) -> None:
    patch = STRANGER + BROKEN.replace("WORKERS", str(workers))
    said = start(tmp_path / "run", num_ranks, words(num_ranks), patch=patch, code=codes)
    assert "KeyError: 'no such label'\nin sample 17 of Points" in said
    assert "another attempt has taken over" not in said, "the error must not be hidden by what follows from it"
    (error,) = (cause for cause in causes.read_causes(tmp_path / "run", 1) if not cause.is_echo)
    assert error.error == "KeyError: 'no such label', in sample 17 of Points"
    assert steps(tmp_path / "run") and torch.isfinite(last_weight(tmp_path / "run"))


def last_weight(run_dir: Path) -> torch.Tensor:
    return weights.read(run_dir / "checkpoints" / "last.ckpt")["layer.weight"]


# The step


NOTHING = "Line.training_step = lambda self, batch, i: None if i % 2 else self.compute_loss(batch)"
MANUALLY = """
before = Line.__init__

def __init__(self, **options):
    before(self)
    self.automatic_optimization = False

def training_step(self, batch, batch_idx):
    loss, optimizer = self.compute_loss(batch), self.optimizers()
    if batch_idx % 2:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

Line.__init__, Line.training_step = __init__, training_step
"""
BY_HOOK = """
def optimizer_step(self, epoch, batch_idx, optimizer, closure):
    return closure() if batch_idx % 2 else optimizer.step(closure=closure)

Line.optimizer_step = optimizer_step
"""
SKIPPING = {"returns nothing": (1, NOTHING), "manually": (2, MANUALLY), "by a hook": (2, BY_HOOK)}


@pytest.mark.parametrize("how", soak_all_but(SKIPPING, "returns nothing"))
def test_a_step_that_is_skipped_is_skipped_after_a_resume(how: str, start: Callable[..., str], tmp_path: Path) -> None:
    num_ranks, patch = SKIPPING[how]
    start(tmp_path / "whole", num_ranks, words(num_ranks), patch=STRANGER + patch)
    start(tmp_path / "run", num_ranks, words(num_ranks), stop_at=3, patch=STRANGER + patch)
    start(tmp_path / "run", num_ranks, [], patch=STRANGER + patch)
    assert last_weight(tmp_path / "run") == last_weight(tmp_path / "whole")
    assert steps(tmp_path / "run")[-1] == steps(tmp_path / "whole")[-1]


ON_ONE_RANK = """
Line.training_step = lambda self, batch, i: None if (i, self.global_rank) == (3, 1) else self.compute_loss(batch)
"""


def test_a_step_that_returns_nothing_on_one_of_several_ranks_ends_the_run(
    start: Callable[..., str], tmp_path: Path
) -> None:
    """Check that Lightning's sentence is seen, as the gradients of the other ranks would wait for it."""
    said = start(tmp_path / "run", 2, words(2), patch=STRANGER + ON_ONE_RANK, code=[86, 1])
    assert "Skipping the `training_step` by returning None in distributed training is not supported" in said
    assert steps(tmp_path / "run")[-1] in (2, 3) and torch.isfinite(last_weight(tmp_path / "run"))


def test_a_loss_that_is_nan_ends_the_run_before_it_is_saved(start: Callable[..., str], tmp_path: Path) -> None:
    patch = "Line.training_step = lambda self, batch, i: self.compute_loss(batch) * (float('nan') if i == 5 else 1)"
    said = start(tmp_path / "run", 1, words(1), patch=STRANGER + patch, code=1)
    assert "stopped at step 6: loss or gradient was not finite, seen at step 6" in said
    assert steps(tmp_path / "run") == [1, 2, 3, 4, 5] and torch.isfinite(last_weight(tmp_path / "run"))


LOGS = """
from torchmetrics import MeanMetric

before = Line.__init__

def __init__(self, **options):
    before(self)
    self.metric = MeanMetric()

def training_step(self, batch, batch_idx):
    loss = self.compute_loss(batch)
    self.metric(loss)
    self.log("own", loss, on_epoch=True)
    self.log("shared", loss, on_epoch=True, sync_dist=True)
    self.log("metric", self.metric, on_epoch=True, on_step=False)
    self.log("step", loss)
    return loss

Line.__init__, Line.training_step = __init__, training_step
"""


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_logged_value_that_depends_on_the_number_of_ranks_is_warned_of_once(
    num_ranks: int, start: Callable[..., str], tmp_path: Path
) -> None:
    said = start(tmp_path / "run", num_ranks, words(num_ranks, "strategy=ddp"), patch=STRANGER + LOGS)
    assert said.count("It is recommended to use `self.log('own', ..., sync_dist=True)`") == num_ranks - 1
    assert said.count("It is recommended to use `self.log(") == num_ranks - 1


MONITORED = """
Line.validation_step = lambda self, batch, batch_idx: self.log("val/loss", self.compute_loss(batch), sync_dist=SYNC)
Data.val_dataloader = lambda self: DataLoader(Points(), batch_size=4)
"""


@pytest.mark.parametrize(
    ("num_ranks", "sync"), [(2, False), *[pytest.param(*c, marks=pytest.mark.soak) for c in [(1, False), (2, True)]]]
)
def test_a_monitored_metric_of_one_rank_is_noted_once(
    num_ranks: int, sync: bool, start: Callable[..., str], tmp_path: Path
) -> None:
    patch = STRANGER + MONITORED.replace("SYNC", str(sync))
    said = start(tmp_path / "run", num_ranks, words(num_ranks, "checkpoint.monitor=val/loss"), patch=patch)
    note = "note: checkpoint.monitor=val/loss goes by rank 0's samples alone: each rank has another value; "
    note += "sync_dist=True in self.log('val/loss', ...) makes it the mean of all"
    assert said.count(note) == (num_ranks == 2 and not sync)


# The classes


KINDS = {
    "data for a module": ("module.Classifier = Data", "model._target_ must make a lightning.LightningModule; got my_"),
    "a module for data": (
        "digits.Digits = Line",
        "data._target_ must make data, such as a lightning.LightningDataModule",
    ),
    "another Lightning": (
        "class Former:\n    __module__ = 'pytorch_lightning.net'\n    def __init__(self, **options): ...\n"
        "module.Classifier = Former",
        "Try: import hpc before pytorch_lightning, which then is lightning.pytorch",
    ),
}


@pytest.mark.parametrize("what", soak_all_but(KINDS, "data for a module"))
def test_a_class_of_another_kind_is_named(what: str, start: Callable[..., str], tmp_path: Path) -> None:
    patch, sentence = KINDS[what]
    said = start(tmp_path / "run", 1, words(1), patch=STRANGER + patch, code=2)
    assert sentence in said and "Traceback" not in said


def test_a_module_may_validate_although_there_are_no_data_for_it(start: Callable[..., str], tmp_path: Path) -> None:
    patch = STRANGER + "Line.validation_step = lambda self, batch, batch_idx: self.compute_loss(batch)"
    start(tmp_path / "run", 1, words(1), patch=patch)
    assert steps(tmp_path / "run")[-1] == 24


# What a module and its data save beside the weights
KEEPING = """
Line.on_save_checkpoint = lambda self, checkpoint: checkpoint.update(steps_seen=self.trainer.global_step)
Line.on_load_checkpoint = lambda self, checkpoint: setattr(self, "steps_seen", checkpoint["steps_seen"])
Line.test_step = lambda self, batch, batch_idx: self.log("seen", self.steps_seen + self.trainer.datamodule.offset)
Line.predict_step = lambda self, batch, batch_idx: batch[0] * 0 + self.steps_seen + self.trainer.datamodule.offset

def setup(self, stage):
    self.offset = 1000 if stage == "fit" else -1

Data.setup = setup
Data.state_dict = lambda self: {"offset": self.offset}
Data.load_state_dict = lambda self, state: setattr(self, "offset", state["offset"])
Data.test_dataloader = Data.predict_dataloader = lambda self: DataLoader(Points(), batch_size=4)
"""


@pytest.mark.parametrize("num_ranks", soak_all_but([1, 2], 1))
def test_what_is_tested_and_predicts_is_what_was_saved(
    num_ranks: int, start: Callable[..., str], tmp_path: Path
) -> None:
    start(tmp_path / "run", num_ranks, words(num_ranks), stop_at=3, patch=STRANGER + KEEPING)
    ckpt = f"ckpt={tmp_path / 'run' / 'checkpoints' / 'last.ckpt'}"
    said = start(tmp_path / "test", num_ranks, words(num_ranks, ckpt, "task=test"), patch=STRANGER + KEEPING)
    assert "seen" in said and "1003.0" in said
    start(tmp_path / "predict", num_ranks, words(num_ranks, ckpt, "task=predict"), patch=STRANGER + KEEPING)
    predicted = torch.load(tmp_path / "predict" / "predictions.pt", weights_only=True)
    assert torch.equal(predicted["outputs"].unique(), torch.tensor([1003.0]))


# What a checkpoint cannot hold


MINE = """
class Mine(L.Callback):
    num = 0

    def on_train_batch_end(self, *args):
        self.num += 1

    def state_dict(self):
        if self.num >= FIRST:
            STATE
        return {"num": self.num}

Line.configure_callbacks = lambda self: [Mine()]
"""
NOT_PLAIN = "callbacks (Mine) must put only plain data into a checkpoint"
UNSAVED: dict[str, Sequence[str]] = {
    "a function": ("return {'how': lambda x: x}", NOT_PLAIN),
    "a file": ("return {'log': open('/dev/null')}", NOT_PLAIN),
    "an error": ("raise RuntimeError('not now')", "callbacks (Mine) must return its state; state_dict has raised"),
}


@pytest.mark.parametrize(
    ("what", "first", "num_ranks"),
    [
        ("a function", 0, 1),
        ("an error", 4, 2),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in [("a file", 0, 1), ("a function", 4, 2)]),
        pytest.param("an error", 0, 1, marks=pytest.mark.soak),
    ],
)
def test_a_callback_that_cannot_be_saved_is_named(
    what: str, first: int, num_ranks: int, start: Callable[..., str], tmp_path: Path
) -> None:
    state, sentence = UNSAVED[what]
    patch = STRANGER + MINE.replace("FIRST", str(first)).replace("STATE", state)
    said = start(tmp_path / "run", num_ranks, words(num_ranks), patch=patch, code=2)
    assert said.count(sentence) == 1 and "Traceback" not in said
    assert steps(tmp_path / "run") == list(range(1, first))
    is_warned = "warning: the state of Mine cannot be saved before the first step: RuntimeError: not now" in said
    assert is_warned == (what == "an error" and first == 0)


def test_a_fault_of_the_file_system_in_a_callback_may_pass(start: Callable[..., str], tmp_path: Path) -> None:
    fault = MINE.replace("state_dict(self)", "on_save_checkpoint(self, *args)").replace("FIRST", "4")
    said = start(
        tmp_path / "run", 1, words(1), patch=STRANGER + fault.replace("STATE", "raise OSError('Stale file')"), code=1
    )
    assert "OSError: Stale file" in said and "must return its state" not in said
    assert steps(tmp_path / "run") == [1, 2, 3]


# Batches


WORDS_OF_TEXT = """
def training_step(self, batch, batch_idx):
    texts = [batch] if isinstance(batch, str) else batch
    assert all(isinstance(text, str) for text in texts)
    loss = self.layer(torch.tensor([[float(len(text))] for text in texts])).square().mean()
    self.log("loss", loss, batch_size=len(texts))
    return loss

Line.training_step = training_step
Data.train_dataloader = lambda self: DataLoader(["one", "another", "third", "4th"] * 8, batch_size=SIZE, shuffle=True)
"""


@pytest.mark.parametrize("size", soak_all_but([4, None], 4))
def test_a_batch_of_strings_or_a_string(size: int | None, start: Callable[..., str], tmp_path: Path) -> None:
    patch = STRANGER + WORDS_OF_TEXT.replace("SIZE", str(size))
    start(tmp_path / "run", 2, words(2), stop_at=3, patch=patch)
    start(tmp_path / "run", 2, [], patch=patch)
    assert steps(tmp_path / "run")[-1] == (8 if size else 32)
