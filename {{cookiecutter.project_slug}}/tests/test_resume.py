"""A run that is stopped and goes on ends as one that was never stopped: bit for bit."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils._pytree import tree_leaves

from {{ cookiecutter.package_name }}.hpc import inert, rundir, weights

pytestmark = pytest.mark.slow

STEPS, CONTINUE = 18, 85  # two epochs of nine steps; the exit code of a rank that is to go on
COMMON = [
    "trainer.accelerator=cpu",
    "trainer.precision=32-true",
    "trainer.log_every_n_steps=1",
    "+trainer.enable_progress_bar=false",
    "callbacks.progress=null",
]
DIGITS = [*COMMON, "trainer.max_epochs=2", "trainer.accumulate_grad_batches=2", "data.global_batch_size=128"]
STRATEGIES = {
    "single": (1, ["trainer=cpu"]),
    "ddp": (4, ["trainer=ddp"]),
    "fsdp": (4, ["trainer=fsdp"]),
    "deepspeed": (4, ["trainer=deepspeed"]),
}
# Dropout, and the text of Python's own library: few windows of it, as an epoch is all of them.
DROPOUT = [
    "trainer=cpu",
    *COMMON,
    "experiment=text",
    "+model.network.dropout=0.1",
    "model.network.width=32",
    "model.network.num_layers=1",
    "trainer.max_steps=12",
    "trainer.val_check_interval=1000",
    "+trainer.limit_val_batches=0",
    "+trainer.limit_test_batches=1",
    "checkpoint.monitor=null",
]


def scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar that TensorBoard shows, but for what depends on time and hardware."""
    board = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    tags = [tag for tag in board.Tags()["scalars"] if not tag.startswith(("perf/", "node/"))]
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in tags}


def state(run_dir: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the last checkpoint: weights, optimizer states, what each rank keeps for itself."""
    last = run_dir / "checkpoints" / "last.ckpt"
    files = {str(file.relative_to(last)): file for file in last.rglob("*.pt")}
    leaves = {name: [*tree_leaves(inert.plain(file))] for name, file in files.items()}
    found = {f"{name} {k}": leaf for name, all in leaves.items() for k, leaf in enumerate(all) if torch.is_tensor(leaf)}
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


@pytest.fixture(scope="module")
def train(start: Callable[..., list[int]]) -> Callable[..., Path]:
    """The directory of a run that was stopped after so many steps, and after so many, and went on to its end."""

    def run(run_dir: Path, ranks: int, words: list[str], stops: Sequence[int] = (), patch: str = "") -> Path:
        log = run_dir.with_suffix(".log")
        for number, step in enumerate([*stops, None]):
            again = [f"resume={run_dir}"] if number else [*words, f"run_dir={run_dir}"]
            codes = start(log, ranks, again, step, patch)
            assert codes == [CONTINUE if step else 0] * ranks, f"{step}: {codes}\n{log.read_text()[-5000:]}"
        return run_dir

    return run


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_that_is_stopped_ends_as_one_that_is_not(strategy: str, train: Callable, tmp_path: Path) -> None:
    ranks, words = STRATEGIES[strategy]
    words = [*words, *DIGITS, f"trainer.devices={ranks}"]
    seed = random.randrange(1000)
    print("seed", seed)  # shown where the test fails
    stops = sorted(random.Random(seed).sample(range(1, STEPS - 1), 3))
    run_dir = train(tmp_path / "stopped", ranks, words, stops)
    assert_same(run_dir, train(tmp_path / "reference", ranks, words))
    assert [step for step, _ in scalars(run_dir)["train/loss"]] == list(range(STEPS))  # no gap, none twice
    ends = [event["step"] for event in rundir.events(run_dir) if event["event"] == "end"]
    assert ends == [*(step + 1 for step in stops), STEPS]  # warned in the middle of a step: it is done first


@pytest.fixture(scope="module")
def dropout(train: Callable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "dropout", 1, DROPOUT)


def test_dropout_goes_on_with_the_same_random_numbers(dropout: Path, train: Callable, tmp_path: Path) -> None:
    assert_same(train(tmp_path / "stopped", 1, DROPOUT, [5]), dropout)


LEFT_OUT = {
    "random numbers": "from {{ cookiecutter.package_name }}.hpc import randomness; randomness.restore = lambda state: None",
    "position": "from {{ cookiecutter.package_name }}.hpc import resume; resume.start_at = lambda trainer, start: None",
}


@pytest.mark.parametrize("what", LEFT_OUT)
def test_what_is_left_out_is_missed(what: str, dropout: Path, train: Callable, tmp_path: Path) -> None:
    """A comparison that could not fail would prove nothing."""
    run_dir = train(tmp_path / "stopped", 1, DROPOUT, [5], LEFT_OUT[what])
    with pytest.raises(AssertionError):
        assert_same(run_dir, dropout)
