"""Test tools/scale.py on a real Slurm: it resumes after an interruption, and its values equal those of TensorBoard."""

import csv
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

import pytest
from slurm_project import QUIET, Desk, made_for_tests

pytestmark = pytest.mark.soak

NODES = (1, 2, 4)
WORDS = ["nodes=1,2,4", "trainer=ddp", "trainer.devices=1", "cluster=test", *QUIET, "trainer.log_every_n_steps=5"]
WORDS += ["trainer.max_steps=40", "out=study"]
WORDS += ["callbacks.witness.fault=hold"]  # hold from the second step on, until `go` exists
TIMES = [f"{part}_seconds" for part in ("step", "compute", "data", "other")]
CURVES = {"rate_per_second": "samples_per_second"} | {name: name for name in TIMES}  # column: curve


@dataclass(frozen=True)
class Study:
    """Three calls of the tool: an interrupted one, the same again, and once more when all jobs had finished."""

    desk: Desk
    interrupted: subprocess.Popen[str]
    said: tuple[str, str]  # output before and after Ctrl-C
    left: list[str]  # states of the jobs after the interruption
    calls: list[subprocess.CompletedProcess[str]]

    @property
    def folder(self) -> Path:
        return self.desk.project / "study"

    def rows(self) -> list[dict[str, str]]:
        return list(csv.DictReader((self.folder / "scaling.csv").open()))


@pytest.fixture(scope="module")
def study(slurm, bake) -> Study:
    desk = Desk(slurm, made_for_tests(bake(cluster="local")))
    first = subprocess.Popen(
        [sys.executable, "tools/scale.py", *WORDS], cwd=desk.project, env=desk.env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's shell ignores it
    )  # fmt: skip
    before = ""
    while "nodes=2 running, nodes=4 running" not in before:
        line = first.stdout.readline()
        assert line, before + first.stderr.read()
        before += line
    os.killpg(first.pid, signal.SIGINT)  # as a terminal does
    _, after = first.communicate(timeout=30)
    folder = desk.project / "study"
    left = [slurm.show(job(folder, nodes))["JobState"] for nodes in NODES]
    for nodes in NODES[1:]:
        (folder / f"nodes-{nodes}" / "go").touch()
    calls = [desk.python("tools/scale.py", *WORDS) for _ in range(2)]
    return Study(desk, first, (before, after), left, calls)


def job(folder: Path, nodes: int) -> str:
    return json.loads((folder / f"nodes-{nodes}" / "submitted.json").read_text())["job"]


def points(run_dir: Path, tag: str) -> dict[int, float]:
    """Return a curve of TensorBoard by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def test_interrupted_it_ends_no_job_and_goes_on(study):
    before, after = study.said
    assert study.interrupted.returncode == 130 and "Traceback" not in after, after
    assert "queued jobs keep running" in after and "python tools/scale.py nodes=1,2,4" in after
    assert set(study.left[1:]) == {"RUNNING"} and study.left[0] in ("RUNNING", "COMPLETING", "COMPLETED")
    second = study.calls[0]
    assert second.returncode == 0 and "job " not in second.stdout, second.stdout + second.stderr
    assert all(f"nodes={nodes}:\njob {job(study.folder, nodes)}\n" in before for nodes in NODES)
    assert sorted(path.name for path in study.folder.glob("nodes-*")) == ["nodes-1", "nodes-2", "nodes-4"]


def test_its_numbers_are_those_of_the_events_files(study):
    rows = study.rows()
    assert [(int(row["nodes"]), int(row["global_batch_size"])) for row in rows] == [(1, 64), (2, 64), (4, 64)]
    printed = [line.split() for line in study.calls[0].stdout.splitlines() if line.strip()[:1].isdigit()]
    for row, cells in zip(rows, printed[-len(rows) :], strict=True):
        run_dir = study.folder / f"nodes-{row['nodes']}"
        times = points(run_dir, "perf/step_seconds")
        measured = dict(list(times.items())[1:])  # without the first window, in which the jobs were held
        assert len(times) == 8 and float(row["step_seconds"]) == median_low(measured.values())
        step = next(step for step, seconds in measured.items() if seconds == float(row["step_seconds"]))
        for column, tag in CURVES.items():
            assert float(row[column]) == points(run_dir, f"perf/{tag}")[step]
        assert (cells[0], cells[-1]) == (row["nodes"], "finished")
        assert float(cells[4]) == pytest.approx(float(row["rate_per_second"]), rel=1e-3)
        assert float(cells[6]) == pytest.approx(1000 * float(row["step_seconds"]), rel=1e-2)
        first = float(rows[0]["rate_per_second"])
        assert float(row["efficiency"]) == float(row["rate_per_second"]) / int(row["devices"]) / first


def test_points_of_strong_scaling_end_at_the_same_metric(study):
    values = [points(study.folder / f"nodes-{nodes}", "test/accuracy")[40] for nodes in NODES]
    assert values == pytest.approx([values[0]] * 3, abs=0.006)  # one of 179 images
    losses = [points(study.folder / f"nodes-{nodes}", "step/loss") for nodes in NODES]
    assert list(losses[2].values()) == pytest.approx(list(losses[0].values()), abs=1e-3)


def test_done_it_submits_nothing_and_shows_the_same(study):
    second, third = (call.stdout.splitlines() for call in study.calls)
    assert study.calls[1].returncode == 0 and "job " not in study.calls[1].stdout
    assert third[-5:] == second[-5:] and len(study.desk.slurm.call("squeue", "--noheader").stdout.split()) == 0


def test_it_leaves_a_page(study):
    assert (study.folder / "scaling.html").read_text().count("<figure>") == 3
