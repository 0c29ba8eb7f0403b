"""Where the library `hpc` comes from: each program asks this first, and env.sh calls it: python env.py VENV

A copy in src/ comes first. Otherwise it is the commit in pyproject.toml, which env.sh installs. Standard library only.
"""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from urllib.parse import unquote

PROJECT = Path(__file__).resolve().parent
SOURCES = PROJECT / "src"
INTERFACE = 1  # of the library, as these programs use it
LOCK = ".env.sh-lock"  # in the environment
SITE_FOLDERS = "site_python.pth"  # in its site-packages, with VERSIONS=site: the package folders of the site's Python
LIMIT_SECONDS = 300  # to fetch the library, which is small
OFFLINE = "Without internet or git: PIP_FIND_LINKS=FOLDER PIP_NO_INDEX=1 source env.sh (README, Environment)"


def use_library():
    """Put src/ first on the path. End the program, with the line to type, if this Python cannot run the project."""
    sys.path.insert(0, str(SOURCES))
    try:
        from hpc.run import interpreter
    except ImportError as error:
        reason = "this Python does not have the library hpc-ml"
        fix = f"Type, in bash or zsh: source {quote(os.path.relpath(str(PROJECT / 'env.sh')))}"
        if any((SOURCES / "hpc").rglob("*.py")):
            reason = f"{SOURCES / 'hpc'} is not a whole copy of the library: {error}"
            fix = "Remove it, or copy all of the library there"
        sys.stderr.write(f"{os.path.basename(sys.argv[0])}: {reason} ({sys.executable}). {fix}\n")
        sys.exit(2)
    interpreter.require_environment(str(PROJECT), INTERFACE)


def complete(venv):
    """Make or complete an environment: the library as pyproject.toml pins it, then all that it and the project need.

    Return the path that it was made with. A job installs nothing: this only checks that its code can run.
    """
    import tomllib  # not in the Pythons that only use_library rejects

    is_job = bool(os.environ.keys() & {"SLURM_JOB_ID", "PBS_JOBID"})
    if not is_job:
        reject_conflicts()
    try:
        table = tomllib.loads(read(PROJECT / "pyproject.toml"))["project"]
    except (tomllib.TOMLDecodeError, KeyError) as error:
        end(f"{PROJECT}/pyproject.toml cannot be read: {error}")
    marker = f".complete-{table['name']}"  # one per project, as projects may share an environment
    made_as = read(venv / marker).partition("\n")[0] or str(venv)
    if made_as != str(venv) and not (os.path.exists(made_as) and os.path.samefile(made_as, venv)):
        end(f"{venv} was made as {made_as} and cannot be moved: remove it, then source again")
    venv = Path(made_as)
    python, packages = venv / "bin" / "python", Path(sysconfig.get_path("purelib", "venv", vars={"base": made_as}))
    if python.is_symlink() and not python.exists():
        end(f"the Python of {venv} is missing: load its module, or remove {venv} and source env.sh again")
    if is_job:
        if not python.exists():
            fix = "source env.sh on a login node, then submit again (python submit.py resume=RUN_DIR)"
            end(f"there is no environment in {venv}, and jobs do not install: {fix}")
        call_library(packages, "--check")
        return venv
    pin = next((text.partition("@")[2].strip() for text in table["dependencies"] if re.match(r"hpc-ml\b", text)), "")
    if not re.fullmatch(r"file://.+|git\+.+@[0-9a-f]{40}", pin):
        end(f"pyproject.toml must pin hpc-ml as git+ADDRESS@COMMIT (40 digits) or a folder; it has {pin or 'none'}")
    mode = os.environ.get("VERSIONS") or ("site" if (packages / SITE_FOLDERS).exists() else "pinned")
    # A folder is a clone of the library, whose requirements may change.
    folders = [PROJECT, Path(folder_of(pin))] if pin.startswith("file:") else [PROJECT]
    files = [PROJECT / "constraints.txt", *(folder / "pyproject.toml" for folder in folders)]
    content = "\n".join([made_as, mode, *(read(file).rstrip() for file in files)])
    if read(venv / marker) != content or not is_installed(pin, packages):
        reject_unsuitable(venv, mode, packages)
        with locked(venv):  # another process may have installed meanwhile
            install(venv, pin, mode, packages, marker=venv / marker, content=content)
    return venv


def install(venv, pin, mode, packages, marker, content):
    has_pip = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode == 0
    if not (os.path.samefile(sys.prefix, venv) and has_pip):  # otherwise env.sh calls the environment's own Python
        make(venv, packages, mode)
    if not is_installed(pin, packages):
        install_library(venv / "bin" / "python", pin)
    if read(marker) != content:
        call_library(f"{folder_of(pin)}/src" if pin.startswith("file:") else packages, str(venv), mode)
        part = marker.with_suffix(".part")
        part.write_text(content, encoding="utf-8", errors="surrogateescape")
        part.replace(marker)


def folder_of(pin):
    return unquote(pin[len("file://") :])


def read(file):
    """Return the text of a file; "" if there is none."""
    return file.read_text(encoding="utf-8", errors="surrogateescape") if file.exists() else ""


def call_library(place, *words):
    """Run hpc.run.installation by this Python, whose packages VERSIONS=site uses, and end if it fails."""
    path = [str(SOURCES), str(place), os.environ.get("PYTHONPATH", "")]
    environ = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, path)), HPC_PROJECT=str(PROJECT))
    command = [sys.executable, "-sPm", "hpc.run.installation", *words]
    code = subprocess.run(command, env=environ, stdout=sys.stderr, close_fds=False).returncode
    if code:
        sys.exit(code)


def reject_conflicts():
    """End where an update left conflicts in a file that says what is installed."""
    for name in ("pyproject.toml", "constraints.txt", ".cruft.json"):
        if (PROJECT / f"{name}.rej").exists() or re.search("(?m)^<<<<<<< ", read(PROJECT / name)):
            end(f"{name} has conflicts of an update: resolve them (and remove {name}.rej), then source again")


def reject_unsuitable(venv, mode, packages):
    """End if nothing may be installed into this folder."""
    if mode not in ("pinned", "site"):
        end(f"VERSIONS must be site or pinned; got {mode}")
    if set(str(venv)) & set('"$`\\:\n'):
        forbidden = "a double quote, $, `, \\, a colon or a line break"
        end(f"the path {venv} must not contain {forbidden}: set VENV to another folder")
    if not venv.exists():
        return
    if venv.stat().st_uid != os.geteuid():
        end(f"{venv} belongs to somebody else and is not complete for {PROJECT}: let them source env.sh, or set VENV")
    if any(venv.iterdir()) and not any((venv / name).exists() for name in ("pyvenv.cfg", LOCK)):
        end(f"{venv} exists and is not a virtual environment: set VENV to another folder")
    if (venv / "pyvenv.cfg").exists() and (packages / SITE_FOLDERS).exists() != (mode == "site"):
        other = "pinned" if mode == "site" else "site"
        end(f"{venv} was made with VERSIONS={other}: remove it, or set VENV to another folder, then source again")


@contextmanager
def locked(venv):
    """Let one process at a time install. However it ends, the kernel releases its lock, and the next one continues."""
    venv.mkdir(parents=True, exist_ok=True)
    with (venv / LOCK).open("a") as lock:
        os.set_inheritable(lock.fileno(), True)  # pip holds it, too: it goes on when this process is killed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another installation into {venv}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            note = "install into it from one shell at a time"
            say(f"note: the file system of {venv} has no locks ({error.strerror}): {note}")
        yield


def make(venv, packages, mode):
    """Make the environment, with VERSIONS=site one that has the packages of this Python, and those of modules, too."""
    if mode == "site":
        packages.mkdir(parents=True, exist_ok=True)
        folders = [folder for folder in sys.path if folder and any(Path(folder).glob("*-info"))]
        (packages / SITE_FOLDERS).write_text("".join(f"{folder}\n" for folder in folders))
    done = subprocess.run([sys.executable, "-m", "venv", str(venv)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        reason = (done.stdout.decode(errors="replace").strip().splitlines() or ["it gave no reason"])[-1]
        end(f"'{sys.executable} -m venv' failed (on Debian and Ubuntu: apt install python3-venv): {reason}")


def is_installed(pin, packages):
    """Return whether the environment has this very commit, or this very folder as it is."""
    folders = list(packages.glob("hpc_ml-*.dist-info"))
    try:
        (source,) = [json.loads((folder / "direct_url.json").read_text()) for folder in folders]
    except (OSError, ValueError):  # none, half of one, or one from an index
        return False
    if pin.startswith("file:"):
        return source["url"] == pin and source.get("dir_info", {}).get("editable", False)
    commit = pin.rpartition("@")[2]  # in its name, too, if it is from a wheel
    return commit in (source.get("vcs_info", {}).get("commit_id"), folders[0].stem.rpartition("+g")[2])


def install_library(python, pin):
    """Install the library alone: from a wheel of its commit in PIP_FIND_LINKS, or from its address."""
    places = os.environ.get("PIP_FIND_LINKS", "").split()
    wheels = [str(wheel) for place in places for wheel in Path(place).glob(f"hpc_ml-*+g{pin.rpartition('@')[2]}-*.whl")]
    what = ["--editable", folder_of(pin)] if pin.startswith("file:") else wheels[:1] or [f"hpc-ml @ {pin}"]
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--force-reinstall"]
    environ = dict(os.environ, GIT_TERMINAL_PROMPT="0", GIT_SSH_COMMAND="ssh -o BatchMode=yes")
    say(f"installing hpc-ml from {what[-1]}")
    command = [str(python), "-Im", "pip", "install", *options, *what]
    pip = subprocess.Popen(command, env=environ, stdout=sys.stderr, close_fds=False, start_new_session=True)
    try:
        if pip.wait(LIMIT_SECONDS):
            end(f"hpc-ml cannot be installed from {what[-1]} (see above). {OFFLINE}")
    except subprocess.TimeoutExpired:
        end(f"hpc-ml could not be fetched from {what[-1]} within {LIMIT_SECONDS} s. {OFFLINE}")
    finally:
        if pip.poll() is None:
            os.killpg(pip.pid, signal.SIGKILL)  # and its git, which would keep the lock


def say(sentence):
    print(f"env.sh: {sentence}", file=sys.stderr, flush=True)


def end(sentence):
    say(sentence)
    sys.exit(1)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    try:
        print(complete(folder))
    except OSError as error:
        end(f"cannot write into {folder}: {error}; set VENV to a folder that you can write into")
    except KeyboardInterrupt:
        end("interrupted; source env.sh again to continue the installation")
