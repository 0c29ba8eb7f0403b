"""Test env.sh with a stub of Python. `make test` runs the real installation, which takes minutes."""

import fcntl
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

import packaging
import pytest
from conftest import REPO, library_requirements

BASH, ZSH = ("bash", "--norc"), ("zsh", "-f")
# A stub of Python: it makes a real virtual environment, but logs its arguments instead of installing. Where it runs
# Python, that takes the stub for its own executable.
STUB = """#!/bin/bash
echo "$*" >>{log}
case "$*" in
  *version_info*) exit ${{STUB_OLD:-0}} ;;
  "-m venv "*)
    [ -z "${{STUB_HALF:-}}" ] || {{ mkdir "$3/bin"; kill -9 $PPID; exit; }}
    {python} -m venv --without-pip "$3" && rm "$3/bin/python" && cp "$0" "$3/bin/python"
    for packages in "$3"/lib/python3*/site-packages; do
        mkdir -p "$packages/pip-1.dist-info" && touch "$packages/pip-1.dist-info/RECORD"
    done ;;
  *"-Im pip install"*--no-deps*)
    sleep ${{STUB_SECONDS:-0}}; echo "pip is done" >>{log}; [ -z "${{STUB_LIBRARY:-}}" ] || exit 1
    {python} {library} "$0" "${{@: -1}}" ;;
  *"-Im pip install"*) sleep ${{STUB_SECONDS:-0}}; echo "pip is done" >>{log}; exit ${{STUB_PIP:-0}} ;;
  *signatures) [ -n "$PYTHONPATH" ] ;;
  *) exec -a "$0" {base} "$@" ;;
esac
"""
# Instead of pip: leave of the library what an installation of this commit leaves, and its sources as they are here.
LIBRARY = """
import re, shutil, sys
from pathlib import Path

packages = next(Path(sys.argv[1]).parents[1].glob("lib/python3*/site-packages"))
for former in packages.glob("hpc_ml-*"):
    shutil.rmtree(former)
(packages / "hpc").is_symlink() or (packages / "hpc").symlink_to(HPC)
(commit,) = re.findall("[0-9a-f]{40}", sys.argv[2])
info = packages / f"hpc_ml-0.3.0+g{commit}.dist-info"
info.mkdir()
(info / "METADATA").write_text(METADATA.replace("COMMIT", commit))
(info / "RECORD").touch()
"""
# Python imports this at its start, from a folder on PYTHONPATH.
WITHOUT_LOCKS = """
import errno, fcntl, os

def flock(*_):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

fcntl.flock = flock
"""


COMMITS = ["1" * 40, "2" * 40]


def library_metadata() -> str:
    """Return METADATA of the library as a build of it would write it."""
    lines = [f"Requires-Dist: {text}" for text in library_requirements()]
    return "\n".join(["Metadata-Version: 2.4", "Name: hpc-ml", "Version: 0.3.0+gCOMMIT", *lines, ""])


class Place:
    """A project without sources and a stub of Python that writes down its arguments."""

    def __init__(self, folder: Path, baked: Path) -> None:
        self.folder = folder
        self.project = folder / "my project's $(touch canary)"
        self.project.mkdir()
        for name in ("env.sh", "env.py", "pyproject.toml", "constraints.txt"):
            shutil.copy(baked / name, self.project)
        shutil.copytree(baked / "configs", self.project / "configs")
        self.library = folder / "library.py"
        self.library.write_text(f"HPC, METADATA = {str(REPO / 'src' / 'hpc')!r}, {library_metadata()!r}\n{LIBRARY}")
        self.pin(COMMITS[0])
        self.venv = folder / "an environment"
        self.log = folder / "log"
        self.stub = folder / "python"
        pythons = {"python": sys.executable, "base": os.path.realpath(sys.executable)}
        quoted = {key: shlex.quote(str(value)) for key, value in (vars(self) | pythons).items()}
        self.stub.write_text(STUB.format(**quoted))
        self.stub.chmod(0o755)

    def pin(self, commit: str) -> None:
        """Name the library by this commit of an address."""
        file = self.project / "pyproject.toml"
        pinned = re.sub(r"(hpc-ml\[.*\] @ )[^\"]+", rf"\1git+https://example.org/template@{commit}", file.read_text())
        file.write_text(pinned)

    def load(self, cluster: str, lines: str) -> None:
        """Write the file of a cluster, and its file for bash."""
        folder = self.project / "configs" / "cluster"
        (folder / f"{cluster}.yaml").write_text(f"defaults: [base]\nname: {cluster}\n")
        (folder / f"{cluster}.sh").write_text(f"{lines}\n")

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
    assert not place.asked("wandb")
    (library,) = [line for line in place.log.read_text().splitlines() if "--no-deps" in line]
    assert library.endswith(f"hpc-ml @ git+https://example.org/template@{COMMITS[0]}")
    assert not (place.folder / "canary").exists() and not (place.project / "canary").exists()


def test_second_use_installs_nothing(place):
    place.bash('source "$ENV"')
    before = place.log.read_text()
    code, out, err = place.bash('source "$ENV"; source "$ENV"; echo $?; tr : "\\n" <<<"$PATH" | grep -c environment')
    assert (code, out.split(), err) == (0, ["0", "1"], "")
    started = place.log.read_text().removeprefix(before).splitlines()
    assert len(started) == 4 and sum("env.py" in line for line in started) == 2, started


@pytest.mark.slow
def test_the_library_is_replaced_by_the_pinned_commit(place):
    """Check an update, and two projects with different pins that share an environment."""
    assert place.bash('source "$ENV"')[0] == 0
    for number, commit in enumerate([*reversed(COMMITS), COMMITS[1]], 2):
        place.pin(commit)
        assert place.bash('source "$ENV"')[0] == 0
        (library,) = place.venv.glob("lib/python3*/site-packages/hpc_ml-*.dist-info")
        assert library.name == f"hpc_ml-0.3.0+g{commit}.dist-info" and place.asked("--no-deps") == number
    other = place.folder / "other"
    shutil.copytree(place.project, other)
    (other / "pyproject.toml").write_text((other / "pyproject.toml").read_text().replace('name = "', 'name = "x'))
    assert place.bash('source "$ENV"', ENV=f"{other}/env.sh")[0] == 0
    rest, libraries = place.asked("lightning>="), place.asked("--no-deps")
    place.pin(COMMITS[0])
    assert place.bash('source "$ENV"')[0] == 0 and place.asked("lightning>=") == rest + 1
    assert place.bash('source "$ENV"', ENV=f"{other}/env.sh")[0] == 0
    assert place.bash('source "$ENV"')[0] == 0
    assert (place.asked("lightning>="), place.asked("--no-deps")) == (rest + 1, libraries + 3), "in seconds"


def test_a_library_that_is_half_installed_or_from_an_index_is_replaced(place):
    assert place.bash('source "$ENV"')[0] == 0
    (library,) = place.venv.glob("lib/python3*/site-packages/hpc_ml-*.dist-info")
    (library / "RECORD").unlink()  # pip writes it last
    assert place.bash('source "$ENV"')[0] == 0 and place.asked("--no-deps") == 2 and (library / "RECORD").exists()
    library.rename(library.with_name("hpc_ml-0.3.0.dist-info"))  # a release without a commit
    assert place.bash('source "$ENV"')[0] == 0 and place.asked("--no-deps") == 3 and library.exists()
    assert place.asked("lightning>=") == 1


def test_a_folder_of_wheels_has_the_library_too(place):
    wheels = place.folder / "wheels"
    wheels.mkdir()
    for commit in COMMITS:
        (wheels / f"hpc_ml-0.3.0+g{commit}-py3-none-any.whl").touch()
    offline = {"PIP_FIND_LINKS": str(wheels), "PIP_NO_INDEX": "1"}
    code, _, err = place.bash('source "$ENV"; source "$ENV"', **offline)
    assert code == 0, err
    (library,) = [line for line in place.log.read_text().splitlines() if "--no-deps" in line]
    assert library.endswith(f"{wheels}/hpc_ml-0.3.0+g{COMMITS[0]}-py3-none-any.whl")


@pytest.mark.slow
@pytest.mark.parametrize("has_wheels", [False, True], ids=["address", "wheels"])
def test_an_image_has_what_env_sh_installs(has_wheels, place, project):
    """Do what container.def says, with folders of this test in place of the image's."""
    text = (project / "container.def").read_text()
    if has_wheels:
        text = text.replace("    #wheels", "    wheels").replace("    #export", "    export")
        (place.project / "wheels").mkdir()
        (place.project / "wheels" / f"hpc_ml-0.3.0+g{COMMITS[0]}-py3-none-any.whl").touch()
    shutil.copytree(project / "src", place.project / "src")
    image = place.folder / "image"
    files, post = (re.search(rf"(?m)^%{name}\n((?:    .*\n|\n)+)", text)[1] for name in ("files", "post"))
    for name, target in re.findall(r"(?m)^    (\w\S*) (/opt/\S+)$", files):
        (image / target.strip("/")).mkdir(parents=True, exist_ok=True)
        source = place.project / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, image / target.strip("/") / name)
    (place.folder / "apt-get").write_text("#!/bin/sh\n")
    (place.folder / "apt-get").chmod(0o755)
    script = post.replace("/opt/", f"{image}/opt/").replace("/var/", f"{image}/var/")
    code, _, err = place.bash(script, PATH=f"{place.folder}:{os.environ['PATH']}")
    assert code == 0 and not (image / "opt" / "project").exists(), err
    assert list((image / "opt" / "venv").glob(f"lib/python3*/site-packages/hpc_ml-0.3.0+g{COMMITS[0]}.dist-info"))
    (library,) = [line for line in place.log.read_text().splitlines() if "--no-deps" in line]
    assert library.endswith(".whl") == has_wheels and place.asked("--constraint constraints.txt") == 1


@pytest.mark.parametrize(
    ("pattern", "text", "sentence"),
    [
        (r"@ git[^\"]+", "@ git+https://example.org/template@v0.3.0", "it has git+https://example.org/template@v0.3.0"),
        (r".*hpc-ml.*\n", "", "it has none"),
        (r"dependencies = \[", "dependencies = [[", "pyproject.toml cannot be read: "),
    ],
)
def test_a_pin_that_is_no_commit_is_told(pattern, text, sentence, place):
    file = place.project / "pyproject.toml"
    file.write_text(re.sub(pattern, text, file.read_text(), count=1))
    code, _, err = place.bash('source "$ENV"')
    assert code == 1 and sentence in err and err.count("\n") == 1 and not place.asked("pip install")


@contextmanager
def server(kind: str) -> Iterator[str]:
    """Listen on the loopback interface as a server that never answers, asks for a password, or has no such commit."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    if kind == "hangs":
                        held.append(connection)
                        continue
                    status = "401 Unauthorized\r\nWWW-Authenticate: Basic" if kind == "password" else "404 Not Found"
                    connection.recv(4096)
                    connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
                    connection.close()

        held: list[socket.socket] = []
        Thread(target=answer, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/template"
        for connection in held:
            connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hangs", "password", "no such repository", "no git"])
def test_an_address_that_does_not_give_the_library_is_one_sentence(kind, place):
    """Let the real pip and git try."""
    file = place.project / "env.py"
    file.write_text(file.read_text().replace('SPEED_TIME": "60"', 'SPEED_TIME": "5"'))
    pinned = place.project / "pyproject.toml"
    path = f"{place.folder}/bin" if kind == "no git" else os.environ["PATH"]
    (place.folder / "bin").mkdir()
    with server(kind) as address:
        pinned.write_text(pinned.read_text().replace("https://example.org/template", address))
        command = [sys.executable, "-sP", str(file), str(place.venv)]
        environ = {**os.environ, "PATH": path, "HOME": str(place.folder)}
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
        )
    *_, last = done.stderr.strip().splitlines()
    assert done.returncode == 1 and not done.stdout
    assert last.startswith("env.sh: hpc-ml cannot be installed from") and f"{address}@{COMMITS[0]}" in last
    assert "PIP_FIND_LINKS=FOLDER PIP_NO_INDEX=1 source env.sh" in last
    with (place.venv / ".env.sh-lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no git is left, which would keep it


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt", ".cruft.json"])
def test_conflicts_of_an_update_are_told(name, place):
    assert place.bash('source "$ENV"')[0] == 0
    file = place.project / name
    file.write_text(f"{file.read_text() if file.exists() else ''}<<<<<<< ours\n")
    code, _, err = place.bash('source "$ENV"')
    assert code == 1 and f"env.sh: {name} has conflicts of an update" in err and err.count("\n") == 1
    file.write_text(file.read_text().replace("<<<<<<< ours\n", ""))
    (place.project / f"{name}.rej").touch()
    code, _, err = place.bash('source "$ENV"')
    assert code == 1 and f"remove {name}.rej" in err


def test_conflicts_in_env_sh_are_told(place):
    assert place.bash('source "$ENV"')[0] == 0
    (place.project / "env.sh.rej").touch()
    code, _, err = place.bash('source "$ENV"')
    assert code == 1 and "env.sh has conflicts of an update" in err and "remove env.sh.rej" in err
    file = place.project / "env.sh"
    file.write_text(file.read_text().replace("_env_main() {", "<<<<<<< ours\n_env_main() {"))
    code, _, err = place.bash('source "$ENV"')  # bash itself shows the line
    assert code and "<<<<<<< ours" in err


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
        ({"STUB_LIBRARY": "1"}, "PIP_FIND_LINKS=FOLDER PIP_NO_INDEX=1 source env.sh"),
        ({"VENV": "/proc/none/venv"}, "set VENV"),
    ],
)
def test_a_failure_is_one_line_and_spares_the_shell(env, reason, place):
    code, out, err = place.bash('source "$ENV"; echo "status $?, still here"', **env)
    assert (code, out) == (0, "status 1, still here\n")
    lines = [line for line in err.splitlines() if "installing" not in line]
    assert len(lines) == 1 and lines[0].startswith("env.sh: ") and reason in lines[0]


def test_goes_on_after_an_interrupted_installation(place):
    assert place.bash('source "$ENV"', STUB_PIP="1")[0] == 1
    assert place.bash('source "$ENV"')[0] == 0
    assert place.asked("-m venv") == 1 and place.asked("lightning>=") == 2 and place.asked("--no-deps") == 1


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_installs_again_when_the_versions_change(name, place):
    place.bash('source "$ENV"')
    with (place.project / name).open("a") as file:
        file.write("\n# changed\n")
    assert place.bash('source "$ENV"')[0] == 0
    assert place.asked("lightning>=") == 2


@pytest.mark.slow
def test_two_at_once_install_once(place):
    both = [place.popen('source "$ENV" && type -P python', STUB_SECONDS="2") for _ in range(2)]
    results = [process.communicate(timeout=60) for process in both]
    assert [out.strip() for out, _ in results] == [f"{place.venv}/bin/python"] * 2
    assert place.asked("lightning>=") == 1


@pytest.mark.slow
def test_a_killed_installer_leaves_no_lock(place):
    place.killed("lightning>=", STUB_SECONDS="2")
    code, _, err = place.bash('source "$ENV"')
    assert code == 0 and "waiting for another installation" in err
    assert place.asked("lightning>=") == 2
    lines = [line for line in place.log.read_text().splitlines() if "pip install" in line or line == "pip is done"]
    assert [line == "pip is done" for line in lines] == [False, True] * 3  # the pip of the killed one has ended first


@pytest.mark.slow
def test_of_many_that_wait_for_a_killed_process_one_installs(place):
    place.killed("lightning>=", STUB_SECONDS="1")
    many = [place.popen('source "$ENV"', STUB_SECONDS="1") for _ in range(4)]
    said = [process.communicate(timeout=60) for process in many]
    assert [process.returncode for process in many] == [0] * 4, said
    assert place.asked("lightning>=") == 2


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


WITHOUT_ZSH = pytest.mark.skipif(not shutil.which("zsh"), reason="not installed: zsh")


@WITHOUT_ZSH
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
        assert place.asked("lightning>=") == 1 and place.asked("hpc.config.signatures") == 1
        assert not (place.folder / "canary").exists() and not (place.project / "canary").exists()

    def test_the_clusters_sh_file_is_run_as_bash_would(self, place):
        place.load("mine", "WORDS='a b'; set -- $WORDS; export SEEN=$#\n[ -n \"${VENV:-}\" ] || return")
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


def test_modules_of_the_cluster_come_first(place):
    place.load("mine", "export LOADED=yes")
    code, out, err = place.bash('source "$ENV" && echo "$LOADED"', CLUSTER="mine")
    assert (code, out.strip()) == (0, "yes"), err
    assert place.bash('source "$ENV" && echo "[${LOADED:-}]"', CLUSTER="")[1].strip() == "[]"
    code, _, err = place.bash('source "$ENV"', CLUSTER="nowhere")
    assert code == 1 and "CLUSTER=nowhere has no file" in err


def test_a_person_s_own_file_comes_after_the_project_s(place):
    place.load("mine", "export LOADED=project")
    personal = place.folder / "config" / "hpc-ml-template" / "mine.sh"
    personal.parent.mkdir(parents=True)
    personal.write_text("LOADED+=,mine\n")
    environ = {"CLUSTER": "mine", "XDG_CONFIG_HOME": f"{place.folder}/config"}
    code, out, err = place.bash('source "$ENV" && echo "$LOADED"', **environ)
    assert (code, out.strip()) == (0, "project,mine"), err


@pytest.mark.parametrize("shell", [BASH, pytest.param(ZSH, marks=WITHOUT_ZSH)])
def test_a_file_of_the_cluster_that_fails_is_told(shell, place):
    place.load("mine", "export LOADED=yes\nno_such_command --x || return\nexport LATER=yes")
    code, out, err = place.bash('source "$ENV"; echo "status $?, $LOADED ${LATER:-}"', shell, CLUSTER="mine")
    assert (code, out) == (0, "status 1, yes \n"), err
    assert f"{place.project}/configs/cluster/mine.sh failed: its last command returned 127" in err


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="not installed: shellcheck")
def test_the_files_of_clusters_are_sound(project):
    files = sorted((project / "configs" / "cluster").glob("*.sh"))
    assert len(files) > 8 and all(file.with_suffix(".yaml").exists() for file in files)
    said = subprocess.run(
        ["shellcheck", "--shell=bash", "--exclude=SC2034,SC1091", *files], capture_output=True, text=True
    )
    assert said.returncode == 0, said.stdout


def test_a_path_that_an_environment_cannot_have_is_rejected(place):
    code, _, err = place.bash('source "$ENV"', VENV=f"{place.folder}/a:b")
    assert code == 1 and not place.asked("pip install")
    assert "a:b must not contain a double quote, $, `, \\, a colon or a line break: set VENV to another folder" in err


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
        assert self.place.asked("lightning>=") == 1, "a job installs nothing"
        return (code, out.strip()) == (0, f"{self.place.venv}/bin/python")


@pytest.fixture
def queued(place) -> QueuedJob:
    return QueuedJob(place)


@pytest.mark.slow
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


def test_a_package_outside_its_range_stops_a_job(queued):
    queued.install("old", "1.0")
    queued.require("old>=2")
    assert not queued.starts() and "does not meet old>=2, which this code needs" in queued.err


def test_a_job_has_the_library_of_its_copy_whatever_is_pinned(queued):
    """Check that the copy is asked what it needs, and that an environment of a newer commit will do."""
    sources = queued.place.project / "src"
    shutil.copytree(REPO / "src" / "hpc", sources / "hpc", ignore=shutil.ignore_patterns("__pycache__"))
    metadata = sources / "hpc_ml-0.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Name: hpc-ml\nVersion: 0.1\nRequires-Dist: packaging>=20\n")
    queued.place.pin(COMMITS[1])
    assert queued.starts() and queued.err == ""
    metadata.write_text("Name: hpc-ml\nVersion: 0.1\nRequires-Dist: packaging<1\n")
    assert not queued.starts() and "does not meet packaging<1, which this code needs" in queued.err


def test_a_job_without_its_environment_says_how_to_go_on(queued):
    shutil.rmtree(queued.place.venv)
    assert not queued.starts()
    assert "source env.sh on a login node, then submit again" in queued.err and queued.err.count("\n") == 1


def site_python(place: Place, version: str) -> dict[str, str]:
    """Return the environment of a shell in which a module has put this version of torch on PYTHONPATH."""
    folder = place.folder / "module"
    shutil.rmtree(folder, ignore_errors=True)
    info = folder / f"torch-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: torch\nVersion: {version}\n")
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
    assert code == 1 and not place.asked("lightning>=")
    rule = f"torch must be in the range >=2.10,<2.14 of hpc-ml, but the one in {place.folder}/module is not"
    assert f"env.sh: {rule}; got 2.9.1. Try: load another module; or, if this version works for you" in err


def test_a_python_that_has_torch_is_told_when_another_is_installed(place):
    code, _, err = place.bash('source "$ENV"', **site_python(place, "2.12.0"))
    assert (
        code == 0 and f"has torch-2.12.0 in {place.folder}/module; to use it, type: VERSIONS=site source env.sh" in err
    )
    assert place.asked("--constraint constraints.txt") == 1
    before = place.log.read_text()
    code, _, err = place.bash('source "$ENV"', VERSIONS="site")
    assert code == 1 and "was made with VERSIONS=pinned: remove it" in err
    code, _, err = place.bash('source "$ENV"', VERSIONS="newest")
    assert code == 1 and "VERSIONS must be site or pinned; got newest" in err
    assert "pip install" not in place.log.read_text().removeprefix(before)


@pytest.mark.slow
def test_an_environment_on_top_of_one_that_has_torch_from_a_folder_of_wheels(place, template):
    """Let the real pip complete an environment on top of this one, without an index, and from a real wheel."""
    if not list(Path(sys.prefix).glob(".complete-*")):
        pytest.skip("the environment was not made by env.sh: make test")
    wheels = place.folder / "wheels"
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), str(template)]
    subprocess.run(pip, check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=template, capture_output=True, text=True).stdout.strip()
    assert [path.name for path in wheels.iterdir()] == [f"hpc_ml-0.3.0+g{commit}-py3-none-any.whl"]
    status = subprocess.run(["git", "status", "--short", "--ignored"], cwd=template, capture_output=True, text=True)
    assert status.stdout == "", "a build leaves nothing in the clone"
    place.pin(commit)
    env = {"PYTHON": sys.executable, "VERSIONS": "site", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    code = "import torch, hpc, sys; print(torch.__file__, hpc.__file__, sys.prefix, sep=chr(10))"
    script = f"source \"$ENV\" && python -c '{code}'"
    without_network = ("unshare", "--net", *BASH) if os.geteuid() == 0 else BASH
    process = place.popen(script, without_network, **env)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    torch, hpc, prefix = out.splitlines()
    assert torch == f"{sysconfig.get_path('purelib')}/torch/__init__.py" and prefix == str(place.venv)
    assert not list(place.venv.glob("lib/python*/site-packages/torch*"))
    assert place.venv.resolve() in Path(hpc).resolve().parents


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
    assert code == 1 and err.count("\n") == 1
    assert f"env.sh: {place.venv} belongs to somebody else and is not complete for" in err
    assert {path: path.lstat().st_mtime_ns for path in (place.venv, *place.venv.rglob("*"))} == before
    theirs = place.folder / "theirs"
    theirs.mkdir(mode=0o777)
    os.chown(theirs, 65534, 65534)
    code, out, err = place.bash(f"{other} 'source \"$ENV\" && type -P python'", VENV=str(theirs / "venv"))
    assert (code, out.strip()) == (0, f"{theirs}/venv/bin/python"), err
