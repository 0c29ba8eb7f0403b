"""Check tools/scale.py: its points and their overrides, the measurements, and a study with stand-ins for Slurm."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_low

import pytest
import typed_fixes
from fork import ENVIRON, PROJECT, scalars

from hpc.checkpoint import on_disk
from hpc.config import compose, layout
from hpc.config.errors import ConfigError
from hpc.jobs.job_states import JobState
from hpc.run import attempt_log, frozen_config
from hpc.studies import run_rates, scaling_jobs, scaling_points, scaling_table
from hpc.studies.run_rates import RunRates
from hpc.studies.scaling_jobs import PointRun
from hpc.studies.scaling_points import ScalingPoint

pytestmark = pytest.mark.slow

# A job needs an environment that env.sh has marked as complete, or a container; neither is started here.
DDP = ["trainer=ddp", "cluster=slurm", "cluster.container=none"]
BEGAN = 1_800_000_000.0
PARTS = ("step", "compute", "data", "other")


def points(*words: str) -> list[ScalingPoint]:
    return scaling_points.compose_points(scaling_points.parse_study([*DDP, *words]))


def rejection(*words: str) -> str:
    with pytest.raises(ConfigError) as rejected:
        points(*words)
    typed_fixes.follow(lambda typed: points(*typed), words, rejected.value)
    return str(rejected.value)


# The points


def test_strong_scaling_keeps_the_batch_and_the_rate() -> None:
    cfgs = [point.cfg for point in points("nodes=4,1,2")]
    assert [cfg.trainer.num_nodes for cfg in cfgs] == [1, 2, 4]
    for cfg in cfgs:
        assert (cfg.data.global_batch_size, cfg.model.optimizer.lr, cfg.model.warmup_steps) == (64, 0.003, 20)
        assert (cfg.trainer.max_steps, cfg.trainer.max_epochs) == (200, -1)
    assert [layout.derive_layout(cfg).micro_batch_size for cfg in cfgs] == [16, 8, 4]


@pytest.mark.parametrize(
    ("words", "rates"),
    [
        (["lr=keep"], [0.003] * 3),
        (["lr=sqrt"], [0.003, 0.006, 0.012]),
        (["lr=linear"], [0.003, 0.012, 0.048]),
        (["lr=linear", "model.optimizer.lr=0.1"], [0.1, 0.4, 1.6]),
    ],
)
def test_weak_scaling_keeps_the_samples_per_device(words: list[str], rates: list[float]) -> None:
    cfgs = [point.cfg for point in points("nodes=1,4,16", "scaling=weak", *words)]
    assert [layout.derive_layout(cfg).micro_batch_size for cfg in cfgs] == [16] * 3
    assert [cfg.data.global_batch_size for cfg in cfgs] == [64, 256, 1024]
    assert [cfg.model.optimizer.lr for cfg in cfgs] == pytest.approx(rates)
    assert {cfg.model.warmup_steps for cfg in cfgs} == {20}, "nobody asked for another warm-up"


def test_the_overrides_of_a_point_give_its_config() -> None:
    for point in points("nodes=2,3", "scaling=weak", "lr=sqrt"):
        again = compose.compose_overrides(point.overrides)
        assert again.data.global_batch_size == point.cfg.data.global_batch_size == 32 * point.num_nodes
        assert again.model.optimizer.lr == point.cfg.model.optimizer.lr


def test_a_rate_that_the_config_does_not_have_is_not_scaled() -> None:
    words = ["nodes=1,2", "scaling=weak", "model.optimizer.lr=null"]
    assert "lr=keep" in rejection(*words, "lr=sqrt")


def test_what_is_typed_counts_more_than_the_defaults_of_a_study() -> None:
    plain, typed = points("nodes=1")[0].cfg, points("nodes=1", "checkpoint.keep=5", "trainer.max_steps=80")[0].cfg
    assert (plain.checkpoint.keep, plain.checkpoint.monitor, plain.trainer.max_steps) == (1, None, 200)
    assert (typed.checkpoint.keep, typed.trainer.max_steps) == (5, 80)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "nodes=1,2,4"),
        (["nodes=0"], "above 0"),
        (["nodes=1,two"], "above 0"),
        (["nodes=2,1,2"], "different integers"),
        (["nodes=1,2", "nodes=4"], "typed twice"),
        (["nodes=1,2", "scaling=weak", "lr=sqrt", "lr=keep"], "typed twice"),
        (["nodes=1,2", "trainer.num_nodes=2"], "nodes="),
        (["nodes=1,2", "run_dir=x"], "out="),
        (["nodes=1,2", "trainer.max_steps=39"], "trainer.max_steps=40"),
        (["nodes=1,2", "scaling=week", "lr=keep"], "scaling=weak"),
        (["nodes=1,2", "scaling=weak"], "lr=keep, lr=linear or lr=sqrt"),
        (["nodes=1,2", "lr=root"], "must be one of"),
        (["nodes=1,2", "lr=sqrt"], "scaling=weak"),
        (["nodes=1,2", "callbacks.throughput=null"], "it measures"),
        (["nodes=1,2", "data.global_batch_size=many"], "type int"),
        (["nodes=1,2,3"], "data.global_batch_size (at nodes=3) must be divisible"),
        (["nodes=3,4", "data.global_batch_size=64", "scaling=weak", "lr=keep"], "data.global_batch_size (at nodes=3)"),
    ],
)
def test_what_makes_no_study_is_rejected(words: list[str], says: str) -> None:
    assert says in rejection(*words)


# The table


def measured(step: float, compute: float, rate: float) -> RunRates:
    return RunRates("samples", rate, step, compute, 0.01, step - compute - 0.01)


def rows_of(rates: Mapping[int, RunRates], *words: str) -> list[scaling_table.ScalingRow]:
    """Return the rows of points of which these have finished, and the others wait."""
    waiting = JobState("pending", "Priority", is_active=True)
    states = [(point, JobState("finished") if point.num_nodes in rates else waiting) for point in points(*words)]
    return scaling_table.make_rows([PointRun(*pair) for pair in states], rates)


def test_efficiency_is_held_against_the_first_measured_point() -> None:
    rates = {1: measured(0.10, 0.08, 640.0), 2: measured(0.08, 0.06, 800.0), 4: measured(0.05, 0.03, 1280.0)}
    rows = rows_of(rates, "nodes=1,2,4")
    assert [row.efficiency for row in rows] == pytest.approx([1, 800 / 1280, 0.5])
    assert [(row.nodes, row.devices, row.global_batch_size) for row in rows] == [(1, 4, 64), (2, 8, 64), (4, 16, 64)]
    rows = rows_of({2: rates[2], 4: rates[4]}, "nodes=1,2,4")  # the first one waits
    assert [row.efficiency for row in rows] == [None, 1.0, pytest.approx(0.8)]
    assert [row.state for row in rows] == ["pending (Priority)", "finished", "finished"]
    assert "efficiency, % of nodes=2" in scaling_table.format_rows(rows)[0], "not of the first point, which is unknown"


def test_the_table_has_the_digits_that_people_compare() -> None:
    assert [scaling_table.format_number(value) for value in (None, 0, 2, 0.0042426, 1234567.8, 0.91234)] == [
        "-", "0", "2", "0.004243", "1234568", "0.9123",
    ]  # fmt: skip
    rows = rows_of({1: measured(0.10, 0.08, 640.0), 2: measured(0.08, 0.06, 1.5e6)}, "nodes=1,2,4")
    head, *lines = scaling_table.format_rows(rows)
    assert head.split()[:5] == ["nodes", "devices", "batch", "lr", "samples/s"] and head.endswith("state")
    assert lines[0].split() == ["1", "4", "64", "0.003", "640", "100", "100", "80", "10", "10", "finished"]
    assert "1500000" in lines[1]
    assert lines[2].split() == ["4", "16", "64", "0.003", *"------", "pending", "(Priority)"]
    assert max(map(len, lines)) <= 120
    written = list(csv.DictReader(io.StringIO(scaling_table.to_csv(rows))))
    assert written[1]["rate_per_second"] == "1500000.0" and written[2]["rate_per_second"] == ""


def test_the_charts_show_what_was_measured() -> None:
    rates = {1: measured(0.1, 0.08, 640.0), 4: RunRates("samples", 1280.0, 0.05, 0.03, None, None)}
    rate, efficiency, step = scaling_table.make_charts(rows_of(rates, "nodes=1,2,4"))
    assert [(series.name, list(series.points)) for series in rate.series] == [
        ("measured", [(1, 640.0), (4, 1280.0)]),
        ("ideal", [(1, 640.0), (4, 2560.0)]),
    ]
    assert next(list(series.points) for series in efficiency.series) == [(1, 100.0), (4, 50.0)]
    assert {series.name: len(series.points) for series in step.series} == {
        "step": 2,
        "compute": 2,
        "data": 1,
        "other": 1,
    }


# What a run has measured


def leave(
    run_dir: Path,
    times: Sequence[float],
    batch: int = 64,
    unit: str = "samples",
    every: int = 10,
    parts: Sequence[str] = PARTS,
) -> None:
    """Write the curves of a run as its loggers do: step times of windows, with points a minute apart."""
    from torch.utils.tensorboard.writer import SummaryWriter

    points, half = list(enumerate(times)), len(times) // 2
    for part, of_attempt in enumerate((points[:half], points[half:])):  # a file each
        with SummaryWriter(str(run_dir / "tensorboard"), filename_suffix=f".{part}") as writer:
            for number, seconds in of_attempt:
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
    rates = run_rates.read_rates(tmp_path)
    assert rates is not None and rates.unit == "samples"
    by_reader = {part: scalars(tmp_path, f"perf/{part}_seconds") for part in PARTS}
    at = by_reader["step"].index(rates.step_seconds)
    assert rates.step_seconds == median_low(by_reader["step"][1:]) == pytest.approx(0.3)
    for part in PARTS:
        assert getattr(rates, f"{part}_seconds") == by_reader[part][at]
    assert rates.rate_per_second == scalars(tmp_path, "perf/samples_per_second")[at] == pytest.approx(64 / 0.3)


def test_a_run_without_two_windows_has_measured_nothing(tmp_path: Path) -> None:
    assert run_rates.read_rates(tmp_path) is None
    leave(tmp_path, [9.0])
    assert run_rates.read_rates(tmp_path) is None


def test_a_run_whose_rate_is_not_known_has_measured_nothing(tmp_path: Path) -> None:
    leave(tmp_path, [9.0, 0.3, 0.3], unit="")
    assert run_rates.read_rates(tmp_path) is None


def test_a_wait_that_was_not_measured_is_no_number(tmp_path: Path) -> None:
    leave(tmp_path, [9.0, 0.3, 0.3], parts=("step", "compute"))
    rates = run_rates.read_rates(tmp_path)
    assert rates and rates.compute_seconds == pytest.approx(0.21) and rates.data_seconds is rates.other_seconds is None


@pytest.mark.parametrize("damage", ["cut short", "overwritten"])
def test_an_events_file_that_a_crash_damaged_counts_as_far_as_it_goes(tmp_path: Path, damage: str) -> None:
    leave(tmp_path, [9.0, 0.3, 0.3, 0.3], unit="tokens")
    last = max((tmp_path / "tensorboard").iterdir())
    if damage == "cut short":
        os.truncate(last, last.stat().st_size - 5)
    else:
        last.write_bytes(last.read_bytes()[:-9] + b"no event.")
    rates = run_rates.read_rates(tmp_path)
    assert rates and (rates.step_seconds, rates.unit) == (pytest.approx(0.3), "tokens")


# State of a job


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
    one, other = scaling_jobs.read_runs(points("nodes=1,2", f"out={tmp_path}"))
    assert (one.state.name, one.has_failed, one.is_finished) == (word, failed, word == "finished")
    assert other.state.name == "not submitted"
    assert len(asked) <= 1  # one query to the scheduler for all points
    assert ("Priority" in one.short_state) == (noted == ["submitted"] and word == "pending")


def test_a_run_that_ends_while_the_scheduler_is_asked_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue(tmp_path / "nodes-1", "17")
    monkeypatch.setattr(
        scaling_jobs.job_states, "query_states", lambda *_, **__: end(tmp_path / "nodes-1", "finished") or {}
    )
    (one,) = scaling_jobs.read_runs(points("nodes=1", f"out={tmp_path}"))
    assert one.is_finished and not one.has_failed


@pytest.mark.parametrize(
    ("word", "is_other"),
    [
        ("model.optimizer.lr=0.1", True),
        ("trainer.max_steps=80", True),
        ("cluster.time=2:00:00", False),
        ("cluster=leonardo", True),
    ],
)
def test_a_folder_with_another_study_is_rejected(tmp_path: Path, word: str, is_other: bool) -> None:
    words = ["nodes=1,2", f"out={tmp_path}"]
    (point, _) = points(*words)
    queue(point.run_dir, "17")
    frozen_config.create_exclusively(point.run_dir, point.cfg, words=point.overrides)
    scaling_jobs.reject_other_study(points(*words))
    if is_other:
        with pytest.raises(ConfigError, match=rf"{word.partition('=')[0]}(.name)?: .*\n  Try: out=<a new folder>"):
            scaling_jobs.reject_other_study(points(*words, word))
    else:
        scaling_jobs.reject_other_study(points(*words, word))


def queue(run_dir: Path, job: str | None) -> None:
    """Record a submission as submit.py does."""
    run_dir.mkdir(parents=True, exist_ok=True)
    error = None if job else "not submitted: the queue is full"
    note = {"time": time.time(), "scheduler": "slurm", "job": job, "jobs": [job] if job else [], "error": error}
    (run_dir / "submitted.json").write_text(json.dumps(note))
    (run_dir / "job.sh").touch()


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


def test_nothing_is_queued_where_one_point_cannot_run(tool: Tool) -> None:
    for words, says in (
        (["nodes=1,2,3", "data.global_batch_size=64"], "data.global_batch_size=48 or data.global_batch_size=72"),
        (["nodes=1,2,4", "cluster.max_nodes=2"], "trainer.num_nodes (at nodes=4) must be at most 2"),
    ):
        code, said = tool.type(*words)
        assert (code, tool.jobs(), tool.folder.exists()) == (2, 0, False), said
        assert says in said and "Traceback" not in said


def test_a_folder_that_cannot_be_is_told_first(tool: Tool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", Path("/dev/null/x")):
        code, said = tool.type("nodes=1", f"out={out}")
        assert (code, tool.jobs()) == (2, 0), said
        assert "ConfigError: out must be a folder that can be written; got" in said and "run_dir" not in said


def test_without_a_scheduler_nothing_is_left(tool: Tool) -> None:
    tool.environ["PATH"] = os.path.dirname(sys.executable)
    code, said = tool.type("nodes=1,2")
    assert (code, tool.folder.exists()) == (2, False) and "ConfigError: sbatch" in said, said
    assert "--dry-run" in said
    code, said = tool.type("nodes=2,4", "--dry-run")
    assert (code, tool.folder.exists()) == (0, False) and "#SBATCH --nodes=2\n" in said, said
    assert [line.split()[0] for line in said.splitlines()[:3]] == ["nodes", "2", "4"]


def test_a_cluster_without_a_scheduler_is_told_before_what_its_file_does_not_say(tool: Tool) -> None:
    code, said = tool.type("nodes=1,2,4,8", "cluster=local")
    assert (code, tool.folder.exists()) == (2, False), said
    assert said.startswith("ConfigError: cluster (at nodes=1) must be a cluster with a scheduler; got local.\n")
    assert "trainer.devices" not in said


@pytest.mark.parametrize("kept", [False, True])
def test_what_to_type_for_a_point_that_failed(tool: Tool, kept: bool) -> None:
    tool.says(job17="RUNNING")
    assert tool.type("nodes=1", "--no-wait")[0] == 0
    run_dir = tool.folder / "nodes-1"
    end(run_dir, "failed")
    if kept:
        final = on_disk.checkpoint_path(run_dir, 40)
        on_disk.publish(on_disk.make_part_folder(final), final, files={}, details={"step": 40, "attempt": 1})
    tool.says()
    code, said = tool.type("nodes=1")
    assert code == 1 and "nodes=1 failed: it ran out of memory" in said, said
    start = "from its last checkpoint" if kept else "from the first step"
    assert f"{start}: python tools/scale.py" in said and "nodes=1 --retry-failed\n" in said, said
    assert f"rm -r {run_dir}, then python tools/scale.py" in said


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
    assert "task 5: Killed" in said and "--retry-failed" in said
    rows = list(csv.DictReader((tool.folder / "scaling.csv").open()))
    assert [(row["nodes"], row["state"], row["efficiency"]) for row in rows] == [
        ("1", "finished", "1.0"),
        ("2", "failed", ""),
    ]

    code, said = tool.type("nodes=1,2,4", "cluster.time=2:00:00", "--retry-failed", "--no-wait")  # and one more point
    assert (tool.jobs(), tool.runs()) == (4, ["nodes-1", "nodes-2", "nodes-4"]), said
    for nodes in (2, 4):
        assert "#SBATCH --time=02:00:00\n" in (tool.folder / f"nodes-{nodes}" / "job.sh").read_text()
        leave(tool.folder / f"nodes-{nodes}", [9.0, 0.3 / nodes, 0.3 / nodes, 0.3 / nodes])
        end(tool.folder / f"nodes-{nodes}", "finished")
    code, said = tool.type("nodes=1,2,4")
    assert (code, tool.jobs()) == (0, 4), said
    rows = list(csv.DictReader((tool.folder / "scaling.csv").open()))
    assert [float(row["efficiency"]) for row in rows] == pytest.approx([1, 1, 1])
    assert (tool.folder / "scaling.html").read_text().count("<figure>") == 3

    code, said = tool.type("nodes=1,2,4", "seed=2", "--no-wait")
    assert (code, tool.jobs()) == (2, 4) and "another config" in said and "seed: 1 -> 2" in said, said


@pytest.mark.slow
def test_a_point_that_a_full_queue_rejects_is_queued_by_the_next_call(tool: Tool) -> None:
    tool.says(job17="RUNNING", job18="RUNNING")
    (tool.bin / "sbatch.calls").touch()
    full = 'if [ "$(wc -l <"$0.calls")" -ge 1 ] && [ ! -e "$0.room" ]; then echo QOSMaxSubmitJob >&2; exit 1; fi\n'
    tool.stub("sbatch", full + 'echo job >>"$0.calls"; echo $((16 + $(wc -l <"$0.calls")))')
    code, said = tool.type("nodes=1,2", "--no-wait")
    assert (code, tool.jobs()) == (2, 1) and "QOSMaxSubmitJob" in said
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
