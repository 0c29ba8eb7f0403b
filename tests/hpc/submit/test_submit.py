"""Check submit.py as a user types it: the submitted job, the written files, and early rejections."""

import errno
import importlib.util
import json
import os
import re
import shlex
import shutil
import socket
import struct
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import typed_fixes
from desk import FILES, SOURCED, Desk
from fork import PROJECT, REPO
from omegaconf import OmegaConf

from hpc.config import compose, defaults, freezing, library, parse, personal_clusters, project
from hpc.config.errors import ConfigError
from hpc.run import attempt_log, directory, environment, frozen_config, snapshot
from hpc.submit import scheduler


def git(folder: Path, *arguments: str) -> None:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    subprocess.run(command, check=True, capture_output=True)


def mode(path: Path) -> str:
    return f"{path.stat().st_mode & 0o777:o}"


# -- Submitted jobs --


def test_a_job_is_handed_over_with_all_that_it_needs(desk: Desk, tmp_path: Path) -> None:
    assert desk.type("cluster=slurm", "trainer=ddp_4node", "cluster.time=1:30:00", "name=first") == 0
    (run_dir,) = desk.runs()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_first_\d+", run_dir.name)
    assert desk.out.splitlines() == [
        "job 17",
        f"run directory {run_dir}",
        f"log {run_dir}/job-17.log",
        "asks for at most 4 nodes x 4 tasks, 01:30:00: 24 GPU-hours",
    ]
    assert desk.noted("sbatch.argv").splitlines() == ["--parsable", str(run_dir / "job.sh")]
    script = desk.noted("sbatch.script")
    assert script == (run_dir / "job.sh").read_text()
    assert f"\nwork_dir={tmp_path} " in script and f"export VENV={desk.venv}\n" in script
    assert f"\nrun_dir={shlex.quote(str(run_dir))} " in script and 'resume="$run_dir"' in script
    assert OmegaConf.load(run_dir / "config.yaml").run_dir == str(run_dir)
    typed = ["cluster=slurm", "trainer=ddp_4node", "cluster.time=1:30:00", "name=first"]
    assert json.loads((run_dir / "overrides.json").read_text()) == typed
    noted = desk.submitted()
    assert noted.pop("time") > 1.7e9
    assert noted == {
        "cluster": "slurm", "scheduler": "slurm", "name": "first", "nodes": 4, "gpus_per_node": 4, "seconds": 5400,
        "argv": ["cluster=slurm", "trainer=ddp_4node", "cluster.time=1:30:00", "name=first"],
        "job": "17", "jobs": ["17"],
    }  # fmt: skip


@pytest.mark.parametrize(("umask", "folder", "file"), [(0o077, "700", "600"), (0o027, "750", "640")])
def test_the_umask_of_a_person_says_who_reads_a_run(desk: Desk, umask: int, folder: str, file: str) -> None:
    os.umask(umask)  # which the desk restores
    assert desk.type("cluster=slurm", "run_dir=deep/mine") == 0
    assert mode(Path("deep")) == mode(Path("deep/mine")) == folder
    names = ["job.sh", "config.yaml", "overrides.json", "submitted.json", "made_by.json"]
    assert {mode(Path("deep/mine") / name) for name in names} == {file}
    assert not re.search(r"(?m)^[^#]*\bumask ", Path("deep/mine/job.sh").read_text())
    assert desk.type("cluster=slurm", "run_dir=ours", "group_readable=true") == 2
    assert "group_readable" in desk.err


def test_pbs_is_asked_before_qsub(desk: Desk) -> None:
    """Check it by what OpenPBS 23.06 prints; qsub takes such a job, which waits for ever."""
    recorded = Path(__file__).parents[1] / "jobs" / "pbs_systems"
    queues, server, nodes = (recorded / f"whole_nodes-{part}.txt" for part in ("queues", "server", "nodes"))
    desk.command("qstat", f"case $1 in -Q) /bin/cat '{queues}' ;; -B) /bin/cat '{server}' ;; esac")
    desk.command("pbsnodes", f"/bin/cat '{nodes}'")
    assert desk.type("cluster=pbs", "run_dir=mine", "cluster.cores_per_gpu=80") == 2
    assert "cluster.cores_per_gpu must be at most 64" in desk.err and not Path("mine").exists()
    assert not desk.noted("qsub.argv")
    assert desk.type("cluster=pbs", "run_dir=mine") == 0, desk.err


def test_a_job_that_can_never_start_is_not_queued(desk: Desk) -> None:
    """Check it by what Slurm 22.05 says; plain sbatch takes such a job."""
    said = "sbatch: error: CPU count per node can not be satisfied\n"
    said += "allocation failure: Requested node configuration is not available"
    desk.command("sbatch", f'[ "$1" = --test-only ] || exec /bin/echo 17; echo "{said}" >&2; exit 1')
    assert desk.type("cluster=slurm", "run_dir=mine") == 2
    assert "can never start this job" in desk.err and "cluster.cores_per_gpu" in desk.err and not Path("mine").exists()
    down = "allocation failure: Required node not available (down, drained or reserved)"  # it may be back soon
    for answer in (f'echo "{down}" >&2; exit 1', "exit 0"):
        desk.command("sbatch", f'[ "$1" = --test-only ] || exec /bin/echo 17; {answer}')
        desk.set.delenv("HPC_RUN_DIR", raising=False)  # set by the previous run
        assert desk.type("cluster=slurm", f"run_dir={len(answer)}") == 0, desk.err


def test_parsable_is_one_line(desk: Desk) -> None:
    desk.scheduler('echo "sbatch: the account has 5 hours left" >&2; echo "17;cluster"')
    assert desk.type("cluster=slurm", "--parsable") == 0
    assert desk.out == f"17 {desk.runs()[0]}\n"
    assert "5 hours left" in desk.err  # messages of the site's sbatch are shown


@pytest.mark.parametrize(("cluster", "answer", "job"), [("slurm", "18;c1", "18"), ("pbs", "18.pbs1", "18.pbs1")])
def test_what_a_site_prints_before_the_number_is_none(cluster: str, answer: str, job: str, desk: Desk) -> None:
    desk.scheduler(f'echo "-----"; echo "Welcome, 3 hours left"; echo "{answer}"')
    assert desk.type(f"cluster={cluster}", "cluster.account=a", "--parsable") == 0
    assert desk.out.split()[0] == job and desk.submitted()["job"] == job and "Welcome" in desk.err
    desk.scheduler('echo "Welcome"')
    assert desk.type(f"cluster={cluster}", "cluster.account=a", "run_dir=mine") == 2
    assert "no message" in desk.err


def test_a_chain_tells_what_all_its_jobs_may_cost(desk: Desk) -> None:
    assert desk.type("cluster=pbs", "cluster.account=a", "cluster.chain=3", "cluster.time=1:00:00", "trainer=ddp") == 0
    size = "3 jobs, one after the other until the run is finished, of 1 nodes x 4 tasks, 01:00:00 each"
    assert f"asks for at most {size}: 12 GPU-hours" in desk.out
    assert desk.type("cluster=slurm", "cluster.chain=3") == 2 and "cluster.chain=1" in desk.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "option", "fix"),
    [
        ("slurm", "--nodes=8", "trainer.num_nodes="), ("slurm", "-N8", "trainer.num_nodes="),
        ("slurm", "--time 4:00:00", "cluster.time="), ("slurm", "--array=0-3", "--multirun"),
        ("slurm", "--no-requeue", "faults.retries="), ("pbs", "-l walltime=4:00:00", "cluster.time="),
        ("slurm", "--mail-user=a@b", "cluster.mail="), ("pbs", "-m n", "cluster.mail_on="),
        ("slurm", "--mem-per-cpu=1G", ""), ("slurm", "--gres=lscratch:10", ""), ("pbs", "-l filesystems=home", ""),
    ],
)  # fmt: skip
def test_what_a_script_says_already_is_no_option(cluster: str, option: str, fix: str, desk: Desk) -> None:
    code = desk.type(f"cluster={cluster}", "cluster.account=a", f'cluster.options=["{option}"]', "--dry-run")
    assert code == (2 if fix else 0), desk.err
    assert fix in desk.err


def test_where_nothing_more_can_be_written_no_run_is_left(desk: Desk) -> None:
    def full(*words: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with desk.set.context() as patch:
        patch.setattr(snapshot.shutil, "copy2", full)
        assert desk.type("cluster=slurm", "run_dir=mine") == 2
    assert "No space left" in desk.err and "make room" in desk.err
    assert desk.type("cluster=slurm", "run_dir=mine") == 0, desk.err


def test_a_dry_run_writes_nothing_and_needs_no_scheduler(desk: Desk, tmp_path: Path) -> None:
    (desk.bin / "sbatch").unlink()
    (desk.venv / f".complete-{project.project_name()}").unlink()
    before = sorted(tmp_path.rglob("*"))
    for more in (["trainer=ddp"], ["seed=1,2", "--multirun"], ["run_dir=mine"]):
        assert desk.type("cluster=slurm", "--dry-run", *more) == 0
        assert desk.out.startswith("#!/bin/bash\n") and "#SBATCH --nodes=1\n" in desk.out
    assert sorted(tmp_path.rglob("*")) == before


def test_what_this_shell_has_for_sbatch_is_told(desk: Desk) -> None:
    desk.set.setenv("SBATCH_ACCOUNT", "grant")
    desk.set.setenv("SBATCH_RESERVATION", "course")
    assert desk.type("cluster=slurm") == 0
    assert "SBATCH_ACCOUNT=grant of this shell is not passed on; the job gets it by cluster.account=grant" in desk.err
    assert "SBATCH_RESERVATION=course of this shell is not passed on; cluster.options= takes options" in desk.err
    assert "SBATCH_" not in desk.noted("sbatch.env")
    assert desk.type("cluster=slurm", "cluster.account=grant") == 0, desk.err
    assert "SBATCH_ACCOUNT" not in desk.err
    desk.set.setenv("SLURM_JOB_ID", "16")  # submitted in a job: these may be that job's
    assert desk.type("cluster=slurm") == 0 and "SBATCH_" not in desk.err


@pytest.mark.parametrize("cluster", ["slurm", "pbs"])
def test_where_this_shell_imports_from_is_told(cluster: str, desk: Desk) -> None:
    desk.set.setenv("PYTHONPATH", "/home/me/its lib:/opt")
    assert desk.type(f"cluster={cluster}") == 0
    (word,) = re.findall("PYTHONPATH=/home/me/its lib:/opt of this shell is not passed on; .* by (.*)\n", desk.err)
    assert desk.type(f"cluster={cluster}", *shlex.split(word), "run_dir=mine") == 0 and "PYTHONPATH" not in desk.err
    scripts = "".join(path.read_text() for path in Path("mine").glob("*.sh"))
    assert 'export PYTHONPATH="/home/me/its lib:/opt"\n' in scripts


@pytest.mark.parametrize("word", ["hydra.run.dir=x", "+hydra.job.chdir=true", "hydra/launcher=x", "~hydra"])
def test_words_that_hydra_would_take_elsewhere_are_rejected(word: str, desk: Desk) -> None:
    assert desk.type("cluster=slurm", word) == 2
    assert "Hydra's launcher" in desk.err and "run_dir=<folder>" in desk.err and desk.runs() == []


def test_words_after_a_job_script_are_rejected(desk: Desk) -> None:
    for cluster, job_id in (("slurm", "SLURM_JOB_ID"), ("pbs", "PBS_JOBID")):
        desk.type(f"cluster={cluster}", "cluster.account=a", f"run_dir={cluster}")
        environ = {job_id: "17", "PBS_NODEFILE": os.devnull, "PATH": os.environ["PATH"]}
        ran = subprocess.run(
            ["bash", f"{cluster}/job.sh", "seed=2"], env=environ, capture_output=True, text=True, timeout=60
        )
        assert ran.returncode == 2 and "not used: seed=2" in ran.stderr, ran.stderr


@pytest.mark.parametrize(("ends", "code"), [("exit 0", 0), ("exit 7", 7)])
def test_wait_ends_with_the_code_of_the_job(ends: str, code: int, desk: Desk) -> None:
    desk.scheduler(f"echo 17; sleep 0.1; {ends}")
    assert desk.type("cluster=slurm", "--wait", "--parsable") == code
    assert desk.noted("sbatch.argv").splitlines()[:2] == ["--parsable", "--wait"]
    assert desk.out.startswith("17 ")


def test_the_log_of_an_array_is_where_it_is_told(desk: Desk) -> None:
    """Check the printed log: Slurm writes to the array's folder by --output, the PBS script to each run directory."""
    desk.scheduler('case "$0" in *qsub) echo "17[].server";; *) echo 17;; esac')
    for cluster in ("slurm", "pbs"):
        assert desk.type(f"cluster={cluster}", "seed=1,2", "--multirun") == 0
        (told,) = re.findall("(?m)^log (.*)$", desk.out)
        folder = Path(re.findall("(?m)^run directory (.*)$", desk.out)[0])
        members = (folder / "members").read_text().splitlines()
        written = [folder / f"job-17_{number}.log" for number in range(len(members))]
        if cluster == "pbs":
            written = [Path(member) / "job-17.log" for member in members]
            assert "\nbegin_array_run " in (folder / "job.sh").read_text()
            assert '>>"$run_dir/job-$id.log"' in (folder / "code/src/hpc/jobs/pbs.bash").read_text()
        else:
            assert f'--output="{folder}/job-%A_%a.log"' in (folder / "job.sh").read_text()
        assert len(written) == 2 and all(fnmatch(str(path), told) for path in written), told


@pytest.mark.parametrize("value", ["[-l a=b]", '"[-l a=b]"', "-l a=b"])
def test_the_fix_of_a_list_is_a_list(value: str, desk: Desk) -> None:
    assert desk.type("cluster=pbs", f"cluster.options={value}", "--dry-run") == 2
    (fix,) = re.findall(r"""Try: .*?('cluster\.options=.*')$""", desk.err.strip(), re.MULTILINE)
    assert desk.type("cluster=pbs", *shlex.split(fix), "--dry-run") == 0, desk.err
    assert "\n#PBS -l a=b\n" in desk.out


def test_pbs_gets_a_chain_of_jobs(desk: Desk) -> None:
    desk.scheduler('count=$(cat "$0.count" || echo 0); echo $((count + 1)) >"$0.count"; echo "$((count + 30)).server"')
    assert desk.type("cluster=pbs", "cluster.chain=3") == 0
    assert desk.out.startswith("job 30.server 31.server 32.server\n") and "/job-30.log\n" in desk.out
    options = [line for line in desk.noted("qsub.argv").splitlines() if not line.endswith("job.sh")]
    assert options == ["-h", "-h", "-W", "depend=afternotok:30.server", "-h", "-W", "depend=afternotok:31.server"]
    assert desk.noted("qrls.argv") == "30.server 31.server 32.server\n"
    assert desk.submitted()["jobs"] == ["30.server", "31.server", "32.server"]
    assert (desk.runs()[0] / "job.sh").exists()


def test_of_a_chain_that_breaks_off_nothing_is_queued(desk: Desk) -> None:
    desk.scheduler('[ ! -e "$0.count" ] || { echo "qsub: too many" >&2; exit 1; }; >"$0.count"; echo 30.server')
    assert desk.type("cluster=pbs", "cluster.chain=3") == 2
    assert "qsub: too many (nothing is queued)" in desk.err and desk.runs() == []
    assert desk.noted("qdel.argv") == "30.server\n" and not desk.noted("qrls.argv")


def test_what_another_job_left_in_the_shell_is_not_passed_on(desk: Desk) -> None:
    leaked = ["SLURM_JOB_ID", "SLURM_NTASKS_PER_NODE", "SBATCH_PARTITION", "PMI_RANK", "OMPI_COMM_WORLD_RANK"]
    leaked += ["MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "PBS_JOBID", "TORCHELASTIC_RUN_ID"]
    kept = ["SLURM_CONF", "PBS_CONF_FILE", "MASTERS", "RANKING", "MODULEPATH"]
    for name in leaked + kept:
        desk.set.setenv(name, "1")
    assert desk.type("cluster=slurm", "run_dir=mine") == 0
    passed = {line.partition("=")[0] for line in desk.noted("sbatch.env").splitlines()}
    assert passed.isdisjoint({*leaked, "HPC_RUN_DIR"}) and passed.issuperset(kept)


def test_the_scheduler_does_not_read_what_is_typed(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "typed").write_text("echo next command\n")
    before = os.dup(0)
    with (tmp_path / "typed").open() as typed:
        os.dup2(typed.fileno(), 0)
    try:
        assert desk.type("cluster=slurm", "run_dir=mine") == 0
    finally:
        os.dup2(before, 0)
        os.close(before)
    assert desk.noted("sbatch.stdin") == ""


def test_paths_count_from_where_submit_is_called(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "else where").mkdir()
    desk.set.chdir(tmp_path / "else where")
    assert desk.type("cluster=slurm", "run_dir=../mine", "--parsable") == 0
    run_dir = Path(desk.out.split(" ", 1)[1].strip())
    assert run_dir.resolve() == tmp_path / "mine" and run_dir.is_absolute()
    assert f"\nwork_dir='{tmp_path / 'else where'}' " in (run_dir / "job.sh").read_text()


def test_a_container_needs_no_environment(desk: Desk) -> None:
    (desk.venv / f".complete-{project.project_name()}").unlink()
    assert desk.type("cluster=slurm", "cluster.container=apptainer exec my.sif", "--parsable") == 0
    assert "VENV" not in desk.noted("sbatch.script")


# -- Rejected submissions --


def test_a_scheduler_that_rejects_is_quoted(desk: Desk) -> None:
    desk.scheduler('echo "sbatch: error: invalid account" >&2; exit 1')
    assert desk.type("cluster=slurm") == 2
    assert "sbatch: error: invalid account (nothing is queued)" in desk.err and desk.out == ""


def test_a_scheduler_that_says_nothing_is_not_believed(desk: Desk) -> None:
    desk.scheduler("exit 3")
    assert desk.type("cluster=slurm") == 2 and "exit code 3, no message" in desk.err


def test_no_scheduler_here(desk: Desk) -> None:
    (desk.bin / "sbatch").unlink()
    assert desk.type("cluster=slurm") == 2
    assert "login node" in desk.err and desk.runs() == []


def test_waiting_for_the_scheduler_is_announced(desk: Desk) -> None:
    desk.set.setattr(scheduler, "NOTICE_AFTER_SECONDS", 0.05)
    desk.scheduler("sleep 0.5; echo 17")
    assert desk.type("cluster=slurm", "--parsable") == 0
    assert desk.err == "waiting for sbatch to answer ...\n" and desk.out.startswith("17 ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["cluster=local"], "with a scheduler"),
        (["cluster=local", "trainer=ddp"], "with a scheduler"),  # cluster=local does not define GPUs per node
        (["cluster=juwels_booster", "cluster.account=null"], "cluster.account=<account>"),
        (["cluster=slurm", "trainer.num_nodes=0"], "at least 1"),
        (["cluster=slurm", "+trainer.max_epoch=2"], "trainer.max_epochs"),
        (["cluster=slurm", "model.optimizer.lr=fast"], "float"),
        (["cluster=slurm", "model.optimizer.lr=-1"], "above 0"),
        (["cluster=slurm", "cluster.time=2:30"], "2:30:00 (hours)"),
        (["cluster=slurm", "ckpt=/nowhere"], "must be an existing file"),
        (["cluster=slurm", "ckpt="], "ckpt=null for none"),
        (["cluster=slurm", "cluster.account="], "cluster.account=null for none"),
        (["resume="], "resume=<a run directory>"),
        (["cluster=pbs", "cluster.chain=2", "--wait"], "chain"),
        (["cluster=slurm", "--at-once", "2"], "--multirun"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(typed: list[str], words: str, desk: Desk) -> None:
    assert desk.type(*typed) == 2
    assert desk.err.startswith("ConfigError: ") and words in desk.err
    assert desk.runs() == [] and desk.noted("sbatch.argv") == desk.noted("qsub.argv") == ""

    def type_again(accepted: list[str]) -> None:
        if desk.type(*accepted):
            raise typed_fixes.printed(desk.err)

    typed_fixes.follow(type_again, typed, typed_fixes.printed(desk.err))


def test_an_environment_that_is_not_complete_is_rejected(desk: Desk) -> None:
    desk.write("constraints.txt", "torch==9\n")
    assert desk.type("cluster=slurm") == 2 and "source env.sh" in desk.err
    desk.complete()
    assert desk.type("cluster=slurm") == 0
    (desk.venv / f".complete-{project.project_name()}").unlink()
    assert desk.type("cluster=slurm") == 2 and "source env.sh" in desk.err


def test_of_two_that_submit_into_one_directory_one_does(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two processes both find the directory free before either one writes."""
    run_dir = desk.project / "runs" / "mine"
    create = directory.create_run_dir

    def meanwhile(path: Path, *words: Any, **more: Any) -> None:
        monkeypatch.setattr(directory, "create_run_dir", create)
        assert desk.type("cluster=slurm", f"run_dir={run_dir}", "seed=2") == 0
        create(path, *words, **more)

    monkeypatch.setattr(directory, "create_run_dir", meanwhile)
    assert desk.type("cluster=slurm", f"run_dir={run_dir}", "seed=2") == 2
    assert "must not hold another run" in desk.err and desk.noted("sbatch.argv").count(str(run_dir)) == 1
    assert frozen_config.read(run_dir).seed == 2 and "seed=2" in (run_dir / "overrides.json").read_text()
    assert not list(run_dir.glob(".*"))


def test_a_directory_that_holds_a_run_is_not_used_again(desk: Desk) -> None:
    assert desk.type("cluster=slurm", "run_dir=mine") == 0
    before = Path("mine/job.sh").read_text()
    assert desk.type("cluster=slurm", "run_dir=mine", "seed=2") == 2
    assert "submit.py resume=" in desk.err and Path("mine/job.sh").read_text() == before


@pytest.mark.parametrize("theirs", ["code/train.py", "job.sh", "verdict", "checkpoints/model.pt"])
def test_files_of_others_are_not_replaced(theirs: str, desk: Desk) -> None:
    file = Path("paper", theirs)
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    Path("paper/notes.txt").write_text("mine")
    assert desk.type("cluster=slurm", "run_dir=paper") == 2
    assert file.parts[1] in desk.err and "run_dir=<a new directory>" in desk.err
    assert file.read_text() == "mine" and len(list(Path("paper").iterdir())) == 2
    assert desk.noted("sbatch.argv") == ""


def test_a_folder_with_other_names_in_it_holds_a_run(desk: Desk) -> None:
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    assert desk.type("cluster=slurm", "run_dir=mine") == 0, desk.err


def test_the_project_is_no_run(desk: Desk) -> None:
    for folder in (desk.project, desk.project.parent):
        assert desk.type("cluster=slurm", f"run_dir={folder}") == 2 and "the project's folder" in desk.err
        assert not (folder / "config.yaml").exists()


# -- Resuming --


def test_resume_hands_the_same_script_over_again(desk: Desk) -> None:
    assert desk.type("cluster=slurm", "run_dir=mine", "seed=5") == 0
    desk.write("configs/train.yaml", "changed: since\n")
    desk.write("constraints.txt", "torch==9\n")  # differs from the constraints of the run's own code
    desk.scheduler("echo 18")
    assert desk.type("resume=mine", "--parsable") == 0
    assert desk.out == f"18 {Path('mine').absolute()}\n"
    assert json.loads(Path("mine/submitted.json").read_text())["job"] == "18"
    assert Path("mine/code/configs/train.yaml").read_text() == "# configs/train.yaml\n"
    desk.scheduler("exit 1")
    assert desk.type("resume=mine", "--dry-run") == 0 and desk.out == Path("mine/job.sh").read_text()


def test_what_cannot_go_on_is_rejected(desk: Desk) -> None:
    assert desk.type("cluster=slurm", "run_dir=mine") == 0
    for typed, words in {
        ("resume=nowhere",): "must be an existing directory",
        ("resume=mine/job.sh",): "is a file",
        ("resume=mine/code",): "holds no config.yaml",
        ("resume=mine", "resume=mine"): "must be given once",
    }.items():
        assert desk.type(*typed) == 2
        assert words in desk.err
    frozen, mine = Path("mine/config.yaml").read_text(), Path("mine").absolute()
    for text, words in {
        "a: [": "is damaged",
        "- a": "is damaged: no keys",
        "": "is damaged: no keys",
        f"{frozen}later: 1\n": f"unknown keys later; got {mine}.\n  Try: python {mine}/code/submit.py",
        frozen.replace("\nfaults:", "\nfalts:"): "its config lacks faults and has the unknown keys falts",
        frozen.replace("scheduler: slurm", "scheduler: null"): "with a scheduler",
    }.items():
        Path("mine/config.yaml").write_text(text)
        assert desk.type("resume=mine") == 2, text
        assert desk.err.startswith("ConfigError: ") and words in desk.err
    Path("mine/config.yaml").write_text(frozen)
    Path("mine/job.sh").unlink()  # a run of train.py
    assert desk.type("resume=mine") == 2 and "train.py resume=" in desk.err


def test_secrets_of_the_environment_are_not_written_down(desk: Desk) -> None:
    desk.set.setenv("SECRET", "hush")
    cfg = compose.compose_overrides(["cluster=slurm"])
    words = {"A": "${oc.env:SECRET}", "B": "${oc.env:NO,null}", "C": '${oc.env:NO,"a, b"}', "D": "${oc.env:SECRET}/x"}
    cfg.cluster.env = words | {"E": "${oc.env:NO,${oc.env:SECRET}}", "F": "${oc.env:NO,''}", "G": "${name}"}
    Path("run").mkdir()
    text = freezing.to_frozen_yaml(cfg)
    assert "hush" not in text and "${oc.env:SECRET}" in text
    Path("run/config.yaml").write_text(text)
    read = {"A": "hush", "B": None, "C": "a, b", "D": "hush/x", "E": "hush", "F": "", "G": "digits_resnet"}
    assert frozen_config.read(Path("run")).cluster.env == read
    assert cfg.cluster.env.A == "hush"  # the resolver is restored


# -- The snapshot --


def copied(run_dir: Path) -> list[str]:
    """Return the files of code/ without bytecode, the metadata of the library, and the defaults that it writes."""
    files = [path for path in (run_dir / "code").rglob("*") if path.is_file()]
    made = f".{sys.implementation.cache_tag}.pyc"
    names = sorted(str(path.relative_to(run_dir / "code")) for path in files if not path.name.endswith(made))
    written = {f"configs/{name}.yaml" for name in defaults.all_defaults()}
    assert written <= set(names)
    return [name for name in names if ".dist-info/" not in name and name not in written]


def rank_environment(script: Path) -> str:
    """Return bash code that exports a script's rank variables, by the copy of the code that the script sources."""
    (call,) = re.findall(r"(?m)^ *(set_rank_environment .*)$", script.read_text())
    (sourced,) = re.findall(r'source (<\(cat "\$code/src/hpc/jobs/"\{[\w,]+\}\.bash\))', script.read_text())
    return f"set -e; code={shlex.quote(str(script.parent / 'code'))}; source {sourced}; {call}"


def test_job_scripts_source_the_copy_that_was_made_with_them(desk: Desk) -> None:
    for cluster in ("slurm", "pbs"):
        assert desk.type(f"cluster={cluster}", f"run_dir={cluster}") == 0
        for name in SOURCED:
            assert Path(cluster, "code", name).read_text() == (REPO / name).read_text()
        desk.write(f"src/hpc/jobs/{cluster}.bash", "echo edited since\n")
        environ = {"SLURM_JOB_ID": "17", "PATH": os.environ["PATH"]}
        ran = subprocess.run(
            ["bash", f"{cluster}/job.sh", "x"], env=environ, capture_output=True, text=True, timeout=60
        )
        assert ran.returncode == 2 and "edited" not in ran.stdout and ran.stderr.startswith("job.sh: error: ")
        assert "missing or damaged" not in ran.stderr
        desk.write(f"src/hpc/jobs/{cluster}.bash", (REPO / f"src/hpc/jobs/{cluster}.bash").read_text())


def test_the_snapshot_is_what_git_would_commit(desk: Desk) -> None:
    git(desk.project, "init", "-q")
    git(desk.project, "add", "train.py")
    git(desk.project, "commit", "-qm", "one")
    desk.write("train.py", "# changed\n")
    desk.write("größe 1.py", "")
    assert desk.type("cluster=slurm", "run_dir=mine") == 0
    assert copied(Path("mine")) == sorted([*FILES, ".gitignore", "größe 1.py"])
    assert Path("mine/code/train.py").read_text() == "# changed\n"
    assert "+# changed" in Path("mine/code.diff").read_text()
    made_by = json.loads(Path("mine/made_by.json").read_text())
    assert len(made_by["commit"]) == 40 and made_by["hpc"] == library.library_version()


def test_ranks_find_the_code_compiled_and_compile_nothing_themselves(desk: Desk) -> None:
    desk.write("src/p/b.py", "begun, but no Python yet\n")
    assert desk.type("cluster=slurm", "run_dir=mine") == 0, desk.err
    source = Path("mine/code/src/p/build/runs/a.py")
    compiled = Path(importlib.util.cache_from_source(str(source)))
    # As importlib compares them (PEP 552): no flags, then the time and the size of the source.
    expected = struct.pack("<3I", 0, int(source.stat().st_mtime), source.stat().st_size)
    assert compiled.read_bytes()[4:16] == expected
    assert "b.py" not in desk.out + desk.err
    exported = subprocess.check_output(["bash", "-c", f"{rank_environment(Path('mine/job.sh'))}; export -p"], text=True)
    assert 'PYTHONDONTWRITEBYTECODE="1"\n' in exported


@pytest.mark.parametrize("cluster", ["slurm", "pbs"])
def test_sets_of_words_have_one_order_in_all_ranks_and_attempts(cluster: str, desk: Desk) -> None:
    desk.type(f"cluster={cluster}", "cluster.account=a", "run_dir=mine")
    ask = f"{rank_environment(Path('mine/job.sh'))}\n{sys.executable} -c 'print(list(set(map(str, range(9)))))'"
    orders = [subprocess.check_output(["bash", "-c", ask], env={}) for _ in range(2)]
    assert orders[0] == orders[1]


def test_without_git_the_snapshot_leaves_out_what_is_no_code(desk: Desk) -> None:
    assert desk.type("cluster=slurm", "run_dir=mine") == 0
    assert copied(Path("mine")) == sorted(FILES)
    assert json.loads(Path("mine/made_by.json").read_text())["commit"] is None and not Path("mine/code.diff").exists()


@pytest.mark.parametrize("tracks", ["git", "nobody"])
def test_what_runs_have_left_beside_the_code_is_no_code(tracks: str, desk: Desk) -> None:
    if tracks == "git":
        git(desk.project, "init", "-q")
        git(desk.project, "add", ".")
        git(desk.project, "commit", "-qm", "one")
    results = ["weak/scaling.csv", "weak/nodes-1/attempts.jsonl", "weak/nodes-1/checkpoints/step-1/0.distcp"]
    code = ["configs/scaling.csv", "attempts/a.py"]  # code, although named like results
    for name in (*results, *code):
        desk.write(name, "")
    for number in (1, 2):  # the first copy exists when the second one is made
        assert desk.type("cluster=slurm", f"run_dir={desk.project}/my runs/{number}") == 0, desk.err
    kept = [".gitignore"] if tracks == "git" else []
    assert copied(desk.project / "my runs" / "2") == sorted([*FILES, *code, *kept])


@pytest.mark.parametrize("tracks", ["git", "nobody"])
def test_code_in_folders_of_its_own_is_copied_and_links_lead_on(tracks: str, desk: Desk, tmp_path: Path) -> None:
    library, elsewhere = tmp_path / "library", tmp_path / "elsewhere"
    for folder in (library, elsewhere):
        (folder / "part").mkdir(parents=True)
        (folder / "part" / "a.py").write_text("")
    git(library, "init", "-q")
    git(library, "add", ".")
    git(library, "commit", "-qm", "one")
    (desk.project / "src" / "linked").symlink_to("p/build")
    (desk.project / "src" / "shared").symlink_to(elsewhere)
    (desk.project / "runs").mkdir(exist_ok=True)
    (desk.project / "runs" / "table").write_text("")  # no code
    (desk.project / "src" / "results").symlink_to("../runs")
    git(tmp_path, "clone", "-q", str(library), str(desk.project / "src" / "cloned"))
    if tracks == "git":
        git(desk.project, "init", "-q")
        git(desk.project, "add", "train.py")
        with desk.set.context() as patch:
            patch.setenv("PATH", os.defpath)  # git submodule is a script that needs more commands
            allowed = ("-c", "protocol.file.allow=always")
            git(desk.project, *allowed, "submodule", "add", "-q", str(library), "src/its module")
    assert desk.type("cluster=slurm", "run_dir=mine") == 0, desk.err
    assert all(f"note: src/{name} leads out of the code" in desk.err for name in ("shared", "results"))
    assert "src/linked" not in desk.err
    code = Path("mine/code/src")
    there = [code / "cloned/part/a.py", code / "linked/runs/a.py", code / "shared/part/a.py"]
    there += [code / "results/table"]
    there += [code / "its module/part/a.py"] if tracks == "git" else []
    assert all(file.is_file() for file in there), there
    assert (code / "linked").resolve() == (code / "p/build").resolve()


@pytest.mark.parametrize("tracked", [False, True])
def test_a_file_that_goes_away_while_it_is_copied(tracked: bool, desk: Desk) -> None:
    git(desk.project, "init", "-q")
    git(desk.project, "add", ".")
    names = snapshot.project_files()
    gone = "env.sh" if tracked else "notes.tmp"
    desk.set.setattr(snapshot, "project_files", lambda: [*names, *([] if tracked else [gone])])
    (desk.project / gone).unlink(missing_ok=True)
    snapshot.reject_unsuitable_code("snapshot")
    mine = desk.project / "runs" / "mine"
    mine.mkdir()
    if tracked:
        with pytest.raises(ConfigError, match="git tracks it"):
            snapshot.copy_code(mine)
    else:
        snapshot.copy_code(mine)
        assert copied(mine) == sorted([*FILES, ".gitignore"])


def test_a_repository_above_that_ignores_the_project_is_not_asked(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("*\n")  # a home directory under version control
    git(tmp_path, "init", "-q")
    assert desk.type("cluster=slurm", "run_dir=mine") == 0
    assert copied(Path("mine")) == sorted(FILES)


def test_pipes_and_sockets_are_left_out(desk: Desk) -> None:
    os.mkfifo(desk.project / "src" / "p" / "wandb.pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        Path("socket").rename(desk.project / "socket")
        assert desk.type("cluster=slurm", "run_dir=mine") == 0, desk.err
    assert copied(Path("mine")) == sorted(FILES)


def test_a_file_that_cannot_be_copied_is_named(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(source: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied", str(source))

    monkeypatch.setattr(snapshot.shutil, "copy2", copy)
    assert desk.type("cluster=slurm", "run_dir=mine") == 2 and not Path("mine").exists()
    assert f"{desk.project}/" in desk.err and "must be readable" in desk.err and "chmod u+r" in desk.err


def test_an_environment_is_packed_anew_where_it_has_changed(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    (desk.bin / "tar").symlink_to("/bin/tar")
    packages = desk.venv / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    (desk.venv / "bin").mkdir()
    sizes = []
    for name in ("one", "one", "two"):
        (packages / name).mkdir(exist_ok=True)
        if name == "two":  # as pip leaves it
            later = packages.stat().st_mtime + 5
            os.utime(packages, (later, later))
        environment.pack_environment(desk.venv)
        listed = subprocess.run(["tar", "-tf", f"{desk.venv}.tar"], capture_output=True, text=True, check=True).stdout
        sizes.append("site-packages/two/" in listed)
    assert sizes == [False, False, True]


def test_git_does_not_see_an_archive_of_the_environment_that_is_being_made(desk: Desk, tmp_path: Path) -> None:
    """Check the name of the unfinished file: another submission at that time would copy gigabytes, or reject them."""
    git(desk.project, "init", "-q")
    (desk.project / ".gitignore").write_text((PROJECT / ".gitignore").read_text())
    venv, seen = desk.project / ".venv", tmp_path / "seen"
    (venv / "bin").mkdir(parents=True)
    look = f"git -C {shlex.quote(str(desk.project))} ls-files --others --exclude-standard"
    (desk.bin / "tar").write_text(f'#!/bin/bash\n: >"$2"\n{look} >{shlex.quote(str(seen))}\nexit 1\n')
    (desk.bin / "tar").chmod(0o755)
    with pytest.raises(ConfigError, match="packing the environment failed"):
        environment.pack_environment(venv)
    assert "train.py" in seen.read_text() and ".tar" not in seen.read_text()


def test_a_repository_that_git_rejects_is_told(desk: Desk) -> None:
    git(desk.project, "init", "-q")
    (desk.project / ".git" / "HEAD").write_text("no more")
    assert desk.type("cluster=slurm") == 2 and "safe.directory" in desk.err and desk.runs() == []


def test_only_committed_code_where_that_is_the_rule(desk: Desk, tmp_path: Path) -> None:
    assert desk.type("cluster=slurm", "dirty_tree=refuse") == 2 and "git does not know" in desk.err
    (desk.project / ".gitignore").write_text((PROJECT / ".gitignore").read_text())
    scratch = tmp_path.parent / f"{tmp_path.name}-scratch"
    shutil.move(desk.project / "runs", scratch)
    git(tmp_path, "init", "-q")  # one repository for several projects
    git(tmp_path, "add", "my project")
    git(tmp_path, "commit", "-qm", "one")
    for name in ("runs", ".venv"):
        (desk.project / name).symlink_to(scratch)
    (tmp_path / "another project").write_text("")
    assert desk.type("cluster=slurm", "dirty_tree=refuse") == 0, desk.err
    desk.write("train.py", "# changed\n")
    assert len(desk.runs()) == 1
    assert desk.type("cluster=slurm", "dirty_tree=refuse") == 2
    assert "train.py" in desk.err and "git commit" in desk.err and len(desk.runs()) == 1


def test_data_beside_the_code_are_not_copied_into_every_run(desk: Desk) -> None:
    desk.set.setattr(snapshot, "MAX_BYTES", 100_000)
    desk.write("data/huge.bin", "x" * 200_000)
    assert desk.type("cluster=slurm") == 2
    assert "data/huge.bin" in desk.err and ".gitignore" in desk.err and desk.runs() == []


def test_the_shipped_project_is_copied_whole() -> None:
    names = set(snapshot.project_files())
    assert {"train.py", "submit.py", "env.sh", "configs/cluster/local.yaml"} <= names
    assert not any(name.startswith(("runs/", ".git/", ".venv/")) or "__pycache__" in name for name in names)


# -- This user's own values --


@pytest.fixture
def personal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(personal_clusters, "PERSONAL_CLUSTERS", tmp_path / "clusters.yaml")
    return tmp_path / "clusters.yaml"


def test_values_of_the_user_are_taken_for_a_cluster_of_another_folder(personal: Path, tmp_path: Path) -> None:
    file = tmp_path / "shared" / "cluster" / "ours.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("defaults: [slurm]\nname: ours\n")
    personal.write_text("ours: {account: mine}")
    cfg = compose.compose_overrides([f"hydra.searchpath=[file://{tmp_path}/shared]", "cluster=ours"])
    assert cfg.cluster.account == "mine"


def test_the_users_environment_is_added_to_the_clusters(personal: Path) -> None:
    personal.write_text("lumi_g: {env: {WANDB_MODE: offline, NCCL_DEBUG: WARN}}")
    shipped = compose.compose_overrides(["cluster=lumi_g"], personal=False).cluster.env
    mine = {"WANDB_MODE": "offline", "NCCL_DEBUG": "WARN"}
    assert shipped and compose.compose_overrides(["cluster=lumi_g"]).cluster.env == {**shipped, **mine}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("slurm: {acount: x}", "(similar: account)"),
        ("slurm: {account: [", "YAML"),
        ("- slurm", "YAML"),
        ("slurm: proj", "YAML"),
        ("slurm: [proj]", "YAML"),
        ("slurm: {account: 0123}", "quote it"),
        ("slurm: {time: 1:30:00}", "quote it"),
    ],
)
def test_mistakes_in_the_users_file_are_rejected(text: str, words: str, personal: Path) -> None:

    personal.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse.parse(compose.compose_overrides(["cluster=slurm"]))
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["", "other: {account: x}", "slurm:\n", "slurm: {}"])
def test_a_users_file_may_say_nothing(text: str, personal: Path) -> None:
    personal.write_text(text)
    assert compose.compose_overrides(["cluster=slurm"]).cluster.name == "slurm"


# -- The run directory --


def test_attempts_and_the_verdict_are_noted(tmp_path: Path) -> None:
    attempt_log.record_start(tmp_path, 1, environ={"SLURM_JOB_ID": "17"}, hosts=["n1"])
    with (tmp_path / "attempts.jsonl").open("a") as stream:
        stream.write('{"event": "st')  # cut off by a crash
        stream.write("\n")
    attempt_log.record_end(
        tmp_path, None, attempt=1, step=500, outcome="continue", why="told\nto", metrics={"test/loss": 0.5}
    )
    assert (tmp_path / "verdict").read_text() == "attempt 1\nstep 500\noutcome continue\nwhy told to\n"
    attempt_log.record_start(tmp_path, 2, environ={}, from_step=500)
    assert not (tmp_path / "verdict").exists()
    first, end, second = attempt_log.read_events(tmp_path)
    assert (first["job"], first["hosts"], second["job"]) == ("17", ["n1"], None)
    assert (first["from_step"], second["attempt"], second["from_step"]) == (0, 2, 500)
    assert (end["outcome"], end["step"], end["metrics"]) == ("continue", 500, {"test/loss": 0.5})


@pytest.mark.slow
@pytest.mark.parametrize("then", ["without it", "another one"])
def test_a_script_is_not_written_for_code_whose_functions_are_others(then: str, desk: Desk) -> None:
    """Check that a new script needs the run's own version of its code.

    A run that moves gets a new script, but keeps its code.
    """
    shutil.copytree(PROJECT / "configs", desk.project / "configs", dirs_exist_ok=True)
    assert desk.type("cluster=slurm", "trainer=ddp", "run_dir=mine") == 0, desk.err
    before = {path.name: path.read_bytes() for path in Path("mine").iterdir() if path.is_file()}
    sourced = Path("mine/code/src/hpc/jobs/slurm.bash")
    if then == "without it":  # submitted before this file existed
        sourced.unlink()
    else:
        desk.write("src/hpc/jobs/slurm.bash", sourced.read_text() + "\n")  # changed since
        project_file = desk.project / "src/hpc/jobs/slurm.bash"
        assert project_file.read_text() != sourced.read_text()
    assert desk.type("resume=mine", "cluster.time=0:30:00") == 2
    fix = f"python {Path('mine').absolute()}/code/submit.py resume={Path('mine').absolute()}"
    assert "slurm.bash" in desk.err and fix in desk.err, desk.err
    assert {path.name: path.read_bytes() for path in Path("mine").iterdir() if path.is_file()} == before
    assert desk.type("resume=mine") == 0, "the same script goes on with the same code"
