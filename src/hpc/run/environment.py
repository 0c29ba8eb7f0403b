"""The environment of a job: checked on the login node, checked again in the job, and perhaps packed.

A job installs nothing. Its env.sh calls this before the ranks start: python -sPm hpc.run.environment
"""

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

from hpc.config import versions
from hpc.config.errors import ConfigError, ExitCode
from hpc.config.project import PROJECT, project_name
from hpc.system.files import complete_file

SITE_FOLDERS = "site_python.pth"  # that env.py writes with VERSIONS=site, into the folder of packages


def main() -> int:
    """Print what this environment lacks for the copy of the code that runs, and return the exit code of the job.

    Only requirements are checked, not the pin: the environment may have been updated for newer code since then.
    """
    if unmet := versions.unmet_requirements(PROJECT):
        fix = f"Try: {_pip_command(unmet, PROJECT)}; then submit the run again"
        print(f"env.sh: {_lack_sentence(unmet)}. {fix}", file=sys.stderr)
        return ExitCode.REJECTED
    return ExitCode.DONE


def reject_incomplete_environment(code: Path) -> None:
    """Raise `ConfigError` if this environment, which may have changed meanwhile, cannot run a copy of the code."""
    if unmet := versions.unmet_requirements(code):
        raise ConfigError("VENV", sys.prefix, _lack_sentence(unmet), f"{_pip_command(unmet, code)}; then submit again")


def reject_unsuitable_environment() -> None:
    """Check that a job could use this environment for the project as it is now.

    Raises:
        ConfigError: env.sh has not completed it for these files, a package is not in the supported range, or another
            project that shares it has replaced one.
    """
    marker = Path(sys.prefix, f".complete-{project_name()}")  # env.py writes it, with the text of these files
    content = marker.read_text(encoding="utf-8", errors="surrogateescape") if marker.exists() else ""
    for name in ("pyproject.toml", "constraints.txt"):
        if (PROJECT / name).read_text(
            encoding="utf-8", errors="surrogateescape"
        ).rstrip() not in content or not content:
            rule = "must be a complete environment for this project's pyproject.toml and constraints.txt"
            raise ConfigError("VENV", sys.prefix, rule, "source env.sh, then submit again: a job installs nothing")
    versions.reject_unsupported_packages()
    reject_incomplete_environment(PROJECT)


def pack_environment(venv: Path) -> None:
    """Write `<venv>.tar` beside the environment, for jobs that unpack it on each node, if the environment has changed.

    A virtual environment works wherever it is unpacked, as long as the Python that it was made with is there.

    Raises:
        ConfigError: the archive cannot be written.
    """
    packed = Path(f"{venv}.tar")
    # pip changes the last two as well.
    changed = [*venv.glob(".complete-*"), venv / "bin", *venv.glob("lib/python*/site-packages")]
    if packed.exists() and packed.stat().st_mtime >= max(path.stat().st_mtime for path in changed):
        return
    print(f"packing {venv} into {packed} (once) ...", file=sys.stderr)
    with complete_file(packed, Path(f"{packed}.{os.getpid()}")) as temporary:  # a name that .gitignore has
        done = subprocess.run(["tar", "-cf", str(temporary), "-C", str(venv), "."], stderr=subprocess.PIPE, text=True)
        if done.returncode:
            reason = (done.stderr.splitlines() or ["tar gave no reason"])[0]
            rule = f"cannot be used, as packing the environment failed: {reason}"
            raise ConfigError("cluster.stage_env", True, rule, f"make room beside {venv}, or cluster.stage_env=false")


def _lack_sentence(requirements: list[str]) -> str:
    return f"{sys.prefix} does not meet {', '.join(requirements)}, which this code needs, and a job installs nothing"


def _pip_command(requirements: list[str], code: Path) -> str:
    """Return the command that installs these packages, in a pinned environment in the versions that `code` pins."""
    is_site = Path(sysconfig.get_path("purelib"), SITE_FOLDERS).exists()
    pins = [] if is_site else ["-c", str(code / "constraints.txt")]
    return shlex.join([f"{sys.prefix}/bin/python", "-m", "pip", "install", *pins, *requirements])


if __name__ == "__main__":
    sys.exit(main())
