"""Test tools/scale.py on a real Slurm: called again it submits nothing, and its values equal those of TensorBoard."""

import csv
import json
import subprocess
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
    """Two calls of the tool, the second one while jobs are running; and a report when all jobs have finished."""

    desk: Desk
    calls: list[subprocess.CompletedProcess[str]]
    report: subprocess.CompletedProcess[str]

    @property
    def folder(self) -> Path:
        return self.desk.project / "study"

    def rows(self) -> list[dict[str, str]]:
        return list(csv.DictReader((self.folder / "scaling.csv").open()))


@pytest.fixture(scope="module")
def study(slurm, bake) -> Study:
    desk = Desk(slurm, made_for_tests(bake(cluster="local")))
    calls = [desk.python("tools/scale.py", *WORDS) for _ in range(2)]
    folder = desk.project / "study"
    for nodes in NODES:
        (folder / f"nodes-{nodes}" / "go").touch()
    for nodes in NODES:
        slurm.wait(job(folder, nodes), 240)
    return Study(desk, calls, desk.python("report.py", str(folder)))


def job(folder: Path, nodes: int) -> str:
    return json.loads((folder / f"nodes-{nodes}" / "submitted.json").read_text())["job"]


def points(run_dir: Path, tag: str) -> dict[int, float]:
    """Return a curve of TensorBoard by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def test_called_again_it_submits_nothing(study):
    first, second = study.calls
    assert first.returncode == second.returncode == 0, first.stdout + first.stderr + second.stdout + second.stderr
    assert all(f"nodes={nodes}:\njob {job(study.folder, nodes)}\n" in first.stdout for nodes in NODES)
    assert "job " not in second.stdout and second.stdout.count("it has a run already") == len(NODES)
    assert sorted(path.name for path in study.folder.glob("nodes-*")) == ["nodes-1", "nodes-2", "nodes-4"]


def test_its_numbers_are_those_of_the_events_files(study):
    rows = study.rows()
    assert [(int(row["nodes"]), int(row["global_batch_size"])) for row in rows] == [(1, 64), (2, 64), (4, 64)]
    printed = [line.split() for line in study.report.stdout.splitlines() if line.strip()[:1].isdigit()]
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


def test_it_leaves_a_page(study):
    assert (study.folder / "scaling.html").read_text().count("<figure>") == 3
