"""Find the library `hpc` for the programs here, and complete the environment for env.sh: python env.py VENV

A copy in src/ is preferred to the installed library, which is the commit in pyproject.toml. Standard library only.
"""

import fcntl
import os
import re
import subprocess
import sys
import sysconfig
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from urllib.parse import unquote

PROJECT = Path(__file__).resolve().parent
SOURCES = PROJECT / "src"
INTERFACE = 1  # the version of the library's interface that this project's programs use
LOCK = ".env.sh-lock"  # in the environment
SITE_FOLDERS = "site_python.pth"  # in its site-packages, with VERSIONS=site: the package folders of the site's Python
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


def complete_environment(venv):
    """Install what this project needs and the environment lacks. In a job, only check that the code can run there."""
    python = venv / "bin" / "python"
    if python.is_symlink() and not python.exists():
        fail(f"the Python of {venv} is missing: load its module, or remove {venv} and source env.sh again")
    if os.environ.keys() & {"SLURM_JOB_ID", "PBS_JOBID"}:
        if not python.exists():
            fix = "source env.sh on a login node, then submit again (python submit.py resume=RUN_DIR)"
            fail(f"there is no environment in {venv}, and jobs do not install: {fix}")
        return call_library(python, "hpc.run.environment")
    reject_conflicts()
    name, pin = read_pyproject()
    clone = Path(unquote(pin[len("file://") :])) if pin.startswith("file:") else None
    if clone and not (clone / "pyproject.toml").exists():
        fail(f"pyproject.toml pins hpc-ml to {clone}, where it is not: clone the template there, or change the pin")
    packages = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(venv)}))
    mode = os.environ.get("VERSIONS") or ("site" if (packages / SITE_FOLDERS).exists() else "pinned")
    marker = venv / f".complete-{name}"  # one per project, as projects may share an environment
    # A clone of the library is used as it is, and what it requires may change.
    files = [PROJECT / "constraints.txt", PROJECT / "pyproject.toml", *([clone / "pyproject.toml"] if clone else [])]
    content = "\n".join([mode, *(read_text(file).rstrip() for file in files)])
    if read_text(marker) != content or not is_installed(pin, packages):
        reject_unsuitable_folder(venv, mode, packages)
        with lock_environment(venv):  # another process may have installed something meanwhile
            if not any(packages.glob("pip-*.dist-info/RECORD")):
                create_environment(venv, packages, mode)
            if not is_installed(pin, packages):
                install_library(python, pin, clone)
            if read_text(marker) != content:
                call_library(python, "hpc.run.installation", mode)
                marker.with_suffix(".part").write_text(content, encoding="utf-8", errors="surrogateescape")
                marker.with_suffix(".part").replace(marker)


def read_pyproject():
    """Return the project's name, and the address of its library, as git+https://host/template@COMMIT."""
    import tomllib  # only here: use_library must run with an older Python, too

    try:
        table = tomllib.loads(read_text(PROJECT / "pyproject.toml"))["project"]
        pins = [text.partition("@")[2].strip() for text in table["dependencies"] if re.match(r"hpc-ml\b", text)]
        name, pin = table["name"], "".join(pins[:1])
    except (tomllib.TOMLDecodeError, KeyError) as error:
        fail(f"{PROJECT}/pyproject.toml cannot be read: {error}")
    if not re.fullmatch(r"file://.+|git\+.+@[0-9a-f]{40}", pin):
        fail(f"pyproject.toml must pin hpc-ml as git+ADDRESS@COMMIT (40 digits) or a folder; it has {pin or 'none'}")
    return name, pin


def read_text(file):
    """Return the text of a file; "" if there is none."""
    return file.read_text(encoding="utf-8", errors="surrogateescape") if file.exists() else ""


def call_library(python, module, *words):
    """Run a module of the library, of a copy in src/ if there is one, and end if it fails."""
    path = os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")]))
    environ = dict(os.environ, PYTHONPATH=path, HPC_PROJECT=str(PROJECT))
    command = [str(python), "-sPm", module, *words]
    code = subprocess.run(command, env=environ, stdout=sys.stderr, close_fds=False).returncode
    if code:
        sys.exit(code)


def reject_conflicts():
    """End where an update left conflicts in a file that says what is installed."""
    for name in ("pyproject.toml", "constraints.txt", ".cruft.json", "env.sh"):
        if (PROJECT / f"{name}.rej").exists() or re.search("(?m)^<<<<<<< ", read_text(PROJECT / name)):
            fail(f"{name} has conflicts of an update: resolve them (and remove {name}.rej), then source env.sh")


def reject_unsuitable_folder(venv, mode, packages):
    """End if nothing may be installed into this folder."""
    if mode not in ("pinned", "site"):
        fail(f"VERSIONS must be site or pinned; got {mode}")
    if set(str(venv)) & set('"$`\\:\n'):
        forbidden = "a double quote, $, `, \\, a colon or a line break"
        fail(f"the path {venv} must not contain {forbidden}: set VENV to another folder")
    if not venv.exists():
        return
    if venv.stat().st_uid != os.geteuid():
        fail(f"{venv} belongs to somebody else and is not complete for {PROJECT}: let them source env.sh, or set VENV")
    if any(venv.iterdir()) and not any((venv / name).exists() for name in ("pyvenv.cfg", LOCK)):
        fail(f"{venv} exists and is not a virtual environment: set VENV to another folder")
    if (venv / "pyvenv.cfg").exists() and (packages / SITE_FOLDERS).exists() != (mode == "site"):
        other = "pinned" if mode == "site" else "site"
        fail(f"{venv} was made with VERSIONS={other}: remove it, or set VENV to another folder, then source again")


@contextmanager
def lock_environment(venv):
    """Let one process at a time install. The kernel releases the lock once it and its pip have ended in any way."""
    venv.mkdir(parents=True, exist_ok=True)
    with (venv / LOCK).open("a") as lock:
        os.set_inheritable(lock.fileno(), True)  # by pip, which may outlive this process
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"waiting for another installation into {venv}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            note = "install into it from one shell at a time"
            log(f"note: the file system of {venv} has no locks ({error.strerror}): {note}")
        yield


def create_environment(venv, packages, mode):
    """Make the environment, with VERSIONS=site one that has the packages of this Python, and those of modules, too."""
    infos = [info for folder in sys.path for info in Path(folder).glob("torch-*.dist-info")]
    if mode == "site":
        packages.mkdir(parents=True, exist_ok=True)
        folders = [folder for folder in sys.path if folder and any(Path(folder).glob("*-info"))]
        (packages / SITE_FOLDERS).write_text("".join(f"{folder}\n" for folder in folders))
    elif infos:
        use = "to use it, type: VERSIONS=site source env.sh, with a new VENV"
        log(f"note: {sys.executable} has {infos[0].stem} in {infos[0].parent}; {use}")
    done = subprocess.run([sys.executable, "-m", "venv", str(venv)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        reason = (done.stdout.decode(errors="replace").strip().splitlines() or ["it gave no reason"])[-1]
        fail(f"'{sys.executable} -m venv' failed (on Debian and Ubuntu: apt install python3-venv): {reason}")


def is_installed(pin, packages):
    """Return whether the environment has this very commit, which is in its version, or this very folder as it is."""
    infos = list(packages.glob("hpc_ml-*.dist-info"))
    if len(infos) != 1 or not (infos[0] / "RECORD").exists():  # none, or half of one
        return False
    if pin.startswith("file:"):
        source = read_text(infos[0] / "direct_url.json")
        return f'"{pin}"' in source and '"editable": true' in source
    return infos[0].stem.endswith(f"+g{pin.rpartition('@')[2]}")


def install_library(python, pin, clone):
    """Install the library alone: from a wheel of its commit in PIP_FIND_LINKS, or from its address."""
    places = os.environ.get("PIP_FIND_LINKS", "").split()
    wheels = [str(wheel) for place in places for wheel in Path(place).glob(f"hpc_ml-*+g{pin.rpartition('@')[2]}-*.whl")]
    source = ["--editable", str(clone)] if clone else wheels[:1] or [f"hpc-ml @ {pin}"]
    log(f"installing hpc-ml from {source[-1]}")
    # git asks for no password, and waits a minute for an address that does not answer.
    ssh = "ssh -o BatchMode=yes -o ConnectTimeout=60 -o ServerAliveInterval=20"
    limits = {"GIT_HTTP_LOW_SPEED_LIMIT": "1", "GIT_HTTP_LOW_SPEED_TIME": "60", "GIT_SSH_COMMAND": ssh}
    environ = dict(os.environ, GIT_TERMINAL_PROMPT="0", **limits)
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--force-reinstall"]
    command = [str(python), "-Im", "pip", "install", *options, *source]
    if subprocess.run(command, env=environ, stdout=sys.stderr, close_fds=False).returncode:
        fail(f"hpc-ml cannot be installed from {source[-1]} (see above). {OFFLINE}")
    if not is_installed(pin, Path(sysconfig.get_path("purelib", "venv", vars={"base": str(python.parents[1])}))):
        fail(f"{source[-1]} is not the pinned library: its version must end with the commit. Correct the pin")


def log(sentence):
    print(f"env.sh: {sentence}", file=sys.stderr, flush=True)


def fail(sentence):
    sys.exit(f"env.sh: {sentence}")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    try:
        complete_environment(folder)
    except OSError as error:
        fail(f"cannot write into {folder}: {error}; set VENV to a folder that you can write into")
    except KeyboardInterrupt:
        fail("interrupted; source env.sh again to continue the installation")
