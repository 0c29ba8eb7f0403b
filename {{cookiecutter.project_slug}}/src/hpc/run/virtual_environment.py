"""The virtual environment of a job: complete before the job is submitted, and packed for nodes that unpack it."""

import os
import subprocess
import sys
from pathlib import Path

from hpc.config import versions
from hpc.config.errors import ConfigError
from hpc.config.project import project_name
from hpc.run.installation import PINNED, SITE, completion_marker


def reject_unsuitable_environment(venv: Path, code: Path) -> None:
    """Check that a job could use this environment, as it installs nothing.

    Raises:
        ConfigError: env.sh has not finished the environment for this code, or a package is not in the supported range.
    """
    complete = [completion_marker(venv, which, code=code) for which in (PINNED, SITE)]
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
    changed = [venv / f".complete-{project_name()}", venv / "bin", *venv.glob("lib/python*/site-packages")]
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
