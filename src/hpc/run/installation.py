"""Install what the library and the project need: python -sPm hpc.run.installation VERSIONS

A project's env.py calls this by the environment's own Python, once that has the library. At first it may have nothing
else, so only the standard library is imported.
"""

import subprocess
import sys

from hpc.config import versions
from hpc.config.project import PROJECT


def main(mode: str) -> None:
    """Install the packages into this environment, or exit with the reason. env.py lets nobody else do so meanwhile.

    Args:
        mode: "pinned" for the versions of constraints.txt, "site" for those of the site.
    """
    options, requirements = ["--constraint", "constraints.txt"], versions.requirements_to_install()
    if mode == "site":
        options, requirements = [], _keep_torch(requirements)
    _print(f"installing into {sys.prefix} (once; takes some minutes)")
    # Without PYTHONPATH (-I), as jobs have none. pip keeps the lock of the environment, even if this process is killed.
    if _run_python("-Im", "pip", "install", "--quiet", "--disable-pip-version-check", *options, *requirements):
        sys.exit("env.sh: the installation failed (see above); source env.sh again to continue it")
    _check_versions(*versions.CHECKED)
    # Store the signatures of the libraries' classes, so that checking a config does not import these libraries.
    if _run_python("-sPm", "hpc.config.signatures"):
        sys.exit("env.sh: storing the libraries' signatures failed (see above)")


def _run_python(*arguments: str) -> int:
    return subprocess.run([sys.executable, *arguments], cwd=PROJECT, stdout=sys.stderr, close_fds=False).returncode


def _keep_torch(requirements: list[str]) -> list[str]:
    """Return the requirements, with the version of the site's torch, which is never replaced."""
    _check_versions("torch")
    if not (torch := versions.installed_package("torch")):
        return requirements  # from a folder of wheels, or an index
    _print(f"using torch {torch.version} in {torch.folder}")
    return [
        f"torch=={torch.version}",
        *(text for text in requirements if not versions.is_requirement_of(text, "torch")),
    ]


def _check_versions(*names: str) -> None:
    """Exit if the environment has one of these packages in a version that is not supported."""
    for package in versions.unsupported_packages(names):
        sys.exit(f"env.sh: {package.name} {package.rule}; got {package.version}. Try: {versions.FIX_SITE_VERSION}")


def _print(sentence: str) -> None:
    print(f"env.sh: {sentence}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
