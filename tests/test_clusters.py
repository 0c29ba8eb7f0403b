"""Check each cluster's job script with a Slurm that is configured like it, with bash and with shellcheck."""

import json
import re
import shutil
import sys

import pytest
import slurm_nodes
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
    overrides = {name: TWINS[name]["overrides"] for name in SLURM if name in TWINS} | dict.fromkeys(PBS, ACCOUNT)
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
    assert len(sourced) == 4 and len(made) > len([*SLURM, *PBS])
    # Scripts source what cat or Python print.
    for excluded, files in ((["--exclude=SC1090,SC2034,SC2154"], made), ([], sourced)):
        done = run(
            ["shellcheck", "-x", f"--source-path={REPO}", f"--source-path={project}", *excluded, *map(str, files)],
            tmp_path,
        )
        assert done.returncode == 0, done.stdout
