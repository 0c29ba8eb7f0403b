"""The project's virtual environment: created for env.sh, and complete, perhaps packed, before a job is submitted.

To create or complete it: python -sPm hpc.run.installation VENV. The Python that runs this becomes the environment's. It
may have no packages, so this imports the standard library only. In a job, which installs nothing, the environment's
Python checks it instead: python -sPm hpc.run.installation --check.
"""

import fcntl
import os
import pwd
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpc.config import versions
from hpc.config.errors import ConfigError, ExitCode
from hpc.config.project import PROJECT, SOURCES, project_name

PINNED, SITE = "pinned", "site"  # values of VERSIONS
LOCK = ".env.sh-lock"  # in the environment
SITE_FOLDERS = "site_python.pth"  # in its site-packages: the package folders of the Python that made it


class InstallationError(Exception):
    """The environment cannot be completed. The text says why, and what to do."""


def main(venv: Path, mode: str) -> int:
    """Create or complete the environment, and return the exit code.

    Args:
        mode: `PINNED`, `SITE`, or "" for what the environment was made with, by default `PINNED`.
    """
    try:
        _reject_unsuitable(venv, mode)
        with _locked(venv) as descriptor:
            _install(venv, mode, lock=descriptor)
    except InstallationError as error:
        _print(str(error))
    except OSError as error:
        _print(f"cannot write into {venv}: {error}; set VENV to a folder that you can write into")
    except KeyboardInterrupt:
        _print("interrupted; source env.sh again to continue the installation")
    else:
        return 0
    return 1


def completion_marker(venv: Path, mode: str, *, code: Path) -> bytes:
    """Return the content of the file that marks a complete environment: its path, its versions, the project's files."""
    files = [(code / name).read_bytes().rstrip(b"\n") for name in ("pyproject.toml", "constraints.txt")]
    return b"\n".join([os.fsencode(venv), mode.encode(), *files])


def check_for_job() -> int:
    """Print what this environment lacks for the code beside this package, and return the exit code of the job.

    After a job was queued, its owner may have changed the environment for newer code. The job runs nevertheless, unless
    a package is missing, or torch or lightning is outside the range that its code supports.
    """
    unmet = versions.unmet_requirements(PROJECT)
    for requirement, installed in unmet:
        if not _stops_job(requirement, installed):
            _print(f"note: {PROJECT} was made for {requirement}, and {sys.prefix} has {installed} by now")
    if not (needed := [text for text, installed in unmet if _stops_job(text, installed)]):
        return ExitCode.DONE
    _print(f"{_lack_sentence(needed)}. Try: {_pip_command(needed, PROJECT)}; then submit the run again")
    return ExitCode.REJECTED


def reject_incomplete_environment(code: Path) -> None:
    """Raise `ConfigError` if this environment, which may have changed meanwhile, cannot run a copy of the code."""
    needed = [text for text, installed in versions.unmet_requirements(code) if _stops_job(text, installed)]
    if needed:
        fix = f"{_pip_command(needed, code)}; then submit again"
        raise ConfigError("VENV", sys.prefix, _lack_sentence(needed), fix)


def _stops_job(requirement: str, installed: str | None) -> bool:
    is_ranged = any(versions.is_requirement_of(requirement, name) for name in versions.PACKAGES)
    return installed is None or is_ranged


def _lack_sentence(requirements: list[str]) -> str:
    return f"{sys.prefix} does not meet {', '.join(requirements)}, which this code needs, and a job installs nothing"


def _pip_command(requirements: list[str], code: Path) -> str:
    """Return the command that installs these packages, in a pinned environment in the versions that `code` pins."""
    pins = [] if _site_folders_file(Path(sys.prefix)).exists() else ["-c", str(code / "constraints.txt")]
    return shlex.join([f"{sys.prefix}/bin/python", "-m", "pip", "install", *pins, *requirements])


def reject_unsuitable_environment(venv: Path, code: Path) -> None:
    """Check that a job could use this environment, as it installs nothing.

    Raises:
        ConfigError: env.sh has not finished the environment for this code, or a package is not in the supported range.
    """
    complete = [completion_marker(venv, mode, code=code) for mode in (PINNED, SITE)]
    try:
        is_complete = (venv / f".complete-{project_name()}").read_bytes() in complete
    except OSError:
        is_complete = False
    if not is_complete:
        rule = "must be a complete environment for this project's pyproject.toml and constraints.txt"
        raise ConfigError("VENV", venv, rule, "source env.sh, then submit again: a job installs nothing")
    versions.reject_unsupported_packages()


def pack_environment(venv: Path) -> None:
    """Write `<venv>.tar` beside the environment, for jobs that unpack it on each node, if the environment has changed.

    A virtual environment works wherever it is unpacked, as long as the Python that it was made with is there.

    Raises:
        ConfigError: the archive cannot be written.
    """
    packed, temporary = Path(f"{venv}.tar"), Path(f"{venv}.tar.{os.getpid()}")
    # pip changes the last two as well.
    changed = [*venv.glob(".complete-*"), venv / "bin", *venv.glob("lib/python*/site-packages")]
    if packed.exists() and packed.stat().st_mtime >= max(path.stat().st_mtime for path in changed):
        return
    print(f"packing {venv} into {packed} (once) ...", file=sys.stderr)
    done = subprocess.run(["tar", "-cf", str(temporary), "-C", str(venv), "."], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        temporary.unlink(missing_ok=True)
        reason = (done.stderr.splitlines() or ["tar gave no reason"])[0]
        rule = f"cannot be used, as packing the environment failed: {reason}"
        raise ConfigError("cluster.stage_env", True, rule, f"make room beside {venv}, or cluster.stage_env=false")
    temporary.replace(packed)


def _reject_unsuitable(venv: Path, mode: str) -> None:
    """Raise `InstallationError` if nothing may be installed into this folder."""
    if mode not in ("", PINNED, SITE):
        raise InstallationError(f"VERSIONS must be {SITE} or {PINNED}; got {mode}")
    if set(str(venv)) & set('"$`\\:\n'):
        forbidden = "a double quote, $, `, \\, a colon or a line break"
        raise InstallationError(f"the path {venv} must not contain {forbidden}: set VENV to another folder")
    if not venv.exists():
        return
    if (owner := venv.stat().st_uid) != os.geteuid():
        rule = f"{venv} belongs to {_user_name(owner)} and is not complete for pyproject.toml and constraints.txt of"
        raise InstallationError(f"{rule} {PROJECT}: let its owner source env.sh, or set VENV to a folder of yours")
    if not any((venv / name).exists() for name in ("pyvenv.cfg", LOCK)) and any(venv.iterdir()):
        raise InstallationError(f"{venv} exists and is not a virtual environment: set VENV to another folder")


@contextmanager
def _locked(venv: Path) -> Iterator[int]:
    """Let one process at a time install. However it ends, the kernel releases its lock, and the next one continues."""
    venv.mkdir(parents=True, exist_ok=True)
    with (venv / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _print(f"waiting for another installation into {venv}")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            note = "install into it from one shell at a time"
            _print(f"note: the file system of {venv} has no locks ({error.strerror}): {note}")
        yield file.fileno()


def _install(venv: Path, mode: str, *, lock: int) -> None:
    """Create or complete the environment, unless another process has done so while this one waited for the lock."""
    mode = mode or (SITE if _site_folders_file(venv).exists() else PINNED)
    marker, content = venv / f".complete-{project_name()}", completion_marker(venv, mode, code=PROJECT)
    if marker.exists() and marker.read_bytes() == content:
        return
    _make(venv, mode)
    python = str(venv / "bin" / "python")
    _print(f"installing into {venv} (once; takes some minutes)")
    options = ["--constraint", "constraints.txt"] if mode == PINNED else []
    requirements = versions.read_requirements() if mode == PINNED else _site_requirements(python)
    # Without PYTHONPATH (-I), as jobs have none. pip holds the lock, too: it goes on when this process is killed.
    pip = [python, "-Im", "pip", "install", "--quiet", "--disable-pip-version-check", *options, *requirements]
    if subprocess.run(pip, cwd=PROJECT, stdout=sys.stderr, pass_fds=[lock]).returncode:
        raise InstallationError("the installation failed (see above); source env.sh again to continue it")
    _check_versions(python, *versions.PACKAGES)
    # Store the signatures of the libraries' classes, so that checking a config does not import these libraries.
    if subprocess.run([python, "-sPm", "hpc.config.signatures"], stdout=sys.stderr).returncode:
        raise InstallationError("storing the libraries' signatures failed (see above)")
    part = marker.with_suffix(".part")
    part.write_bytes(content)
    part.replace(marker)


def _make(venv: Path, mode: str) -> None:
    """Create the environment, if it has no pip yet. One that was made with VERSIONS=site has a file SITE_FOLDERS."""
    site_folders, is_made = _site_folders_file(venv), (venv / "pyvenv.cfg").exists()
    if is_made and site_folders.exists() != (mode == SITE):
        rule = f"{venv} was made with VERSIONS={PINNED if mode == SITE else SITE}"
        raise InstallationError(f"{rule}: remove it, or set VENV to another folder, then source again")
    if os.path.samefile(sys.prefix, venv):  # env.sh uses the environment's own Python where that has pip
        return
    if mode == SITE:
        site_folders.parent.mkdir(parents=True, exist_ok=True)
        site_folders.write_text("".join(f"{folder}\n" for folder in _package_folders()))
    elif torch := versions.installed_package("torch"):
        use = f"to use it ({torch.supported} is supported), type: VERSIONS={SITE} source env.sh, with a new VENV"
        _print(f"note: {sys.executable} has torch {torch.version} in {torch.folder}; {use}")
    done = subprocess.run([sys.executable, "-m", "venv", str(venv)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        reason = (done.stdout.decode(errors="replace").strip().splitlines() or ["it gave no reason"])[-1]
        command = f"'{sys.executable} -m venv' failed (on Debian and Ubuntu: apt install python3-venv)"
        raise InstallationError(f"{command}: {reason}")


def _site_folders_file(venv: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", vars={"base": str(venv)})) / SITE_FOLDERS


def _package_folders() -> list[str]:
    """Return the folders from which this Python imports installed packages: its own, a parent's, those of modules."""
    folders = [folder for folder in sys.path if folder and Path(folder) != SOURCES]
    return [folder for folder in folders if any(Path(folder).glob("*-info"))]


def _site_requirements(python: str) -> list[str]:
    """Return the requirements, with the version of the site's torch, which is never replaced."""
    _check_versions(python, "torch")
    requirements = versions.read_requirements()
    if not (torch := versions.installed_package("torch")):
        return requirements  # from a wheel house, or an index
    _print(f"using torch {torch.version} in {torch.folder}")
    others = [text for text in requirements if not versions.is_requirement_of(text, "torch")]
    return [f"torch=={torch.version}", *others]


def _check_versions(python: str, *packages: str) -> None:
    """Raise `InstallationError` if the environment has one of these packages in a version that is not supported."""
    done = subprocess.run([python, "-sPm", "hpc.config.versions", *packages], stdout=subprocess.PIPE)
    if done.returncode or done.stdout:
        raise InstallationError(done.stdout.decode().strip() or "checking the versions failed (see above)")


def _user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _print(sentence: str) -> None:
    print(f"env.sh: {sentence}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(check_for_job())
    sys.exit(main(Path(sys.argv[1]), os.environ.get("VERSIONS", "")))
