"""Check tools/scale.py: its points and their overrides, and a study with stand-ins for Slurm."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typed_fixes
from fork import ENVIRON, PROJECT

from hpc.config import compose, layout
from hpc.config.errors import ConfigError
from hpc.run import attempt_log, frozen_config
from hpc.studies import scaling_file, scaling_points, scaling_study
from hpc.studies.scaling_points import ScalingPoint

pytestmark = pytest.mark.slow

# A job needs an environment that env.sh has marked as complete, or a container; neither is started here.
DDP = ["trainer=ddp", "cluster=slurm", "cluster.container=none"]
BEGAN = 1_800_000_000.0
PARTS = ("step", "compute", "data", "other")


def points(*words: str) -> list[ScalingPoint]:
    study = scaling_points.parse_study([*DDP, *words])
    return scaling_points.compose_points(study, scaling_points.study_folder(study))


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


def test_weak_scaling_keeps_the_samples_per_device_and_the_rate() -> None:
    cfgs = [point.cfg for point in points("nodes=1,4,16", "scaling=weak", "model.optimizer.lr=0.1")]
    assert [layout.derive_layout(cfg).micro_batch_size for cfg in cfgs] == [16] * 3
    assert [cfg.data.global_batch_size for cfg in cfgs] == [64, 256, 1024]
    assert {cfg.model.optimizer.lr for cfg in cfgs} == {0.1}, "a study compares speed"
    assert {cfg.model.warmup_steps for cfg in cfgs} == {20}, "nobody asked for another warm-up"


def test_weak_scaling_with_batches_of_a_device_needs_no_global_batch() -> None:
    by_device = ["data.global_batch_size=null", "data.batch_size=8"]
    cfgs = [point.cfg for point in points("nodes=1,2", "scaling=weak", *by_device)]
    assert [layout.derive_layout(cfg).global_batch_size for cfg in cfgs] == [32, 64]


def test_the_overrides_of_a_point_give_its_config() -> None:
    for point in points("nodes=2,3", "scaling=weak"):
        again = compose.compose_overrides(point.overrides)
        assert again.data.global_batch_size == point.cfg.data.global_batch_size == 32 * point.num_nodes


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
        (["nodes=1,2", "trainer.num_nodes=2"], "nodes="),
        (["nodes=1,2", "run_dir=x"], "out="),
        (["nodes=1,2", "trainer.max_steps=39"], "trainer.max_steps=40"),
        (["nodes=1,2", "scaling=week"], "scaling=weak"),
        (["nodes=1,2", "scaling=weak", "lr=sqrt"], "model.optimizer.lr=<a number> for all points"),
        (["nodes=1,2", "callbacks.throughput=null"], "it measures"),
        (["nodes=1,2", "data.global_batch_size=many"], "type int"),
        (["nodes=1,2,3"], "data.global_batch_size (at nodes=3) must be divisible"),
        (["nodes=3,4", "data.global_batch_size=64", "scaling=weak"], "data.global_batch_size (at nodes=3)"),
    ],
)
def test_what_makes_no_study_is_rejected(words: list[str], says: str) -> None:
    assert says in rejection(*words)


# The folder


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
    frozen_config.create_exclusively(point.run_dir, point.cfg.node, words=point.overrides)
    scaling_study.reject_other_study(points(*words))
    if is_other:
        with pytest.raises(ConfigError, match=rf"{word.partition('=')[0]}(.name)?: .*\n  Try: out=<a new folder>"):
            scaling_study.reject_other_study(points(*words, word))
    else:
        scaling_study.reject_other_study(points(*words, word))


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
        # sbatch is asked first whether the job can ever start.
        (self.bin / name).write_text(f'#!/bin/bash\n[ "$1" != --test-only ] || exit 0\n{body}\n')
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
        (["nodes=1,2", "trainer.devices=9"], "trainer.devices (at nodes=1) must be at most 4"),
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
    assert said.splitlines()[0].startswith("nodes=2: 8 devices, 64 samples in a step, run directory ")
    assert said.splitlines()[1].startswith("nodes=4: 16 devices, 64 samples in a step, run directory ")


def test_a_cluster_without_a_scheduler_is_told_before_what_its_file_does_not_say(tool: Tool) -> None:
    code, said = tool.type("nodes=1,2,4,8", "cluster=local")
    assert (code, tool.folder.exists()) == (2, False), said
    assert said.startswith("ConfigError: cluster (at nodes=1) must be a cluster with a scheduler; got local.\n")
    assert "trainer.devices" not in said


@pytest.mark.slow
def test_a_study_goes_on_where_it_was(tool: Tool) -> None:
    tool.says(job17="PENDING", job18="RUNNING")
    code, said = tool.type("nodes=1,2")
    assert (code, tool.jobs(), tool.runs()) == (0, 2, ["nodes-1", "nodes-2"]), said
    assert f"python report.py {tool.folder}\n" in said
    script = (tool.folder / "nodes-2" / "job.sh").read_text()
    assert "#SBATCH --nodes=2\n" in script

    end(tool.folder / "nodes-1", "failed")
    code, said = tool.type("nodes=1,2")
    assert (code, tool.jobs()) == (0, 2), said  # neither finished nor failed points are submitted again
    assert (
        f"nodes=1: it has a run already (to go on with it if it has failed: python submit.py resume={tool.folder}"
        in said
    )

    code, said = tool.type("nodes=4", "cluster.time=2:00:00")  # one more point
    assert (tool.jobs(), tool.runs()) == (3, ["nodes-1", "nodes-2", "nodes-4"]), said
    assert "#SBATCH --time=02:00:00\n" in (tool.folder / "nodes-4" / "job.sh").read_text()
    assert [point.nodes for point in scaling_file.load_points(tool.folder)] == [1, 2, 4]

    for words in (["nodes=1,2,4", "seed=2"], ["nodes=8", "seed=2"]):  # a report would show it beside the others
        code, said = tool.type(*words)
        assert (code, tool.jobs()) == (2, 3) and "another config" in said and "seed: 1 -> 2" in said, said


@pytest.mark.slow
def test_a_later_point_of_weak_scaling_has_the_batch_of_the_first_ones(tool: Tool) -> None:
    assert tool.type("nodes=1", "scaling=weak")[0] == 0
    code, said = tool.type("nodes=4", "scaling=weak")
    assert code == 0, said
    assert [point.global_batch_size for point in scaling_file.load_points(tool.folder)] == [64, 256]
    assert frozen_config.read(tool.folder / "nodes-4").data.global_batch_size == 256


@pytest.mark.parametrize(
    ("option", "fix"), [("--retry-failed", "python submit.py resume=RUN_DIR"), ("--no-wait", "without --no-wait")]
)
def test_an_option_that_is_gone_is_answered_by_what_to_type(tool: Tool, option: str, fix: str) -> None:
    code, said = tool.type("nodes=1", option)
    assert (code, tool.jobs()) == (2, 0) and said.startswith(f"ConfigError: {option} cannot be given") and fix in said


@pytest.mark.slow
def test_a_point_that_a_full_queue_rejects_is_queued_by_the_next_call(tool: Tool) -> None:
    tool.says(job17="RUNNING", job18="RUNNING")
    (tool.bin / "sbatch.calls").touch()
    full = 'if [ "$(wc -l <"$0.calls")" -ge 1 ] && [ ! -e "$0.room" ]; then echo QOSMaxSubmitJob >&2; exit 1; fi\n'
    tool.stub("sbatch", full + 'echo job >>"$0.calls"; echo $((16 + $(wc -l <"$0.calls")))')
    code, said = tool.type("nodes=1,2")
    assert (code, tool.jobs()) == (2, 1) and "QOSMaxSubmitJob" in said
    (tool.bin / "sbatch.room").touch()
    code, said = tool.type("nodes=1,2")
    assert (code, tool.jobs(), tool.runs()) == (0, 2, ["nodes-1", "nodes-2"]), said


@pytest.mark.slow
def test_ctrl_c_leaves_the_jobs_and_says_how_to_go_on(tool: Tool) -> None:
    """Check Ctrl-C while the second job is handed over. submit/test_rejected.py decides what is left of that one."""
    first = 'if [ -e "$0.calls" ]; then touch "$0.asked"; exec tail -f /dev/null; fi\n'
    tool.stub("sbatch", first + 'echo job >>"$0.calls"; echo 17')
    process = tool.start("nodes=1,2")
    limit = time.monotonic() + 60
    while not (tool.bin / "sbatch.asked").exists():
        assert time.monotonic() < limit and process.poll() is None, process.communicate()
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "queued jobs keep running" in err and "nodes=1,2" in err, (out, err)
    assert "Traceback" not in err and not (tool.bin / "scancel.calls").exists()
    assert tool.jobs() == 1 and tool.runs() == ["nodes-1"]
    assert json.loads((tool.folder / "nodes-1" / "submitted.json").read_text())["job"] == "17"
