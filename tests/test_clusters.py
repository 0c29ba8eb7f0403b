"""Check each cluster's job script with a Slurm that is configured like it, with bash and with shellcheck."""

import json
import re
import shutil
import sys

import pytest
import slurm_nodes
import yaml
from conftest import REPO
from twins import ACCOUNT, REJECTED_EVERYWHERE, TWINS

FILES = sorted(path for path in REPO.glob("*/configs/cluster/*.yaml"))
SLURM, PBS = (
    [path.stem for path in FILES if f"\nscheduler: {scheduler}\n" in path.read_text()] for scheduler in ("slurm", "pbs")
)

# In a baked project: for each cluster a job of four whole nodes, and one of a single device.
RENDER = """
import json, sys
from pathlib import Path
sys.path[:0] = ["src", "."]
from hpc.config import compose, parse
from hpc.submit.scripts import make_job, render_script
scripts, run_dir = {}, Path("/runs/it's 100 % mine")
for cluster, overrides in json.loads(sys.argv[1]).items():
    cfg = compose.compose_overrides([f"cluster={cluster}", "trainer=ddp_4node", *overrides])
    cfg = parse.parse(cfg, for_job=True)
    works = {"job": make_job(cfg, run_dir=run_dir)}
    cfg.trainer.num_nodes = cfg.trainer.devices = 1
    works["one"] = make_job(cfg, run_dir=run_dir)
    scripts[cluster] = {name: render_script(work, cfg) for name, work in works.items()}
Path(sys.argv[2]).write_text(json.dumps(scripts))
"""


@pytest.fixture(scope="module")
def scripts(project, run, tmp_path_factory) -> dict[str, dict[str, str]]:
    """Return the text of scripts by cluster and name, with those in slurm/. One process makes all, to save time."""
    folder = tmp_path_factory.mktemp("scripts")
    overrides = {name: TWINS[name]["overrides"] for name in SLURM if name in TWINS}
    overrides |= {name: ["cluster.options=['-P abc']"] if name == "abci3" else ACCOUNT for name in PBS}
    command = [sys.executable, "-c", RENDER, json.dumps(overrides), str(folder / "scripts.json")]
    done = run(command, project, env={"XDG_CONFIG_HOME": str(folder)})  # without this user's clusters.yaml
    assert done.returncode == 0, done.stdout
    kept = {path.name: path.read_text() for path in (project / "slurm").iterdir()}
    made = json.loads((folder / "scripts.json").read_text())
    return made | {"slurm": made["slurm"] | kept}


def test_every_cluster_with_slurm_has_a_twin():
    assert SLURM and PBS
    without = ", ".join(f"configs/cluster/{name}.yaml" for name in SLURM if name not in TWINS)
    assert not without, (
        f"{without}: nothing tests what Slurm says to its jobs. Add to TWINS in tests/twins.py the NodeName and "
        "PartitionName lines that `scontrol show node` and `scontrol show partition` tell there"
    )
    assert not set(TWINS) - set(SLURM), "twins of clusters that are not in configs/cluster"


@pytest.mark.slow
@pytest.mark.skipif(slurm_nodes.missing() is not None, reason=f"{slurm_nodes.missing()}")
@pytest.mark.parametrize("name", [name for name in SLURM if name in TWINS])
def test_slurm_takes_the_job_and_no_larger_one(name, scripts, tmp_path):
    conf = "\n".join(TWINS[name]["conf"])
    with slurm_nodes.controller_only(tmp_path, f"{conf}\n") as slurm:

        def answer(script: str) -> str:
            (tmp_path / "job.sh").write_text(script)
            return slurm.call("sbatch", "--test-only", tmp_path / "job.sh", check=False).stdout

        for script in scripts[name].values():
            said = answer(script)
            assert re.match(r"sbatch: Job \d+ to start", said), f"{said}\n{script}"
        for what, script in too_much(scripts[name]["job"], conf).items():
            said = answer(script)
            assert said.startswith("allocation failure"), f"more {what} than there are: {said}"


def too_much(job: str, conf: str) -> dict[str, str]:
    """Return scripts by resource. Each requests more of that resource than the twin has."""
    more = {
        "nodes": re.sub(r"(?m)^(#SBATCH --nodes=).*", r"\g<1>9", job),
        "cores": re.sub(r"(?m)^(#SBATCH --cpus-per-task=)(\d+)$", one_more, job),
        "GPUs": re.sub(r"(?m)^(#SBATCH --g\S+[=:])(\d+)$", one_more, job),
        "time": re.sub(r"(?m)^(#SBATCH --time=).*", r"\g<1>365-00:00:00", job) if "MaxTime" in conf else job,
    }
    return {what: script for what, script in more.items() if script != job}


def one_more(found: re.Match) -> str:
    return f"{found[1]}{int(found[2]) + 1}"


@pytest.mark.parametrize("name", [name for name in SLURM if name in TWINS])
def test_asks_for_nothing_that_is_rejected_there(name, scripts):
    for script in scripts[name].values():
        assert [option for option in TWINS[name]["rejected"] + REJECTED_EVERYWHERE if option in script] == []


def test_the_table_has_each_file_and_says_who_ran_it():
    """Check docs/clusters.md: scheduler, GPUs and newest source of each file, and the number that README tells."""
    page = (REPO / "docs/clusters.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.partition("|---|")[2].splitlines()[1:]]
    found = {name.strip("`"): [scheduler, gpus, read.rpartition(", ")[2]] for name, _, scheduler, gpus, read, _ in rows}
    told = {path.stem: facts_of(path) for path in FILES if path.stem not in ("local", "slurm", "pbs")}
    assert found == told and len(rows) == len(told)
    assert ("None of the files was run" in page) == all(row[-1] == "none yet" for row in rows)
    assert f"are derived for {len(told)} supercomputers" in " ".join((REPO / "README.md").read_text().split())


def facts_of(path) -> list[str]:
    """Return scheduler, GPUs of a node, and date of the newest source of a cluster's file."""
    cluster = yaml.safe_load(path.read_text())
    gpus = " ".join(str(cluster[key]) for key in ("gpus_per_node", "gpu") if key in cluster) or "by partition"
    sources = "".join(re.findall(r"(?m)^#   \[.*", path.read_text()))
    return [cluster["scheduler"], gpus, max(re.findall(r"\b20\d\d(?:-\d\d)?\b", sources), default="no date")]


def test_modules_of_python_leave_no_packages_of_their_own(run, tmp_path):
    """Source NAME.sh where `module` sets PYTHONPATH, as the Python of JSC's stages does."""
    files = [file for file in FILES[0].parent.glob("*.sh") if "Stages/" in file.read_text()]
    assert len(files) == 3
    for file in files:
        command = f"module() {{ export PYTHONPATH=/theirs; }}; source '{file}'; echo \"it is ${{PYTHONPATH-unset}}\""
        assert run(["bash", "-c", command], tmp_path).stdout == "it is unset\n"


def test_nccl_does_not_use_a_protocol_that_corrupts_data():
    """Check clusters of GH200 with Slingshot: https://github.com/NVIDIA/nccl/issues/2001."""
    texts = {path.stem: path.read_text() for path in FILES}
    affected = {name for name, text in texts.items() if "GH200" in text and "Slingshot" in text.splitlines()[0]}
    affected -= {name for name in affected if "\ngpu: GH200" not in texts[name]}
    assert affected == {"clariden", "isambard_ai", "deltaai", "olivia"}
    assert [name for name in affected if '\n  NCCL_PROTO: "^LL128"' not in texts[name]] == []


@pytest.mark.parametrize("name", [*SLURM, *PBS])
def test_bash_can_read_it(name, scripts, run, tmp_path):
    for number, script in enumerate(scripts[name].values()):
        (tmp_path / f"{number}.sh").write_text(script)
        done = run(["bash", "-n", f"{number}.sh"], tmp_path)
        assert done.returncode == 0, f"{done.stdout}\n{script}"


@pytest.mark.soak
@pytest.mark.skipif(not shutil.which("shellcheck"), reason="not installed: shellcheck")
def test_shellcheck_finds_nothing(scripts, run, tmp_path, project):
    for name in [*SLURM, *PBS]:
        for kind, script in scripts[name].items():
            (tmp_path / f"{name}, {kind}.sh").write_text(script)
    sourced, made = sorted((REPO / "src/hpc/jobs").glob("*.bash")), sorted(tmp_path.glob("*.sh"))
    assert len(sourced) == 5 and len(made) > len([*SLURM, *PBS])
    # Scripts source what cat or Python print.
    for excluded, files in ((["--exclude=SC1090,SC2034,SC2154"], made), ([], sourced)):
        done = run(
            ["shellcheck", "-x", f"--source-path={REPO}", f"--source-path={project}", *excluded, *map(str, files)],
            tmp_path,
        )
        assert done.returncode == 0, done.stdout
