"""Test env.sh with a stub of Python. `make test` runs the real installation, which takes minutes."""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import packaging
import pytest

BASH, ZSH = ("bash", "--norc"), ("zsh", "-f")
# A stub of Python: it makes a real virtual environment, but logs its arguments instead of installing. Where it runs
# Python, that takes the stub for its own executable.
STUB = """#!/bin/bash
echo "$*" >>{log}
case "$*" in
  *version_info*) exit ${{STUB_OLD:-0}} ;;
  "-m venv "*)
    [ -z "${{STUB_HALF:-}}" ] || {{ mkdir "$3/bin"; kill -9 $PPID; exit; }}
    {python} -m venv --without-pip "$3" && rm "$3/bin/python" && cp "$0" "$3/bin/python" ;;
  "-m pip --version") [ "$0" != {stub} ] ;;
  *"-Im pip install"*) sleep ${{STUB_SECONDS:-0}}; echo "pip is done" >>{log}; exit ${{STUB_PIP:-0}} ;;
  *signatures) [ -n "$PYTHONPATH" ] ;;
  *) exec -a "$0" {base} "$@" ;;
esac
"""
# Python imports this at its start, from a folder on PYTHONPATH.
WITHOUT_LOCKS = """
import errno, fcntl, os

def flock(*_):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

fcntl.flock = flock
"""


class Place:
    """A project without sources and a stub of Python that writes down its arguments."""

    def __init__(self, folder: Path, baked: Path) -> None:
        self.folder = folder
        self.project = folder / "my project's $(touch canary)"
        self.project.mkdir()
        for name in ("env.sh", "pyproject.toml", "constraints.txt"):
            shutil.copy(baked / name, self.project)
        for name in ("configs/cluster", "src/hpc/jobs/cluster", "src/hpc/config", "src/hpc/run", "src/hpc/system"):
            shutil.copytree(baked / name, self.project / name)
        shutil.copy(baked / "src/hpc/__init__.py", self.project / "src/hpc")
        self.venv = folder / "an environment"
        self.log = folder / "log"
        self.stub = folder / "python"
        pythons = {"python": sys.executable, "base": os.path.realpath(sys.executable)}
        quoted = {key: shlex.quote(str(value)) for key, value in (vars(self) | pythons).items()}
        self.stub.write_text(STUB.format(**quoted))
        self.stub.chmod(0o755)

    def popen(self, script: str, shell: tuple[str, ...] = BASH, **env: str) -> subprocess.Popen:
        """Start `script` in a shell, where $ENV is the path of env.sh."""
        left_out = ("VIRTUAL_ENV", "PYTHONPATH", "VERSIONS")
        kept = {key: value for key, value in os.environ.items() if key not in left_out}
        known = {"PYTHON": str(self.stub), "VENV": str(self.venv), "ENV": str(self.project / "env.sh")}
        return subprocess.Popen(
            [*shell, "-c", script],
            cwd=self.folder,
            env=kept | known | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def bash(self, script: str, shell: tuple[str, ...] = BASH, **env: str) -> tuple[int, str, str]:
        process = self.popen(script, shell, **env)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def killed(self, until: str, **env: str) -> None:
        """Kill the installer of a `source env.sh` once `until` is in the log."""
        process = self.popen('source "$ENV"', **env)
        while not self.asked(until):
            time.sleep(0.05)
            assert process.poll() is None
        (installer,) = (
            pid for pid, words in processes() if "hpc.run.installation" in words and str(self.venv) in words
        )
        os.kill(installer, 9)
        assert process.wait(timeout=60) == 1

    def asked(self, what: str) -> int:
        """Return how often `what` occurs in the logged arguments of Python."""
        return self.log.read_text().count(what) if self.log.exists() else 0


def processes() -> Iterator[tuple[int, str]]:
    """Yield the id and the command line of each process."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            yield int(folder.name), (folder / "cmdline").read_text().replace("\0", " ")


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


def test_goes_on_after_an_interrupted_installation(place):
    assert place.bash('source "$ENV"', STUB_PIP="1")[0] == 1
    assert place.bash('source "$ENV"')[0] == 0
    assert place.asked("-m venv") == 1 and place.asked("-Im pip install") == 2


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_installs_again_when_the_versions_change(name, place):
    place.bash('source "$ENV"')
    with (place.project / name).open("a") as file:
        file.write("\n# changed\n")
    assert place.bash('source "$ENV"')[0] == 0
    assert place.asked("-Im pip install") == 2


@pytest.mark.slow
def test_two_at_once_install_once(place):
    both = [place.popen('source "$ENV" && type -P python', STUB_SECONDS="2") for _ in range(2)]
    results = [process.communicate(timeout=60) for process in both]
    assert [out.strip() for out, _ in results] == [f"{place.venv}/bin/python"] * 2
    assert place.asked("-Im pip install") == 1


@pytest.mark.slow
def test_a_killed_installer_leaves_no_lock(place):
    place.killed("-Im pip install", STUB_SECONDS="2")
    code, _, err = place.bash('source "$ENV"')
    assert code == 0 and "waiting for another installation" in err
    assert place.asked("-Im pip install") == 2
    lines = [line for line in place.log.read_text().splitlines() if "pip install" in line or line == "pip is done"]
    assert [line == "pip is done" for line in lines] == [False, True] * 2  # the pip of the killed one has ended first


@pytest.mark.slow
def test_of_many_that_wait_for_a_killed_process_one_installs(place):
    place.killed("-Im pip install", STUB_SECONDS="1")
    many = [place.popen('source "$ENV"', STUB_SECONDS="1") for _ in range(4)]
    said = [process.communicate(timeout=60) for process in many]
    assert [process.returncode for process in many] == [0] * 4, said
    assert place.asked("-Im pip install") == 2


def test_an_environment_killed_while_it_was_made_is_completed(place):
    assert place.bash('source "$ENV"', STUB_HALF="1")[0] == 1
    assert not (place.venv / "pyvenv.cfg").exists() and (place.venv / "bin").exists()
    code, out, err = place.bash('source "$ENV" && type -P python')
    assert (code, out.strip()) == (0, f"{place.venv}/bin/python"), err


def test_a_file_system_without_locks_is_told(place):
    (place.folder / "sitecustomize.py").write_text(WITHOUT_LOCKS)
    code, _, err = place.bash('source "$ENV"', PYTHONPATH=str(place.folder))
    assert code == 0 and "has no locks (Function not implemented): install into it from one shell at a time" in err


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


@pytest.mark.skipif(not shutil.which("zsh"), reason="not installed: zsh")
class TestZsh:
    """env.sh in zsh, the shell of every Mac."""

    def test_installs_activates_and_keeps_options_and_names(self, place):
        script = """
            setopt nounset noclobber errexit ksh_arrays; before=$(setopt; print -l ${(ko)functions})
            source "$ENV"; source "$ENV"
            deactivate() { :; }; unset -f deactivate
            [ "$before" = "$(setopt; print -l ${(ko)functions})" ] && echo kept
            echo "$PYTHONHASHSEED ${_env_file:-none}"; tr : "\\n" <<<"$PATH" | grep -c environment; command -v python
        """
        code, out, err = place.bash(script, ZSH, VENV="an environment")
        assert (code, out.splitlines()) == (0, ["kept", "0 none", "1", f"{place.venv}/bin/python"]), err
        assert place.asked("-Im pip install") == 1 and place.asked("hpc.config.signatures") == 1
        assert not (place.folder / "canary").exists() and not (place.project / "canary").exists()

    def test_setup_of_the_cluster_is_run_as_bash_would(self, place):
        lines = "setup:\n  - WORDS='a b'; set -- $WORDS; export SEEN=$#\n  - [ -n \"${VENV:-}\" ]\n"
        (place.project / "configs/cluster/mine.yaml").write_text(lines.replace("- [", "- '[").replace("]\n", "]'\n"))
        code, out, err = place.bash('source "$ENV" && echo "$SEEN"', ZSH, CLUSTER="mine")
        assert (code, out) == (0, "2\n"), err
        code, _, err = place.bash('source "$ENV"', ZSH, CLUSTER="nowhere")
        assert code == 1 and "CLUSTER=nowhere has no file" in err

    def test_a_failure_is_one_line_and_spares_the_shell(self, place):
        code, out, err = place.bash('source "$ENV"; echo "status $?, still here"', ZSH, STUB_OLD="1")
        assert (code, out) == (0, "status 1, still here\n")
        assert err.count("\n") == 1 and err.startswith("env.sh: Python 3.11 or newer is needed")

    def test_run_instead_of_sourced_says_so(self, place):
        code, _, err = place.bash('zsh "$ENV"', ZSH)
        assert code == 1 and "must be sourced, in bash or zsh" in err and not place.log.exists()


def setup_lines(project: Path, file: Path) -> subprocess.CompletedProcess[str]:
    """Run env.sh's function that reads `setup` of a cluster's file."""
    text = (project / "env.sh").read_text()
    function = text[text.index("_env_setup_lines()") : text.index("\n}\n", text.index("_env_setup_lines()")) + 3]
    command = ["bash", "-c", f'{function}_env_setup_lines "$1"', "bash", str(file)]
    return subprocess.run(command, capture_output=True, text=True)


def test_setup_of_every_cluster_is_read_as_its_file_says(project):
    """Check that env.sh, which parses `setup` without Python, reads the same lines as the job script."""
    from omegaconf import OmegaConf

    some = 0
    for path in (project / "src/hpc/jobs/cluster").glob("*.yaml"):
        read = setup_lines(project, path).stdout.splitlines()
        assert read == list(OmegaConf.load(path).get("setup") or []), path.name
        some += len(read)
    assert some > 5


# Items of a list as YAML allows them: those that env.sh reads, and those that it rejects, as it could misread them.
READ = [
    *(
        "a b",
        "a  # why",
        "a#b",
        "a=b:c",
        '"a # b"',
        "'a \" b' # c",
        "a 'b' \"c\"",
        '"a" # "c"',
        "a\n\n  # why\n  - b",
        "a \r",
    ),
    *("-a", "~/a", "$A/b", "(a)", "a \\ b", ". a"),
]
REJECTED = [
    *("'a''b'", '"a\\tb"', '"a" b', '"a', "'a", "a: b", "a:", "|\n    a", "> \n    a", "a\n    b", "- a"),
    *("? a", "[a]", "{a: b}", "&x a", "*x", "!!str a", "%a", "@a", "`a`", "# a", "", "-", ",a", "]a"),
]


@pytest.mark.parametrize("head", ["setup:", "setup: # why", "a: 1\nsetup:", "b:\n  - c\nsetup:"])
def test_an_item_of_setup_is_read_as_yaml_does_or_rejected(head, project, tmp_path):
    import yaml

    file = tmp_path / "cluster.yaml"
    for item in READ + REJECTED:
        file.write_bytes(f"{head}\n  - {item}\n  - last\nother: [1]\nlist:\n  - 2\n".encode())
        done = setup_lines(project, file)
        assert done.returncode == (3 if item in REJECTED else 0), item
        if item in READ:
            assert done.stdout.splitlines() == yaml.safe_load(file.read_bytes())["setup"]


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
  - "export TWO='a # b'"  # it's quoted
  - 'export THREE="it is"'
    - export FOUR=4
- export FIVE=5
other: 1
"""
    )
    code, out, err = place.bash('source "$ENV" && echo "$ONE $TWO $THREE $FOUR $FIVE"', CLUSTER="mine")
    assert (code, out.strip()) == (0, "1 a # b it is 4 5"), err
    for text in ('setup: ["module load a"]\n', "setup:\n  - |\n    module load a\n"):
        file.write_text(text)
        code, _, err = place.bash('source "$ENV"', CLUSTER="mine")
        assert code == 1 and "must be a list" in err


def test_a_path_that_an_environment_cannot_have_is_rejected(place):
    code, _, err = place.bash('source "$ENV"', VENV=f"{place.folder}/a:b")
    assert code == 1 and not place.asked("pip install")
    assert "a:b must not contain a double quote, $, `, \\, a colon or a line break: set VENV to another folder" in err


def test_the_setup_of_a_person_is_noted_for_this_cluster_only(place):
    personal = place.folder / "config" / "hpc-ml-template" / "clusters.yaml"
    personal.parent.mkdir(parents=True)
    (place.project / "configs" / "cluster" / "mine.yaml").write_text("setup: []\n")
    for text, is_noted in (
        ("mine:\n  account: me\n\n  setup: [module load a]\n", True),
        ("mine: {account: me, setup: [module load a]}\n", True),
        ("mine:\n  account: me\nother:\n  setup: [module load a]\n", False),
        ("mine2:\n  setup: [module load a]\n", False),
    ):
        personal.write_text(text)
        code, _, err = place.bash('source "$ENV"', CLUSTER="mine", XDG_CONFIG_HOME=f"{place.folder}/config")
        assert code == 0 and (f"note: the setup in {personal} runs in jobs only" in err) == is_noted, (text, err)


def test_an_environment_may_be_reached_by_another_name(place):
    assert place.bash('source "$ENV"')[0] == 0
    (place.folder / "link").symlink_to(place.venv)
    around = f"{place.folder}/../{place.folder.name}/{place.venv.name}"
    for other in (str(place.folder / "link"), f"{place.venv}/", around):
        code, out, err = place.bash('source "$ENV" && echo "$VIRTUAL_ENV"', VENV=other)
        assert (code, out.strip()) == (0, str(place.venv)), err


class QueuedJob:
    """A job that was queued when its environment was complete. Its own copy of the code is `place.project`."""

    def __init__(self, place: Place) -> None:
        self.place = place
        assert place.bash('source "$ENV"')[0] == 0
        self.packages = next(place.venv.glob("lib/python3*/site-packages"))
        (self.packages / "borrowed.pth").write_text(f"{sysconfig.get_path('purelib')}\n")

    def require(self, requirement: str) -> None:
        file = self.place.project / "pyproject.toml"
        file.write_text(file.read_text().replace("dependencies = [\n", f'dependencies = [\n    "{requirement}",\n', 1))

    def install(self, name: str, version: str) -> None:
        (self.packages / f"{name}-{version}.dist-info").mkdir()
        (self.packages / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")

    def starts(self, **env: str) -> bool:
        code, out, self.err = self.place.bash(
            'source "$ENV" && type -P python', **{"SLURM_JOB_ID": "7", "CLUSTER": ""} | env
        )
        assert self.place.asked("-Im pip install") == 1, "a job installs nothing"
        return (code, out.strip()) == (0, f"{self.place.venv}/bin/python")


@pytest.fixture
def queued(place) -> QueuedJob:
    return QueuedJob(place)


@pytest.mark.parametrize("job", ["SLURM_JOB_ID", "PBS_JOBID"])
def test_a_queued_job_starts_whatever_its_owner_adds_for_newer_code(job, queued):
    """Check that the versions of the environment may change within the ranges of the job's own code."""
    marker = next(queued.place.venv.glob(".complete-*"))
    for change in (
        lambda: marker.write_text(marker.read_text() + "\nruff = 1\n"),  # pyproject.toml of newer code
        lambda: (queued.place.project / "constraints.txt").write_text("torch==2.10.0\n"),
        lambda: queued.require("packaging>=20"),
        lambda: queued.require("no-such-package; python_version < '3'"),
        lambda: queued.require("own @ git+https://example.org/own@main") or queued.install("own", "0.1"),
        marker.unlink,  # it is being completed
    ):
        change()
        assert queued.starts(**{job: "7"}), queued.err
        assert queued.err == ""


def test_a_job_whose_code_cannot_run_stops_with_what_to_type(queued):
    queued.require("two-words[extra]>=0.8")
    assert not queued.starts()
    constraints = shlex.quote(str(queued.place.project / "constraints.txt"))
    python = shlex.quote(f"{queued.place.venv}/bin/python")
    fix = f"{python} -m pip install -c {constraints} 'two-words[extra]>=0.8'; then submit the run again"
    assert queued.err.startswith(f"env.sh: {queued.place.venv} does not meet two-words[extra]>=0.8, which")
    assert queued.err.endswith(f"Try: {fix}\n") and queued.err.count("\n") == 1
    queued.install("Two_Words", "0.9")  # names are compared as pip does
    assert queued.starts() and queued.err == ""


def test_a_package_outside_its_range_is_noted_and_torch_is_needed(queued):
    queued.install("old", "1.0")
    queued.require("old>=2")
    assert queued.starts()
    assert (
        queued.err
        == f"env.sh: note: {queued.place.project} was made for old>=2, and {queued.place.venv} has 1.0 by now\n"
    )
    queued.require("torch<2")
    assert not queued.starts() and "does not meet torch<2, which" in queued.err


def test_a_job_without_its_environment_says_how_to_go_on(queued):
    shutil.rmtree(queued.place.venv)
    assert not queued.starts()
    assert "source env.sh on a login node, then submit again" in queued.err and queued.err.count("\n") == 1


def site_python(place: Place, version: str) -> dict[str, str]:
    """Return the environment of a shell in which a module has put this version of torch on PYTHONPATH."""
    folder = place.folder / "module"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "torch-0.dist-info").mkdir(parents=True)
    (folder / "torch-0.dist-info" / "METADATA").write_text(f"Name: torch\nVersion: {version}\n")
    (folder / "packaging").symlink_to(Path(packaging.__file__).parent)
    return {"PYTHONPATH": str(folder)}


def test_the_torch_of_a_module_is_used_and_kept(place):
    module = site_python(place, "2.12.0+site")
    code, _, err = place.bash('source "$ENV"', VERSIONS="site", **module)
    assert code == 0 and f"using torch 2.12.0+site in {place.folder}/module\n" in err
    assert place.asked("torch==2.12.0+site ") == 1 and place.asked("lightning>=2.") == 1
    assert not place.asked("--constraint") and not place.asked("torch>=")
    # Jobs have no PYTHONPATH, and nobody needs to repeat VERSIONS.
    code, out, err = place.bash('source "$ENV" && python -c "import packaging; print(packaging.__file__)"')
    assert (code, err) == (0, "") and out.startswith(f"{place.folder}/module/packaging/")
    assert place.bash('source "$ENV"', VERSIONS="site")[::2] == (0, "")
    with (place.project / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    assert place.bash('source "$ENV"')[0] == 0
    assert place.asked("torch==2.12.0+site ") == 2


def test_a_torch_of_the_site_that_is_not_supported_is_rejected_before_anything_is_installed(place):
    code, _, err = place.bash('source "$ENV"', VERSIONS="site", **site_python(place, "2.9.1"))
    assert code == 1 and not place.asked("pip install")
    rule = f"torch must be in the range >=2.10,<2.14 of pyproject.toml, but the one in {place.folder}/module is not"
    assert f"env.sh: {rule}; got 2.9.1. Try: load another module, or change the range" in err
    file = place.project / "pyproject.toml"
    file.write_text(file.read_text().replace("torch>=2.10", "torch>=2.9"))
    assert place.bash('source "$ENV"', **site_python(place, "2.9.1"))[0] == 0
    assert place.asked("torch==2.9.1 ")


def test_a_python_that_has_torch_is_told_when_another_is_installed(place):
    code, _, err = place.bash('source "$ENV"', **site_python(place, "2.12.0"))
    assert (
        code == 0 and f"has torch 2.12.0 in {place.folder}/module; to use it (>=2.10,<2.14 is supported), type: " in err
    )
    assert place.asked("--constraint constraints.txt") == 1
    before = place.log.read_text()
    code, _, err = place.bash('source "$ENV"', VERSIONS="site")
    assert code == 1 and "was made with VERSIONS=pinned: remove it" in err
    code, _, err = place.bash('source "$ENV"', VERSIONS="newest")
    assert code == 1 and "VERSIONS must be site or pinned; got newest" in err
    assert "pip install" not in place.log.read_text().removeprefix(before)


@pytest.mark.slow
def test_an_environment_on_top_of_one_that_has_torch(place, project):
    """Let the real pip complete an environment on top of this one, without an index."""
    if not list(Path(sys.prefix).glob(".complete-*")):
        pytest.skip("the environment was not made by env.sh: make test")
    env = {"PYTHON": sys.executable, "VERSIONS": "site", "PIP_NO_INDEX": "1", "ENV": str(project / "env.sh")}
    script = 'source "$ENV" && python -c "import torch, sys; print(torch.__file__, sys.prefix)"'
    process = place.popen(script, **env)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert out.split(maxsplit=1) == [f"{sysconfig.get_path('purelib')}/torch/__init__.py", f"{place.venv}\n"]
    assert not list(place.venv.glob("lib/python*/site-packages/torch*"))


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root can start another user's shell")
def test_an_environment_of_another_user_is_used_and_never_changed(place):
    """Let another user, who may read everything here, source env.sh."""
    assert place.bash('source "$ENV"')[0] == 0
    place.log.chmod(0o666)
    for path in (place.venv, *place.venv.rglob("*")):
        path.chmod(0o777)  # even if it could be changed
    before = {path: path.lstat().st_mtime_ns for path in (place.venv, *place.venv.rglob("*"))}
    read_all = "--inh-caps=+dac_read_search --ambient-caps=+dac_read_search"
    other = f"setpriv --reuid=65534 --regid=65534 --clear-groups {read_all} bash --norc -c"
    code, out, err = place.bash(f"{other} 'source \"$ENV\" && id -u && type -P python'")
    assert (code, out.split("\n", 1), err) == (0, ["65534", f"{place.venv}/bin/python\n"], "")
    with (place.project / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    code, _, err = place.bash(f"{other} 'source \"$ENV\"'")
    assert code == 1 and f"env.sh: {place.venv} belongs to root and is not complete for" in err and err.count("\n") == 1
    assert {path: path.lstat().st_mtime_ns for path in (place.venv, *place.venv.rglob("*"))} == before
    theirs = place.folder / "theirs"
    theirs.mkdir(mode=0o777)
    os.chown(theirs, 65534, 65534)
    code, out, err = place.bash(f"{other} 'source \"$ENV\" && type -P python'", VENV=str(theirs / "venv"))
    assert (code, out.strip()) == (0, f"{theirs}/venv/bin/python"), err
