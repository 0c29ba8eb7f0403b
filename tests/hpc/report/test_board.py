"""Check tools/board.py: the ssh command, the end of TensorBoard, and the curves that it shows of real runs."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from fork import ENVIRON
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from hpc.config.errors import ConfigError
from hpc.config.project import PROJECT
from hpc.report import board

TOOL = str(PROJECT / "tools" / "board.py")


def logged(run_dir: Path, values: list[float]) -> Path:
    """Return a run directory with a curve."""
    writer = EventFileWriter(str(run_dir / "tensorboard"))
    for step, value in enumerate(values):
        writer.add_event(Event(step=step, summary=Summary(value=[Summary.Value(tag="loss", simple_value=value)])))
    writer.close()
    return run_dir


@pytest.mark.parametrize(
    ("host", "login_host", "jump"),
    [
        ("n7", "login.site", "-J ana@login.site "),
        ("login3.internal", "login.site", "-J ana@login.site "),  # an address that several login nodes share
        ("login.site", "login.site", ""),
        ("login", "login.site", ""),
        ("n7", None, ""),
    ],
)
def test_one_line_leads_to_the_machine(
    host: str, login_host: str | None, jump: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "ana")
    lines = board.address_lines(4321, host=host, login_host=login_host)
    commands = [line.strip() for line in lines if line.startswith("    ")]
    assert commands == [f"ssh {jump}-L 4321:localhost:4321 ana@{host}"]
    assert ("type this on a login node" in " ".join(lines)) == bool(jump)
    assert ("add -J ana@LOGIN_NODE" in " ".join(lines)) == (login_host is None)


def test_places_without_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "loop").symlink_to(tmp_path / "empty")
    for place, said in {"empty": "must hold TensorBoard events", "nowhere": "does not exist"}.items():
        with pytest.raises(ConfigError, match=said):
            board.select_places([tmp_path / place])
    run = logged(tmp_path / "run", [1.0])
    assert board.select_places([run, tmp_path / "empty"]) == [run]
    assert capsys.readouterr().err == f"{tmp_path}/empty: no TensorBoard events\n"


def test_several_places_have_names_of_their_own(tmp_path: Path) -> None:
    assert board.logdir_arguments([tmp_path, tmp_path]) == ["--logdir", str(tmp_path)]
    option, spec = board.logdir_arguments([tmp_path / "a" / "run", tmp_path / "b:c" / "run"])
    assert option == "--logdir_spec"
    assert spec == f"a/run:{tmp_path}/a/run,b_c/run:{tmp_path}/b:c/run"
    with pytest.raises(ConfigError, match="commas"):
        board.logdir_arguments([tmp_path / "a,b", tmp_path / "c"])


def test_no_torch() -> None:
    code = f"import runpy, sys; runpy.run_path({TOOL!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT).returncode == 0


def rejected(*words: Path | str, **environ: str) -> str:
    command = [sys.executable, TOOL, *map(str, words)]
    done = subprocess.run(command, env=ENVIRON | environ, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("ConfigError: "), done.stdout + done.stderr
    return done.stderr


def test_a_login_host_that_is_no_name_is_rejected(tmp_path: Path) -> None:
    said = rejected(logged(tmp_path / "run", [1.0]), "cluster.login_host='a; reboot'")
    assert "cluster.login_host" in said.splitlines()[0] and "a; reboot" in said.splitlines()[0]


class Shown:
    """A running tools/board.py, queried as by a browser."""

    def __init__(self, *words: Path | str) -> None:
        command = [sys.executable, TOOL, *map(str, words)]
        environ = ENVIRON | {"http_proxy": "http://127.0.0.1:9"}  # a proxy, as clusters set it, cannot reach localhost
        self.process = subprocess.Popen(
            command,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's shell ignores it
        )
        self.said = ""
        while "Ctrl-C ends it here" not in self.said:
            line = self.process.stdout.readline()
            assert line, self.process.stderr.read()
            self.said += line
        self.port = int(re.search(r"http://localhost:(\d+)/", self.said)[1])  # type: ignore[index]
        limit = time.monotonic() + 60
        while not self.listens():
            assert self.process.poll() is None and time.monotonic() < limit, self.process.communicate()
            time.sleep(0.1)

    def listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def get(self, path: str, ask: dict[str, Any] | None = None, **query: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        if ask is None:
            connection.request("GET", f"/data/{path}?{urlencode(query)}")
        else:
            connection.request("POST", f"/data/{path}", json.dumps(ask), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200, (path, answer.status, answer.read())
        return json.loads(answer.read())

    def curve(self, run: str, tag: str, until: int | None = None) -> list[tuple[int, float]]:
        """Return steps and values once the last step is shown: TensorBoard rereads its files every 5 seconds."""
        limit = time.monotonic() + 60
        while True:
            known = self.get("plugin/scalars/tags")
            points = self.get("plugin/scalars/scalars", run=run, tag=tag) if tag in known.get(run, {}) else []
            if points and (until is None or points[-1][1] == until):
                return [(step, value) for _, step, value in points]
            assert time.monotonic() < limit, (known, points)
            time.sleep(0.2)

    def processes(self) -> list[int]:
        """Return this process, TensorBoard, and TensorBoard's children."""
        found, new = [], [self.process.pid]
        while new:
            found += new
            files = [Path(f"/proc/{pid}/task/{pid}/children") for pid in new]
            new = [int(child) for file in files if file.exists() for child in file.read_text().split()]
        return found


@pytest.fixture
def show() -> Iterator[Callable[..., Shown]]:
    started: list[Shown] = []

    def start(*words: Path | str) -> Shown:
        started.append(Shown(*words))
        return started[-1]

    yield start
    for shown in started:
        shown.process.kill()
        shown.process.communicate()


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 0), (signal.SIGKILL, -9)])
def test_nothing_is_left_behind(number: int, code: int, show: Callable[..., Shown], tmp_path: Path) -> None:
    shown = show(logged(tmp_path / "run", [3.0, 2.0]), "cluster=slurm", "cluster.login_host=login.site")
    assert re.search(rf"\n +ssh -J \S+@login\.site -L {shown.port}:localhost:{shown.port} \S+\n", shown.said)
    assert shown.curve("tensorboard", "loss", until=1) == [(0, 3.0), (1, 2.0)]
    processes = shown.processes()
    assert len(processes) >= 2
    listens = Path("/proc/net/tcp").read_text()
    assert f"0100007F:{shown.port:04X} 00000000:0000 0A" in listens, "on localhost"
    assert f"00000000:{shown.port:04X}" not in listens, "and nowhere else"
    shown.process.send_signal(number)
    assert shown.process.wait(20) == code
    limit = time.monotonic() + 10
    while alive := [pid for pid in processes if os.path.exists(f"/proc/{pid}")]:
        assert time.monotonic() < limit, alive
        time.sleep(0.05)


@pytest.mark.slow
def test_several_places_and_an_unknown_login_host(show: Callable[..., Shown], tmp_path: Path) -> None:
    runs = [logged(tmp_path / name / "seed=1", [value]) for name, value in {"a": 1.0, "b": 2.0}.items()]
    shown = show(*runs, "cluster=local")
    assert shown.curve("a/seed=1/tensorboard", "loss") == [(0, 1.0)]
    assert shown.curve("b/seed=1/tensorboard", "loss") == [(0, 2.0)]
    assert "add -J " in shown.said + shown.process.stdout.readline()  # type: ignore[union-attr]


SMALL = [
    "trainer=cpu",
    "trainer.log_every_n_steps=1",
    "+trainer.enable_progress_bar=false",
    "callbacks.progress=null",
    "+trainer.limit_val_batches=1",
    "+trainer.limit_test_batches=1",
]
# Killed without a warning, three steps after its last checkpoint
KILLED = """
import os
import time
from hpc.resume.resume import Resume

before = Resume.on_train_batch_end

def on_train_batch_end(self, trainer, module, outputs, *batch):
    before(self, trainer, module, outputs, *batch)
    if trainer.global_step == 7:
        limit = time.monotonic() + 60
        while not os.path.exists(f"{self.run.run_dir}/checkpoints/step-000000004-001") and time.monotonic() < limit:
            time.sleep(0.01)
        for logger in trainer.loggers:
            logger.experiment.flush()
        os._exit(9)

Resume.on_train_batch_end = on_train_batch_end
"""


@pytest.mark.soak
@pytest.mark.slow
def test_the_curve_of_a_run_that_was_killed_is_one_curve(
    start: Callable, show: Callable[..., Shown], tmp_path: Path
) -> None:
    words = [*SMALL, "trainer.max_steps=12", "checkpoint.every_n_steps=4"]
    start(tmp_path / "whole", 1, words)
    start(tmp_path / "cut", 1, words, patch=KILLED, code=9)
    # One board stays open all the time, another shows several runs, whose files TensorBoard reads in another way.
    boards = [show(tmp_path), show(tmp_path / "cut", tmp_path / "whole")]
    for shown in boards:
        before = shown.curve("cut/tensorboard", "step/loss", until=5)
        assert before[-1][0] > 4, "logged beyond the checkpoint, and seen"
    start(tmp_path / "cut", 1, [])
    boards.append(show(tmp_path))  # and a newly opened one
    for shown in boards:
        curve = shown.curve("cut/tensorboard", "step/loss", until=11)
        whole = shown.curve("whole/tensorboard", "step/loss", until=11)
        assert [step for step, _ in whole] == list(range(12))
        assert sorted(set(curve)) == whole and len(curve) <= 13, curve  # the point at the checkpoint may be there twice
    runs = boards[-1].get("plugin/scalars/tags")
    assert [run for run in runs if run.startswith("cut") and "node-" not in run] == ["cut/tensorboard"]


@pytest.mark.soak
@pytest.mark.slow
def test_hyperparameters_and_results_of_a_sweep(start: Callable, show: Callable[..., Shown], tmp_path: Path) -> None:
    rates = {"0_model.optimizer.lr=0.001": 0.001, "1_model.optimizer.lr=0.01": 0.01}
    for name, rate in rates.items():
        start(tmp_path / name, 1, [*SMALL, "trainer.max_steps=2", f"model.optimizer.lr={rate}"])
    shown = show(tmp_path)
    curves = {name: shown.curve(f"{name}/tensorboard", "test/accuracy")[-1][1] for name in rates}
    ask = {"experimentName": "", "allowedStatuses": ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_RUNNING"]}
    columns = {"colParams": [], "startIndex": 0, "sliceSize": 10, "includeMetrics": True}
    known = shown.get("plugin/hparams/experiment", ask={"experimentName": ""})
    assert "model.optimizer.lr" in {hparam["name"] for hparam in known["hparamInfos"]}
    wanted = [{"hparam": "model.optimizer.lr"}] + [{"metric": info["name"]} for info in known["metricInfos"]]
    groups = shown.get("plugin/hparams/session_groups", ask=ask | columns | {"colParams": wanted})["sessionGroups"]
    listed = {group["sessions"][0]["name"].split("/")[0]: group for group in groups}
    assert set(listed) == set(rates)
    for name, group in listed.items():
        assert group["hparams"]["model.optimizer.lr"] == rates[name]
        values = {value["name"]["tag"]: value["value"] for value in group["metricValues"]}
        assert values["test/accuracy"] == pytest.approx(curves[name])
