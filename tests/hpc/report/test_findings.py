"""Check which sentence the measurements of a run give, and that every proposed override can be typed."""

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from omegaconf import OmegaConf

from hpc.config import compose, parse
from hpc.config.layout import Layout, derive_layout
from hpc.report.endings import Ending, explain_ending
from hpc.report.findings import list_findings
from hpc.report.run_statistics import RunStatistics
from hpc.system import tables

GPU = ["trainer=gpu", "cluster=juwels_booster", "cluster.account=a"]
IMAGES = [*GPU, "data=images", "data.dir=.", "data.num_classes=10", "model=resnet18"]
CLOCK = {"start-up": 10.0, "training": 980.0, "validation": 5.0, "checkpoints": 5.0}
LONG_VALIDATION = {"validation": 250.0}
STEP = {"step": 0.1, "compute": 0.097, "data": 0.002, "other": 0.001}


def make_statistics(
    wall: dict[str, float] | None = None, step: dict[str, float] | None = None, **other: Any
) -> RunStatistics:
    """Return statistics of a GPU run without a bottleneck, with these values changed."""
    counts = {"start-up": 1, "validation": 5, "checkpoints": 5}
    gpu = {"gpu_percent": 97.0, "gpu_memory_gb": 35.0, "gpu_capacity_gb": 42.3}
    known = {"phase_counts": counts, "cpu_percent": 40.0, "mfu": 0.5, "communication_share": None} | gpu | other
    return RunStatistics(phase_seconds=CLOCK | (wall or {}), step_seconds=STEP | (step or {}), **known)


@cache
def composed(*words: str) -> dict[str, Any]:
    """Compose a config as config.yaml stores it."""
    plain = OmegaConf.to_container(compose.compose_overrides(words, personal=False), resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def config(words: list[str]) -> dict[str, Any]:
    return composed(*words)


def layout(words: list[str]) -> Layout:
    return derive_layout(OmegaConf.create(composed(*words)))


FEW, EAGER = [*IMAGES, "data.num_workers=3"], [*GPU, "strategy.compile=false"]
WAITS, LEFT = {"compute": 0.04, "data": 0.05, "other": 0.01}, {"gpu_memory_gb": 8.0, "mfu": 0.4}
TEXT = [*GPU, "data=text", "data.files=x.npy", "data.vocab_size=50304", "model=gpt_124m"]
CASES = [
    pytest.param(IMAGES, {"step": WAITS}, "waits for data during 50 %", None, id="images by default use all cores"),
    pytest.param(FEW, {"step": WAITS}, "50 ms of 100 ms", "data.num_workers=6", id="workers"),
    pytest.param([*IMAGES, "data.num_workers=0"], {"step": WAITS}, "50 %", "data.num_workers=2", id="no worker"),
    pytest.param(FEW, {"step": WAITS, "cpu_percent": 99.0}, "50 %", None, id="no core left"),
    pytest.param([*TEXT, "cluster.node_local=/tmp"], {"step": WAITS}, "50 %", "data.stage=true", id="stage"),
    pytest.param(GPU, {"wall": {"validation": 250.0}}, "Validation takes 20 %", "trainer.check_val_every_n_epoch=5",
                 id="validation"),
    pytest.param([*GPU, "trainer.max_epochs=3"], {"wall": {"validation": 250.0}}, "20 %",
                 "trainer.check_val_every_n_epoch=3", id="validation at the end only"),
    pytest.param([*GPU, "experiment=text"], {"wall": {"validation": 250.0}}, "20 %",
                 "trainer.val_check_interval=2000", id="validation by steps, of which there are 2000"),
    pytest.param([*GPU, "+trainer.val_check_interval=100"], {"wall": {"validation": 250.0}}, "20 %",
                 "trainer.val_check_interval=500", id="validation by steps, as typed"),
    pytest.param([*GPU, "+trainer.val_check_interval=100"], {"wall": LONG_VALIDATION, "steps_per_epoch": 300}, "20 %",
                 "trainer.val_check_interval=300", id="validation no rarer than the run is long"),
    pytest.param([*GPU, "+trainer.val_check_interval=100"], {"wall": LONG_VALIDATION, "steps_per_epoch": 150}, "20 %",
                 None, id="validation is rare"),
    pytest.param([*GPU, "+trainer.val_check_interval=0.25"], {"wall": {"validation": 250.0}}, "20 %",
                 "trainer.val_check_interval=1.0", id="validation within an epoch"),
    pytest.param([*GPU, "checkpoint.every_n_steps=10"], {"wall": {"checkpoints": 100.0}}, "5 of them, 100 s",
                 "checkpoint.every_n_steps=50", id="checkpoints by steps"),
    pytest.param([*GPU, "checkpoint.every_minutes=3"], {"wall": {"checkpoints": 100.0}}, "hold up training",
                 "checkpoint.every_minutes=17", id="checkpoints by the clock"),
    pytest.param(GPU, {"wall": {"checkpoints": 100.0}}, "5 of them", "trainer.check_val_every_n_epoch=5", id="best"),
    pytest.param([*GPU, "cluster.node_local=/tmp"], {"wall": {"start-up": 330.0}}, "Starting takes 25 %",
                 "cluster.stage_env=true", id="start from the node"),
    pytest.param(GPU, {"wall": {"start-up": 330.0}}, "5.5 min in 1 start", "strategy.compile=false", id="compiling"),
    pytest.param(GPU, LEFT, "8.0 GB of a GPU's 42.3 GB", "data.global_batch_size=128", id="memory left"),
    pytest.param([*GPU, "strategy.activation_checkpointing=true"], LEFT, "42.3 GB",
                 "strategy.activation_checkpointing=false", id="memory left, computed twice"),
    pytest.param([*GPU, "trainer.precision=32-true"], {"mfu": 0.12}, "12 % of the GPU's peak",
                 "trainer.precision=bf16-mixed", id="fp32"),
    pytest.param(EAGER, {"mfu": 0.12}, "97 % of a step", "strategy.compile=true", id="low MFU"),
    pytest.param(["trainer=ddp", *GPU[1:]], {"communication_share": 0.3}, "wait for each other during 30 %",
                 "data.global_batch_size=128 trainer.accumulate_grad_batches=2", id="communication"),
    pytest.param(["trainer=fsdp", *TEXT[1:], "strategy.tensor_parallel_size=4"], {"communication_share": 0.3}, "30 %",
                 "strategy.tensor_parallel_size=2", id="tensor parallelism"),
    pytest.param([], {"gpu_percent": None, "gpu_memory_gb": None, "mfu": None}, "CPU is 97 %", "trainer=gpu", id="CPU"),
    pytest.param(["cluster.accelerator=cpu"], {"gpu_percent": None, "mfu": None}, "CPU is 97 %", None, id="CPUs only"),
    pytest.param(["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"], {"gpu_percent": None, "mfu": None},
                 "CPU is 97 %", None, id="CPU, many ranks"),
    pytest.param(["strategy.compile=false"], {"wall": {"start-up": 9000.0}}, "in 1 start. No override shortens it",
                 None, id="start"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("words", "numbers", "expected", "override"), CASES)
def test_what_to_try(words: list[str], numbers: dict[str, Any], expected: str, override: str | None) -> None:
    (sentence, *more) = list_findings(make_statistics(**numbers), config(words))
    assert expected in sentence, sentence
    typed = re.findall("`(.+?)`", sentence)
    assert typed == ([override] if override else [])
    if override:  # the override can be typed, and the run submitted
        changed = compose.compose_overrides([*words, *override.split()], personal=False)
        if override != "trainer=gpu":  # on another machine
            parse.parse(changed)
        is_doubled = layout(words).global_batch_size != layout([*words, *override.split()]).global_batch_size
        assert is_doubled == ("the global batch doubles" in sentence)
    assert len(more) <= 2


def test_a_run_without_bottleneck() -> None:
    assert list_findings(make_statistics(), config(GPU)) == [
        "No bottleneck was measured: 97 % of a step is computation."
    ]


@pytest.mark.parametrize("other", [{}, {"gpu_percent": 40.0}])
def test_nothing_is_concluded_from_a_wait_that_was_not_measured(other: dict[str, Any]) -> None:
    statistics = replace(make_statistics(**other), step_seconds={"step": 0.1, "compute": 0.034})
    (sentence,) = list_findings(statistics, config(GPU))
    assert "66 % of a step is not computation" in sentence and "not measured" in sentence and "`" not in sentence
    almost = replace(make_statistics(), step_seconds={"step": 0.1, "compute": 0.097})
    assert list_findings(almost, config(GPU)) == list_findings(make_statistics(), config(GPU))


def test_a_run_without_a_step() -> None:
    nothing = RunStatistics({}, {}, {}, None, None, None, None, None, None)
    assert list_findings(nothing, {}) == ["No step was timed, so the speed of the run cannot be judged."]
    assert list_findings(nothing, config(GPU)) == list_findings(nothing, {})


def test_the_weightiest_finding_comes_first_and_three_are_listed() -> None:
    wall = {"start-up": 400.0, "training": 400.0, "validation": 200.0, "checkpoints": 60.0}
    findings = list_findings(make_statistics(wall, WAITS, gpu_memory_gb=8.0), config(FEW))
    assert [sentence.split()[0] for sentence in findings] == ["Training", "Starting", "Validation"]


@pytest.mark.parametrize(
    "damaged", [{}, {"data": None}, {"trainer": [1]}, {"trainer": {"max_epochs": "x"}, "checkpoint": 3}]
)
def test_a_damaged_config_gives_sentences_all_the_same(damaged: dict[str, Any]) -> None:
    wall = {"start-up": 400.0, "validation": 200.0, "checkpoints": 260.0}
    idle = make_statistics(gpu_percent=20.0, mfu=0.1, communication_share=0.5, gpu_memory_gb=1.0)
    for statistics in (make_statistics(wall, WAITS), idle):
        assert 1 <= len(list_findings(statistics, damaged)) <= 3


# -- What ended it --

MEMORY = "rank 0: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
RESUME = "python submit.py resume=runs/x"
ENDS = [
    ("failed", "loss or gradient was not finite, seen at step 9", [], "model.optimizer.lr=0.0001"),
    ("failed", MEMORY, ["trainer.accumulate_grad_batches=2"], "trainer.accumulate_grad_batches=4"),
    ("out of memory", "", ["data.num_workers=8"], "data.num_workers=4"),
    ("failed", "rank 3: Hang: no step for 600 s since step 8", [], "faults.hang_minutes=20"),
    ("killed", "it left no word", [], RESUME),
    ("timeout", "", [], RESUME),
    ("failed", "rank 0: ValueError: no", [], RESUME),
    ("failed", "rank 0: ConfigError: data.dir=x: there is no such directory", [], None),
]


BY_DEVICE = ["data.global_batch_size=null"]
# By whom the batch size is given, and what is typed besides.
SHARES = [
    (["data.global_batch_size=64"], []),
    (["data.global_batch_size=36", "trainer.accumulate_grad_batches=2"], []),  # odd micro-batches
    ([*BY_DEVICE, "data.batch_size=16"], ["data.batch_size=8"]),
    ([*BY_DEVICE, "data.batch_size=15", "trainer.accumulate_grad_batches=3"], ["data.batch_size=5"]),
]
TRAINERS = [GPU, ["trainer=ddp", "trainer.devices=2", *GPU[1:]]]
FULL = [
    MEMORY,
    "rank 1 on n1: torch.OutOfMemoryError: CUDA out of memory.",
    "rank 0: RuntimeError: CUDA error: out of memory",
    "rank 0: RuntimeError: HIP out of memory. Tried to allocate 2.00 GiB",
]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS, ids=["one", "two"])
@pytest.mark.parametrize(("given", "beside"), SHARES)
def test_after_a_full_gpu_the_same_global_batch_is_computed_in_smaller_pieces(
    given: list[str], beside: list[str], trainer: list[str]
) -> None:
    words = [*trainer, *given]
    for why in FULL:
        sentence = explain_ending(Ending(1, "failed", why, 3), config(words), RESUME)
        first, plan = re.findall("`(.+?)`", sentence)
        assert plan == "python plan.py" and first.split()[1:] == beside
    before, after = layout(words), layout([*words, *first.split()])
    assert (after.global_batch_size, after.world_size) == (before.global_batch_size, before.world_size)
    assert after.micro_batch_size < before.micro_batch_size
    parse.parse(compose.compose_overrides([*words, *first.split()], personal=False))
    # The converse: the memory is not used, so the pieces may be as large as before.
    (sentence, *_) = list_findings(make_statistics(**LEFT), config([*words, *first.split()]))
    (back,) = re.findall("`(.+?)`", sentence)
    again = layout([*words, *first.split(), *back.split()])
    assert again.global_batch_size == before.global_batch_size and again.micro_batch_size > after.micro_batch_size


@pytest.mark.parametrize(("words", "expected"), [
    (BY_DEVICE, "The loaders of the data give the batch size: halve it there, and type "
                    "trainer.accumulate_grad_batches=2. `python plan.py`"),
    ([*BY_DEVICE, "data.batch_size=1"], "A device computes one sample at a time already. `python plan.py`"),
])  # fmt: skip
def test_where_no_override_keeps_the_batch_a_sentence_says_what_to_do(words: list[str], expected: str) -> None:
    sentence = explain_ending(Ending(1, "failed", MEMORY, 3), config([*GPU, *words]), RESUME)
    assert expected in sentence and re.findall("`(.+?)`", sentence) == ["python plan.py"]


def test_fewer_tensor_parallel_ranks_share_the_same_batch() -> None:
    words = ["trainer=fsdp", *TEXT[1:], "strategy.tensor_parallel_size=4", *BY_DEVICE, "data.batch_size=8"]
    (sentence, *_) = list_findings(make_statistics(communication_share=0.3), config(words))
    (typed,) = re.findall("`(.+?)`", sentence)
    assert typed == "strategy.tensor_parallel_size=2 data.batch_size=4"
    assert layout(words).global_batch_size == layout([*words, *typed.split()]).global_batch_size
    (sentence, *_) = list_findings(make_statistics(communication_share=0.3), config([*words, "data.batch_size=9"]))
    assert not re.findall("`(.+?)`", sentence) and "if more devices can share the batch" in sentence


@pytest.mark.parametrize(("why", "is_memory"), [
    ("rank 0: FileNotFoundError: lsun/bedroom", False),
    ("rank 0: ValueError: BloomModel has no head", False),
    ("rank 0: RuntimeError: the layout of memory differs", False),
    ("slurmstepd: error: Detected 1 oom_kill event", True),
    ("oom-kill", True),
    ("OUT_OF_MEMORY", True),
    ("rank 0: MemoryError", True),
    ("rank 0: _ArrayMemoryError: Unable to allocate 8 GiB", True),
    ("rank 0: RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed", True),
    ("rank 0: RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", True),
])  # fmt: skip
def test_memory_is_a_word_of_its_own(why: str, is_memory: bool) -> None:
    sentence = explain_ending(Ending(1, "failed", why, 3), config([*GPU, "data.num_workers=0"]), RESUME)
    assert ("needs more memory on a node: increase cluster.memory_gb" in sentence) == is_memory


@pytest.mark.parametrize(("outcome", "why", "words", "typed"), ENDS)
def test_advice_on_an_unexpected_end(outcome: str, why: str, words: list[str], typed: str | None) -> None:
    sentence = explain_ending(Ending(2, outcome, why, 120), config([*IMAGES, *words]), RESUME)
    assert sentence.startswith(f"Attempt 2 ended at step 120 ({outcome})") and why in sentence
    tries = re.findall("`(.+?)`", sentence)
    assert tries[:1] == ([typed] if typed else [])
    for override in tries:
        if not override.startswith("python"):
            compose.compose_overrides([*IMAGES, *words, override], personal=False)
    assert explain_ending(Ending(1, outcome, why, None), {}, RESUME).startswith(f"Attempt 1 ended ({outcome})")


def test_a_long_reason_leaves_room_for_the_advice_in_a_line_of_the_terminal() -> None:
    why = f"rank 0: RuntimeError: {'mat1 and mat2 shapes cannot be multiplied ' * 20}"
    sentence = explain_ending(Ending(1, "failed", why, 5), {}, RESUME)
    assert " [...]. errors/1/" in sentence and tables.one_line(sentence).endswith("from the last checkpoint.")
