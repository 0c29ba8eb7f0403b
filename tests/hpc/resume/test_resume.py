"""Check that a run that is stopped and resumed ends bit for bit as one that was never stopped."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiers import soak_all_but
from torch.utils._pytree import keystr, tree_flatten_with_path

from hpc.checkpoint import safe_unpickle, weights
from hpc.run import attempt_log

pytestmark = pytest.mark.slow

STEPS = 18  # two epochs of nine
COMMON = [
    "trainer.accelerator=cpu",
    "trainer.precision=32-true",
    "trainer.log_every_n_steps=1",
    "+trainer.enable_progress_bar=false",
    "callbacks.progress=null",
]
DIGITS = [
    *COMMON,
    "trainer.max_epochs=2",
    "trainer.accumulate_grad_batches=2",
    "data.global_batch_size=128",
    "+trainer.limit_test_batches=1",
]
STRATEGIES = {
    "single": (1, ["trainer=cpu"]),
    "ddp": (4, ["trainer=ddp"]),
    "fsdp": (4, ["trainer=fsdp"]),
    "deepspeed": (4, ["trainer=deepspeed"]),
}
# Dropout, and the text of Python's own library, with few windows per epoch.
DROPOUT = [
    "trainer=cpu",
    *COMMON,
    "experiment=text",
    "model.network.dropout=0.1",
    "model.network.width=32",
    "model.network.num_layers=1",
    "trainer.max_steps=12",
    "trainer.val_check_interval=1000",
    "+trainer.limit_val_batches=0",
    "+trainer.limit_test_batches=1",
    "checkpoint.monitor=null",
]
# A callback of the researcher's own, in the place of `callbacks.samples`.
OWN_CALLBACK = """
from hpc.logging import predicted_samples

class OwnCallback(predicted_samples.PredictedSamples):
    __module__ = "my_research.callbacks"

predicted_samples.PredictedSamples = OwnCallback
"""


def scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """Return every TensorBoard scalar that does not depend on time and hardware."""
    board = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    tags = [tag for tag in board.Tags()["scalars"] if not tag.startswith(("perf/", "node/"))]
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in tags}


def state(run_dir: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of the last checkpoint: weights, optimizer states, and each rank's own state."""
    last = run_dir / "checkpoints" / "last.ckpt"
    files = {str(file.relative_to(last)): file for file in last.rglob("*.pt")}
    leaves = {name: tree_flatten_with_path(safe_unpickle.load_plain(file))[0] for name, file in files.items()}
    named = {f"{name}{keystr(path)}": leaf for name, all in leaves.items() for path, leaf in all}
    found = {name.replace(str(run_dir), ""): leaf for name, leaf in named.items() if torch.is_tensor(leaf)}
    for prefix in ("state_dict.", "optimizer_0.state."):
        kept, weights.PREFIX = weights.PREFIX, prefix
        try:
            found |= {f"{prefix}{name}": value for name, value in weights.read(last).items()}
        finally:
            weights.PREFIX = kept
    return found


def assert_same(run_dir: Path, reference: Path) -> None:
    mine, its = state(run_dir), state(reference)
    assert mine.keys() == its.keys()
    assert not [name for name in its if not torch.equal(mine[name], its[name])]
    assert scalars(run_dir) == scalars(reference)
    lasts = [path / "checkpoints" / "last.ckpt" for path in (run_dir, reference)]
    sums = [json.loads((last / "manifest.json").read_text())["files"] for last in lasts]
    tensors = [{name: one for name, one in files.items() if name.endswith(".distcp")} for files in sums]
    assert tensors[0] == tensors[1]  # byte for byte


@pytest.mark.parametrize("strategy", soak_all_but(STRATEGIES, "single", "ddp"))
def test_a_run_that_is_stopped_ends_as_one_that_is_not(strategy: str, start: Callable, tmp_path: Path) -> None:
    ranks, words = STRATEGIES[strategy]
    words = [*words, *DIGITS, f"trainer.devices={ranks}"]
    seed = random.randrange(1000)
    print("seed", seed)  # shown where the test fails
    stops = sorted(random.Random(seed).sample(range(1, STEPS - 1), 2))
    run_dir, reference = tmp_path / "stopped", tmp_path / "reference"
    start(reference, ranks, words)
    for step in [*stops, None]:
        assert "that training has changed" not in start(run_dir, ranks, [] if run_dir.exists() else words, step)
    assert_same(run_dir, reference)
    assert [step for step, _ in scalars(run_dir)["step/loss"]] == list(range(STEPS))  # each step exactly once
    ends = [event["step"] for event in attempt_log.read_events(run_dir) if event["event"] == "end"]
    assert ends == [*(step + 1 for step in stops), STEPS]  # warned in the middle of a step: it is done first


# Further objects with state. A `_target_` cannot be typed on the command line; here it is allowed.
TYPED = "import re; from hpc.config import typed_words; typed_words.CODE_KEYS = re.compile('(?!)')"
PLATEAU = """
import torch
from my_research.module import Classifier

def configure_optimizers(self):
    optimizer = self.make_optimizer(self.parameters())
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val/loss"}}

Classifier.configure_optimizers = configure_optimizers
"""
STOPPING = [
    "+callbacks.stop._target_=lightning.pytorch.callbacks.EarlyStopping",
    "+callbacks.stop.monitor=val/loss",
    "+callbacks.stop.min_delta=10",
    "+callbacks.stop.patience=1",
]
FINETUNED = ["callbacks=finetune", "callbacks.finetune.unfreeze_backbone_at_epoch=1"]
ALL = """
from my_research.module import Classifier

Classifier.configure_optimizers = lambda self: self.make_optimizer(self.parameters())
"""
OTHERS = {
    "finetuning": (FINETUNED, ""),
    "finetuning, where the optimizer has what is frozen": (FINETUNED, ALL),
    "early stopping": (STOPPING, TYPED),
    "plateau": ([], PLATEAU),
}


@pytest.mark.parametrize("what", soak_all_but(OTHERS))
def test_what_has_a_state_keeps_it(what: str, start: Callable, tmp_path: Path) -> None:
    words, patch = OTHERS[what]
    words = ["trainer=cpu", *COMMON, "data.global_batch_size=128", "trainer.max_epochs=3", *words]
    start(tmp_path / "reference", 1, words, patch=patch)
    for step in (4, 9, 13, None):
        start(tmp_path / "run", 1, words if step == 4 else [], step, patch)
    assert_same(tmp_path / "run", tmp_path / "reference")


# A schedule that depends on each rank's metric: it rises on one rank and falls on the other.
WATCHED = """
import os
from my_research.module import Classifier

stepped = Classifier.training_step

def training_step(self, batch, batch_idx):
    sign = 1 - 2 * int(os.environ["RANK"])
    self.log("own/watched", float(sign * self.global_step), sync_dist=SYNC)
    return stepped(self, batch, batch_idx)

Classifier.training_step = training_step
""" + PLATEAU.replace("val/loss", "own/watched").replace("threshold=10", "threshold=0")


@pytest.mark.soak
def test_ranks_whose_learning_rates_differ_train_no_further(start: Callable, tmp_path: Path) -> None:
    words = ["trainer=ddp", *COMMON, "trainer.devices=2", "trainer.max_epochs=4", "data.global_batch_size=128"]
    start(tmp_path / "mean", 2, words, patch=WATCHED.replace("SYNC", "True"))
    said = start(tmp_path / "own", 2, words, patch=WATCHED.replace("SYNC", "False"), code=2)
    assert "All ranks must have the same learning rates" in said and "sync_dist=True in self.log('own/watched'" in said
    assert "Traceback" not in said


# On a CPU Lightning takes bf16 where fp16 is asked for.
SCALED = """
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from hpc.strategies import single

scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=2)
single.double_precision_plugins = lambda precision: [MixedPrecision("16-mixed", "cpu", scaler)]
"""


def test_the_loss_scale_of_fp16_goes_on(start: Callable, tmp_path: Path) -> None:
    words = ["trainer=cpu", *COMMON, "trainer.max_steps=3", "data.global_batch_size=16", "checkpoint.monitor=null"]
    words += ["+trainer.limit_val_batches=0", "+trainer.limit_test_batches=1"]
    start(tmp_path / "reference", 1, words, patch=SCALED)
    for step in (2, None):
        start(tmp_path / "run", 1, words if step else [], step, SCALED)
    assert_same(tmp_path / "run", tmp_path / "reference")


@pytest.fixture(scope="module")
def dropout(start: Callable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "dropout"
    start(run_dir, 1, DROPOUT)
    return run_dir


def test_dropout_goes_on_with_the_same_random_numbers(dropout: Path, start: Callable, tmp_path: Path) -> None:
    start(tmp_path / "stopped", 1, DROPOUT, 5)
    start(tmp_path / "stopped", 1, [])
    assert_same(tmp_path / "stopped", dropout)


LEFT_OUT = {
    "random numbers": "from hpc.state import randomness; randomness.restore = lambda state: None",
    "position": "from hpc.data import position; position.start_at = lambda trainer, start: None",
}


@pytest.mark.parametrize("what", LEFT_OUT)
def test_what_is_left_out_is_missed(what: str, dropout: Path, start: Callable, tmp_path: Path) -> None:
    """Check that the comparison fails if a part of the state is not restored."""
    start(tmp_path / "stopped", 1, DROPOUT, 5)
    start(tmp_path / "stopped", 1, [], patch=LEFT_OUT[what])
    with pytest.raises(AssertionError):
        assert_same(tmp_path / "stopped", dropout)


CLOCK = """
import os, time
from my_research.module import Classifier

os.environ["HPC_JOB_END"] = str(time.time() + 36)  # a third of it is the time to save, also on a busy machine
print("until", os.environ["HPC_JOB_END"])
before = Classifier.training_step

def training_step(self, batch, batch_idx):
    time.sleep(0.3)
    return before(self, batch, batch_idx)

Classifier.training_step = training_step
"""


def test_the_end_of_the_jobs_time_is_seen_coming(start: Callable, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    said = start(run_dir, 2, [*COMMON, "strategy=ddp", "trainer.devices=2"], patch=CLOCK, code=85)
    assert "outcome continue\nwhy the end of the job's time" in (run_dir / "verdict").read_text()
    assert (run_dir / "verdict").stat().st_mtime < min(map(float, re.findall(r"until (\S+)", said)))
    saved = (run_dir / "checkpoints" / "last.ckpt").resolve()
    step = int(saved.name.split("-")[1])
    assert f"step {step}\n" in (run_dir / "verdict").read_text()


# Of rank 0, a batch takes four minutes by this clock, of other ranks no time. No batch begins before a checkpoint is
# written, as one that is due meanwhile is saved later.
FOUR_MINUTES = """
import os, time
from types import SimpleNamespace
from hpc.resume import saving
from my_research.module import Classifier

now = [0.0]
saving.time = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
before = Classifier.training_step

def training_step(self, batch, batch_idx):
    while self.trainer.strategy.is_writing:
        time.sleep(0.01)
    now[0] += 240 * (self.global_rank == 0)
    return before(self, batch, batch_idx)

Classifier.training_step = training_step
"""


def test_a_checkpoint_is_saved_each_ten_minutes_of_any_rank(start: Callable, tmp_path: Path) -> None:
    words = [*COMMON, "strategy=ddp", "trainer.devices=2", "trainer.max_steps=10", "checkpoint.keep=9"]
    words += ["checkpoint.monitor=null", "+trainer.limit_val_batches=0", "+trainer.limit_test_batches=1"]
    start(tmp_path / "run", 2, words, patch=FOUR_MINUTES)
    saved = sorted(int(path.name.split("-")[1]) for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert saved == [3, 6, 9, 10], "after 12, 24 and 36 minutes, and at the end"


LONG = """
import os, time
from hpc.checkpoint import on_disk as checkpoint
from hpc.resume import saving

saving.WRITE_HANG_FACTOR = 2
make_durable = checkpoint.make_durable

def slow(part):
    if os.environ.get("RANK") == "1":
        for number in range(60):
            time.sleep(0.25)
            GROWS and (part / "big").write_bytes(bytes(2**20))
    make_durable(part)

checkpoint.make_durable = slow
"""
FEW = ["trainer=ddp", "trainer.devices=2", *COMMON, "trainer.max_steps=2", "faults.hang_minutes=0.1"]
FEW += ["+trainer.limit_val_batches=0", "+trainer.limit_test_batches=1", "checkpoint.monitor=null"]


@pytest.mark.soak
@pytest.mark.parametrize(("grows", "codes"), [(True, [0, 0]), (False, [86, 86])])
def test_a_write_is_waited_for_as_long_as_it_goes_on(
    grows: bool, codes: list[int], start: Callable, tmp_path: Path
) -> None:
    """Let a rank write for much longer than the step timeout, or claim to write without progress."""
    said = start(tmp_path / "run", 2, FEW, patch=LONG.replace("GROWS", str(grows)), code=codes)
    assert (tmp_path / "run" / "checkpoints" / "step-000000002-001").exists() is grows
    assert grows or "waiting for a checkpoint to be written" in said


# A part that the loss uses and `forward` does not.
PRIOR = """
import torch
from my_research.module import Classifier

made, step = Classifier.__init__, Classifier.training_step

def __init__(self, *args, **kwargs):
    made(self, *args, **kwargs)
    self.prior = torch.nn.Linear(1, 1)

def training_step(self, batch, batch_idx):
    return step(self, batch, batch_idx) + self.prior(torch.ones(1, 1, device=self.device)).square().sum()

def configure_optimizers(self):
    return self.make_optimizer(self.parameters())

Classifier.__init__, Classifier.training_step = __init__, training_step
Classifier.configure_optimizers = configure_optimizers
"""


@pytest.mark.soak
def test_ddp_trains_what_only_the_loss_uses(start: Callable, tmp_path: Path) -> None:
    words = ["trainer=ddp", *COMMON, "trainer.devices=2", "trainer.max_steps=4", "data.global_batch_size=16"]
    start(tmp_path / "reference", 2, words, patch=PRIOR)
    start(tmp_path / "run", 2, words, 1, PRIOR)
    start(tmp_path / "run", 2, [], patch=PRIOR)
    assert_same(tmp_path / "run", tmp_path / "reference")
    assert "optimizer_0.state.prior.weight.exp_avg" in state(tmp_path / "run")


# A network that counts its calls in training and its gradients, and keeps the first batch that it sees.
BY_FIRST_BATCH = """
import json, os, torch
from my_research.module import Classifier

forward = Classifier.forward

def called(self, inputs):
    if self.training:
        self.calls = getattr(self, "calls", 0) + 1
        self.first = getattr(self, "first", None) or [inputs.double().sum().item(), torch.rand(()).item()]
    return forward(self, inputs)

def on_fit_start(self):
    self.register_forward_pre_hook(lambda module, inputs: setattr(self, "last", inputs[0]))
    self.gradients, weight = [], next(self.parameters())
    weight.register_hook(lambda gradient: self.gradients.append("gradient"))
    weight.register_post_accumulate_grad_hook(lambda weight: self.gradients.append("accumulated"))

def on_train_end(self):
    assert self.gradients == ["gradient", "accumulated"] * 3, self.gradients
    print(f"seen by rank {os.environ['RANK']}: {self.calls} {json.dumps(self.first)}", flush=True)

Classifier.forward, Classifier.on_train_end = called, on_train_end
Classifier.on_fit_start = on_fit_start
"""


@pytest.mark.soak
def test_before_the_first_batch_a_module_is_called_with_nothing(start: Callable, tmp_path: Path) -> None:
    """Check that the network's first call is with data, as it may set itself up by it.

    Measuring throughput must not change the random numbers of the ranks.
    """
    words = ["trainer=ddp", *COMMON, "trainer.devices=2", "trainer.max_steps=3", "data.global_batch_size=16"]
    seen = []
    for more in ([], ["callbacks.throughput=null"]):
        said = start(tmp_path / f"run-{len(seen)}", 2, [*words, *more], patch=BY_FIRST_BATCH)
        seen.append(sorted(line for line in said.splitlines() if line.startswith("seen by rank")))
    assert seen[0] == seen[1] and len(seen[0]) == 2
    assert all(": 3 [" in line for line in seen[0]), seen


@pytest.mark.soak
def test_other_code_than_the_runs_is_told(start: Callable, tmp_path: Path) -> None:
    run_dir, changed = tmp_path / "my run", "from hpc.system import files\n"
    changed += "files.source_checksum = lambda *_: '0' * 8\n"
    words = [*COMMON, "trainer.max_steps=4", "+trainer.limit_val_batches=0", "+trainer.limit_test_batches=1"]
    assert "note: the code" not in start(run_dir, 1, [*words, "checkpoint.monitor=null"], 1)
    assert "note: the code" not in start(run_dir, 1, [], 2)
    assert "has changed since the last attempt" in start(run_dir, 1, [], 3, changed)
    assert [len(event["code"]) for event in attempt_log.read_starts(run_dir)] == [8] * 3
    (run_dir / "code" / "src").mkdir(parents=True)  # as in a submitted run
    (run_dir / "code" / "train.py").write_text("")
    assert f"To use the latter: python '{run_dir}/code/train.py' 'resume={run_dir}'" in start(run_dir, 1, [])
