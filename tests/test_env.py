"""Test env.sh with a stub of Python. `make test` runs the real installation, which takes minutes."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

# A stub of Python: it makes a real virtual environment, but logs its arguments instead of installing.
STUB = """#!/bin/bash
echo "$*" >>{log}
case "$*" in
  *version_info*) exit ${{STUB_OLD:-0}} ;;
  "-m venv "*)
    {python} -m venv --without-pip "$3" && rm "$3/bin/python" && cp "$0" "$3/bin/python" ;;
  "-m pip --version") [ "$0" != {stub} ] ;;
  "-m pip install"*) cat >>{log}; sleep ${{STUB_SECONDS:-0}}; exit ${{STUB_PIP:-0}} ;;
  *signatures) [ -n "$PYTHONPATH" ] ;;
  *) exec {python} "$@" ;;
esac
"""


class Place:
    """A project without sources and a stub of Python that writes down its arguments."""

    def __init__(self, folder: Path, baked: Path) -> None:
        self.folder = folder
        self.project = folder / "my project's $(touch canary)"
        self.project.mkdir()
        for name in ("env.sh", "pyproject.toml", "constraints.txt"):
            shutil.copy(baked / name, self.project)
        for clusters in ("configs/cluster", "src/hpc/jobs/cluster"):
            shutil.copytree(baked / clusters, self.project / clusters)
        self.venv = folder / "an environment"
        self.log = folder / "log"
        self.stub = folder / "python"
        quoted = {key: shlex.quote(str(value)) for key, value in vars(self).items()}
        self.stub.write_text(STUB.format(**quoted | {"python": shlex.quote(sys.executable)}))
        self.stub.chmod(0o755)

    def popen(self, script: str, **env: str) -> subprocess.Popen:
        """Start `script` in bash, where $ENV is the path of env.sh."""
        kept = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
        known = {"PYTHON": str(self.stub), "VENV": str(self.venv), "ENV": str(self.project / "env.sh")}
        return subprocess.Popen(
            ["bash", "--norc", "-c", script],
            cwd=self.folder,
            env=kept | known | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def bash(self, script: str, **env: str) -> tuple[int, str, str]:
        process = self.popen(script, **env)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def asked(self, what: str) -> int:
        """Return how often `what` occurs in the logged arguments of Python."""
        return self.log.read_text().count(what) if self.log.exists() else 0


@pytest.fixture
def place(tmp_path, project) -> Place:
    return Place(tmp_path, project)


def test_first_use_installs_and_activates(place):
    code, out, err = place.bash('source "$ENV" && type -P python && echo "$VIRTUAL_ENV"')
    assert code == 0, err
    assert out.split("\n")[:2] == [f"{place.venv}/bin/python", str(place.venv)]
    assert place.asked("--constraint constraints.txt") == 1
    for wanted in ("torch>=", "deepspeed", "ruff", "hpc.config.signatures"):
        assert place.asked(wanted), wanted
    assert not (place.folder / "canary").exists() and not (place.project / "canary").exists()


def test_second_use_starts_no_python(place):
    place.bash('source "$ENV"')
    before = place.log.read_text()
    code, out, err = place.bash('source "$ENV"; source "$ENV"; echo $?; tr : "\\n" <<<"$PATH" | grep -c environment')
    assert (code, out.split(), err) == (0, ["0", "1"], "")
    assert place.log.read_text() == before


def test_the_default_place_is_beside_env_sh(place):
    code, _, err = place.bash('unset VENV; cd /; source "$ENV"')
    assert code == 1 and "set VENV" in err  # activating a path with $(...) would execute it
    plain = place.project.rename(place.folder / "Übung 1")
    code, out, err = place.bash('unset VENV; cd /; source "$ENV" && type -P python', ENV=f"{plain}/env.sh")
    assert (code, out.strip()) == (0, f"{plain}/.venv/bin/python"), err


def test_sets_of_words_have_one_order_in_every_python(place):
    script = 'source "$ENV" && echo "$PYTHONHASHSEED" && bash -c "echo \\$PYTHONHASHSEED"'
    code, out, err = place.bash(f"unset PYTHONHASHSEED; {script}")
    assert (code, out.split()) == (0, ["0", "0"]), err
    assert place.bash(script, PYTHONHASHSEED="7")[1].split() == ["7", "7"]


def test_a_relative_venv_counts_from_where_it_is_sourced(place):
    code, out, err = place.bash('source "$ENV" && type -P python', VENV="here")
    assert (code, out.strip()) == (0, f"{place.folder}/here/bin/python"), err


def test_keeps_the_shells_options_and_names(place):
    script = """
        set -euo pipefail -f -C; shopt -s nullglob; IFS=x; before=$(set +o; shopt; compgen -A function; trap)
        source "$ENV"; source "$ENV"
        after=$(set +o; shopt; compgen -A function | grep -v deactivate; trap)
        [ "$before" = "$after" ] && compgen -v | grep -c _env_ || echo clean
    """
    code, out, err = place.bash(script)
    assert (code, out.split()) == (0, ["0", "clean"]), err


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"STUB_OLD": "1"}, "Python 3.11 or newer is needed"),
        ({"PYTHON": "no-such-python"}, "Python 3.11 or newer is needed"),
        ({"STUB_PIP": "1"}, "the installation failed"),
        ({"VENV": "/proc/none/venv"}, "set VENV"),
    ],
)
def test_a_failure_is_one_line_and_spares_the_shell(env, reason, place):
    code, out, err = place.bash('source "$ENV"; echo "status $?, still here"', **env)
    assert (code, out) == (0, "status 1, still here\n")
    lines = [line for line in err.splitlines() if "some minutes" not in line]
    assert len(lines) == 1 and lines[0].startswith("env.sh: ") and reason in lines[0]
    assert not list(place.folder.glob("*.lock"))


def test_goes_on_after_an_interrupted_installation(place):
    assert place.bash('source "$ENV"', STUB_PIP="1")[0] == 1
    assert place.bash('source "$ENV"')[0] == 0
    assert place.asked("-m venv") == 1 and place.asked("-m pip install") == 2


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_installs_again_when_the_versions_change(name, place):
    place.bash('source "$ENV"')
    with (place.project / name).open("a") as file:
        file.write("\n# changed\n")
    assert place.bash('source "$ENV"')[0] == 0
    assert place.asked("-m pip install") == 2


def test_two_at_once_install_once(place):
    both = [place.popen('source "$ENV" && type -P python', STUB_SECONDS="2") for _ in range(2)]
    results = [process.communicate(timeout=60) for process in both]
    assert [out.strip() for out, _ in results] == [f"{place.venv}/bin/python"] * 2
    assert place.asked("-m pip install") == 1
    assert not list(place.folder.glob("*.lock"))


def test_clears_the_lock_of_a_killed_process(place):
    process = place.popen('source "$ENV"', STUB_SECONDS="5")
    lock = Path(f"{place.venv}.lock/owner")
    while not (lock.exists() and place.asked("-m pip install")):
        time.sleep(0.05)
        assert process.poll() is None
    installer = int(lock.read_text().split()[-1])
    os.kill(installer, 9)
    process.communicate(timeout=60)
    assert lock.exists()
    assert place.bash('source "$ENV"')[0] == 0
    assert not lock.exists()


def test_of_many_that_find_the_lock_of_a_killed_process_one_installs(place):
    """Check that only one process installs if several find a stale lock before the first of them removes it."""
    killed = place.popen('source "$ENV"', STUB_SECONDS="60")
    lock = Path(f"{place.venv}.lock/owner")
    while not (lock.exists() and place.asked("-m pip install")):
        time.sleep(0.05)
    os.kill(int(lock.read_text().split()[-1]), 9)
    killed.wait(timeout=60)
    (place.folder / "looked").mkdir()
    script = """
        cat() {
            command cat "$@"; local code=$?
            if [[ $* = *lock/owner ]] && [ ! -e "looked/$NUMBER" ]; then
                : >"looked/$NUMBER"
                for _ in {1..500}; do [ "$(ls looked | wc -l)" = 4 ] && break; sleep 0.02; done
                sleep "0.$((NUMBER * 2))"
            fi
            return "$code"
        }
        source "$ENV"
    """
    many = [place.popen(script, NUMBER=str(number), STUB_SECONDS="1.5") for number in range(4)]
    said = [process.communicate(timeout=60) for process in many]
    assert [process.returncode for process in many] == [0] * 4, said
    assert place.asked("-m pip install") == 2
    assert not list(place.folder.glob("*.lock*"))


def test_a_moved_environment_is_named(place):
    place.bash('source "$ENV"')
    moved = place.venv.rename(place.folder / "moved")
    code, _, err = place.bash('source "$ENV"', VENV=str(moved))
    assert code == 1 and f"was made as {place.venv}" in err


def test_a_folder_with_other_things_is_left_alone(place):
    place.venv.mkdir()
    (place.venv / "thesis.tex").write_text("mine")
    code, _, err = place.bash('source "$ENV"')
    assert code == 1 and "is not a virtual environment" in err
    assert [path.name for path in place.venv.iterdir()] == ["thesis.tex"]


def test_run_instead_of_sourced_says_so(place):
    for shell in ("bash", "sh"):
        code, _, err = place.bash(f'{shell} "$ENV"')
        assert code == 1 and "source env.sh" in err and not place.log.exists()


def test_setup_of_every_cluster_is_read_as_its_file_says(project):
    """Check that env.sh, which parses `setup` without Python, reads the same lines as the job script."""
    from omegaconf import OmegaConf

    some = 0
    for path in (project / "src/hpc/jobs/cluster").glob("*.yaml"):
        text = (project / "env.sh").read_text()
        function = text[text.index("_env_setup_lines()") : text.index("\n}\n", text.index("_env_setup_lines()")) + 3]
        command = ["bash", "-c", f'{function}_env_setup_lines "$1"', "bash", str(path)]
        read = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        assert read == list(OmegaConf.load(path).get("setup") or []), path.name
        some += len(read)
    assert some > 5


def test_modules_of_the_cluster_come_first(place):
    (place.project / "configs" / "cluster" / "mine.yaml").write_text(
        "name: mine\nsetup:\n  - export LOADED=yes  # why\n"
    )
    code, out, err = place.bash('source "$ENV" && echo "$LOADED"', CLUSTER="mine")
    assert (code, out.strip()) == (0, "yes"), err
    assert place.bash('source "$ENV" && echo "[${LOADED:-}]"', CLUSTER="")[1].strip() == "[]"
    code, _, err = place.bash('source "$ENV"', CLUSTER="nowhere")
    assert code == 1 and "CLUSTER=nowhere has no file" in err
    (place.project / "configs" / "cluster" / "mine.yaml").write_text("setup:\n  - no_such_command --x\n")
    code, _, err = place.bash('source "$ENV"', CLUSTER="mine")
    assert code == 1 and "a setup line of configs/cluster/mine.yaml failed: no_such_command --x" in err


def test_a_cluster_of_the_project_comes_before_a_shipped_one(place):
    shipped = place.project / "src/hpc/jobs/cluster/leonardo.yaml"
    shipped.write_text("setup:\n  - export LOADED=shipped\n")
    assert place.bash('source "$ENV" && echo "$LOADED"', CLUSTER="leonardo")[1].strip() == "shipped"
    own = place.project / "configs/cluster/leonardo.yaml"
    own.write_text("setup:\n  - export LOADED=own\n")
    assert place.bash('source "$ENV" && echo "$LOADED"', CLUSTER="leonardo")[1].strip() == "own"
    own.unlink()
    shipped.write_text("setup:\n  - no_such_command --x\n")
    code, _, err = place.bash('source "$ENV"', CLUSTER="leonardo")
    assert code == 1 and "a setup line of src/hpc/jobs/cluster/leonardo.yaml failed: no_such_command --x" in err


def test_setup_is_read_however_its_lines_are_written(place):
    file = place.project / "configs" / "cluster" / "mine.yaml"
    file.write_text(
        """setup:
  - export ONE=1  # why

  # the next one
  - "export TWO=\\"a # b\\""
  - 'export THREE="it''s"'
    - export FOUR=4
- export FIVE=5
other: 1
"""
    )
    code, out, err = place.bash('source "$ENV" && echo "$ONE $TWO $THREE $FOUR $FIVE"', CLUSTER="mine")
    assert (code, out.strip()) == (0, "1 a # b it's 4 5"), err
    for text in ('setup: ["module load a"]\n', "setup:\n  - |\n    module load a\n"):
        file.write_text(text)
        code, _, err = place.bash('source "$ENV"', CLUSTER="mine")
        assert code == 1 and "must be a list" in err


def test_an_environment_may_be_reached_by_another_name(place):
    assert place.bash('source "$ENV"')[0] == 0
    (place.folder / "link").symlink_to(place.venv)
    around = f"{place.folder}/../{place.folder.name}/{place.venv.name}"
    for other in (str(place.folder / "link"), f"{place.venv}/", around):
        code, out, err = place.bash('source "$ENV" && echo "$VIRTUAL_ENV"', VENV=other)
        assert (code, out.strip()) == (0, str(place.venv)), err


def test_a_job_installs_nothing(place):
    code, _, err = place.bash('source "$ENV"', SLURM_JOB_ID="7")
    assert code == 1 and "jobs do not install" in err
    assert not place.asked("-m pip install")
