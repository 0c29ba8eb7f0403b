"""The version of these sources: the release, and the commit of the clone that they lie in. The build reads it, too."""

import subprocess
from pathlib import Path

RELEASE = "0.3.0"
ROOT = Path(__file__).absolute().parents[2]  # of a clone


def source_version() -> str:
    """Return 0.3.0+gCOMMIT, at a tag, too, as forks may have the same tags; without git, 0.3.0+unknown.

    Uncommitted changes add `.dirty`.
    """
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return f"{RELEASE}+unknown"
    return f"{RELEASE}+g{commit}{'.dirty' * bool(_git('status', '--porcelain', '--', 'src', 'pyproject.toml'))}"


def _git(*arguments: str) -> str:
    """Return the output of git for this clone, and not for a repository around it; "" if git fails."""
    command = ["git", f"--git-dir={ROOT}/.git", f"--work-tree={ROOT}", *arguments]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
