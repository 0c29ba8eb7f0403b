"""Check page and terminal output of `python report.py RUN_DIR`, for intact and damaged run directories."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from html.parser import HTMLParser
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fork import ENVIRON, PROJECT
from rich.console import Console
from torch.utils.tensorboard.writer import SummaryWriter

from hpc.charts import chart
from hpc.charts import page as charts_page
from hpc.config import compose, freezing
from hpc.monitor import event_files, node_usage
from hpc.report import blocks, latest_metric, overview, page, run_charts, run_data, scaling_table, terminal
from hpc.run import attempt_log, causes, history

BEGAN = 1_790_000_000.0
WORDS = ["trainer=ddp", "cluster=juwels_booster", "cluster.gpu=A100", "trainer.devices=2", "trainer.num_nodes=2"]
SECTIONS = [
    "What limits the run", "Curves", "Throughput", "Where the time goes", "Use of the nodes",
    "Attempts", "Environment", "Config",
]  # fmt: skip


@pytest.fixture(autouse=True)
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for all commands on the PATH, empty at first."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "bin"


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of 20 minutes on two nodes of two GPUs, restarted once; half of its training waits for data."""
    return made(tmp_path / "digits", monkeypatch)


@cache
def config_text() -> str:
    return freezing.to_frozen_yaml(compose.compose_overrides(WORDS, personal=False))


def stub(commands: Path, name: str, body: str) -> None:
    (commands / name).write_text(f"#!/bin/bash\n{body}\n")
    (commands / name).chmod(0o755)


def made(run_dir: Path, monkeypatch: pytest.MonkeyPatch, hosts: Sequence[str] = ("n1", "n2")) -> Path:
    """Write a run directory as a run does."""
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(config_text())
    (run_dir / "made_by.json").write_text(json.dumps({"commit": "c0ffee", "packages": ["torch==2.13.0", "yaml==6"]}))
    for number, (begin, end, outcome) in enumerate([(0, 600, "continue"), (700, 1300, "finished")], 1):
        monkeypatch.setattr(time, "time", lambda begin=begin: BEGAN + begin + 30)
        attempt_log.record_start(
            run_dir, number, environ={"SLURM_JOB_ID": "17"}, hosts=list(hosts), world_size=4, gpus_per_node=2
        )
        monkeypatch.setattr(time, "time", lambda end=end: BEGAN + end)
        attempt_log.record_end(
            run_dir,
            None,
            attempt=number,
            step=end,
            outcome=outcome,
            why="time limit" if number == 1 else "",
            metrics={"test/accuracy": 0.91},
        )
        for what, since, until in [
            ("start", 0, 60),
            ("validation", 300, 330),
            ("checkpoint", 330, 333),
            ("epoch", 60, 333),
        ]:
            phase(run_dir, what, begin + since, begin + until, number)
    for host in hosts:
        sampled(run_dir, host)
    curves(run_dir)
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(run_dir.parent / "bin"))
    return run_dir


def phase(run_dir: Path, what: str, begin: float, end: float, attempt: int = 1) -> None:
    (run_dir / "monitor").mkdir(exist_ok=True)
    with (run_dir / "monitor" / "phases.jsonl").open("a") as stream:
        note = {"what": what, "begin": BEGAN + begin, "end": BEGAN + end, "attempt": attempt, "step": 1}
        stream.write(json.dumps(note) + "\n")


def sampled(run_dir: Path, host: str) -> Path:
    """Write a sample every 10 seconds: GPUs are idle during startup and at 50 % in training."""
    file = node_usage.samples_file(run_dir, host)
    file.parent.mkdir(exist_ok=True)
    rows = [
        sample(BEGAN + begin + when, attempt, [0, 1.5, 100, 30] if when <= 60 else [52, 12.25, 300, 61])
        for attempt, begin in ((1, 0), (2, 700))
        for when in range(10, 601, 10)
    ]
    file.write_text("".join(rows))
    return file


def sample(time: float, attempt: int, gpu: list[float]) -> str:
    """Return a line of samples, with two GPUs that do the same."""
    metrics = ("percent", "memory_gb", "watts", "celsius")
    gpus = {f"gpu{i}_{name}": value for i in (0, 1) for name, value in zip(metrics, gpu, strict=True)}
    values = {"time": time, "attempt": attempt, "cpu_percent": 35.5, "memory_gb": 80.1, "net_in_mbs": None}
    return json.dumps(values | gpus) + "\n"


def edit_samples(file: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        edit(row)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def curves(run_dir: Path, steps: int = 100) -> Path:
    """Write curves with the writer that runs use."""
    writer = SummaryWriter(str(run_dir / "tensorboard"))
    for step in range(9, steps, 10):
        split = {"step": 0.2, "compute": 0.09, "data": 0.1, "other": 0.01}
        numbers = {
            "train/loss": 3 - step / 50,
            "lr": 1e-3,
            "grad_norm": 1.0,
            "perf/samples_per_second": 320.0,
            "perf/mfu": 0.2,
        }
        for tag, value in (numbers | {f"perf/{part}_seconds": spent for part, spent in split.items()}).items():
            writer.add_scalar(tag, value, step)
    writer.add_scalar("val/loss", 1.5, steps)
    writer.add_text("config", "```yaml\n" + "x" * 100_000)
    writer.close()
    (file,) = (run_dir / "tensorboard").iterdir()
    return file


class Reader(HTMLParser):
    """A parser that collects a page's text and links, and rejects HTML that is not well-formed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.wants: list[str] = []
        self.texts: list[tuple[str, str]] = []  # the heading above, text
        self.heading = ""
        self.num_scripts = 0  # that are executed
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.num_scripts += tag == "script" and ("type", "application/json") not in attrs
        assert not [name for name, _ in attrs if name.startswith("on")]
        self.wants += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action", "data")]
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h1", "h2"):
            self.heading = data
        elif self.open and self.open[-1] not in ("style", "script") and data.strip():
            self.texts.append((self.heading, data.strip()))

    def under(self, heading: str) -> str:
        return " | ".join(text for above, text in self.texts if above == heading)


def reported(run_dir: Path) -> tuple[Reader, list[str]]:
    """Return the page and the lines of the terminal."""
    (run,) = history.find_runs(run_dir)
    lines = overview.write_report(run)
    return Reader((run_dir / "report.html").read_text()), lines


def missing(run_dir: Path) -> list[str]:
    (run,) = history.find_runs(run_dir)
    return run_data.read_run_data(run).notes


def used(data: run_data.RunData) -> chart.Chart:
    """Return the chart of GPU use."""
    return run_charts.usage_charts(data.nodes, data.phases, data.spans)[0]


# -- A whole run --


def test_the_sections_of_the_page_are_in_order(run_dir: Path) -> None:
    read, lines = reported(run_dir)
    assert list(dict.fromkeys(heading for heading, _ in read.texts if heading in SECTIONS)) == SECTIONS
    assert [line for line in lines if line in SECTIONS] == SECTIONS[:-1]  # nobody reads a config here
    assert lines[0] == "digits: finished"
    assert lines[-1] == f"page: {run_dir}/report.html"
    assert read.tags.count("h1") == 1
    assert "missing or damaged" not in "".join(text for _, text in read.texts)


def test_the_heading_is_the_name_and_the_whole_state() -> None:
    html = page.render_html([blocks.Section("digits: pending (Not Running: too busy)", [])]).decode()
    assert "<h1>digits <span>pending (Not Running: too busy)</span></h1>" in html


def test_its_numbers_are_those_of_the_files(run_dir: Path) -> None:
    statistics = run_data.read_run_data(history.find_runs(run_dir)[0]).statistics
    assert statistics.phase_seconds == {
        "start-up": 120, "training": 1200 - 120 - 60 - 6, "validation": 60, "checkpoints": 6
    }  # fmt: skip
    assert statistics.step_seconds == pytest.approx({"step": 0.2, "compute": 0.09, "data": 0.1, "other": 0.01})
    assert statistics.gpu_percent == 52  # without the samples of startup
    assert statistics.gpu_memory_gb == 12.25
    assert statistics.gpu_capacity_gb == 42.3
    assert statistics.cpu_percent == 35.5
    assert statistics.mfu == pytest.approx(0.2)
    assert missing(run_dir) == []


def test_the_steps_of_an_epoch_come_from_its_phases(run_dir: Path) -> None:
    lines = (run_dir / "monitor" / "phases.jsonl").read_text().splitlines()
    phases = [json.loads(line) for line in lines]
    steps = {"epoch": iter((40, 80))}
    for phase in phases:
        if phase["what"] in steps:
            phase["step"] = next(steps[phase["what"]])
    (run_dir / "monitor" / "phases.jsonl").write_text("".join(json.dumps(phase) + "\n" for phase in phases))
    assert run_data.read_run_data(history.find_runs(run_dir)[0]).statistics.steps_per_epoch == 40
    (run_dir / "monitor" / "phases.jsonl").unlink()
    assert run_data.read_run_data(history.find_runs(run_dir)[0]).statistics.steps_per_epoch == 1300, "that were made"


def test_each_number_of_a_finding_stands_elsewhere_on_the_page(run_dir: Path) -> None:
    read, _ = reported(run_dir)
    elsewhere = " ".join(text for heading, text in read.texts if heading != "What limits the run")
    sentences = read.under("What limits the run")
    numbers = re.findall(r"\d[\d.]* (?:%|ms|s|min|h|GB)(?!\w)", re.sub(r"Try \| [^|]+ \|", "", sentences))
    assert len(numbers) >= 4
    assert [number for number in numbers if number not in elsewhere] == []
    assert "waits for data during 50 %" in sentences


def test_the_energy_is_the_integral_of_the_power(run_dir: Path) -> None:
    # Two nodes of two GPUs, two attempts: 50 s at 100 W, 10 s between them, 530 s at 300 W, and gaps without samples.
    joules = 8 * (50 * 100 + 10 * 200 + 530 * 300)
    assert run_data.read_run_data(history.find_runs(run_dir)[0]).joules == pytest.approx(joules)
    assert f"{joules / 3600:.3g} Wh, of 4 GPU(s)" in reported(run_dir)[0].under("Use of the nodes")


def test_phases_are_marked_in_the_picture_of_the_nodes(run_dir: Path) -> None:
    gpus = used(run_data.read_run_data(history.find_runs(run_dir)[0]))
    assert {series.name for series in gpus.series} == {"n1", "n2"}
    assert [band.name for band in gpus.bands] == [
        name for name in ("start-up", "validation", "checkpoints", "end of an epoch") for _ in range(2)
    ]
    assert (gpus.bands[1].begin, gpus.bands[1].end) == pytest.approx((700 / 60, 760 / 60))
    # No line connects the two attempts.
    assert any(y != y for _, y in gpus.series[0].points)


def test_no_line_leads_from_one_attempt_to_the_next(run_dir: Path) -> None:
    for file in run_dir.glob("monitor/node-*.jsonl"):  # requeued at once
        edit_samples(file, lambda row: row.update(time=row["time"] - (98 if row["attempt"] == 2 else 0)))
    points = used(run_data.read_run_data(history.find_runs(run_dir)[0])).series[0].points
    assert [x for x, y in points if y != y] == pytest.approx([612 / 60])


def test_bars_have_the_scale_of_their_chart() -> None:
    series = [chart.Series("n1", [(0, 99.9), (1, 100.0), (2, 99.95)])]
    ((_, bars, _),) = terminal._curve_rows(chart.Chart("CPU use", "minutes", "%", series, from_zero=True))
    assert bars == "███"
    ((_, bars, _),) = terminal._curve_rows(chart.Chart("loss", "step", "", series))
    assert bars == "▁█▄"


def test_a_table_that_is_too_wide_for_the_terminal_is_wrapped_in_its_cells() -> None:
    hosts, why = "2: " + ", ".join("a-very-long-host-name-of-the-cluster-0001.example.org" for _ in "ab"), "x" * 130
    table = blocks.Table(["", "nodes", "why"], [["1", hosts, why], ["2", "1: n1", ""]])
    console = Console(file=StringIO(), force_terminal=True, color_system=None, width=100)
    lines = list(terminal.section_lines([blocks.Section("title", [table])], console))
    assert len(lines) > 4 and max(map(len, lines)) <= 100
    assert "".join(lines).count("x") == 130 + 2 and "…" not in "".join(lines)


def test_nothing_is_wrapped_or_coloured_in_a_pipe(run_dir: Path, commands: Path) -> None:
    host = "a-very-long-host-name-of-the-cluster-0001.example.org"
    attempt_log.record_start(run_dir, 3, environ={}, hosts=[host, host], world_size=4)
    attempt_log.record_end(run_dir, None, attempt=3, step=1, outcome="failed", why="[bold]no[/bold] [0] " + "x" * 130)
    environ = ENVIRON | {"PATH": str(commands), "TERM": "xterm-256color", "COLUMNS": "80"}
    command = [sys.executable, "report.py", str(run_dir)]
    done = subprocess.run(command, cwd=PROJECT, env=environ, capture_output=True, text=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("  3 ")]
    assert f"2: {host}, {host}" in line and line.endswith("[bold]no[/bold] [0] " + "x" * 130)
    assert "\x1b" not in done.stdout


def test_a_terminal_gets_lines_of_its_width(run_dir: Path, commands: Path) -> None:
    host = "a-very-long-host-name-of-the-cluster-0001.example.org"
    attempt_log.record_start(run_dir, 3, environ={}, hosts=[host, host], world_size=4)
    environ = ENVIRON | {"PATH": str(commands), "TERM": "xterm-256color", "COLUMNS": "70"}
    ours, theirs = pty.openpty()
    command = [sys.executable, "report.py", str(run_dir)]
    with subprocess.Popen(command, cwd=PROJECT, env=environ, stdin=subprocess.DEVNULL, stdout=theirs) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the end of a pseudo-terminal
            while data := os.read(ours, 2**16):
                shown += data
    os.close(ours)
    assert process.returncode == 0
    assert "\x1b[1mAttempts" in shown.decode()
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown.decode()).splitlines()
    assert max(len(line) for line in plain if "page:" not in line) <= 70


def test_the_page_loads_nothing(run_dir: Path) -> None:
    read, _ = reported(run_dir)
    assert set(read.wants) == {"data:,"}
    assert not {"iframe", "img", "object", "embed", "form"} & set(read.tags)
    assert read.num_scripts == 2, "plotly.js and the one that calls it"
    text = (run_dir / "report.html").read_text().replace(charts_page.read_plotly_js().decode(), "")
    assert not re.findall(r"\w+://[^\"' ]+", text)
    assert "url(" not in text and "@import" not in text
    assert "default-src 'none'; script-src 'nonce-" in text and len(text) < 200_000


def test_each_attempt_has_its_reason_after_a_resume_too(run_dir: Path) -> None:
    lines = (run_dir / "attempts.jsonl").read_text().splitlines()
    (run_dir / "attempts.jsonl").write_text("\n".join([lines[0], *lines[2:]]) + "\n")
    (run_dir / "claims").mkdir()
    (run_dir / "claims" / "000001.beat").touch()
    os.utime(run_dir / "claims" / "000001.beat", (BEGAN + 600,) * 2)
    cells = reported(run_dir)[0].under("Attempts")
    assert "10 min | 1 | killed | it recorded no end" in cells, "to the step of its last phase"
    causes.write_cause(run_dir, 1, rank=1, host="n1", error="ValueError: no such label", stack="Traceback")
    read, text = reported(run_dir)
    assert "failed | rank 1 on n1: ValueError: no such label" in read.under("Attempts")
    assert "no such label" in "".join(text)
    assert "no such label" not in read.under("What limits the run"), "the run went on, and finished"


def test_the_first_sentence_explains_why_a_run_failed(run_dir: Path) -> None:
    lines = (run_dir / "attempts.jsonl").read_text().splitlines()
    (run_dir / "attempts.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    why = "loss or gradient was not finite, seen at step 1300"
    attempt_log.record_end(run_dir, None, attempt=2, step=1300, outcome="failed", why=why)
    text = reported(run_dir)[0].under("What limits the run")
    assert text.startswith("Attempt 2 ended at step 1300 (failed): loss or gradient was not finite, seen at step 1300.")
    assert "model.optimizer.lr=" in text
    assert "waits for data" in text


# -- Text of a run directory is escaped --

EVIL = "<script>alert(1)</script>\x1b[2J\x07\u202e\"'&`"


def test_hostile_text_stays_text(run_dir: Path) -> None:
    evil = run_dir.rename(run_dir.with_name("<b>\x1b[2J&amp;"))
    (evil / "config.yaml").write_text(
        (evil / "config.yaml").read_text().replace("name: ddp", f"name: {json.dumps(EVIL)}")
    )
    (evil / "made_by.json").write_text(
        json.dumps({"commit": EVIL, "packages": [EVIL, 3], "modules": [EVIL], "host": [EVIL]})
    )
    attempt_log.record_start(evil, 3, environ={}, hosts=[EVIL], world_size=4)
    attempt_log.record_end(evil, None, attempt=3, step=1, outcome=EVIL, why=EVIL, metrics={EVIL: 1.0})
    (evil / "monitor" / "node-n1.jsonl").rename(node_usage.samples_file(evil, EVIL.replace("/", "")))
    writer = SummaryWriter(str(evil / "tensorboard"))
    writer.add_scalar(EVIL, 1.0, 1)
    writer.close()
    read, lines = reported(evil)
    assert "b" not in read.tags and read.num_scripts == 2
    text = (evil / "report.html").read_text().replace(charts_page.read_plotly_js().decode(), "")
    assert not [char for char in "".join(lines) + text if char in "\x1b\x07\u202e"]
    assert "alert(1)" in read.under("Environment")


# -- Damage --

NO_SAMPLES = "there are no samples of any node: callbacks.monitor is off, or the run ended before the first one"


def cut(file: Path, to: int) -> None:
    os.truncate(file, file.stat().st_size - to)


def test_an_events_file_that_a_crash_cut_off(run_dir: Path) -> None:
    (file,) = (run_dir / "tensorboard").iterdir()
    whole = event_files.read_curves(run_dir / "tensorboard").points
    cut(file, 100_000 + 500)  # truncate the text and the last records before it
    read = event_files.read_curves(run_dir / "tensorboard")
    assert 0 < len(read.points["train/loss"]) <= len(whole["train/loss"])
    assert "val/loss" not in read.points
    (note,) = missing(run_dir)
    assert note.startswith(f"{file.name}: damaged or cut off at byte ") and note.endswith(
        "points before that are shown"
    )
    assert "train/loss" in "\n".join(reported(run_dir)[1])


def test_curves_end_before_a_damaged_record_and_the_page_says_so(run_dir: Path) -> None:
    (file,) = (run_dir / "tensorboard").iterdir()
    content = file.read_bytes()
    whole = event_files.read_curves(run_dir / "tensorboard").points["train/loss"]
    at = content.rindex(b"train/loss") + len(b"train/loss") + 4  # within the four bytes of its last value
    file.write_bytes(content[:at] + bytes([content[at] ^ 0x40]) + content[at + 1 :])
    points = event_files.read_curves(run_dir / "tensorboard").points["train/loss"]
    assert points == whole[:-1] and len(points) == 9, "a value that is wrong is not shown"
    (note,) = missing(run_dir)
    assert note.startswith(f"{file.name}: damaged or cut off at byte ")
    position = int(note.partition("at byte ")[2].split()[0])
    assert 0 < at - position < 100, "at the beginning of that record"
    writer = SummaryWriter(str(run_dir / "tensorboard"), filename_suffix=".x")  # the next attempt's
    writer.add_scalar("train/loss", 0.5, 200)
    writer.close()
    assert event_files.read_curves(run_dir / "tensorboard").points["train/loss"] == [*points, (200, 0.5)]


def test_an_events_file_that_is_a_directory(run_dir: Path) -> None:
    (run_dir / "tensorboard" / "events.out.tfevents.2").mkdir()
    assert missing(run_dir) == ["events.out.tfevents.2 cannot be read: is a directory"]


def test_a_curve_that_becomes_nan_is_marked(run_dir: Path) -> None:
    writer = SummaryWriter(str(run_dir / "tensorboard"), filename_suffix=".x")
    for step in (109, 119, 129):
        writer.add_scalar("train/loss", float("nan"), step)
        writer.add_scalar("perf/step_seconds", float("inf"), step)
        writer.add_scalar("val/only_nan", float("nan"), step)
        writer.add_scalar("large", 1e32, step)
    writer.close()
    read, lines = reported(run_dir)
    (at,) = [index for index, line in enumerate(lines) if "loss: train/loss" in line]
    assert lines[at].endswith("2.82 → 1.02; NaN or infinite from step 109 on")
    assert "train/loss: NaN or infinite from step 109 on" in read.under("Curves")
    assert "val/only_nan: NaN or infinite from step 109 on" in read.under("Curves")
    assert "1e+32 → 1e+32" in "".join(lines)
    assert "of a step" in read.under("Where the time goes"), "the other steps were timed"
    (loss, *_) = run_charts.curve_charts(event_files.read_curves(run_dir / "tensorboard"))
    assert chart.make_figure(loss)["data"][0]["x"][-1] == 129, "the axis goes on to the last step"


@pytest.mark.parametrize("place", ["tensorboard/x", "tensorboard/version_3", "logs/mine", "."])
def test_curves_are_found_where_the_loggers_have_written(place: str, run_dir: Path) -> None:
    (file,) = (run_dir / "tensorboard").iterdir()
    (run_dir / place).mkdir(parents=True, exist_ok=True)
    file.rename(run_dir / place / file.name)
    # not known to have ended, so that its curves are read
    attempt_log.record_start(run_dir, 3, environ={}, log_dirs=["table", place])
    assert "no curves" not in reported(run_dir)[0].under("Curves")
    assert latest_metric.latest_step_and_metric(history.read_run(run_dir, "x"))[0] == 100
    measured = scaling_table.read_rates(run_dir)
    assert measured and measured.rate_per_second == 320


@pytest.mark.parametrize(("name", "is_noted"), [("TensorBoardLogger", False), ("CSVLogger", True)])
def test_a_run_without_tensorboard_says_that_it_has_no_curves(name: str, is_noted: bool, run_dir: Path) -> None:
    with (run_dir / "config.yaml").open("a") as stream:
        stream.write(f"logger: {{one: {{_target_: lightning.pytorch.loggers.{name}}}}}\n")
    assert not [note for note in missing(run_dir) if "no curves" in note]
    for file in (run_dir / "tensorboard").iterdir():
        file.unlink()
    assert bool([note for note in missing(run_dir) if "no curves" in note]) == is_noted


def test_a_note_of_where_curves_lie_leads_nowhere_else(run_dir: Path, tmp_path: Path) -> None:
    (file,) = (run_dir / "tensorboard").iterdir()
    (tmp_path / "other").mkdir()
    (run_dir / "link").symlink_to(tmp_path / "other")
    file.rename(tmp_path / "other" / file.name)
    (run_dir / "loop").symlink_to("loop")
    names = ["../other", str(tmp_path / "other"), "link", "loop", "x/../../other", "\0", "\ud800", "x" * 999, 7]
    attempt_log.record_start(run_dir, 3, environ={}, log_dirs=names)
    attempt_log.record_start(run_dir, 4, environ={}, log_dirs="link")
    assert reported(run_dir)[0].under("Curves") == "The events files contain no curves."
    assert attempt_log.curve_folders(run_dir) == [run_dir / "tensorboard"]


@pytest.mark.parametrize("content", [b"", b"\x00", b"\xff" * 64, b"\x05" + b"\x00" * 11 + b"\xff" * 9])
def test_an_events_file_of_something_else(content: bytes, run_dir: Path) -> None:
    (file,) = (run_dir / "tensorboard").iterdir()
    file.write_bytes(content)
    assert bool(missing(run_dir)) == bool(content)
    assert reported(run_dir)[0].under("Curves") == "The events files contain no curves."


def test_a_run_that_failed_at_its_start(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    attempt_log.record_start(run, 1, environ={}, hosts=["n1"], world_size=4)
    attempt_log.record_end(run, None, attempt=1, step=0, outcome="failed", why="out of memory")
    read, lines = reported(run)
    assert lines[0] == "run: failed"
    assert "out of memory" in read.under("Attempts")
    for heading, words in {
        "What limits the run": "No step was timed", "Curves": "no curves", "Throughput": "No throughput",
        "Where the time goes": "unknown", "Use of the nodes": "no samples", "Environment": "no made_by.json",
        "Config": "no config.yaml",
    }.items():  # fmt: skip
        assert words in read.under(heading), heading


def test_a_run_that_was_only_submitted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("{name: run")
    (run / "job.sh").write_text("")
    read, _ = reported(run)
    assert "No attempt has started." in read.under("Attempts")


def test_a_run_that_is_still_running(run_dir: Path, commands: Path) -> None:
    lines = (run_dir / "attempts.jsonl").read_text().splitlines()
    (run_dir / "attempts.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    (run_dir / "verdict").unlink()
    stub(commands, "squeue", "echo 17 RUNNING None")
    (run,) = history.find_runs(run_dir)
    data = run_data.read_run_data(run)
    assert data.row.state == "running"
    assert data.spans[-1].end == pytest.approx(time.time(), abs=60)
    assert "not recorded an end" in reported(run_dir)[0].under("Attempts")


def test_an_attempt_without_an_end_lasted_until_its_last_heartbeat(run_dir: Path) -> None:
    lines = (run_dir / "attempts.jsonl").read_text().splitlines()
    (run_dir / "attempts.jsonl").write_text("\n".join([lines[0], *lines[2:]]) + "\n")  # the first one was killed
    spans = run_data.read_run_data(history.find_runs(run_dir)[0]).spans
    assert [span.is_end_recorded for span in spans] == [False, True]
    assert spans[0].end == BEGAN + 30  # it has left none: its start was recorded then
    (run_dir / "claims").mkdir()
    (run_dir / "claims" / "000001.beat").touch()  # long after the second one began: a copy
    assert run_data.read_run_data(history.find_runs(run_dir)[0]).spans[0].end == BEGAN + 30
    os.utime(run_dir / "claims" / "000001.beat", (BEGAN + 580,) * 2)
    assert run_data.read_run_data(history.find_runs(run_dir)[0]).spans[0].end == BEGAN + 580


def test_a_killed_run_that_waits_for_its_next_start_needs_no_advice(run_dir: Path, commands: Path) -> None:
    lines = (run_dir / "attempts.jsonl").read_text().splitlines()
    (run_dir / "attempts.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    (run_dir / "verdict").unlink()
    stub(commands, "squeue", "echo 17 PENDING BeginTime")
    read, _ = reported(run_dir)
    assert "killed | it recorded no end" in read.under("Attempts")
    assert "Attempt 2" not in read.under("What limits the run")
    stub(commands, "squeue", "echo 17 OUT_OF_MEMORY None")
    read, _ = reported(run_dir)
    assert "Attempt 2 ended at step 100 (out of memory)" in read.under("What limits the run")


def test_no_attempt_lasts_into_the_next_one(run_dir: Path) -> None:
    (run_dir / "claims").mkdir()
    (run_dir / "claims" / "000001.beat").touch()
    os.utime(run_dir / "claims" / "000001.beat", (BEGAN + 720,) * 2)  # it was fenced off
    lines = (run_dir / "attempts.jsonl").read_text().splitlines()
    (run_dir / "attempts.jsonl").write_text("\n".join([lines[0], *lines[2:]]) + "\n")
    first, second = run_data.read_run_data(history.find_runs(run_dir)[0]).spans
    assert first.end <= second.begin == BEGAN + 700
    late = json.dumps(json.loads(lines[1]) | {"time": BEGAN + 720})  # recorded by attempt 1 after it was fenced off
    (run_dir / "attempts.jsonl").write_text("\n".join([lines[0], late, *lines[2:]]) + "\n")
    first, second = run_data.read_run_data(history.find_runs(run_dir)[0]).spans
    assert first.end == second.begin == BEGAN + 700


def test_a_killed_run_lasted_until_its_last_heartbeat(run_dir: Path) -> None:
    lines = (run_dir / "attempts.jsonl").read_text().splitlines()
    (run_dir / "attempts.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    (run_dir / "verdict").unlink()
    (run_dir / "claims").mkdir()
    (beat := run_dir / "claims" / "000002.beat").touch()
    killed = time.time() - 40  # may still run: a file server shows some heartbeats late
    os.utime(beat, (killed, killed))
    data = run_data.read_run_data(history.find_runs(run_dir)[0])
    assert (data.row.state, data.spans[-1].end) == ("running?", pytest.approx(killed))
    assert [ending.outcome for ending in data.endings] == ["continue", "running?"]
    os.utime(beat, (killed - 30, killed - 30))
    text = reported(run_dir)[0].under("What limits the run")
    assert text.startswith("Attempt 2 ended at step 100 (killed): it recorded no end")
    assert f"python submit.py resume={run_dir}" in text


def test_no_monitor(run_dir: Path) -> None:
    for file in (run_dir / "monitor").iterdir():
        file.unlink()
    (run_dir / "monitor").rmdir()
    assert missing(run_dir) == [NO_SAMPLES]
    read, _ = reported(run_dir)
    assert "There are no samples" in read.under("Use of the nodes")
    assert "Training waits for data" in read.under("What limits the run")  # the events files suffice for this sentence


def test_one_of_two_nodes_has_no_samples(run_dir: Path) -> None:
    (run_dir / "monitor" / "node-n2.jsonl").unlink()
    assert missing(run_dir) == ["there are no samples of n2"]
    (run_dir / "monitor" / "node-n2.jsonl").touch()
    assert missing(run_dir) == ["node-n2.jsonl has no sample"]
    assert ", of 2 GPU(s)" in reported(run_dir)[0].under("Use of the nodes")


def without_power(file: Path, *gpus: int) -> None:
    """Make these GPUs report no power."""
    edit_samples(file, lambda row: row.update(dict.fromkeys(f"gpu{gpu}_watts" for gpu in gpus)))


def test_power_that_is_unknown_is_no_energy_of_0(run_dir: Path) -> None:
    whole = node_usage.read_node(run_dir / "monitor" / "node-n1.jsonl")[0].energy_joules()
    without_power(run_dir / "monitor" / "node-n1.jsonl", 1)
    assert whole and node_usage.read_node(run_dir / "monitor" / "node-n1.jsonl")[0].energy_joules() == whole / 2
    assert ", of 3 of 4 GPU(s): others report no power" in reported(run_dir)[0].under("Use of the nodes")
    without_power(run_dir / "monitor" / "node-n1.jsonl", 0)
    without_power(run_dir / "monitor" / "node-n2.jsonl", 0, 1)
    assert "energy" not in reported(run_dir)[0].under("Use of the nodes")


def test_many_phases_are_no_damage(run_dir: Path) -> None:
    file = run_dir / "monitor" / "phases.jsonl"
    before, num_phases = file.read_text(), len(node_usage.read_phases(run_dir))
    line = json.dumps({"what": "checkpoint", "begin": BEGAN + 400, "end": BEGAN + 400, "attempt": 1, "step": 1}) + "\n"
    count = 5 * 2**20 // len(line)
    file.write_text(before + count * line)
    assert node_usage.count_damaged_phases(run_dir) == 0
    assert len(node_usage.read_phases(run_dir)) == num_phases + count


def test_curves_for_which_there_is_no_room_are_named() -> None:
    tags = [*(f"train/metric_{number:02}" for number in range(20)), "train/loss", "lr", "grad_norm"]
    many = event_files.RunCurves({tag: [(1, 1.0), (2, 2.0)] for tag in tags})
    titles = [shown.title for shown in run_charts.curve_charts(many)]
    assert titles == ["loss", *(f"metric {number:02}" for number in range(9)), "learning rate", "gradient norm"]
    assert run_charts.omitted_curves(many) == [f"metric_{number:02}" for number in range(9, 20)]
    few = event_files.RunCurves({tag: [(1, 1.0)] for tag in tags[:3]})
    assert len(run_charts.curve_charts(few)) == 3 and not run_charts.omitted_curves(few)


def test_the_page_names_curves_that_it_does_not_show(run_dir: Path) -> None:
    writer = SummaryWriter(str(run_dir / "tensorboard"))
    for number in range(20):
        writer.add_scalar(f"train/metric_{number:02}", 1.0, 1)
    writer.close()
    assert "TensorBoard shows" in reported(run_dir)[0].under("Curves") and "metric_19" in reported(run_dir)[0].under(
        "Curves"
    )


def test_gaps_between_samples_count_no_energy(run_dir: Path) -> None:
    file = sampled(run_dir, "n1")
    before = node_usage.read_node(file)[0].energy_joules()
    file.write_text(file.read_text() + sample(BEGAN + 9000, 2, [52, 12.25, 300, 61]))
    assert node_usage.read_node(file)[0].energy_joules() == before


def test_a_number_without_the_end_of_its_line_may_be_half_of_one(run_dir: Path) -> None:
    file = sampled(run_dir, "n1")
    cut(file, 3)  # of 61: the newline, the brace and a digit
    node, damaged = node_usage.read_node(file)
    assert damaged == 1
    assert set(node.gpu_columns("celsius")[1]) == {30, 61}


def test_half_written_and_damaged_lines_of_samples(run_dir: Path) -> None:
    file = run_dir / "monitor" / "node-n1.jsonl"
    whole = node_usage.read_node(file)[0].columns["time"]
    late = sample(BEGAN + 1310, 2, [52, 12.25, 300, 61])
    file.write_text(file.read_text() + "1,2\n" + late.replace("35.5", '"x"') + late[:-30])
    node, damaged = node_usage.read_node(file)
    assert damaged == 3
    assert node.columns["time"] == whole
    assert missing(run_dir) == ["node-n1.jsonl: 3 damaged line(s) left out"]
    (run_dir / "monitor" / "node-n2.jsonl").write_text(f"{BEGAN},1,3\n{BEGAN + 1},1,3\n")
    assert missing(run_dir)[1:] == ["node-n2.jsonl has no sample"]
    reported(run_dir)


@pytest.mark.parametrize("line", ["{", "[1]", "{}", '{"what": 3, "begin": "x", "end": 1, "attempt": 1}',
                                  '{"what": "start", "begin": 9, "end": 1, "attempt": 1}',
                                  '{"what": "start", "begin": -1e300, "end": NaN, "attempt": 1}',
                                  '{"what": "start", "begin": 1, "end": 2, "attempt": 1e999}'])  # fmt: skip
def test_a_damaged_phase_is_left_out(line: str, run_dir: Path) -> None:
    before = node_usage.read_phases(run_dir)
    with (run_dir / "monitor" / "phases.jsonl").open("a") as stream:
        stream.write(line + "\n" + '{"what": "checkpo')
    assert node_usage.read_phases(run_dir) == before


@pytest.mark.slow
@pytest.mark.parametrize("file", ["config.yaml", "made_by.json", "attempts.jsonl", "verdict", "monitor/node-n1.jsonl",
                                  "monitor/phases.jsonl"])  # fmt: skip
@pytest.mark.parametrize(
    "content", [b"", b"\xff\x00\xfe", b"[[[[", b"{}", b"a: [1", b"NaN", b'{"event": "start", "time": NaN}']
)
def test_any_damaged_file_gives_a_page(file: str, content: bytes, run_dir: Path) -> None:
    (run_dir / file).write_bytes(content)
    assert history.find_runs(run_dir) or file == "attempts.jsonl", "which makes a directory a run's"
    if history.find_runs(run_dir):
        reported(run_dir)


@pytest.mark.parametrize(
    ("file", "note"),
    [
        ("attempts.jsonl", "attempts.jsonl: 1 damaged line(s) left out"),
        ("monitor/phases.jsonl", "monitor/phases.jsonl: 1 damaged line(s) left out"),
        ("config.yaml", "config.yaml is damaged"),
        ("made_by.json", "made_by.json is damaged"),
    ],
)
@pytest.mark.parametrize("garbage", [False, True], ids=["half", "garbage"])
def test_damage_is_named_and_nothing_is_concluded_from_it(file: str, note: str, garbage: bool, run_dir: Path) -> None:
    whole = (run_dir / file).read_bytes()
    (run_dir / file).write_bytes(b"\xff\x00\xfe" if garbage else whole[: len(whole) // 2 - 9])
    read, lines = reported(run_dir)
    after = lines.index("  Some data of this run are missing or damaged:") + 1
    assert [line for line in lines[after : lines.index("", after)]] == [f"  - {note}."]
    assert ("the files that record them are damaged" in read.under("Where the time goes")) == file.endswith("jsonl")
    if file.endswith("jsonl"):
        text = "\n".join(lines)
        assert "Starting takes" not in text and "node-hours" not in text
        assert "waits for data during 50 %" in text, "that stands elsewhere"


def test_a_run_that_ended_before_the_first_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(tmp_path / "digits", monkeypatch)
    for file in (run / "monitor").iterdir():
        file.unlink()
    assert missing(run) == [NO_SAMPLES]


def test_a_network_check_shows_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(tmp_path / "comm", monkeypatch)
    (run / "network.txt").write_text("gloo on one node\n  size |   <time>\n")
    read, lines = reported(run)
    assert "  size |   <time>" in read.under("Network check")
    assert "    size |   <time>" in lines
    assert [heading for heading in SECTIONS if heading in lines] == ["Attempts", "Environment"]
    assert not {"precision", "strategy", "ResNet on Digits"} & set(read.under(read.texts[0][0]).split(" | "))


# -- Bounds --


def test_a_mean_rate_is_all_samples_over_all_seconds() -> None:
    """Check two windows with equally many steps, one of which took nine times as long."""
    seconds, rates = [(9, 0.1), (19, 0.9)], [(9, 900.0), (19, 100.0)]
    assert event_files.RunCurves({"perf/step_seconds": seconds, "rate": rates}).mean_rate("rate") == pytest.approx(
        2 * 90 / 1.0
    )
    assert event_files.RunCurves({"rate": rates}).mean_rate("rate") == pytest.approx(500.0)


def test_a_long_curve_is_read_with_a_bounded_number_of_points() -> None:
    curve = event_files.Curve()
    for step in range(50_000):
        curve.add(step, float(step))
    assert curve.points()[-1] == (49_999, 49_999.0)
    curve.add(50_000, 1.0)
    curve.add(50_001, 1e9)
    curve.add(50_002, 2.0)
    assert (50_001, 1e9) in curve.points() and curve.points()[-1] == (50_002, 2.0)
    curve.add(49_001, 3.0)  # steps repeated after a resume
    assert (50_001, 1e9) not in curve.points()
    steps = list(curve.values)
    assert event_files.MAX_POINTS / 2 <= len(steps) <= event_files.MAX_POINTS
    assert {b - a for a, b in pairwise(steps)} == {curve.stride}  # evenly


def test_no_more_than_max_records_are_read(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_files, "MAX_RECORDS", 20)
    assert "there are more than 20 points; the points before that are shown" in "".join(missing(run_dir))


def test_a_step_that_was_made_twice_counts_as_it_was_made_last(tmp_path: Path) -> None:
    for value, steps in ((1.0, (1, 2, 3)), (5.0, (2,))):
        writer = SummaryWriter(str(tmp_path))
        for step in steps:
            writer.add_scalar("loss", value, step)
        writer.close()
        (file,) = tmp_path.glob("*.tfevents.*.*")
        file.rename(tmp_path / f"events.out.tfevents.{value:.0f}")  # not in the order of a process's 9th and 10th file
    points = [(1, 1.0), (2, 5.0)]  # step 3 was abandoned, and has not been made again yet
    assert event_files.read_curves(tmp_path).points["loss"] == points


def test_no_point_of_an_abandoned_attempt_stays_among_those_of_the_next(tmp_path: Path) -> None:
    """Check an attempt that logs at other steps than the one before."""
    curve = event_files.Curve()
    for file, steps in enumerate([(10, 20, 30, 40), (25, 32, 39)]):
        for step in steps:
            curve.add(step, float(file), file=file)
    assert curve.points() == [(10, 0.0), (20, 0.0), (25, 1.0), (32, 1.0), (39, 1.0)]
    curve.add(35, 7.0, file=1)  # a researcher's own order within an attempt
    assert {32, 35, 39} <= {step for step, _ in curve.points()}


def test_of_many_nodes_all_are_read_and_two_lines_drawn(run_dir: Path) -> None:
    before = run_data.read_run_data(history.find_runs(run_dir)[0]).joules
    for number in range(3, 71):
        sampled(run_dir, f"n{number}")
    (slow := node_usage.samples_file(run_dir, "n66")).write_text(slow.read_text().replace(" 52,", " 21,"))
    data = run_data.read_run_data(history.find_runs(run_dir)[0])
    assert data.notes == []
    assert before and data.joules == pytest.approx(35 * before), "of all nodes"
    assert [series.name for series in used(data).series] == ["mean of 70", "least used: n66"]
    read, _ = reported(run_dir)
    assert ", of 140 GPU(s)" in read.under("Use of the nodes")
    assert "The 40 least used of 70 nodes:" in read.under("Use of the nodes")
    assert "n66 | 120 | 21" in read.under("Use of the nodes")


def test_of_very_many_samples_some_are_read(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = run_data.read_run_data(history.find_runs(run_dir)[0])
    monkeypatch.setattr(
        node_usage, "MAX_BYTES", sum(file.stat().st_size for file in run_dir.glob("monitor/node-*.jsonl")) // 3
    )
    data = run_data.read_run_data(history.find_runs(run_dir)[0])
    assert data.notes == ["only one in 3 of the samples of the 2 nodes is read"]
    assert len(data.nodes[0].times) == 40
    assert data.joules == pytest.approx(before.joules, rel=0.1), "the integral is that of all the time"


# -- The command --


def test_the_command_writes_the_page_without_torch(run_dir: Path) -> None:
    slow = "{'torch', 'plotly', 'omegaconf'} & sys.modules.keys()"
    code = f"import runpy, sys; runpy.run_path('report.py', run_name='__main__'); sys.exit(bool({slow}))"
    script = f"import sys; sys.argv = ['report.py', {str(run_dir)!r}]; {code}"
    done = subprocess.run([sys.executable, "-c", script], cwd=PROJECT, env=ENVIRON, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("digits: finished\n")
    assert (run_dir / "report.html").exists()


def test_of_a_folder_it_prints_the_table_and_writes_nothing(run_dir: Path) -> None:
    command = [sys.executable, "report.py", str(run_dir.parent)]
    done = subprocess.run(command, cwd=PROJECT, env=ENVIRON, capture_output=True, text=True)
    assert done.stdout.split()[:3] == ["run", "job", "state"]
    assert not (run_dir / "report.html").exists()


@pytest.mark.parametrize(
    ("place", "rule"),
    [
        ("nothing", "must be an existing directory"),
        ("README.md", "must be a directory, but it is a file"),
        ("resume=runs/x", "must be an existing directory"),
    ],
)
def test_a_place_that_does_not_exist_is_rejected(place: str, rule: str) -> None:
    done = subprocess.run(
        [sys.executable, "report.py", place], cwd=PROJECT, env=ENVIRON, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"ConfigError: {place} {rule}.\n")


def test_a_closed_pipe_gives_no_traceback(run_dir: Path) -> None:
    command = f"{sys.executable} report.py {run_dir} | true"  # `true` exits before the first line is written
    done = subprocess.run(["/bin/bash", "-c", command], cwd=PROJECT, env=ENVIRON, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")
    assert (run_dir / "report.html").exists()


def test_without_a_page_the_terminal_still_shows_the_report(run_dir: Path) -> None:
    (run_dir / "report.html").mkdir()  # cannot be replaced, like another user's directory
    lines = overview.write_report(history.find_runs(run_dir)[0])
    assert lines[0] == "digits: finished"
    assert lines[-1] == f"cannot write {run_dir}/report.html: Is a directory"
    assert not list(run_dir.glob(".report*"))


def test_text_between_backticks_is_code() -> None:
    assert page._with_code("Try `a=<b>`: x") == "Try <code>a=&lt;b&gt;</code>: x"
