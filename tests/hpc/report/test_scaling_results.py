"""Check what a report shows of a scaling study: the measured speed, the table, the charts, and what to type."""

import csv
import io
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_low

import pytest
from fork import scalars

from hpc.report import overview, scaling_results, scaling_table
from hpc.report.scaling_table import RunRates
from hpc.run import attempt_log
from hpc.studies import scaling_file
from hpc.studies.scaling_file import PointSizes

BEGAN = 1_800_000_000.0
PARTS = ("step", "compute", "data", "other")
POINTS = [PointSizes(nodes, 4 * nodes, 64, 0.003) for nodes in (1, 2, 4)]


# The table


def measured(step: float, compute: float, rate: float) -> RunRates:
    return RunRates("samples", rate, step, compute, 0.01, step - compute - 0.01)


def rows_of(rates: Mapping[int, RunRates]) -> list[scaling_table.ScalingRow]:
    """Return the rows of three points of which these have finished, and the others wait."""
    states = {point.nodes: "finished" if point.nodes in rates else "pending (Priority)" for point in POINTS}
    return scaling_table.make_rows(POINTS, states, rates)


def test_efficiency_is_held_against_the_first_measured_point() -> None:
    rates = {1: measured(0.10, 0.08, 640.0), 2: measured(0.08, 0.06, 800.0), 4: measured(0.05, 0.03, 1280.0)}
    rows = rows_of(rates)
    assert [row.efficiency for row in rows] == pytest.approx([1, 800 / 1280, 0.5])
    assert [(row.nodes, row.devices, row.global_batch_size) for row in rows] == [(1, 4, 64), (2, 8, 64), (4, 16, 64)]
    rows = rows_of({2: rates[2], 4: rates[4]})  # the first one waits
    assert [row.efficiency for row in rows] == [None, 1.0, pytest.approx(0.8)]
    assert [row.state for row in rows] == ["pending (Priority)", "finished", "finished"]
    assert "efficiency, % of nodes=2" in scaling_table.format_rows(rows)[0], "not of the first point, which is unknown"


def test_the_table_has_the_digits_that_people_compare() -> None:
    assert [scaling_table.format_number(value) for value in (None, 0, 2, 0.0042426, 1234567.8, 0.91234)] == [
        "-", "0", "2", "0.004243", "1234568", "0.9123",
    ]  # fmt: skip
    rows = rows_of({1: measured(0.10, 0.08, 640.0), 2: measured(0.08, 0.06, 1.5e6)})
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
    rate, efficiency, step = scaling_table.make_charts(rows_of(rates))
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
    rates = scaling_table.read_rates(tmp_path)
    assert rates is not None and rates.unit == "samples"
    by_reader = {part: scalars(tmp_path, f"perf/{part}_seconds") for part in PARTS}
    at = by_reader["step"].index(rates.step_seconds)
    assert rates.step_seconds == median_low(by_reader["step"][1:]) == pytest.approx(0.3)
    for part in PARTS:
        assert getattr(rates, f"{part}_seconds") == by_reader[part][at]
    assert rates.rate_per_second == scalars(tmp_path, "perf/samples_per_second")[at] == pytest.approx(64 / 0.3)


def test_a_run_without_two_windows_has_measured_nothing(tmp_path: Path) -> None:
    assert scaling_table.read_rates(tmp_path) is None
    leave(tmp_path, [9.0])
    assert scaling_table.read_rates(tmp_path) is None


def test_a_run_whose_rate_is_not_known_has_measured_nothing(tmp_path: Path) -> None:
    leave(tmp_path, [9.0, 0.3, 0.3], unit="")
    assert scaling_table.read_rates(tmp_path) is None


def test_a_wait_that_was_not_measured_is_no_number(tmp_path: Path) -> None:
    leave(tmp_path, [9.0, 0.3, 0.3], parts=("step", "compute"))
    rates = scaling_table.read_rates(tmp_path)
    assert rates and rates.compute_seconds == pytest.approx(0.21) and rates.data_seconds is rates.other_seconds is None


@pytest.mark.parametrize("damage", ["cut short", "overwritten"])
def test_an_events_file_that_a_crash_damaged_counts_as_far_as_it_goes(tmp_path: Path, damage: str) -> None:
    leave(tmp_path, [9.0, 0.3, 0.3, 0.3], unit="tokens")
    last = max((tmp_path / "tensorboard").iterdir())
    if damage == "cut short":
        os.truncate(last, last.stat().st_size - 5)
    else:
        last.write_bytes(last.read_bytes()[:-9] + b"no event.")
    rates = scaling_table.read_rates(tmp_path)
    assert rates and (rates.step_seconds, rates.unit) == (pytest.approx(0.3), "tokens")


# The folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a study of a finished, a failed and an unsubmitted point, where no scheduler answers."""
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    folder = tmp_path / "study"
    for nodes, outcome in {1: "finished", 2: "failed"}.items():
        run_dir = folder / f"nodes-{nodes}"
        run_dir.mkdir(parents=True)
        (run_dir / "job.sh").touch()
        (run_dir / "config.yaml").write_text("name: digits\n")
        note = {
            "time": time.time() - 60,
            "scheduler": "slurm",
            "job": f"1{nodes}",
            "jobs": [f"1{nodes}"],
            "error": None,
        }
        (run_dir / "submitted.json").write_text(json.dumps(note))
        attempt_log.record_start(run_dir, 1, environ={"SLURM_JOB_ID": f"1{nodes}"}, hosts=["n1"], world_size=4)
        why = "it ran out of memory" if outcome == "failed" else ""
        attempt_log.record_end(run_dir, None, attempt=1, step=200, outcome=outcome, why=why)
    leave(folder / "nodes-1", [9.0, 0.3, 0.3, 0.3])
    scaling_file.save_points(folder, POINTS)
    return folder


def test_a_report_shows_the_runs_and_below_them_the_points(folder: Path) -> None:
    lines = overview.write_report_or_table([folder])
    assert lines[0].split()[:3] == ["run", "job", "state"] and "it ran out of memory" in "\n".join(lines)
    table = lines[lines.index("") + 1 :]
    assert [line.split()[0] for line in table[:4]] == ["nodes", "1", "2", "4"]
    assert [line.rsplit("  ", 1)[1].strip() for line in table[1:4]] == ["finished", "failed", "not submitted"]
    assert table[4:] == [
        f"to go on with nodes-2: python submit.py resume={folder / 'nodes-2'}",
        "nodes-4 is not submitted: the command of the study submits it",
        f"table: {folder}/scaling.csv",
        f"page: {folder}/scaling.html",
    ]
    rows = list(csv.DictReader((folder / "scaling.csv").open()))
    assert [(row["nodes"], row["state"], row["efficiency"]) for row in rows] == [
        ("1", "finished", "1.0"), ("2", "failed", ""), ("4", "not submitted", ""),
    ]  # fmt: skip
    assert (folder / "scaling.html").read_text().count("<figure>") == 3
    assert "" not in overview.write_report_or_table([folder.parent]), "only where it is asked for"


def test_a_point_that_has_measured_nothing_is_named(folder: Path) -> None:
    for file in (folder / "nodes-1" / "tensorboard").iterdir():
        file.unlink()
    assert "nodes-1 has finished, but has no readable curves of perf/" in scaling_results.point_lines(folder)
    assert not (folder / "scaling.csv").exists()


def test_a_folder_that_cannot_be_written_still_shows_the_table(folder: Path) -> None:
    (folder / "scaling.csv").mkdir()
    *lines, table, _ = scaling_results.point_lines(folder)
    assert lines[0].split()[0] == "nodes" and table == f"cannot write {folder}/scaling.csv: Is a directory"


def test_a_link_in_the_place_of_a_file_is_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    for name in ("scaling.csv", "scaling.html"):
        (folder / name).symlink_to(tmp_path / "mine")
    scaling_results.point_lines(folder)
    assert (tmp_path / "mine").read_text() == "precious" and not (folder / "scaling.csv").is_symlink()


@pytest.mark.parametrize("text", [
    "", "{", "3", "[3]", "[[]]", '["x"]', '[{"nodes": 1}]', "\0", "[" * 9999,
    '[{"nodes": "1", "devices": 4, "global_batch_size": 64, "learning_rate": 0.1}]',
    '[{"nodes": 1, "devices": 0, "global_batch_size": 64, "learning_rate": 0.1}]',
    '[{"nodes": 1, "devices": 4, "global_batch_size": 64, "learning_rate": "x"}]',
])  # fmt: skip
def test_a_damaged_file_is_named(text: str, folder: Path) -> None:
    (folder / scaling_file.FILE).write_text(text)
    lines = overview.write_report_or_table([folder])
    assert lines[0].split()[:3] == ["run", "job", "state"]
    assert any(f"{scaling_file.FILE} must be a file of tools/scale.py" in line for line in lines)
