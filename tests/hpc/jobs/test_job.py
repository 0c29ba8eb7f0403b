"""Check what a job requests for a config, and what its script does, with stand-ins for srun."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from fork import REPO
from omegaconf import DictConfig, OmegaConf

from hpc.config import compose, parse, project, walltime
from hpc.config.errors import ConfigError
from hpc.jobs import job, slurm
from hpc.jobs.job import Job
from hpc.jobs.print_bash import SOURCED_FILES

FOUR = "trainer=ddp_4node"
SLURM = [
    file.stem
    for file in sorted((project.CONFIGS / "cluster").glob("*.yaml"))
    if OmegaConf.load(file).get("scheduler") == "slurm"
]
# Values that the files of some clusters leave open.
NEEDS = {
    "marenostrum5": ["cluster.qos=acc_debug"],
    "massive_m3": ["cluster.partition=m3g", "cluster.gpus_per_node=2", "cluster.cores_per_gpu=6"],
    "lumi_g": ["cluster.container='singularity run my.sif'"],
    "dardel": ["cluster.container='singularity run my.sif'"],
}
SOURCED = [project.LIBRARY / "jobs" / file for file in SOURCED_FILES["slurm"]]
WORK = Path("/home/ana")
PLACES = {"run_dir": WORK / "runs/d", "code": WORK / "runs/d/code", "work_dir": WORK, "venv": WORK / ".venv"}
ODD = [WORK / "with space", WORK / "größe", WORK / "it's", WORK / 'a "b" ; c', WORK / "50%j #1", WORK / "[x]*&"]


@cache
def composed(*overrides: str) -> DictConfig:
    return compose.compose_overrides(list(overrides))


def made(*overrides: str) -> Job:
    return job.job_from_config(parse.parse(composed(*overrides), for_job=True), **PLACES)


def on(cluster: str, *overrides: str) -> Job:
    return made(f"cluster={cluster}", "cluster.account=abc", *NEEDS.get(cluster, []), *overrides)


def directives(text: str) -> list[str]:
    """Return the options that sbatch reads: comments above the first command, quoted as in a shell."""
    assert "\r" not in text and text.startswith("#!/bin/bash\n") and text.endswith("\n")
    top = text[: re.search(r"^(?!#)", text, re.MULTILINE).start()].splitlines()[1:]  # type: ignore[union-attr]
    top = [line for line in top if not line.startswith("# ")]
    assert all(line.startswith("#SBATCH --") for line in top)
    assert text.count("#SBATCH") == len(top), "sbatch reads directives above the first command only"
    assert "$" not in "".join(top), "sbatch expands nothing"
    return [" ".join(shlex.split(line)[1:]) for line in (line.replace("#SBATCH", "X", 1) for line in top)]


# -- Requested resources --

ASKED = {
    "slurm": "--ntasks-per-node=4 --cpus-per-task=8 --gpus-per-node=4 --account=abc --exclusive --mem=0",
    "juwels_booster": "--ntasks-per-node=4 --cpus-per-task=24 --gres=gpu:4 --account=abc --partition=booster",
    "lumi_g": "--ntasks-per-node=8 --cpus-per-task=7 --gpus-per-node=8 --account=abc --partition=standard-g --mem=480G",
    "perlmutter": "--ntasks-per-node=4 --cpus-per-task=32 --gpus-per-node=4 --account=abc --qos=regular "
    "--constraint=gpu",
    "clariden": "--ntasks-per-node=4 --cpus-per-task=72 --account=abc --partition=normal",
    "narval": "--ntasks-per-node=4 --cpus-per-task=12 --gpus-per-node=a100:4 --account=abc --mem=496G",
    "vista": "--ntasks-per-node=1 --cpus-per-task=72 --account=abc --partition=gh",
    "delta": "--ntasks-per-node=4 --cpus-per-task=16 --gpus-per-node=4 --account=abc --partition=gpuA100x4 "
    "--exclusive --mem=208G",
}


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ASKED)
def test_what_is_asked_for_follows_from_trainer_and_cluster(cluster: str) -> None:
    work = on(cluster, FOUR, "trainer.num_nodes=2", "cluster.time=0:45:00")
    more = [
        "--time=00:45:00",
        "--signal=USR2@120",
        "--output=/home/ana/runs/d/job-%j.log",
        "--open-mode=append",
        "--requeue",
    ]
    assert directives(slurm.render_job_script(work)) == [
        "--job-name=digits_resnet",
        "--nodes=2",
        *ASKED[cluster].split(),
        *more,
    ]
    srun = f"--nodes=2 --ntasks-per-node={work.tasks_per_node} --cpus-per-task={work.cores_per_task} "
    assert srun in slurm.render_job_script(work), "srun is told again: some versions inherit not all of it"


@pytest.mark.parametrize(
    ("cluster", "devices", "request_", "memory"),
    [
        ("narval", 1, "--gpus-per-node=a100:1", 124),
        ("delta", 3, "--gpus-per-node=3", 156),
        ("slurm", 2, "--gpus-per-node=2", None),  # a job must not request all memory of a shared node
    ],
)
def test_a_part_of_a_node_asks_for_its_share(cluster: str, devices: int, request_: str, memory: int | None) -> None:
    work = on(cluster, "trainer=ddp", f"trainer.devices={devices}", "data.global_batch_size=60")
    said = directives(slurm.render_job_script(work))
    assert request_ in said and f"--ntasks-per-node={devices}" in said and "--exclusive" not in said
    assert [word for word in said if word.startswith("--mem")] == ([f"--mem={memory}G"] if memory else [])


def test_training_on_cpus_asks_for_no_gpu() -> None:
    for cluster in ("slurm", "juwels_booster", "lumi_g"):
        work = on(cluster, "trainer=cpu")
        assert work.gpus_per_node == 0 and not work.is_exclusive
        assert work.gpu_hours == work.idle_gpus_per_node, "an hour of whole nodes"
        assert not re.search("gpu|gres|--exclusive", " ".join(directives(slurm.render_job_script(work))))


def test_gpu_hours() -> None:
    assert on("slurm", FOUR, "cluster.time=1-12:00:00").gpu_hours == 4 * 4 * 36


@pytest.mark.slow
@pytest.mark.parametrize("cluster", SLURM)
def test_no_task_is_kept_from_the_gpus_of_its_node(cluster: str) -> None:
    text = slurm.render_job_script(on(cluster, FOUR))
    for never in ("--ntasks=", "--gpus-per-task", "--ntasks-per-gpu", "--gpu-bind=single", "--gpu-bind=closest"):
        assert never not in text
    assert "--gpu-bind" not in " ".join(directives(text))


def test_options_container_and_setup_of_the_cluster() -> None:
    assert "--network=disable_rdzv_get" in directives(slurm.render_job_script(on("frontier", FOUR)))
    work = replace(on("narval", FOUR), container="apptainer exec --nv my.sif")
    text = slurm.render_job_script(work)
    assert '    apptainer exec --nv my.sif python "$code/train.py" resume="$run_dir"' in text
    assert "env.sh" not in text and "VENV" not in text  # the image holds the environment
    assert text.index("source_cluster_files narval") < text.index("srun --nodes")
    text = slurm.render_job_script(on("narval", FOUR))
    assert (
        text.index("export VENV=") < text.index("CLUSTER='narval' source \"$code/env.sh\"") < text.index("srun --nodes")
    )


def test_a_script_for_an_image_uses_the_library_in_src(tmp_path: Path) -> None:
    """Let an image unset PYTHONPATH, as that of container.def does. A copy of the library in src/ is a person's own."""
    shutil.copytree(project.LIBRARY, tmp_path / "src" / "hpc")
    (tmp_path / "src" / "hpc" / "jobs" / "slurm.bash").write_text("run_ranks() { :; }; echo MINE; exit\n")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "train.yaml").touch()
    cfg = composed("cluster=slurm", "cluster.container=env -u PYTHONPATH", FOUR)
    text = slurm.render_job_script(job.job_from_config(parse.parse(cfg), (FOUR, "cluster=slurm")))
    done = subprocess.run(["bash", "-c", text], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "MINE\n"), done.stderr


def test_mail_is_sent_at_the_moments_that_are_named() -> None:
    for words in ([], ["cluster.mail_on=[begin]"], ["cluster.mail=ana@uni.hr", "cluster.mail_on=[]"]):
        assert "--mail" not in slurm.render_job_script(on("slurm", *words))
    lines = directives(slurm.render_job_script(on("slurm", "cluster.mail=ana@uni.hr")))
    assert {"--mail-user=ana@uni.hr", "--mail-type=END,FAIL"} <= set(lines)
    more = on("slurm", "cluster.mail=ana@uni.hr", "cluster.mail_on=[begin,fail]")
    assert "--mail-type=BEGIN,FAIL" in directives(slurm.render_job_script(more))


@pytest.mark.parametrize(
    ("word", "key"),
    [
        *((f"cluster.mail='{value}'", "mail") for value in ("ana", "a@b c", "a@b;id", "a@$(id)", "a@b\nc@d", "@b")),
        ("cluster.mail_on=[end,never]", "mail_on"), ("cluster.mail_on=end", "mail_on"),
    ],
)  # fmt: skip
def test_what_is_no_address_or_moment_is_rejected(word: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^cluster\.{key} must be"):
        on("slurm", word)


def test_an_environment_is_staged_where_that_is_wanted() -> None:
    work = on("narval", FOUR, "cluster.stage_env=true")
    text, here = slurm.render_job_script(work), "$SLURM_TMPDIR/env-$SLURM_JOB_ID"
    assert f'tar -xf "$VENV.tar" -C "{here}"' in text and f'PATH="{here}/bin:$PATH" exec python "$@"' in text
    assert text.index("env.sh") < text.index("--ntasks-per-node=1 bash") < text.index("train.py")
    for other in (on("narval", FOUR), replace(work, container="apptainer exec my.sif", venv=None)):
        assert "tar -x" not in slurm.render_job_script(other) and here not in slurm.render_job_script(other)
    with pytest.raises(ConfigError, match="node_local"):
        on("slurm", FOUR, "cluster.stage_env=true")


def test_an_array_has_a_job_per_member() -> None:
    work = replace(on("slurm"), run_dir=None, members_file=WORK / "sweep/members", num_members=16)
    assert "--array=0-15" in directives(slurm.render_job_script(work))
    said = directives(slurm.render_job_script(replace(work, at_once=4)))
    assert "--array=0-15%4" in said and "--output=/home/ana/sweep/job-%A_%a.log" in said


def test_a_script_for_anybody_names_its_run_after_the_job() -> None:
    text = slurm.render_job_script(
        job.job_from_config(parse.parse(composed("cluster=slurm", FOUR)), (FOUR, "cluster=slurm"))
    )
    assert text.endswith(f'python "$code/train.py" {FOUR} cluster=slurm\n') and "--output=digits_resnet-%j.log" in text
    assert "name=digits_resnet " in text and "\nbegin_new_run " in text


@pytest.mark.parametrize("path", ODD, ids=str)
def test_odd_paths_reach_sbatch_and_bash_whole(path: Path) -> None:
    work = replace(on("slurm"), run_dir=path, work_dir=path, venv=path)
    text = slurm.render_job_script(work)
    log = next(word for word in directives(text) if word.startswith("--output="))
    assert log == f"--output={str(path).replace('%', '%%')}/job-%j.log"
    lines = [line for line in text.splitlines() if re.match(r"run_dir=|work_dir=|export VENV=", line)]
    show = 'printf "%s\\n" "$run_dir" "$work_dir" "$VENV" "$code"'
    assert bash("\n".join([*lines, show])).splitlines() == [*[str(path)] * 3, f"{path}/code"]


@pytest.mark.soak
def test_bash_and_shellcheck_find_nothing(tmp_path: Path) -> None:
    works = {cluster: on(cluster, FOUR) for cluster in SLURM}
    works |= {f"odd{number}": replace(works["slurm"], run_dir=path, work_dir=path) for number, path in enumerate(ODD)}
    works["array"] = replace(works["slurm"], run_dir=None, members_file=ODD[1] / "members", num_members=3)
    works["hand"] = job.job_from_config(parse.parse(composed("cluster=slurm")), ("trainer=cpu", "name=it's"))
    works["staged"] = on("narval", "cluster.stage_env=true")
    files = [tmp_path / f"{name}.sh" for name in works]
    for file, work in zip(files, works.values(), strict=True):
        file.write_text(slurm.render_job_script(work), encoding="utf-8")
        subprocess.run(["bash", "-n", file], check=True)
    if shutil.which("shellcheck"):
        # SC2016: $1 of another shell. The others miss what a script sources: the output of cat or Python.
        check = ["shellcheck", "-x", f"--source-path={REPO}", f"--source-path={project.PROJECT}"]
        found = subprocess.run(
            [*check, "--exclude=SC2016,SC1090,SC2034,SC2154", *SOURCED, *files], capture_output=True, text=True
        )
        assert found.returncode == 0, found.stdout


# -- Behaviour of the script --


class Node:
    """A job's shell, in which srun, scontrol and env.sh record their arguments."""

    def __init__(self, folder: Path) -> None:
        self.run_dir, self.bin, self.attempt = folder / "my run's", folder / "bin", 0
        share(self.run_dir / "code")
        self.bin.mkdir()
        (self.run_dir / "code" / "env.sh").write_text('echo "env.sh $VENV"\n')
        self.program("srun", 'env >"$0.env"; printf "%s\\n" "$@" >"$0.argv"; eval "$SRUN"')
        self.program("squeue", "exit 1")
        # scontrol describes a job at its first start, unless a test sets another state.
        show = 'echo "${SHOW:-JobState=RUNNING Reason=None Restarts=0 x}"'
        requeue = 'echo "$2" >>"${0%/*}/requeued"; exit "${REQUEUE:-0}"'
        self.program("scontrol", f'if [ "$1" = show ]; then {show}; else {requeue}; fi')
        self.work = replace(on("slurm"), run_dir=self.run_dir, work_dir=folder, venv=folder / "venv")

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(f"#!/bin/bash\n{text}\n")
        (self.bin / name).chmod(0o755)

    def run(self, work: Job | None = None, outcome: str = "finished", code: int = 0, **environ: str) -> int:
        self.attempt += 1
        said = f"attempt {self.attempt}\\nstep 5\\noutcome {outcome}\\n"
        verdict = f"printf '{said}' >{shlex.quote(str(self.run_dir))}/verdict"
        environ = {"SLURM_JOB_ID": "17", "SRUN": f"{verdict if outcome else ':'}; exit {code}"} | environ
        environ |= {"PATH": f"{self.bin}:/usr/bin:/bin"}
        script = slurm.render_job_script(work or self.work)
        done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True)
        self.said = done.stdout + done.stderr
        return done.returncode

    def noted(self, name: str) -> list[str]:
        return (self.bin / name).read_text().splitlines() if (self.bin / name).exists() else []


def share(code: Path) -> None:
    """Put the files that job scripts source where they look for them."""
    (code / "src/hpc/jobs").mkdir(parents=True)
    for file in SOURCED:
        shutil.copy(file, code / "src/hpc/jobs")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_the_verdict_of_the_ranks_decides_not_their_exit_code(node: Node) -> None:
    assert node.run(outcome="continue", code=1) == 0
    assert node.noted("requeued") == ["17"]
    assert node.run(outcome="failed", code=9) == 9 and "failed (exit code 9)" in node.said
    assert node.run(outcome="failed", code=0) == 1
    assert node.run(outcome="finished", code=143) == 0
    assert node.noted("requeued") == ["17"]


def test_the_script_of_a_copy_does_not_go_on_with_the_original(node: Node, tmp_path: Path) -> None:
    copy = tmp_path / "its copy"
    shutil.copytree(node.run_dir, copy)
    for run_dir in (node.run_dir, copy):
        (run_dir / "job.sh").write_text("")
    (tmp_path / "link").symlink_to(node.run_dir)
    shows = "JobState=RUNNING Restarts=0 x\n   Command={}/job.sh\n   WorkDir=/"
    assert node.run(SHOW=shows.format(copy)) == 2 and not node.noted("srun.argv")
    typed = re.search("to continue that one: (.*)", node.said)
    assert typed and shlex.split(typed[1]) == ["python", "submit.py", f"resume={copy}"]
    for allowed in (node.run_dir, tmp_path / "link", tmp_path):  # the last one is no run directory
        assert node.run(SHOW=shows.format(allowed), outcome="continue") == 0, node.said
    (copy / "job.sh").write_text(slurm.render_job_script(node.work))
    environ = {"SLURM_JOB_ID": "17", "PATH": f"{node.bin}:/usr/bin:/bin"}
    by_hand = subprocess.run(["bash", "job.sh"], cwd=copy, env=environ, capture_output=True, text=True)
    assert by_hand.returncode == 2 and str(node.run_dir) in by_hand.stderr


def test_a_script_has_a_run_for_each_job_and_for_each_call_in_an_allocation(node: Node, tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text("")
    copy = 'mkdir -p "$3/code" && cp env.sh "$3/code"'
    node.program(
        "python", f'case "$2" in *print_bash) cat {shlex.join(map(str, SOURCED))} ;; *snapshot) {copy} ;; esac'
    )
    for preset in ("gpu", "fsdp"):
        words = (f"trainer={preset}", "trainer.devices=1", "cluster=slurm")
        (tmp_path / preset).write_text(
            slurm.render_job_script(job.job_from_config(parse.parse(composed(*words)), words))
        )

    def start(preset: str, outcome: str, reason: str = "", **environ: str) -> str:
        """Run the script and return the run directory that its ranks see; "" if no rank started."""
        (node.bin / "srun.env").unlink(missing_ok=True)
        srun = f'printf "outcome {outcome}\\nrestart $SLURM_RESTART_COUNT\\n" >"$HPC_RUN_DIR/verdict"'
        environ = {"SLURM_JOB_ID": "17", "SRUN": srun, "PATH": f"{node.bin}:/usr/bin:/bin"} | environ
        done = subprocess.run(["bash", preset], cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert (done.returncode == 0) == (outcome == "finished"), done.stderr
        if outcome == "rejected":
            assert done.returncode == 2 and reason in done.stderr, done.stderr
        found = [line for line in node.noted("srun.env") if line.startswith("HPC_RUN_DIR=")]
        return found[0].rpartition("/")[2] if found else ""

    starts = [("gpu", "finished"), ("fsdp", "failed"), ("gpu", "failed")]
    assert [start(*each) for each in starts] == [f"digits_resnet_17{number}" for number in ("", "-2", "-3")]
    batch = {"ENVIRONMENT": "BATCH", "SLURM_JOB_ID": "18"}
    assert start("gpu", "failed", **batch) == "digits_resnet_18"
    assert start("fsdp", "rejected", "a job has one run of this name", **batch) == ""
    (tmp_path / "runs" / "digits_resnet_19").touch()
    reason = f"{tmp_path}/runs/digits_resnet_19 cannot be made: "
    assert start("gpu", "rejected", reason, **batch | {"SLURM_JOB_ID": "19"}) == ""
    again = {"SLURM_RESTART_COUNT": "1", "SHOW": "JobState=RUNNING Reason=None Restarts=1 x"}
    assert start("gpu", "finished", **batch, **again) == "digits_resnet_18"
    assert start("gpu", "finished", **batch, **again) == ""  # it is finished already


@pytest.mark.parametrize("code", [0, 1, 85, 137])
def test_without_a_verdict_it_starts_again(node: Node, code: int) -> None:
    assert node.run(outcome="", code=code) == 0 and node.noted("requeued") == ["17"]


def test_a_rejection_does_not_start_again(node: Node) -> None:
    assert node.run(outcome="", code=2) == 2 and "rejected" in node.said and not node.noted("requeued")


@pytest.mark.parametrize(
    ("said", "again"),
    [
        ("JobState=RUNNING Reason=None Restarts=0 x PreemptTime=None", True),
        ("JobState=RUNNING Reason=None Restarts=0 x PreemptTime=2026-11-21T12:00:00", True),  # within its grace time
        ("JobState=COMPLETING Reason=TimeLimit Restarts=0 x PreemptTime=None", True),
        ("JobState=COMPLETING Reason=None Restarts=0 x PreemptTime=2026-11-21T12:00:00", True),
        ("JobState=COMPLETING Reason=None Restarts=0 x PreemptTime=None", False),  # scancel
        ("JobState=COMPLETING Reason=None Restarts=1 x PreemptTime=None", False),  # requeued by Slurm
        ("JobState=RUNNING Reason=None Restarts=1 x PreemptTime=None", False),  # already running on other nodes
    ],
)
def test_who_starts_it_again(node: Node, said: str, again: bool) -> None:
    """Check who requeues, by output of `scontrol show job` recorded on a real Slurm.

    A cancelled job is not requeued.
    """
    assert (node.run(outcome="continue", code=85, SHOW=said) == 0) == again
    assert node.noted("requeued") == ["17"] * again


def test_where_slurm_rejects_it_says_what_to_type(node: Node) -> None:
    assert node.run(outcome="continue", code=85, REQUEUE="1") == 85, "not requeued is not done"
    typed = re.search("not requeued; to continue: (.*)", node.said)
    assert typed and shlex.split(typed[1]) == ["sbatch", f"{node.run_dir}/job.sh"]


def test_starts_without_a_newer_checkpoint_are_counted(node: Node) -> None:
    def start(count: int, checkpoint: str = "") -> int:
        made = f"mkdir -p {shlex.quote(str(node.run_dir / 'checkpoints' / checkpoint))}; exit 9"
        show = f"JobState=RUNNING Restarts={count} x"
        return node.run(SRUN=made, SHOW=show, **({"SLURM_RESTART_COUNT": str(count)} if count else {}))

    (node.run_dir / "stalled").write_text("2\n")  # recorded before the run was submitted again
    (node.run_dir / "scratch").mkdir()
    (node.run_dir / "checkpoints").symlink_to("scratch")  # they may lie on another disk
    names = [
        "",
        "step-000000380-001.part",
        "step-000000380-003",
        "last.ckpt",
        "step-000000380-004",
        "step-000001000-006",
    ]
    stalled = []
    for count, checkpoint in enumerate(names):
        assert start(count, checkpoint) == 0
        stalled.append(int((node.run_dir / "stalled").read_text()))
    assert stalled == [1, 2, 0, 1, 2, 0]
    assert [start(count) for count in (6, 7, 8)] == [0, 0, 9]
    assert "3 starts in a row brought no newer checkpoint (exit code 9)" in node.said
    assert len(node.noted("requeued")) == 8


def test_parts_of_a_prediction_are_progress(node: Node) -> None:
    stalled = []
    for count, part in enumerate(["part-001-00001-000000.pt", "part-001-00000-000001.pt", "part-003-00000-000000.pt"]):
        made = f"mkdir -p {shlex.quote(str(node.run_dir / 'predictions'))}; touch "
        made += f"{shlex.quote(str(node.run_dir / 'predictions' / part))}; exit 9"
        environ = {"SLURM_RESTART_COUNT": str(count)} if count else {}
        assert node.run(SRUN=made, SHOW=f"JobState=RUNNING Restarts={count} x", **environ) == 0
        stalled.append(int((node.run_dir / "stalled").read_text()))
    assert stalled == [0, 1, 0]  # names sort by attempt, and an attempt begins with part 0 of each rank


@pytest.mark.parametrize("left", ["a[$(touch executed)]", "1 2", "", "08", "-5", "9" * 30])
def test_a_damaged_count_of_starts_counts_from_none_and_is_not_executed(node: Node, left: str) -> None:
    (node.run_dir / "stalled").write_text(left)
    shows = "JobState=RUNNING Restarts=1 x"
    assert node.run(SRUN="exit 9", SHOW=shows, SLURM_RESTART_COUNT="1") in (0, 9)
    assert int((node.run_dir / "stalled").read_text()) == (9 if left == "08" else 1)
    assert not list(node.run_dir.parent.rglob("executed")) and not Path("executed").exists()


def test_when_the_job_ends_is_told_to_the_ranks(node: Node) -> None:
    def end(**environ: str) -> str | None:
        assert node.run(**environ) == 0
        (node.run_dir / "verdict").unlink()
        return dict(line.split("=", 1) for line in node.noted("srun.env") if "=" in line).get("HPC_JOB_END")

    assert end(SLURM_JOB_END_TIME="1795263209", HPC_JOB_END="5") == "1795263209"
    assert end(HPC_JOB_END="5") is None, "neither knows; what a shell has left behind does not count"
    node.program("squeue", 'echo "$SLURM_TIME_FORMAT $*" >"$0.argv"; echo "$END"')
    assert end(END="1795263209") == "1795263209"
    assert node.noted("squeue.argv") == ["%s -h -j 17 -o %e"]
    assert end(END="N/A") is None


def test_the_warning_comes_early_in_a_short_job_too() -> None:
    for time, warning in [("0:10:00", 60), ("1:00:00", 120), ("0:01:00", 6)]:
        assert f"--signal=USR2@{warning}" in directives(slurm.render_job_script(on("slurm", f"cluster.time={time}")))


def test_a_run_that_is_finished_is_not_started(node: Node) -> None:
    assert node.run() == 0
    (node.bin / "srun.argv").unlink()
    assert node.run() == 0 and "finished already" in node.said and not node.noted("srun.argv")
    assert "env.sh" not in node.said


@pytest.mark.parametrize("word", ["failed", "continue"])
def test_the_verdict_of_an_earlier_attempt_does_not_count(word: str, node: Node) -> None:
    """Check that an old verdict is ignored, and that a rejected start, such as a second job's, keeps it."""
    (node.run_dir / "verdict").write_text(said := f"attempt 4\nstep 5\noutcome {word}\n")
    assert node.run(outcome="", code=2) == 2 and node.noted("srun.argv") and not node.noted("requeued")
    assert (node.run_dir / "verdict").read_text() == said
    assert node.run(outcome="", code=9) == 0 and node.noted("requeued") == ["17"], "a crash before an attempt has begun"


def test_the_verdict_of_another_job_of_the_run_does_not_count(node: Node) -> None:
    assert node.run(outcome="continue", code=2) == 2 and "rejected" in node.said and not node.noted("requeued")


def test_ranks_are_started_in_the_environment_of_the_run(node: Node) -> None:
    environ = {"NCCL_SOCKET_IFNAME": "hsn0,hsn1", "CACHE": "/tmp/x-$SLURM_JOB_ID"}
    leaked = {"RANK": "7", "WORLD_SIZE": "8", "MASTER_ADDR": "old", "PYTHONPATH": "/old", "SLURM_EXPORT_ENV": "NONE"}
    assert node.run(replace(node.work, interface="hsn0", env=environ), **leaked) == 0
    seen = dict(line.split("=", 1) for line in node.noted("srun.env") if "=" in line)
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "PYTHONPATH"} & set(seen)
    assert (seen["GLOO_SOCKET_IFNAME"], seen["NCCL_SOCKET_IFNAME"]) == ("hsn0", "hsn0,hsn1")  # env comes last
    assert (seen["CACHE"], seen["OMP_NUM_THREADS"], seen["SLURM_EXPORT_ENV"]) == ("/tmp/x-17", "8", "ALL")
    assert 10000 <= int(seen["MASTER_PORT"]) < 30000
    for name in ("PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "PYTHONDONTWRITEBYTECODE"):
        assert seen[name] == "1"
    assert seen["PYTHONHASHSEED"] == "0"
    assert node.said.startswith(f"env.sh {node.work.venv}")
    start = "--nodes=1 --ntasks-per-node=1 --cpus-per-task=8 --kill-on-bad-exit=0 --wait=30 --label python"
    argv = node.noted("srun.argv")
    assert " ".join(argv[:-2]) == start and argv[-2:] == [f"{node.run_dir}/code/train.py", f"resume={node.run_dir}"]


def test_a_member_of_an_array_finds_its_own_run(node: Node, tmp_path: Path) -> None:
    (tmp_path / "members").write_text(f"/elsewhere\n{node.run_dir}\n")
    share(tmp_path / "code")
    work = replace(node.work, run_dir=None, members_file=tmp_path / "members", num_members=2)
    place = {"SLURM_JOB_ID": "18", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "1"}
    assert node.run(work, outcome="continue", **place) == 0
    assert node.noted("srun.argv")[-1] == f"resume={node.run_dir}"
    assert node.noted("requeued") == ["17_1"]


def test_without_an_allocation_the_script_says_so(node: Node) -> None:
    assert node.run(SLURM_JOB_ID="") != 0 and "no allocation" in node.said and not node.noted("srun.argv")


# -- Invalid values --


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1:30:00", 5400), ("90", 5400), ("1-00:00", 86400), ("2-12", 216000), ("1-02:03:04", 93784),
        ("100:00:00", 360000),
    ],
)  # fmt: skip
def test_times_are_read_as_slurm_reads_them(text: str, seconds: int) -> None:
    assert walltime.walltime_seconds("cluster.time", text) == seconds


def test_a_time_is_shown_in_the_form_that_all_schedulers_read() -> None:
    assert [walltime.format_walltime(seconds) for seconds in (1, 5400, 360000)] == ["00:00:01", "01:30:00", "100:00:00"]


@pytest.mark.parametrize(
    ("text", "fix"),
    [("1:30", "1:30:00 (hours) or 0:01:30 (minutes)"), ("", "1:30:00"), ("abc", "1:30:00"), ("0:00:00", "1:00:00"),
     ("0", "1:00:00"), ("-5", "1:30:00"), ("1:60:00", "1:30:00"), ("1:30:00\n", "1:30:00"), ("1h", "1:30:00")],
)  # fmt: skip
def test_other_times_are_rejected(text: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        walltime.walltime_seconds("cluster.time", text)
    assert caught.value.fix == f"cluster.time={fix}"


@pytest.fixture
def cluster_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Write configs/cluster/mine.yaml in a copy of configs/."""
    shutil.copytree(project.CONFIGS, tmp_path / "configs")
    monkeypatch.setattr(compose, "CONFIGS", tmp_path / "configs")

    def write(text: str) -> None:
        path = tmp_path / "configs" / "cluster" / "mine.yaml"
        path.write_text(f"defaults: [base]\nname: mine\nscheduler: slurm\n{text}\n")

    return write


@pytest.mark.parametrize("line", ["time: 1:30:00", "time: 90", "partition: no", "account: 0123", "qos: 1e3"])
def test_words_that_yaml_takes_for_something_else_are_rejected(line: str, cluster_file: Callable) -> None:
    cluster_file(line)
    with pytest.raises(ConfigError) as caught:
        parse.parse(compose.compose_overrides(["cluster=mine"]))
    key = line.split(":")[0]
    assert caught.value.key == f"cluster.{key}" and caught.value.fix == f'quote it: {key}: "..."'


@pytest.mark.parametrize("line", ["request: '--gres=gpu:{gpu}'", "launcher: 'srun {0}'", "launcher: 'srun {'"])
def test_fields_that_a_cluster_file_may_not_use_are_rejected(line: str, cluster_file: Callable) -> None:
    cluster_file(f"gpus_per_node: 4\n{line}")
    with pytest.raises(ConfigError, match="gpus"):
        job.job_from_config(parse.parse(compose.compose_overrides(["cluster=mine", "trainer=ddp"])))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value"),
    [("partition", "no"), ("account", "0123"), ("constraint", "gpu&hbm80g"), ("qos", "1e3"), ("time", "2-12"),
     ("constraint", "a|b"), ("constraint", "[rack1*2&rack2]"), ("partition", "a,b")],
)  # fmt: skip
def test_typed_words_stay_words(key: str, value: str) -> None:
    cfg = compose.compose_overrides(["cluster=slurm", f"cluster.{key}={value}"])
    parse.parse(cfg)
    assert cfg.cluster[key] == value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "other"),
    [("a b", "a_b"), ("a\nb", "a_b"), ("#SBATCH --x", "SBATCH_--x"), ("Größe", "Gr_e"), ("bash", "my_run"),
     ("interactive", "my_run"), ("x" * 101, "my_run"), ("-x", "x"), ("../x", "x"), ("$(id)", "id"), ("", "my_run")],
)  # fmt: skip
def test_names_that_no_scheduler_takes_are_rejected(name: str, other: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse.parse(compose.compose_overrides(["cluster=slurm", f"name={name}"]))
    assert (caught.value.key, caught.value.fix) == ("name", f"name={other}")
    parse.parse(compose.compose_overrides(["cluster=slurm", f"name={other if other != 'my_run' else 'ok'}"]))


@pytest.mark.parametrize("value", ["a b", "a;b", "$HOME", "it's", "a\n#SBATCH", "größe"])
def test_accounts_are_one_word(value: str) -> None:
    with pytest.raises(ConfigError, match=re.escape("cluster.account")):
        cfg = composed("cluster=slurm").copy()
        cfg.cluster.account = value
        parse.parse(cfg)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["cluster=juwels"], "cluster=juwels_booster"),
        (["cluster=local"], "with a scheduler"),
        (["cluster=juwels_booster", "cluster.account=null"], "cluster.account=<account>"),
        (["cluster=juwels_booster", "cluster.account="], "cluster.account=<account>"),
        (["cluster=marenostrum5", "cluster.account=a"], "cluster.qos=<qos>"),
        (["cluster=slurm", "trainer=ddp", "+data.num_workers=9"], "data.num_workers=7"),
        (["cluster=slurm", "cluster.scheduler=lsf"], "slurm, pbs"),
        (["cluster=slurm", "cluster.chain=0"], "at least 1"),
        (["cluster=pbs", "cluster.launcher='pbsdsh --'"], "cluster.launcher=pbs_tmrsh"),
        (["cluster=pbs", "cluster.launcher='mpiexec -n {nodes} --ppn 1'"], "'mpiexec -n {ranks} --ppn {tasks}'"),
        (["cluster=slurm", "dirty_tree=maybe"], "dirty_tree=snapshot"),
        (["cluster=slurm", "+cluster.env={A-B: x}"], "cluster.env"),
        (["cluster=slurm", "+cluster.env={AB: 'x`id`'}"], "cluster.env"),
        (["cluster=slurm", "+cluster.env={AB: '$(id)'}"], "cluster.env"),
    ],
)
def test_what_a_job_cannot_do_without(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(*overrides)
    assert words in str(caught.value)


def bash(script: str) -> str:
    return subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True).stdout
