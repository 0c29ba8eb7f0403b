"""Check tools/scale.py: its points and their overrides, the measurements, and a study with stand-ins for Slurm."""

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import median_low

import pytest
from fork import ENVIRON, PROJECT, scalars
from omegaconf import DictConfig

from hpc.checkpoint import on_disk
from hpc.config import compose, layout, preflight
from hpc.config.errors import ConfigError
from hpc.jobs.job_states import JobState
from hpc.run import attempt_log
from hpc.studies import (
    run_rates,
    scaling_charts,
    scaling_footnotes,
    scaling_jobs,
    scaling_points,
    scaling_results,
    scaling_table,
)
from hpc.studies.run_rates import RunRates
from hpc.studies.scaling_points import ScalingPoint

# A job needs an environment that env.sh has marked as complete, or a container; neither is started here.
DDP = ["trainer=ddp", "cluster=slurm", "cluster.container=none"]
BEGAN = 1_800_000_000.0


@cache
def composed(words: tuple[str, ...]) -> DictConfig:
    return compose.compose_overrides(words)


def points(*words: str) -> list[ScalingPoint]:
    study = scaling_points.parse_study([*DDP, *words])
    return scaling_points.plan_points(study, composed(study.first_overrides))


def told(*words: str) -> str:
    study = scaling_points.parse_study([*DDP, *words])
    return scaling_footnotes.explain_accuracy(study, points(*words))


def rejection(*words: str) -> str:
    with pytest.raises(ConfigError) as rejected:
        points(*words)
    return str(rejected.value)


# The points


def test_strong_scaling_keeps_the_batch_and_the_rate() -> None:
    cfgs = [composed(point.words) for point in points("nodes=4,1,2")]
    assert [cfg.trainer.num_nodes for cfg in cfgs] == [1, 2, 4]
    for cfg in cfgs:
        preflight.check_rules(cfg)
        assert (cfg.data.global_batch_size, cfg.model.optimizer.lr, cfg.model.warmup_steps) == (64, 0.003, 20)
        assert (cfg.trainer.max_steps, cfg.trainer.max_epochs) == (200, -1)
    assert [layout.derive_layout(cfg).micro_batch_size for cfg in cfgs] == [16, 8, 4]


@pytest.mark.parametrize(
    ("words", "rates"),
    [
        ([], [0.003, 0.006, 0.012]),  # AdamW: its square root
        (["lr=linear"], [0.003, 0.012, 0.048]),
        (["lr=keep"], [0.003] * 3),
        (["model.optimizer.lr=0.1"], [0.1, 0.2, 0.4]),
    ],
)
def test_weak_scaling_keeps_the_samples_per_device(words: list[str], rates: list[float]) -> None:
    cfgs = [composed(point.words) for point in points("nodes=1,4,16", "scaling=weak", *words)]
    for cfg in cfgs:
        preflight.check_rules(cfg)
    assert [layout.derive_layout(cfg).micro_batch_size for cfg in cfgs] == [16] * 3
    assert [cfg.data.global_batch_size for cfg in cfgs] == [64, 256, 1024]
    assert [cfg.model.optimizer.lr for cfg in cfgs] == pytest.approx(rates)


def test_the_rate_of_sgd_is_scaled_linearly() -> None:
    study = scaling_points.parse_study([*DDP, "nodes=2,3", "scaling=weak"])
    first = compose.compose_overrides(study.first_overrides)
    first.model.optimizer._target_ = "torch.optim.SGD"
    assert [point.lr for point in scaling_points.plan_points(study, first)] == pytest.approx([0.003, 0.0045])
    assert [point.global_batch_size for point in scaling_points.plan_points(study, first)] == [64, 96]


def test_a_rate_that_the_config_does_not_have_is_not_scaled() -> None:
    study = scaling_points.parse_study([*DDP, "nodes=1,2", "scaling=weak"])
    first = compose.compose_overrides([*study.first_overrides, "~model.optimizer.lr"])
    with pytest.raises(ConfigError, match="lr=keep"):
        scaling_points.plan_points(study, first)
    kept = scaling_points.parse_study([*DDP, "nodes=1,2", "scaling=weak", "lr=keep"])
    assert [point.lr for point in scaling_points.plan_points(kept, first)] == [None, None]


def test_the_warm_up_fits_into_the_run() -> None:
    assert scaling_points.clamp_warmup_steps(700, 200, is_lr_scaled=False) == 100
    assert scaling_points.clamp_warmup_steps(0, 200, is_lr_scaled=True) == 20  # Goyal et al.: a large rate needs one
    assert scaling_points.clamp_warmup_steps(0, 200, is_lr_scaled=False) == 0
    words = points("nodes=1,2", "scaling=weak", "model.warmup_steps=700")[1].words
    assert composed(words).model.warmup_steps == 100


def test_what_is_typed_for_checkpoints_counts() -> None:
    plain, typed = points("nodes=1")[0], points("nodes=1", "checkpoint.keep=5")[0]
    assert composed(plain.words).checkpoint.keep == 1
    assert composed(typed.words).checkpoint.keep == 5


def test_why_accuracy_falls_is_said_of_this_study() -> None:
    assert "the batch stays 64" in told("nodes=1,4")
    grown = told("nodes=1,4", "scaling=weak")
    assert "from 64 to 256" in grown and "from 0.003 to 0.006 (lr=sqrt), after 20 steps of warm-up" in grown
    assert "the rate stays, because of lr=keep" in told("nodes=1,4", "scaling=weak", "lr=keep")
    assert ". " not in grown  # one sentence


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "nodes=1,2,4"),
        (["nodes=0"], "above 0"),
        (["nodes=1,two"], "above 0"),
        (["nodes=1,2", "steps=-1"], "above 0"),
        (["nodes=1,2", "steps=39"], "steps=40"),
        (["nodes=1,2", "steps=40,80"], "must be an integer above 0; got 40,80."),
        (["nodes=2,1,2"], "nodes=1,2"),
        (["nodes=1,2", "nodes=4"], "typed twice"),
        (["nodes=1,2", "scaling=weak", "lr=sqrt", "lr=keep"], "typed twice"),
        (["nodes=1,2", "trainer.num_nodes=2"], "nodes="),
        (["nodes=1,2", "trainer.max_steps=5"], "steps="),
        (["nodes=1,2", "run_dir=x"], "out="),
        (["nodes=1,2", "scaling=week"], "scaling=weak"),
        (["nodes=1,2", "lr=root"], "must be one of"),
        (["nodes=1,2", "lr=sqrt"], "scaling=weak"),
        (["nodes=1,2", "callbacks.throughput=null"], "it measures"),
        (["nodes=1,2", "data.global_batch_size=many"], "type int"),
    ],
)
def test_what_makes_no_study_is_rejected(words: list[str], says: str) -> None:
    assert says in rejection(*words)


def test_a_batch_that_divides_for_some_points_only_is_rejected_with_one_for_all() -> None:
    text = rejection("nodes=1,2,3", "data.global_batch_size=32")  # fine for one node and for two
    assert "Try: data.global_batch_size=24 or data.global_batch_size=48" in text
    for point in points("nodes=1,2,3", "data.global_batch_size=48"):
        preflight.check_rules(composed(point.words))
    assert "data.global_batch_size=28" in rejection("nodes=1,2,3", "data.global_batch_size=30", "scaling=weak")


def test_further_nodes_belong_to_the_same_study() -> None:
    one, more = (
        scaling_points.parse_study([*DDP, "nodes=1,2"]),
        scaling_points.parse_study(["nodes=1,2,4", *DDP, "out=here"]),
    )
    assert one.digest == more.digest
    assert one.digest != scaling_points.parse_study([*DDP, "nodes=2,4"]).digest  # its first point has another batch
    assert one.digest != scaling_points.parse_study([*DDP, "nodes=1,2", "seed=2"]).digest


# Rows


def found(step: float, compute: float, rate: float) -> RunRates:
    other = step - compute - 0.01
    return RunRates("samples", rate, step, compute, 0.01, other, step, step, 19, "test/accuracy", 0.9, None)


def test_efficiency_and_excess_are_held_against_the_first_point() -> None:
    strong = [ScalingPoint(n, 4 * n, 64, 0.003, "keep", 20, 200, ()) for n in (1, 2, 4)]
    numbers = {1: found(0.10, 0.08, 640.0), 2: found(0.08, 0.06, 800.0), 4: found(0.05, 0.03, 1280.0)}
    rows = scaling_table.make_rows(strong, numbers, plans={2: scaling_table.PredictedRate(900.0, 0.07)})
    assert [row.efficiency for row in rows] == pytest.approx([1, 800 / 1280, 0.5])
    assert [row.excess_seconds for row in rows] == pytest.approx([0, 0.06 - 0.04, 0.03 - 0.02])
    assert [row.planned_rate_per_second for row in rows] == [None, 900.0, None]
    weak = [ScalingPoint(n, 4 * n, 64 * n, 0.003, "sqrt", 20, 200, ()) for n in (1, 2)]
    rows = scaling_table.make_rows(weak, {1: found(0.10, 0.08, 640.0), 2: found(0.125, 0.1, 1024.0)}, plans={})
    assert [row.efficiency for row in rows] == pytest.approx([1, 0.8])
    assert rows[1].excess_seconds == pytest.approx(0.02)
    rows = scaling_table.make_rows(strong, {2: numbers[2], 4: numbers[4]}, plans={})  # the first one failed
    assert [(row.nodes, row.efficiency) for row in rows] == [(2, 1.0), (4, pytest.approx(0.8))]


def test_the_table_has_the_digits_that_people_compare() -> None:
    assert [scaling_table.format_number(value) for value in (None, 0, 2, 0.0042426, 1234567.8, 0.91234)] == [
        "-", "0", "2", "0.004243", "1234568", "0.9123",
    ]  # fmt: skip
    strong = scaling_points.parse_study([*DDP, "nodes=1,2"])
    rows = scaling_table.make_rows(
        points("nodes=1,2"), {1: found(0.10, 0.08, 640.0), 2: found(0.08, 0.06, 1.5e6)}, plans={}
    )
    cells = scaling_table.format_cells(rows)
    assert cells[0][-1] == "accuracy" and cells[2][-1] == "0.9" and "1500000" in cells[2]
    assert max(map(len, scaling_table.align_columns(cells))) <= 120
    assert list(csv.DictReader(io.StringIO(scaling_table.to_csv(rows))))[1]["rate_per_second"] == "1500000.0"
    assert scaling_table.to_markdown("", cells, notes=[]).count("|") == (len(cells) + 1) * (len(cells[0]) + 1)
    assert "They differ by rounding" in scaling_footnotes.compare_metrics(strong, points("nodes=1,2"))
    weak = scaling_points.parse_study([*DDP, "nodes=1,8", "scaling=weak"])
    assert "nodes=1 steps=1600" in scaling_footnotes.compare_metrics(weak, points("nodes=1,8", "scaling=weak"))


def test_below_the_table_stands_what_explains_it() -> None:
    weak, made = scaling_points.parse_study([*DDP, "nodes=1,2", "scaling=weak"]), points("nodes=1,2", "scaling=weak")
    numbers = {1: found(0.10, 0.08, 640.0), 2: found(0.125, 0.1, 1024.0)}
    both, one = (scaling_table.make_rows(made, {n: numbers[n] for n in nodes}, plans={}) for nodes in ((1, 2), (1,)))
    lines = scaling_footnotes.wrap_notes(scaling_footnotes.footnotes(weak, made, both))
    (command,) = [line for line in lines if "tools/scale.py" in line]
    assert command.split()[:3] == ["python", "tools/scale.py", "nodes=1"] and command.endswith(DDP[-1])
    assert max(len(line) for line in lines if line != command) <= 100
    assert "Accuracy often falls" in " ".join(lines)
    assert "accuracy" not in " ".join(scaling_footnotes.footnotes(weak, made, one)), (
        "of one metric there is nothing to explain"
    )
    page = scaling_table.to_markdown(
        "", scaling_table.format_cells(both), notes=scaling_footnotes.footnotes(weak, made, both)
    )
    assert page.rstrip().split("\n")[-2].startswith("- Metrics are"), "one item each"


def test_no_part_of_a_step_lies_below_0() -> None:
    strong = scaling_points.parse_study([*DDP, "nodes=1,2"])
    rows = scaling_table.make_rows(
        points("nodes=1,2"), {1: found(0.1, 0.08, 640.0), 2: found(0.05, 0.039, 1280.0)}, plans={}
    )
    assert rows[1].excess_seconds < 0, "the table says what was measured"
    step = scaling_charts.make_charts(strong, rows)[-1]
    assert min(y for series in step.series for _, y in series.points) == 0 and step.from_zero


# What a run has measured


def leave(
    run_dir: Path,
    times: Sequence[float],
    batch: int = 64,
    unit: str = "samples",
    every: int = 10,
    parts: Sequence[str] = run_rates.PARTS,
) -> None:
    """Write the curves of a run as its loggers do: step times of windows, with points a minute apart."""
    from torch.utils.tensorboard.writer import SummaryWriter

    for part in (0, 1):  # an attempt each, and a file each
        with SummaryWriter(str(run_dir / "tensorboard"), filename_suffix=f".{part}") as writer:
            for number, seconds in list(enumerate(times))[part::2]:
                step, when = every * (number + 1) - 1, BEGAN + 60 * number
                numbers = {"step": seconds, "compute": 0.7 * seconds, "data": 0.1 * seconds, "other": 0.2 * seconds}
                for name in parts:
                    writer.add_scalar(f"perf/{name}_seconds", numbers[name], step, walltime=when)
                if unit:
                    writer.add_scalar(f"perf/{unit}_per_second", batch / seconds, step, walltime=when)
            if part:
                writer.add_scalar("test/accuracy", 0.9, every * len(times))
                writer.add_scalar("test/loss", 0.4, every * len(times))


@pytest.mark.parametrize("times", [[9.0, 0.2, 0.4, 0.3], [9.0, 0.5, 0.2, 0.4, 0.3]])
def test_each_number_is_one_of_the_events_files(tmp_path: Path, times: list[float]) -> None:
    leave(tmp_path, times)
    numbers = run_rates.read_rates(tmp_path)
    assert numbers is not None
    by_reader = {tag: scalars(tmp_path, f"perf/{tag}") for tag in ("step_seconds", "compute_seconds", "data_seconds")}
    at = by_reader["step_seconds"].index(numbers.step_seconds)
    assert numbers.step_seconds == median_low(by_reader["step_seconds"][1:]) == pytest.approx(0.3)
    assert (numbers.compute_seconds, numbers.data_seconds) == (
        by_reader["compute_seconds"][at],
        by_reader["data_seconds"][at],
    )
    assert numbers.rate_per_second == scalars(tmp_path, "perf/samples_per_second")[at] == pytest.approx(64 / 0.3)
    assert numbers.other_seconds == scalars(tmp_path, "perf/other_seconds")[at]
    assert {numbers.fast_step_seconds, numbers.slow_step_seconds} <= set(by_reader["step_seconds"][1:])
    assert (numbers.metric, numbers.metric_value) == ("test/accuracy", scalars(tmp_path, "test/accuracy")[0])
    assert (numbers.num_windows, numbers.unit, numbers.gpu_percent) == (len(times) - 1, "samples", None)


def test_a_run_without_two_windows_has_measured_nothing(tmp_path: Path) -> None:
    assert run_rates.read_rates(tmp_path) is None
    leave(tmp_path, [9.0])
    assert run_rates.read_rates(tmp_path) is None


def test_a_wait_that_was_not_measured_is_no_number(tmp_path: Path) -> None:
    leave(tmp_path, [9.0, 0.3, 0.3], parts=("step", "compute"))
    numbers = run_rates.read_rates(tmp_path)
    assert (
        numbers
        and numbers.compute_seconds == pytest.approx(0.21)
        and numbers.data_seconds is numbers.other_seconds is None
    )
    strong = scaling_points.parse_study([*DDP, "nodes=1,2"])
    rows = scaling_table.make_rows(points("nodes=1,2"), {1: numbers, 2: found(0.05, 0.039, 1280.0)}, plans={})
    titles, first, _ = scaling_table.format_cells(rows)
    assert [first[titles.index(part)] for part in ("step", "compute", "data", "other")] == ["300", "210", "-", "-"]
    data = [series for series in scaling_charts.make_charts(strong, rows)[-1].series if series.name == "data"]
    assert {nodes for series in data for nodes, _ in series.points} == {2}


def test_a_run_whose_rate_is_not_known_has_measured_nothing(tmp_path: Path) -> None:
    leave(tmp_path, [9.0, 0.3, 0.3], unit="")
    assert run_rates.read_rates(tmp_path) is None


@pytest.mark.parametrize("damage", ["cut short", "overwritten"])
def test_an_events_file_that_a_crash_damaged_counts_as_far_as_it_goes(tmp_path: Path, damage: str) -> None:
    leave(tmp_path, [9.0, 0.3, 0.3, 0.3], unit="tokens")
    last = max((tmp_path / "tensorboard").iterdir())
    if damage == "cut short":
        os.truncate(last, last.stat().st_size - 5)
    else:
        last.write_bytes(last.read_bytes()[:-9] + b"no event.")
    numbers = run_rates.read_rates(tmp_path)
    assert numbers and (numbers.step_seconds, numbers.unit) == (pytest.approx(0.3), "tokens")
    assert (numbers.metric, numbers.metric_value) == ("test/accuracy", pytest.approx(0.9))  # the loss is missing


def test_use_of_gpus_is_the_mean_while_the_run_trained(tmp_path: Path) -> None:
    leave(tmp_path, [9.0, 0.3, 0.3])
    (tmp_path / "monitor").mkdir()
    head = "time,attempt,cpu_percent,gpu0_percent,gpu0_memory_gb,gpu1_percent\n"
    rows = [(-60, 1, 1), (0, 80, 90), (60, 100, ""), (120, 70, 60), (121, 2, 2)]
    lines = "".join(f"{BEGAN + after},1,50,{first},40.0,{second}\n" for after, first, second in rows)
    (tmp_path / "monitor" / "n1.csv").write_text(head + lines + f"{BEGAN + 6}")
    (tmp_path / "monitor" / "n2.csv").write_text("time,attempt,cpu_percent\n" + f"{BEGAN + 60},1,99\n")
    phases = [("start", -90, -10), ("epoch", 0, 99), ("test", 120.5, 130)]
    common = {"attempt": 1, "step": 1}
    notes = [json.dumps(common | {"what": what, "begin": BEGAN + b, "end": BEGAN + e}) for what, b, e in phases]
    (tmp_path / "monitor" / "phases.jsonl").write_text("\n".join(notes))
    numbers = run_rates.read_rates(tmp_path)
    assert numbers and numbers.gpu_percent == pytest.approx((85 + 100 + 65) / 3)


# State of a job


def test_a_new_try_has_a_directory_of_its_own(tmp_path: Path) -> None:
    assert scaling_jobs.newest_run_dir(tmp_path, 2) == scaling_jobs.next_run_dir(tmp_path, 2) == tmp_path / "nodes-2"
    for number, name in enumerate(["nodes-2", "nodes-2.2", "nodes-2.3"]):
        made = scaling_jobs.next_run_dir(tmp_path, 2)
        assert made.name == name
        made.mkdir()
        assert scaling_jobs.newest_run_dir(tmp_path, 2) == made, number
    assert scaling_jobs.next_run_dir(tmp_path, 20).name == "nodes-20"


RUNNING = JobState("running", is_active=True)


@pytest.mark.parametrize(
    ("noted", "told", "word", "failed"),
    [
        (["submitted"], {"17": RUNNING}, "running", False),
        (["submitted"], {"17": JobState("pending", "Priority", is_active=True)}, "pending", False),
        (["submitted"], None, "unknown", False),  # the scheduler does not answer: it may run
        (["submitted"], {}, "failed", True),
        (["submitted"], {"17": JobState("timeout")}, "timeout", True),
        (["submitted", "continue"], {"17": JobState("pending", is_active=True)}, "pending", False),  # requeued
        (["submitted", "continue"], {"17": JobState("cancelled")}, "cancelled", True),
        (["submitted", "failed"], {"17": JobState("completed")}, "failed", True),
        (["submitted", "finished"], {"17": RUNNING}, "finished", False),
        (["submitted", "finished"], None, "finished", False),
        (["rejected"], {}, "not submitted", False),
        ([], {}, "not submitted", False),
    ],
)
def test_the_state_of_a_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noted: list[str], told: dict | None, word: str, failed: bool
) -> None:
    asked = []
    monkeypatch.setattr(scaling_jobs.job_states, "query_states", lambda *jobs, owners: asked.append(jobs) or told)
    run_dir = tmp_path / "nodes-1"
    if noted:
        queue(run_dir, None if "rejected" in noted else "17")
    if noted[1:]:
        end(run_dir, noted[1])
    one, other = scaling_jobs.read_point_jobs(tmp_path, points("nodes=1,2"), scheduler="slurm")
    assert (one.state.name, one.has_failed, one.is_finished) == (word, failed, word == "finished")
    assert other.state.name == "not submitted" and other.run is None
    assert len(asked) <= 1  # one query to the scheduler for all points
    assert ("Priority" in one.short_state) == (noted == ["submitted"] and word == "pending")


def test_a_run_that_ends_while_the_scheduler_is_asked_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue(tmp_path / "nodes-1", "17")
    monkeypatch.setattr(
        scaling_jobs.job_states, "query_states", lambda *_, **__: end(tmp_path / "nodes-1", "finished") or {}
    )
    (one,) = scaling_jobs.read_point_jobs(tmp_path, points("nodes=1"), scheduler="slurm")
    assert one.is_finished and not one.has_failed


def queue(run_dir: Path, job: str | None) -> None:
    """Record a submission as submit.py does."""
    run_dir.mkdir(parents=True, exist_ok=True)
    error = None if job else "not submitted: the queue is full"
    note = {"time": time.time(), "scheduler": "slurm", "job": job, "jobs": [job] if job else [], "error": error}
    (run_dir / "submitted.json").write_text(json.dumps(note))


def end(run_dir: Path, outcome: str) -> None:
    """Record an attempt as a finished job leaves it."""
    attempt_log.record_start(run_dir, 1, environ={"SLURM_JOB_ID": "17"}, hosts=["n1"], world_size=4)
    attempt_log.record_end(
        run_dir, None, attempt=1, step=200, outcome=outcome, why="it ran out of memory" if outcome == "failed" else ""
    )


# The tool


class Tool:
    """A run of tools/scale.py on a login node, where sbatch accepts every job and squeue prints what the test sets."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder / "study", folder / "bin"
        self.bin.mkdir()
        self.stub("sbatch", 'echo job >>"$0.calls"; echo $((16 + $(wc -l <"$0.calls")))')
        self.stub("squeue", 'cat "$0.says" 2>/dev/null')
        for name in ("sacct", "scancel"):
            self.stub(name, 'echo "$0" >>"$0.calls"; exit 1')
        self.environ = ENVIRON | {"PATH": f"{self.bin}:{os.environ['PATH']}"}

    def stub(self, name: str, body: str) -> None:
        (self.bin / name).write_text(f"#!/bin/bash\n{body}\n")
        (self.bin / name).chmod(0o755)

    def says(self, **states: str) -> None:
        """Set the output of squeue: job17="RUNNING"."""
        lines = [f"{job.removeprefix('job')} {state} None\n" for job, state in states.items()]
        (self.bin / "squeue.says").write_text("".join(lines))

    def start(self, *words: str) -> subprocess.Popen[str]:
        typed = [*DDP, *([] if any(word.startswith("out=") for word in words) else [f"out={self.folder}"]), *words]
        command = [sys.executable, str(PROJECT / "tools" / "scale.py"), *typed]
        return subprocess.Popen(
            command, cwd=self.bin, env=self.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's shell ignores it
        )  # fmt: skip

    def type(self, *words: str) -> tuple[int, str]:
        """Run tools/scale.py; return the exit code and the output."""
        process = self.start(*words)
        out, err = process.communicate(timeout=60)
        return process.returncode, out + err

    def jobs(self) -> int:
        calls = self.bin / "sbatch.calls"
        return len(calls.read_text().splitlines()) if calls.exists() else 0

    def runs(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("nodes-*"))


@pytest.fixture
def tool(tmp_path: Path) -> Tool:
    return Tool(tmp_path)


@pytest.mark.parametrize(
    ("program", "rate", "seconds"),
    [
        ("print(json.dumps({'rate': 1234.5, 'step': {'seconds': 0.05}, 'words': sys.argv[1:]}))", 1234.5, 0.05),
        ("print(json.dumps({'rate': None, 'step': {'seconds': None}}))", None, None),
        ("print(json.dumps({'rate': 7, 'step': None}))", 7, None),
        ("print('ConfigError: no such cluster'); sys.exit(2)", None, None),
        ("print([1])", None, None),
        (None, None, None),  # there is none
    ],
)
def test_the_plan_stands_beside_the_measurement_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str | None, rate: float | None, seconds: float | None
) -> None:
    monkeypatch.setattr(scaling_results, "PROJECT", tmp_path)
    if program:
        (tmp_path / "plan.py").write_text(f"import json, sys\nassert sys.argv[1:] == ['a=b', '--json']\n{program}\n")
    assert scaling_results.predict_rate(["a=b"]) == scaling_table.PredictedRate(rate, seconds)


def test_nothing_is_queued_where_one_point_cannot_run(tool: Tool) -> None:
    for words, says in (
        (["nodes=1,2,3", "data.global_batch_size=64"], "data.global_batch_size=48 or data.global_batch_size=72"),
        (["nodes=1,2,4", "cluster.max_nodes=2"], "trainer.num_nodes must be at most 2"),
    ):
        code, said = tool.type(*words)
        assert (code, tool.jobs(), tool.folder.exists()) == (2, 0, False), said
        assert says in said and "Traceback" not in said


def test_a_folder_that_cannot_be_is_told_first(tool: Tool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    rules = {tmp_path / "file": "is a file", tool.bin: "something else", Path("/dev/null/x"): "can be written"}
    for out, rule in rules.items():
        code, said = tool.type("nodes=1", f"out={out}")
        assert (code, tool.jobs()) == (2, 0), said
        assert said.startswith("ConfigError: out ") and re.search(rf"; got {re.escape(str(out))}( \(.*\))?\.\n", said)
        assert rule in said and "run_dir" not in said


def test_without_a_scheduler_nothing_is_left(tool: Tool) -> None:
    tool.environ["PATH"] = os.path.dirname(sys.executable)
    code, said = tool.type("nodes=1,2")
    assert (code, tool.folder.exists()) == (2, False) and said.startswith("ConfigError: sbatch"), said
    assert "queued" not in said and "--dry-run" in said
    code, said = tool.type("nodes=2,4", "--dry-run")
    assert (code, tool.folder.exists()) == (0, False) and "#SBATCH --nodes=2\n" in said, said
    assert said.startswith("strong scaling, 200 steps per point") and "\n    4  " in said


def test_a_cluster_without_a_scheduler_is_told_before_what_its_file_does_not_say(tool: Tool) -> None:
    code, said = tool.type("nodes=1,2,4,8", "cluster=local")
    assert (code, tool.folder.exists()) == (2, False), said
    assert said.startswith("ConfigError: cluster must be a cluster with a scheduler; got local.\n")
    assert "trainer.devices" not in said


def test_a_first_point_that_is_rejected_leaves_nothing_queued(tool: Tool) -> None:
    tool.stub("sbatch", "echo QOSMaxSubmitJob >&2; exit 1")
    code, said = tool.type("nodes=1,2", "--no-wait")
    assert (
        code == 2 and "QOSMaxSubmitJob" in said and "are queued" not in said and "same command tries again" in said
    ), said


@pytest.mark.parametrize("kept", [False, True])
def test_a_point_that_failed_goes_on_from_its_checkpoint_or_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kept: bool
) -> None:
    run_dir = tmp_path / "nodes-1"
    queue(run_dir, "17")
    end(run_dir, "failed")
    if kept:
        final = on_disk.checkpoint_path(run_dir, 40)
        on_disk.publish(on_disk.make_part_folder(final), final, files={}, details={"step": 40, "attempt": 1})
    monkeypatch.setattr(scaling_jobs.job_states, "query_states", lambda *_, **__: {})
    (one,) = scaling_jobs.read_point_jobs(tmp_path, points("nodes=1"), scheduler="slurm")
    study = scaling_points.parse_study([*DDP, "nodes=1"])
    assert scaling_results.report_results(study, [one], folder=tmp_path, words=["nodes=1"]) == 1
    said = capsys.readouterr().out
    assert (f"from its last checkpoint: python submit.py resume={run_dir}" in said) == kept, said
    assert ("it left no checkpoint" in said) != kept and "nodes=1 --again" in said, said


@pytest.mark.slow
def test_a_study_goes_on_where_it_was(tool: Tool) -> None:
    tool.says(job17="PENDING", job18="RUNNING")
    code, said = tool.type("nodes=1,2", "--no-wait")
    assert (code, tool.jobs(), tool.runs()) == (0, 2, ["nodes-1", "nodes-2"]), said
    script = (tool.folder / "nodes-2" / "job.sh").read_text()
    assert "#SBATCH --nodes=2\n" in script

    leave(tool.folder / "nodes-1", [9.0, 0.3, 0.3, 0.3])
    end(tool.folder / "nodes-1", "finished")
    tool.says(job18="FAILED")
    (tool.folder / "nodes-2" / "job-18.log").write_text("srun: error: n2: task 5: Killed\n")
    code, said = tool.type("nodes=1,2")
    assert (code, tool.jobs()) == (1, 2), said  # finished and failed points are not resubmitted automatically
    assert "task 5: Killed" in said and "it left no checkpoint" in said and "--again" in said
    (row,) = csv.DictReader((tool.folder / "scaling.csv").open())
    assert (row["nodes"], row["gpu_percent"]) == ("1", "")

    code, said = tool.type("nodes=1,2,4", "--again", "--no-wait")  # and one more point
    assert (tool.jobs(), tool.runs()) == (4, ["nodes-1", "nodes-2", "nodes-2.2", "nodes-4"]), said
    for nodes, name in ((2, "nodes-2.2"), (4, "nodes-4")):
        leave(tool.folder / name, [9.0, 0.3 / nodes, 0.3 / nodes, 0.3 / nodes])
        end(tool.folder / name, "finished")
    code, said = tool.type("nodes=1,2,4")
    assert (code, tool.jobs()) == (0, 4), said
    rows = list(csv.DictReader((tool.folder / "scaling.csv").open()))
    assert [float(row["efficiency"]) for row in rows] == pytest.approx([1, 1, 1])
    assert (tool.folder / "scaling.html").read_text().count("<figure>") == 3
    assert (tool.folder / "scaling.md").read_text().count("\n|") == 5

    code, said = tool.type("nodes=1,2,4", "seed=2", "--no-wait")
    assert (code, tool.jobs()) == (2, 4) and "other words" in said, said


@pytest.mark.slow
def test_a_point_that_a_full_queue_rejects_is_queued_by_the_next_call(tool: Tool) -> None:
    tool.says(job17="RUNNING", job18="RUNNING")
    (tool.bin / "sbatch.calls").touch()
    full = 'if [ "$(wc -l <"$0.calls")" -ge 1 ] && [ ! -e "$0.room" ]; then echo QOSMaxSubmitJob >&2; exit 1; fi\n'
    tool.stub("sbatch", full + 'echo job >>"$0.calls"; echo $((16 + $(wc -l <"$0.calls")))')
    code, said = tool.type("nodes=1,2", "--no-wait")
    assert (code, tool.jobs()) == (2, 1) and "QOSMaxSubmitJob" in said and "same command continues" in said
    (tool.bin / "sbatch.room").touch()
    code, said = tool.type("nodes=1,2", "--no-wait")
    assert (code, tool.jobs(), tool.runs()) == (0, 2, ["nodes-1", "nodes-2"]), said


def test_ctrl_c_leaves_the_jobs_and_says_how_to_go_on(tool: Tool) -> None:
    tool.says(job17="RUNNING", job18="RUNNING")
    process = tool.start("nodes=1,2")
    assert process.stdout
    said = ""
    while "nodes=2 running" not in said:
        line = process.stdout.readline()
        assert line, (said, process.communicate())
        said += line
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "queued jobs keep running" in err and "nodes=1,2" in err, (out, err)
    assert "Traceback" not in err and not (tool.bin / "scancel.calls").exists()
    assert tool.jobs() == 2


@pytest.mark.slow
def test_ctrl_c_while_a_job_is_handed_over_loses_no_job(tool: Tool) -> None:
    wait = 'touch "$0.asked"; while [ ! -e "$0.go" ]; do sleep 0.05; done\n'
    tool.stub("sbatch", wait + 'echo job >>"$0.calls"; echo 17')
    process = tool.start("nodes=1,2")
    limit = time.monotonic() + 60
    while not (tool.bin / "sbatch.asked").exists():
        assert time.monotonic() < limit and process.poll() is None, process.communicate()
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    (tool.bin / "sbatch.go").touch()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, tool.jobs()) == (130, 1) and "Traceback" not in err, (out, err)
    assert json.loads((tool.folder / "nodes-1" / "submitted.json").read_text())["job"] == "17"
