"""Check that two processes with every strategy train the same run as one process, which evaluates each checkpoint."""

import ast
import re
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fork import QUIET, scalars
from tiers import soak_all_but

pytestmark = pytest.mark.slow

STEPS = 50
SHARDED = ["fsdp", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3"]
TASKS = {"digits": ["ddp", *SHARDED], "text": ["ddp", *SHARDED, "tensor_parallel"]}
CASES = [f"{task}-{strategy}" for task, strategies in TASKS.items() for strategy in strategies]
# Each kind of sharding once; `make soak` trains the others, too.
QUICK = ["digits-ddp", "digits-fsdp", "digits-deepspeed_zero3", "text-tensor_parallel"]
CASES_BY_TIER = soak_all_but(CASES, *QUICK)
FILES_OF_RANKS = [case for case in CASES if "ddp" not in case and "zero1" not in case]
COMMON = [f"trainer.max_steps={STEPS}", "trainer.log_every_n_steps=1", "trainer.precision=32-true", QUIET]
ONLY = {"digits": [], "text": ["experiment=text", "data.max_eval_windows=64"]}


# Prints the sum of the buffers before ranks share them, and afterwards.
STATISTICS = """
from hpc.strategies.ddp import DDP
share = DDP.sync_buffers
def saying(self):
    def total():
        return sum(buffer.double().sum().item() for buffer in self.lightning_module.buffers())
    had = total()
    share(self)
    print(f"rank {self.global_rank} had {had!r} has {total()!r}", flush=True)
DDP.sync_buffers = saying
"""
# Sharded weights into another kind of sharding
MOVES = [("deepspeed_zero3", "fsdp"), ("fsdp", "deepspeed_zero3"), ("tensor_parallel", "ddp")]


def last_checkpoint(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / "last.ckpt"


def line(task: str, runs: Path, *more: str) -> list[str]:
    return [*ONLY[task], *COMMON, *more, f"run_dir={runs}"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def metrics(request: pytest.FixtureRequest, runs: Path, run_cases: Callable) -> dict[str, dict[str, float]]:
    """Return test metrics of one process, of two processes per strategy, and of each checkpoint in one process.

    Only what the selected tests name is trained.
    """
    selected = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    params = [spec.params for spec in selected if spec]
    moves = [move for move in MOVES if any((p.get("source"), p.get("target")) == move for p in params)]
    named = {p.get("case") for p in params} | {f"text-{source}" for source, _ in moves}
    pairs = {case: case.split("-") for case in CASES if case in named}
    two = ["trainer.accelerator=cpu", "trainer.devices=2"]
    tasks = {task for task, _ in pairs.values()}
    found = run_cases({task: line(task, runs / task) for task in TASKS if task in tasks}, num_ranks=1)
    together = {case: line(task, runs / case, *two, f"strategy={strategy}") for case, (task, strategy) in pairs.items()}
    for source, target in moves:
        ckpt = f"ckpt={last_checkpoint(runs / f'text-{source}')}"
        name = f"{source} to {target}"
        together[name] = line("text", runs / name, *two, f"strategy={target}", ckpt, "task=test")
    found |= run_cases(together, num_ranks=2)
    evaluate = {
        f"{case} again": line(task, runs / f"{case}-again", f"ckpt={last_checkpoint(runs / case)}", "task=test")
        for case, (task, _) in pairs.items()
    }
    return found | run_cases(evaluate, num_ranks=1)


@pytest.mark.parametrize("case", CASES_BY_TIER)
def test_two_processes_follow_the_single_one(case: str, runs: Path, metrics: dict) -> None:
    alone, together = scalars(runs / case.split("-")[0], "step/loss"), scalars(runs / case, "step/loss")
    assert len(alone) == len(together) == STEPS
    assert together == pytest.approx(alone, abs=1e-4)
    assert alone[-1] < alone[0] - 0.5  # the network learns: equal losses without learning would prove nothing


@pytest.mark.parametrize("case", CASES_BY_TIER)
def test_the_gradient_norm_is_that_of_the_whole_network(case: str, runs: Path, metrics: dict) -> None:
    alone, together = scalars(runs / case.split("-")[0], "step/grad_norm"), scalars(runs / case, "step/grad_norm")
    assert together == pytest.approx(alone, rel=1e-2)


@pytest.mark.parametrize("case", CASES_BY_TIER)
def test_a_checkpoint_of_any_strategy_is_evaluated_from_one_process(case: str, metrics: dict) -> None:
    assert metrics[f"{case} again"] == pytest.approx(metrics[case], abs=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize(("source", "target"), MOVES)
def test_weights_move_from_one_strategy_to_another(source: str, target: str, metrics: dict) -> None:
    assert metrics[f"{source} to {target}"] == pytest.approx(metrics[f"text-{source}"], abs=1e-5)


@pytest.mark.parametrize("case", soak_all_but(FILES_OF_RANKS, *(c for c in FILES_OF_RANKS if c in QUICK)))
def test_sharded_strategies_really_shard(case: str, runs: Path, metrics: dict) -> None:
    """Check that each rank writes its own file."""
    folder = last_checkpoint(runs / case)
    files = [*folder.rglob("__1_*.distcp"), *folder.rglob("*zero_pp_rank_1_*")]
    assert files, [str(f) for f in folder.rglob("*")]


def test_ranks_have_the_statistics_of_rank_0_wherever_they_are_read(start: Callable, tmp_path: Path) -> None:
    """Check batch norm: before each step, each validation, the test and each checkpoint, ranks get rank 0's."""
    words = ["strategy=ddp", "trainer.devices=2", "model.network.norm=batch", "trainer.accelerator=cpu"]
    words += ["trainer.max_steps=4", "checkpoint.monitor=null", "+trainer.val_check_interval=2", QUIET]
    said = start(tmp_path / "run", 2, words, patch=STATISTICS)
    # Two ranks print: a newline may follow the other rank's line.
    shared = re.findall(r"rank (\d) had (-?[\d.e+-]+) has (-?[\d.e+-]+)", said)
    assert {rank for rank, _, _ in shared} == {"0", "1"}
    assert any(had != has for rank, had, has in shared if rank == "1")
    assert all(had == has for rank, had, has in shared if rank == "0")
    by_rank = {rank: [has for other, _, has in shared if other == rank] for rank in "01"}
    assert by_rank["0"] == by_rank["1"] and len(set(by_rank["0"])) > 4


# A buffer that training changes and reads, such as a codebook, a queue or a centre.
CENTRE = """
import torch
from my_research.module import Classifier

made, before = Classifier.__init__, Classifier.training_step

def __init__(self, *args, **options):
    made(self, *args, **options)
    self.register_buffer("centre", torch.zeros(()))

def training_step(self, batch, batch_idx):
    loss = before(self, batch, batch_idx)
    scaled = loss * (1 + self.centre)
    self.centre.mul_(0.5).add_(loss.detach())
    return scaled

Classifier.__init__, Classifier.training_step = __init__, training_step
"""


@pytest.mark.parametrize("strategy", soak_all_but(["ddp", "fsdp"], "ddp"))
def test_training_does_not_depend_on_when_buffers_are_saved(strategy: str, start: Callable, tmp_path: Path) -> None:
    words = [f"strategy={strategy}", "trainer.devices=2", "trainer.accelerator=cpu", "trainer.precision=32-true"]
    words += ["trainer.max_steps=7", "trainer.log_every_n_steps=1", "checkpoint.monitor=null", QUIET]
    words += ["+trainer.limit_val_batches=0", "+trainer.limit_test_batches=1"]
    start(tmp_path / "reference", 2, words, patch=CENTRE)
    start(tmp_path / "run", 2, [*words, "checkpoint.every_n_steps=3"], 5, patch=CENTRE)
    start(tmp_path / "run", 2, [], patch=CENTRE)
    expected = scalars(tmp_path / "reference", "step/loss")
    assert scalars(tmp_path / "run", "step/loss") == expected and len(expected) == 7


def test_what_training_changes_meanwhile_is_written_as_it_was(tmp_path: Path) -> None:
    """Check that objects are copied too: every step of DeepSpeed changes fp16's loss scaler."""
    import torch

    from hpc.strategies.deepspeed import DeepSpeed

    scaler, weight = SimpleNamespace(cur_scale=2.0), torch.ones(2)

    class Engine:
        checkpoint_engine: Any

        def save_checkpoint(self, part: Path, **_: Any) -> None:
            state = {"loss_scaler": scaler, "weight": weight, "shape": torch.Size([2])}
            self.checkpoint_engine.save(state, str(part / "file.pt"))

    strategy = DeepSpeed.__new__(DeepSpeed)
    strategy._model = Engine()  # type: ignore[assignment]
    write = strategy._copy_tensors({"state_dict": {}, "optimizer_states": []}, tmp_path)
    scaler.cur_scale = 99.0
    weight.zero_()
    write(tmp_path)
    written = torch.load(tmp_path / "file.pt", weights_only=False)
    assert (written["loss_scaler"].cur_scale, written["weight"].tolist()) == (2.0, [1.0, 1.0])


TIMEOUTS = """
import torch
from torch.distributed import distributed_c10d as c10d
from hpc.resume.resume import Resume

before = Resume.on_train_batch_end

def on_train_batch_end(self, trainer, *args, **kwargs):
    before(self, trainer, *args, **kwargs)
    backends = [group._get_backend(torch.device("cpu")) for group in c10d._world.pg_map]
    print("waits", [backend.options._timeout.total_seconds() / 60 for backend in backends], "minutes")

Resume.on_train_batch_end = on_train_batch_end
"""


@pytest.mark.parametrize("strategy", soak_all_but(["ddp", "fsdp", "tensor_parallel", "deepspeed_zero2"], "ddp"))
def test_no_group_gives_up_before_the_watch_does(strategy: str, start: Callable, tmp_path: Path) -> None:
    words = ["trainer=ddp", f"strategy={strategy}", "trainer.devices=2", "trainer.accelerator=cpu", "experiment=text"]
    words += ["trainer.precision=32-true", "callbacks.progress=null", "checkpoint.monitor=null", "trainer.max_steps=1"]
    words += ["model.network.width=32", "model.network.num_layers=1", "data.global_batch_size=2"]
    words += ["+trainer.limit_val_batches=0", "+trainer.limit_test_batches=1", "faults.hang_minutes=50"]
    said = start(tmp_path / "run", 2, words, patch=TIMEOUTS)
    waits = [ast.literal_eval(found) for found in re.findall(r"waits (\[.*?\]) minutes", said)]
    assert len(waits) == 2 and all(len(groups) > 1 and min(groups) > 100 for groups in waits), waits


def test_a_group_waits_as_long_as_a_job_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that torch's own limits, which run on meanwhile, end no run: the watchdog ends one that hangs."""
    from torch.distributed import TCPStore, distributed_c10d

    from hpc.strategies import single

    names = ("default_pg_timeout", "default_pg_nccl_timeout")
    for name in names:
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
    single.extend_group_timeouts()
    limits = [limit for name in names if (limit := getattr(distributed_c10d, name))]
    assert min(limits) > timedelta(days=7)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=max(limits))
    setter = threading.Timer(0.3, store.clone().set, ["key", "value"])
    setter.start()
    assert store.get("key") == b"value", "torch can count so many milliseconds"
    setter.join()
