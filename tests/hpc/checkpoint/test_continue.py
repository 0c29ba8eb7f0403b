"""Check that a run resumed with another world size or strategy continues the same loss curve."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_weights import deepspeed_by_hand
from tiers import soak_all_but

from hpc.checkpoint import deepspeed_universal

pytestmark = pytest.mark.slow

COMMON = [
    "trainer.accelerator=cpu",
    "trainer.log_every_n_steps=1",
    "+trainer.enable_progress_bar=false",
    "callbacks.progress=null",
    "callbacks.samples=null",
    "+trainer.limit_val_batches=0",
    "+trainer.limit_test_batches=1",
    "checkpoint.monitor=null",
]
DOUBLE = [*COMMON, "trainer.precision=64-true"]
STEPS = 23  # beyond the end of the first epoch
EXACT = """
from hpc.resume.resume import Resume

before = Resume.on_train_batch_end

def on_train_batch_end(self, trainer, module, outputs, *batch):
    before(self, trainer, module, outputs, *batch)
    loss = trainer.strategy.reduce(outputs["loss"].detach().clone(), reduce_op="mean")
    if trainer.is_global_zero:
        with open(f"{self.run.run_dir}/losses", "a") as stream:
            stream.write(f"{float(loss)!r}\\n")

Resume.on_train_batch_end = on_train_batch_end
"""
NO_OPTIMIZER = """
from hpc.checkpoint import deepspeed_universal, strategy_state

strategy_state.CheckpointMixin.load_optimizer_state_dict = lambda self, checkpoint: None
deepspeed_universal.load_universal = deepspeed_universal.load_weights
"""


def losses(run_dir: Path) -> list[float]:
    """Return the loss of each step in double precision, which TensorBoard does not store."""
    return list(map(float, (run_dir / "losses").read_text().split()))


@pytest.fixture(scope="module")
def reference(start: Callable, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of an uninterrupted run on one device."""
    run_dir = tmp_path_factory.mktemp("runs") / "reference"
    start(run_dir, 1, [*DOUBLE, f"trainer.max_steps={STEPS}"], patch=EXACT)
    return losses(run_dir)


@pytest.mark.parametrize("strategy", soak_all_but(["ddp", "fsdp"], "ddp"))
def test_on_fewer_ranks_and_on_more(strategy: str, reference: list[float], start: Callable, tmp_path: Path) -> None:
    words = [*DOUBLE, f"strategy={strategy}", f"trainer.max_steps={STEPS}"]
    for ranks, stop in ((4, 4), (2, 8), (1, 12), (2, 17), (4, None)):
        start(tmp_path / "run", ranks, [*words, f"trainer.devices={ranks}"], stop, EXACT)
        words = []
    assert losses(tmp_path / "run") == pytest.approx(reference, rel=0, abs=1e-9)


def test_from_one_strategy_to_another_and_back(reference: list[float], start: Callable, tmp_path: Path) -> None:
    """Check that weights and optimizer state survive a change of strategy in both directions."""
    words = [*DOUBLE, "strategy=ddp", "trainer.devices=2", f"trainer.max_steps={STEPS}"]
    start(tmp_path / "run", 2, words, 6, EXACT)
    start(tmp_path / "run", 2, ["strategy=fsdp"], 12, EXACT)
    start(tmp_path / "run", 2, ["strategy=ddp"], None, EXACT)
    assert losses(tmp_path / "run") == pytest.approx(reference, rel=0, abs=1e-9)


@pytest.mark.soak
@pytest.mark.parametrize("strategies", ["ddp fsdp", "deepspeed_zero2 deepspeed_zero2"])
def test_the_optimizers_state_would_be_missed(
    strategies: str, reference: list[float], start: Callable, tmp_path: Path
) -> None:
    first, second = strategies.split()
    precision = "32-true" if "deepspeed" in first else "64-true"
    words = [*COMMON, f"trainer.precision={precision}", f"strategy={first}", f"trainer.max_steps={STEPS}"]
    start(tmp_path / "run", 2, [*words, "trainer.devices=2"], 6, EXACT)
    start(tmp_path / "run", 1, ["trainer.devices=1", f"strategy={second}"], None, EXACT + NO_OPTIMIZER)
    found = losses(tmp_path / "run")
    assert found[:7] == pytest.approx(reference[:7], rel=0, abs=1e-6)  # weights were restored
    assert found != pytest.approx(reference, rel=0, abs=1e-3)


ZERO = [*COMMON, "model.network.widths=[8,8,16]"]


@pytest.mark.soak
@pytest.mark.parametrize(("stage", "ranks"), [(2, [4, 2, 1, 2, 4]), (3, [2, 1])])
def test_deepspeed_on_fewer_ranks_and_on_more(stage: int, ranks: list[int], start: Callable, tmp_path: Path) -> None:
    """Compare 20 steps after each change of world size. In single precision, rounding errors grow from step to step."""
    stops = range(4, 20 * len(ranks), 20)
    words = [*ZERO, f"strategy=deepspeed_zero{stage}", f"trainer.max_steps={stops[-1]}"]
    start(tmp_path / "reference", 1, [*words, "trainer.devices=1"], None, EXACT)
    for devices, stop in zip(ranks, [*stops[:-1], None], strict=True):
        start(tmp_path / "run", devices, [*words, f"trainer.devices={devices}"], stop, EXACT)
        words = []
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "reference"), rel=0, abs=1e-4)


MOMENTUM = """
import torch
from my_research.module import Classifier

Classifier.configure_optimizers = lambda self: torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
"""


@pytest.mark.soak
def test_deepspeed_moves_no_other_states_than_adams(start: Callable, tmp_path: Path) -> None:
    words = [*ZERO, "strategy=deepspeed_zero3", "trainer.max_steps=8", "trainer.devices=1"]
    start(tmp_path / "run", 1, words, 4, MOMENTUM)
    files = sorted((tmp_path / "run" / "checkpoints").rglob("*"))
    said = start(tmp_path / "run", 2, ["trainer.devices=2"], patch=MOMENTUM, code=2)
    assert said.count("must keep the number of ranks at 1, not 2") == 1
    assert "this optimizer keeps momentum_buffer" in said
    assert "Traceback" not in said and sorted((tmp_path / "run" / "checkpoints").rglob("*")) == files
    start(tmp_path / "run", 1, ["trainer.devices=1"], patch=MOMENTUM)


@pytest.mark.parametrize("fails", ["converting", "loading"])
def test_what_is_converted_for_other_ranks_is_gone_where_that_fails(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converter = pytest.importorskip("deepspeed.checkpoint.ds_to_universal")
    folder = deepspeed_by_hand(tmp_path)
    (tmp_path / "run.universal-left.part").mkdir()  # left by a killed process
    files = sorted(folder.rglob("*"))

    def convert(options: Any) -> None:
        Path(options.output_folder).mkdir()
        if fails == "converting":
            raise KeyError("exp_avg")

    def load(path: Path, **options: Any) -> None:
        assert (path / deepspeed_universal.TAG).is_dir()
        raise KeyError("max_exp_avg_sq")

    alone = SimpleNamespace(get_rank=lambda: 0, broadcast_object_list=lambda objects: None, barrier=lambda: None)
    monkeypatch.setattr(deepspeed_universal, "dist", alone)
    monkeypatch.setattr(converter, "main", convert)
    engine = SimpleNamespace(_config=SimpleNamespace(), load_checkpoint=load)
    with pytest.raises(KeyError):
        deepspeed_universal.load_universal(engine, folder)
    assert sorted(folder.rglob("*")) == files and list(tmp_path.iterdir()) == [folder]


@pytest.mark.soak
@pytest.mark.parametrize("moves", ["ddp deepspeed_zero3", "deepspeed_zero2 ddp"])
def test_only_weights_go_to_deepspeed_and_from_it(
    moves: str, reference: list[float], start: Callable, tmp_path: Path
) -> None:
    first, second = moves.split()
    words = [*COMMON, f"strategy={first}", "trainer.devices=2", f"trainer.max_steps={STEPS}"]
    start(tmp_path / "run", 2, words, 6, EXACT)
    said = start(tmp_path / "run", 2, [f"strategy={second}"], 9, EXACT)
    assert said.count("warning: the optimizer starts anew: its state in") == 1
    assert losses(tmp_path / "run")[:7] == pytest.approx(reference[:7], rel=0, abs=1e-6)
    assert losses(tmp_path / "run")[:9] != pytest.approx(reference[:9], rel=0, abs=1e-4)
