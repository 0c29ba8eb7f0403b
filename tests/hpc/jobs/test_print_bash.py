"""Check that job scripts and sourced files are short, rejected if incomplete, and unchanged while a job runs."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fork import REPO
from omegaconf import OmegaConf
from test_job import NEEDS, Node, composed, node  # noqa: F401 - a fixture
from test_pbs import FINISH, Pbs, cluster  # noqa: F401 - a fixture

from hpc.config import project
from hpc.config.parse import parse
from hpc.jobs import job, pbs, slurm
from hpc.jobs.print_bash import SOURCED_FILES
from hpc.jobs.shared_node import share_node

MOST = 40  # lines, few enough to be read in one go
WORK = Path("/home/ana")
ARRAY = {
    "run_dir": None,
    "members_file": WORK / "runs/s/members",
    "num_members": 9,
    "at_once": 4,
    "is_search_trial": True,
}
FILES = {scheduler: [f"src/hpc/jobs/{file}" for file in files] for scheduler, files in SOURCED_FILES.items()}
EACH_FILE = sorted({file for files in FILES.values() for file in files})
SCHEDULERS = {
    file.stem: scheduler
    for file in sorted((project.CONFIGS / "cluster").glob("*.yaml"))
    if (scheduler := OmegaConf.load(file).get("scheduler"))
}


def scripts(name: str) -> dict[str, str]:
    """Render all scripts of a cluster: for a run, for a search, for one whose runs share nodes, to submit by hand."""
    words = (f"cluster={name}", "trainer=ddp_4node", "cluster.account=abc", *NEEDS.get(name, []))
    places = {"run_dir": WORK / "runs/d", "code": WORK / "runs/d/code", "work_dir": WORK, "venv": WORK / ".venv"}
    run = job.job_from_config(parse(composed(*words)), **places)
    search = replace(run, **ARRAY)
    works = {"run": run, "search": search, "by hand": job.job_from_config(parse(composed(*words)), words)}
    render = slurm.render_job_script if SCHEDULERS[name] == "slurm" else pbs.render_job_script
    one_gpu = (*words, "trainer=gpu", "cluster.whole_nodes=true")
    cfg = parse(composed(*one_gpu))
    works["shared node"] = share_node(replace(job.job_from_config(cfg, **places), **ARRAY), cfg.cluster)
    return {kind: render(work) for kind, work in works.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_person_reads_each_script_in_one_go(name: str) -> None:
    for kind, text in scripts(name).items():
        lines = text.splitlines()
        assert len(lines) <= MOST, f"{kind}: {len(lines)} lines\n{text}"
        sourced = "src/hpc/jobs/" if kind != "by hand" else f"hpc.jobs.print_bash {SCHEDULERS[name]})"
        assert sum(sourced in line and "source " in line for line in lines) == 1


def test_the_scripts_of_slurm_are_as_short() -> None:
    kept = {path.name: len(path.read_text().splitlines()) for path in (project.PROJECT / "slurm").iterdir()}
    assert kept and max(kept.values()) <= MOST, kept


@pytest.mark.parametrize("file", EACH_FILE)
def test_what_is_sourced_only_defines_functions(file: str) -> None:
    """Check that sourcing runs no command that could fail halfway: the script alone decides the order."""
    said = subprocess.run(
        ["bash", "-c", f"before=$(set); source {shlex.quote(str(REPO / file))}; echo $?; trap; set +o"],
        env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
    )  # fmt: skip
    bare = subprocess.run(["bash", "-c", "echo 0; trap; set +o"], env={}, capture_output=True, text=True)
    assert (said.stdout, said.stderr) == (bare.stdout, "")
    text = re.sub(r"(?m)^\w+\(\) \{ .* \}$", "", (REPO / file).read_text())
    outside = re.sub(r"(?ms)^\w+\(\) \{.*?^\}$", "", text)
    assert [line for line in outside.splitlines() if line and not line.startswith("#")] == ["{", "}"]


@pytest.mark.parametrize("file", EACH_FILE)
def test_of_a_file_that_was_cut_off_bash_runs_nothing(file: str, tmp_path: Path) -> None:
    """Check that bash executes nothing in a truncated file.

    Cut to `set`, set_rank_environment would print all variables, secrets included.
    """
    text = (REPO / file).read_text()
    words = [found.start() + 3 for found in re.finditer(r"(?m)^(set_|find|exit_|print_)", text)]
    assert words or "shared_node" in file, "none of its functions begins with the name of a command"
    for end in sorted({*words, *range(0, len(text) - 1, 199), len(text) - 2}):
        (tmp_path / "cut").write_text(text[:end])
        ask = "source ./cut 2>/dev/null; declare -F"
        done = subprocess.run(["/bin/bash", "-c", ask], cwd=tmp_path, env={"PATH": "/nowhere"}, capture_output=True)
        assert done.stdout == b"", end


# -- A file that is missing or damaged --


def damage(path: Path) -> dict[str, Callable[[], object]]:
    """Return ways to damage a file, as a full disk or an edit by hand may do, by name."""
    text = path.read_text()
    ends = [found.end() for found in re.finditer(r"(?m)^\}\n", text)]  # ends of functions: cut there, it is valid bash
    return {
        "missing": path.unlink,
        "empty": lambda: path.write_text(""),
        "cut in a function": lambda: path.write_text(text[: len(text) // 2]),
        "cut after a function": lambda: path.write_text(text[: ends[len(ends) // 2]]),
        "cut after all functions": lambda: path.write_text(text[: ends[-2]]),
        "cut in the last line": lambda: path.write_text(text[:-2]),
        "no bash": lambda: path.write_text(text.replace("local ", "local (", 1)),
        "with a block of zeros": lambda: path.write_bytes(text[:2048].encode() + bytes(2048) + text[4096:].encode()),
    }


KINDS = ("missing", "empty", "cut in a function", "cut after a function", "cut after all functions",
         "cut in the last line", "no bash", "with a block of zeros")  # fmt: skip


DAMAGED = "a file of {}/src/hpc/jobs is missing or damaged; if the run was moved, type: python submit.py resume=FOLDER"


@pytest.mark.parametrize("file", FILES["slurm"])
@pytest.mark.parametrize("kind", KINDS)
def test_of_slurm_it_is_rejected_in_one_message(kind: str, file: str, node: Node) -> None:  # noqa: F811
    damage(node.run_dir / "code" / file)[kind]()
    assert node.run() == 2 and not node.noted("srun.argv") and not node.noted("requeued")
    assert node.said == f"job.sh: error: {DAMAGED.format(node.run_dir / 'code')}\n"
    assert not (node.run_dir / "stalled").exists()


@pytest.mark.parametrize("file", FILES["pbs"])
@pytest.mark.parametrize("kind", KINDS)
def test_of_pbs_it_is_rejected_in_one_message(kind: str, file: str, cluster: Pbs) -> None:  # noqa: F811
    cluster.share(cluster.code, 0.05)
    damage(cluster.code / file)[kind]()
    (cluster.run_dir / "job.sh").write_text(pbs.render_job_script(cluster.job))
    for words in ([], ["rank", cluster.run_dir, "17", "0", "p1", "1"]):
        command = ["bash", cluster.run_dir / "job.sh", *words]
        done = subprocess.run(command, env=cluster.environ(), capture_output=True, text=True, timeout=30)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"job.sh: error: {DAMAGED.format(cluster.code)}\n"
    assert not (cluster.home / "tasks").exists()


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_elsewhere_a_script_that_anybody_submits_says_where_to(scheduler: str, tmp_path: Path) -> None:
    (tmp_path / "script").write_text(scripts(scheduler)["by hand"])
    environ = {"SLURM_JOB_ID": "17", "PBS_JOBID": "17", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "script"], cwd=tmp_path, env=environ, capture_output=True, text=True)
    said = "job.sh: error: this must be submitted in the folder of a project whose environment is complete\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
    assert [path.name for path in tmp_path.iterdir()] == ["script"]


# -- While a job runs --


def test_what_slurm_jobs_source_may_change_while_they_run(node: Node) -> None:  # noqa: F811
    """Change the file in place, as an editor or a copy does; bash has already read all of it."""
    path = node.run_dir / "code" / FILES["slurm"][1]
    verdict = shlex.quote(str(node.run_dir / "verdict"))
    ranks = f"echo 'outcome continue' >{verdict}; echo 'exit 77; }} exit 77' >{shlex.quote(str(path))}; exit 85"
    assert node.run(SRUN=ranks) == 0 and node.noted("requeued") == ["17"], node.said


def test_what_pbs_jobs_source_may_change_while_they_run(cluster: Pbs) -> None:  # noqa: F811
    path = cluster.code / FILES["pbs"][1]
    cluster.behaviour(f"time.sleep(0.5)\nopen({str(path)!r}, 'w').write('exit 77')\n{FINISH}")
    assert cluster.run() == 0, cluster.log()


def test_variables_of_the_shell_that_submits_are_not_those_of_the_script(node: Node) -> None:  # noqa: F811
    text = "".join((REPO / file).read_text() for file in FILES["slurm"])
    names = {*re.findall(r"\b([a-z_]+)=", text), "members", "name", "work_dir", "retries"} - {"code"}
    assert {"stalled", "earlier", "ranks"} < names
    assert node.run(outcome="continue", code=85, **dict.fromkeys(names, "17")) == 0, node.said
    assert node.noted("srun.argv")[-1] == f"resume={node.run_dir}" and node.noted("requeued") == ["17"]
    assert (node.run_dir / "stalled").read_text() == "1\n"


# -- The launch --


@pytest.mark.parametrize(
    "launcher",
    ["srun", "srun --mpi=none", "ulimit -c 0; srun", "ulimit -c 0 && srun", "A=1 srun", "time srun", "command srun"],
)
def test_a_launcher_may_be_any_bash_that_ends_in_srun(launcher: str, node: Node) -> None:  # noqa: F811
    """Check that srun replaces the launcher's process, so that Ctrl-C ends it."""
    work = replace(node.work, launcher=launcher)
    assert ("\nrun_ranks srun " in slurm.render_job_script(work)) == launcher.startswith("srun")
    assert node.run(work, outcome="continue", code=85) == 0, node.said
    assert node.noted("srun.argv")[-1] == f"resume={node.run_dir}" and node.noted("requeued") == ["17"]


def test_a_run_of_a_search_asks_once_before_its_ranks(node: Node) -> None:  # noqa: F811
    work = replace(node.work, is_search_trial=True)
    node.program("python", '[ $2 = --draw ] && echo "$1 $3" >>"$0.argv" && [ ! -e "$3/rejects" ] && >"$3/config.yaml"')
    (node.run_dir / "rejects").touch()
    assert node.run(work) == 1 and not node.noted("srun.argv"), node.said
    (node.run_dir / "rejects").unlink()
    for _ in range(2):
        assert node.run(work, outcome="continue", code=85) == 0, node.said
    assert node.noted("python.argv") == [f"{node.run_dir}/code/submit.py {node.run_dir}"] * 2


def test_a_name_is_a_word_in_a_script_too(node: Node, tmp_path: Path) -> None:  # noqa: F811
    """Check that scripts quote names, so that no typed name is executed as code."""
    shutil.copytree(node.run_dir / "code", tmp_path, dirs_exist_ok=True)
    odd = "it's; touch canary; $(touch canary)"
    work = replace(node.work, name=odd, run_dir=None, code=None, work_dir=None, venv=None)
    for render in (slurm.render_job_script, pbs.render_job_script):
        (line,) = (line for line in render(work).splitlines() if line.startswith("name="))
        show = subprocess.run(["bash", "-c", f'{line}\necho "$name"'], cwd=tmp_path, capture_output=True, text=True)
        assert show.stdout == f"{odd}\n" and not (tmp_path / "canary").exists()
