"""Check what a job of several runs on one node requests, and what its script does, with stand-ins for srun."""

import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from test_job import SOURCED, WORK, Node, composed, directives, node, share  # noqa: F401 - a fixture

from hpc.config import parse
from hpc.jobs import job, slurm
from hpc.jobs.job import Job
from hpc.jobs.shared_node import share_node
from hpc.submit.submission import describe_size

FOLDER = WORK / "runs/s"
ARRAY = {"members_file": FOLDER / "members", "code": FOLDER / "code", "work_dir": WORK, "venv": WORK / ".venv"}
ONE_GPU = ("trainer=gpu", "cluster.whole_nodes=true")
PLACE = {"SLURM_JOB_ID": "18", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "0"}


def shared(*words: str, num_members: int = 6, at_once: int | None = None, **fields: bool) -> Job:
    cfg = parse.parse(composed("cluster.account=abc", *words), for_job=True)
    described = job.job_from_config(cfg, num_members=num_members, at_once=at_once, **ARRAY, **fields)
    return share_node(described, cfg.cluster)


def step_options(work: Job) -> list[str]:
    (line,) = re.findall(r"run_ranks (srun .*) \\", slurm.render_job_script(work))
    return shlex.split(line)


# -- Requested resources --


def test_the_job_requests_the_whole_node_and_each_step_its_share() -> None:
    work = shared("cluster=narval", *ONE_GPU)
    said = directives(slurm.render_job_script(work))
    whole = ["--nodes=1", "--ntasks-per-node=4", "--cpus-per-task=12", "--gpus-per-node=a100:4", "--mem=496G"]
    assert set(whole) <= set(said) and "--array=0-1" in said and work.runs_per_node == 4
    own = ["--exact", "--nodes=1", "--ntasks=1", "--cpus-per-task=12", "--gpus-per-node=a100:1", "--mem=124G"]
    assert set(own) <= set(step_options(work))


def test_what_is_not_known_is_not_taken_from_the_other_runs() -> None:
    """Check that a step takes no memory for itself alone where that of the node is unknown."""
    for cluster in ("slurm", "perlmutter"):  # --mem=0, and none
        assert "--mem=0" in step_options(shared(f"cluster={cluster}", *ONE_GPU))
    assert "--gres=gpu:1" in step_options(shared("cluster=clariden", *ONE_GPU)), "a job requests none"
    masks = [
        word
        for word in step_options(shared("cluster=lumi_g", "cluster.container=env", *ONE_GPU))
        if word.startswith("--cpu-bind")
    ]
    assert masks[0].startswith("--cpu-bind=mask_cpu:") and masks[-1] == "--cpu-bind=cores", "the last one counts"


@pytest.mark.parametrize(
    ("words", "num_members", "at_once", "runs_per_node", "array", "idle"),
    [
        (["trainer=gpu"], 6, None, 4, "0-1", 0),
        (["trainer=gpu"], 3, None, 3, "0-0", 1),
        (["trainer=gpu"], 16, 9, 4, "0-3%2", 0),
        (["trainer=gpu"], 16, 2, 2, "0-7%1", 2),
        (["trainer=gpu"], 16, 1, 1, "0-15%1", 3),
        (["trainer=ddp", "trainer.devices=2"], 6, None, 2, "0-2", 0),
        (["trainer=ddp", "trainer.devices=3", "data.global_batch_size=60"], 6, None, 1, "0-5", 1),
        (["trainer=ddp"], 6, None, 1, "0-5", 0),
        (["trainer=ddp_4node", "trainer.devices=1"], 6, None, 1, "0-5", 3),
        (["trainer=cpu"], 6, None, 1, "0-5", 4),
        (["trainer=gpu", "cluster.whole_nodes=false"], 6, None, 1, "0-5", 0),
    ],
)
def test_how_many_runs_share_a_node(
    words: list[str], num_members: int, at_once: int | None, runs_per_node: int, array: str, idle: int
) -> None:
    work = shared("cluster=slurm", "cluster.whole_nodes=true", *words, num_members=num_members, at_once=at_once)
    assert (work.runs_per_node, work.idle_gpus_per_node) == (runs_per_node, idle)
    assert f"--array={array}" in directives(slurm.render_job_script(work))
    assert ("run_members" in slurm.render_job_script(work).splitlines()[-1]) == (runs_per_node > 1)


def test_gpu_hours_of_whole_nodes_count_idle_gpus() -> None:
    def size(*words: str, num_members: int = 0, chain: int = 1) -> str:
        work = shared(*words, num_members=num_members)
        assert work.gpu_hours == work.nodes * (4 if "cluster.whole_nodes=true" in words else work.gpus_per_node)
        return describe_size(work, chain=chain)

    one = "1 nodes x 1 tasks, 01:00:00"
    assert size("cluster=slurm", "trainer=gpu") == f"{one}: 1 GPU-hours"
    assert size("cluster=slurm", *ONE_GPU) == f"{one}: 4 GPU-hours, 3 of them for GPUs that stay idle"
    sweep = size("cluster=slurm", *ONE_GPU, num_members=6)
    assert sweep == f"6 runs of {one} each, 4 on a node: 8 GPU-hours, 2 of them for GPUs that stay idle"
    pbs = size("cluster=pbs", *ONE_GPU, num_members=6)
    assert pbs == f"6 runs of {one} each: 24 GPU-hours, 18 of them for GPUs that stay idle"
    whole = size("cluster=pbs", "cluster.whole_nodes=true", "trainer=ddp", chain=3)
    assert whole.endswith("of 1 nodes x 4 tasks, 01:00:00 each: 12 GPU-hours")
    assert size("cluster=slurm", "trainer=cpu") == f"{one}: no GPU"


# -- Behaviour of the script --


class SharedNode:
    """A job's shell with the runs a, b and c, of which srun does what a test says."""

    def __init__(self, node: Node, tmp_path: Path) -> None:  # noqa: F811 - a fixture
        self.node, self.folder = node, tmp_path / "my sweep's"
        self.runs = {name: self.folder / name for name in "abc"}
        share(self.folder / "code")
        (self.folder / "code" / "env.sh").write_text("")
        for run_dir in self.runs.values():
            run_dir.mkdir()
            (run_dir / "code").symlink_to(self.folder / "code")
        (self.folder / "members").write_text("".join(f"{run_dir}\n" for run_dir in self.runs.values()))
        node.program("srun", 'run=${@: -1}; run=${run#*=}; env >"$run/env"; eval "$SRUN"')
        self.work = replace(shared("cluster=slurm", *ONE_GPU), members_file=self.folder / "members", work_dir=tmp_path)

    def run(self, restarts: int = 0, show: str = "JobState=RUNNING", work: Job | None = None, **deeds: str) -> int:
        """Run the script of the job. In `deeds` each run has the bash code that its srun executes."""
        for run_dir in self.runs.values():
            (run_dir / "env").unlink(missing_ok=True)
        code = "; ".join(f"[ ${{run##*/}} != {name} ] || {{ {deed}; }}" for name, deed in deeds.items())
        environ = PLACE | {"SRUN": code, "SHOW": f"{show} Restarts={restarts} x"}
        environ |= {"SLURM_RESTART_COUNT": f"{restarts}"} if restarts else {}
        return self.node.run(work or self.work, **environ)

    def started(self) -> str:
        return "".join(name for name, run_dir in self.runs.items() if (run_dir / "env").exists())

    def environ(self, name: str) -> dict[str, str]:
        lines = (self.runs[name] / "env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def log(self, name: str) -> str:
        return (self.runs[name] / "job-17_0.log").read_text()

    def end(self, name: str) -> str:
        file = self.runs[name] / "ended"
        return file.read_text().strip() if file.exists() else ""


def verdict(outcome: str, code: int = 0) -> str:
    """Return bash code that ends a run so. The verdicts of two starts differ."""
    return f'printf "attempt $SLURM_RESTART_COUNT\\noutcome {outcome}\\n" >"$run/verdict"; exit {code}'


@pytest.fixture
def shared_node(node: Node, tmp_path: Path) -> SharedNode:  # noqa: F811 - a fixture
    return SharedNode(node, tmp_path)


def test_each_run_has_its_own_directory_port_and_log(shared_node: SharedNode) -> None:
    done = verdict("finished")
    named = replace(shared_node.work, env={"CUDA_VISIBLE_DEVICES": "3,2,1,0"})  # as some clusters' files have it
    assert shared_node.run(a=f"echo I am a; {done}", b=done, c=done, work=named) == 0
    assert shared_node.started() == "abc" and shared_node.node.noted("requeued") == []
    ports = [int(shared_node.environ(name)["MASTER_PORT"]) for name in "abc"]
    assert ports == [ports[0], ports[0] + 1, ports[0] + 2]
    for name in "abc":
        environ = shared_node.environ(name)
        assert "CUDA_VISIBLE_DEVICES" not in environ and environ["HPC_RUNS_PER_NODE"] == "4"
    assert "I am a" in shared_node.log("a") and "I am a" not in shared_node.node.said
    assert str(shared_node.runs["b"] / "job-17_0.log") in shared_node.node.said


def test_it_is_requeued_once_for_the_runs_that_are_not_finished(shared_node: SharedNode) -> None:
    assert shared_node.run(a=verdict("finished"), b=verdict("failed", 3), c="exit 137") == 0
    assert shared_node.node.noted("requeued") == ["17_0"] and "1 of its runs are not finished" in shared_node.node.said
    assert [shared_node.end(name) for name in "abc"] == ["", "17_0 failed", "17_0 continue"]
    assert shared_node.run(restarts=1, a="exit 1", b="exit 1", c=verdict("finished")) == 1, "one has failed"
    assert shared_node.started() == "c" and shared_node.node.noted("requeued") == ["17_0"]
    assert [shared_node.end(name) for name in "abc"] == ["", "17_0 failed", ""]
    assert "finished already" in shared_node.log("a")
    typed = re.search("not started again; to continue: (.*)", shared_node.log("b"))
    assert typed and shlex.split(typed[1]) == ["sbatch", f"{shared_node.runs['b']}/job.sh"]


def test_a_job_that_a_person_submits_again_starts_those_that_failed_too(shared_node: SharedNode) -> None:
    assert shared_node.run(a=verdict("finished"), b=verdict("failed", 3), c=verdict("finished")) == 3
    assert shared_node.run(a="exit 1", b=verdict("finished"), c="exit 1") == 0
    assert shared_node.started() == "b" and shared_node.end("b") == ""


def test_a_run_that_saves_nothing_is_given_up_alone(shared_node: SharedNode) -> None:
    saves = 'mkdir -p "$run/checkpoints/step-00000000$((1 + ${SLURM_RESTART_COUNT:-0}))-001"; exit 85'
    for restarts in range(3):
        assert shared_node.run(restarts, a=saves, b="exit 85", c="exit 2") == 0
        assert shared_node.started() == ("ab" if restarts else "abc"), "what was rejected is not started again"
    assert shared_node.end("b") == "17_0 failed" and "3 starts in a row" in shared_node.log("b")
    assert shared_node.run(restarts=3, a=verdict("finished"), b="exit 85") == 1
    assert shared_node.started() == "a" and shared_node.node.noted("requeued") == ["17_0"] * 3


def test_each_trial_of_a_search_draws_its_values_once(shared_node: SharedNode) -> None:
    shared_node.node.program("python", 'touch "$3/drawn"; [ "${3##*/}" != b ] || exit 7')
    (shared_node.runs["c"] / "config.yaml").touch()
    done = verdict("finished")
    assert shared_node.run(a=done, b=done, c=done, work=replace(shared_node.work, is_search_trial=True)) == 7
    assert shared_node.started() == "ac", "the others go on if one of them gets no values"
    assert [name for name, run_dir in shared_node.runs.items() if (run_dir / "drawn").exists()] == ["a", "b"]


def test_a_job_that_was_cancelled_is_not_requeued(shared_node: SharedNode) -> None:
    assert shared_node.run(show="JobState=COMPLETING Reason=None", a="exit 85", b="exit 85", c="exit 85") == 85
    assert shared_node.node.noted("requeued") == [] and "cancelled" in shared_node.log("a")
    assert [shared_node.end(name) for name in "abc"] == [""] * 3, "who requeues it by hand starts all of them"


def test_a_job_that_was_cancelled_while_a_run_waited_is_not_requeued(shared_node: SharedNode) -> None:
    sign = shlex.quote(str(shared_node.folder / "cancelled"))
    state = f'[ -e {sign} ] && state="COMPLETING Reason=None"; echo "JobState=${{state:-RUNNING}} Restarts=0 x"'
    requeue = 'echo "$2" >>"${0%/*}/requeued"'
    shared_node.node.program("scontrol", f'if [ "$1" = show ]; then {state}; else {requeue}; fi')
    done = verdict("finished")
    cancel = f'until [ -s "$run/../a/ended" ]; do sleep 0.05; done; touch {sign}; exit 85'
    assert shared_node.run(a="exit 85", b=cancel, c=done) == 85
    assert shared_node.end("a") == "17_0 continue" and shared_node.node.noted("requeued") == []
    assert "job 17_0: cancelled; to continue: sbatch --array=0 " in shared_node.node.said


@pytest.mark.parametrize(
    ("reason", "end", "again"),
    [("TimeLimit", "continue", True), ("TimeLimit", "failed", False), ("None", "continue", False)],
)
def test_when_the_job_is_cut_short_it_is_requeued_for_runs_that_wait(
    reason: str, end: str, again: bool, tmp_path: Path
) -> None:
    """Check that TERM reaches the runs that are left, and that the job is requeued even if none of these does it."""
    (tmp_path / "ended").write_text(f"17_0 {end}\n")
    shows = f'echo "JobState=COMPLETING Reason={reason} Restarts=0 x"'
    script = f"""
        source <(cat {shlex.join(map(str, SOURCED))})
        scontrol() {{ if [ $1 = show ]; then {shows}; else echo "requeued $2"; fi; }}
        job=17_0 end_files=({tmp_path}/ended {tmp_path}/none)
        (trap 'touch {tmp_path}/term; exit' TERM; touch {tmp_path}/ready; for _ in {{1..200}}; do sleep 0.05; done) &
        until [ -e {tmp_path}/ready ]; do sleep 0.05; done
        handle_term_of_node
        wait"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "requeued 17_0\n" * again, done.stderr
    assert (tmp_path / "term").exists()
