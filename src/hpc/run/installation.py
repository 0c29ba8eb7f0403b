"""The packages in the project's virtual environment: installed for env.sh, checked before a job, and perhaps packed.

A project's env.py calls this once the library is there: python -sPm hpc.run.installation VENV VERSIONS. The Python that
runs it made the environment and may have no packages, so this imports the standard library only. In a job, which
installs nothing, the environment's Python checks them: ... --check.
"""

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

from hpc.config import library, versions
from hpc.config.errors import ConfigError, ExitCode
from hpc.config.project import PROJECT, project_name

PINNED, SITE = "pinned", "site"  # values of VERSIONS
SITE_FOLDERS = "site_python.pth"  # that env.py writes: the package folders of the Python that made it


class InstallationError(Exception):
    """The environment cannot be completed. The text says why, and what to do."""


def main(venv: Path, mode: str) -> int:
    """Install what the library and the project need, and return the exit code. Nobody else does so meanwhile.

    Args:
        mode: "pinned" for the versions of constraints.txt, "site" for those of the site.
    """
    try:
        _install(venv, mode)
    except InstallationError as error:
        _print(str(error))
        return 1
    return 0


def completion_marker(venv: Path, mode: str, *, code: Path) -> bytes:
    """Return what env.py writes into an environment that is complete: its path, its versions, and what it was made for.

    A folder of the library, which an environment uses as it is, may require other packages some day.
    """
    pin = library.read_pin(code)
    folders = [code, library.folder_of(pin)] if pin.startswith("file:") else [code]
    files = [code / "constraints.txt", *(folder / "pyproject.toml" for folder in folders)]
    texts = [file.read_text(encoding="utf-8", errors="surrogateescape") if file.exists() else "" for file in files]
    text = "\n".join([str(venv), mode, *(text.rstrip() for text in texts)])
    return text.encode(errors="surrogateescape")


def check_for_job() -> int:
    """Print what this environment lacks for the copy of the code that runs, and return the exit code of the job.

    After a job was queued, its owner may have changed the environment for newer code. What is pinned is not compared.
    """
    if not (unmet := [text for text, _ in versions.unmet_requirements(PROJECT)]):
        return ExitCode.DONE
    _print(f"{_lack_sentence(unmet)}. Try: {_pip_command(unmet, PROJECT)}; then submit the run again")
    return ExitCode.REJECTED


def reject_incomplete_environment(code: Path) -> None:
    """Raise `ConfigError` if this environment, which may have changed meanwhile, cannot run a copy of the code."""
    if unmet := [text for text, _ in versions.unmet_requirements(code)]:
        fix = f"{_pip_command(unmet, code)}; then submit again"
        raise ConfigError("VENV", sys.prefix, _lack_sentence(unmet), fix)


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


def _install(venv: Path, mode: str) -> None:
    python = str(venv / "bin" / "python")
    torch = versions.installed_package("torch")
    if mode == PINNED and torch and not os.path.samefile(sys.prefix, venv):
        use = f"to use it ({torch.supported} is supported), type: VERSIONS={SITE} source env.sh, with a new VENV"
        _print(f"note: {sys.executable} has torch {torch.version} in {torch.folder}; {use}")
    _print(f"installing into {venv} (once; takes some minutes)")
    options = ["--constraint", "constraints.txt"] if mode == PINNED else []
    requirements = versions.read_requirements() if mode == PINNED else _site_requirements(python)
    # Without PYTHONPATH (-I), as jobs have none. pip keeps the lock of the environment, even if this process is killed.
    pip = [python, "-Im", "pip", "install", "--quiet", "--disable-pip-version-check", *options, *requirements]
    if subprocess.run(pip, cwd=PROJECT, stdout=sys.stderr, close_fds=False).returncode:
        raise InstallationError("the installation failed (see above); source env.sh again to continue it")
    _check_versions(python, *versions.PACKAGES)
    # Store the signatures of the libraries' classes, so that checking a config does not import these libraries.
    if subprocess.run([python, "-sPm", "hpc.config.signatures"], stdout=sys.stderr).returncode:
        raise InstallationError("storing the libraries' signatures failed (see above)")


def _site_folders_file(venv: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", vars={"base": str(venv)})) / SITE_FOLDERS


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


def _print(sentence: str) -> None:
    print(f"env.sh: {sentence}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(check_for_job())
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
