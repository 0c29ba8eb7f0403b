"""Whether this Python can run the project. Programs call this before all other imports: written for Python 3.6."""

import os
import re
import shlex
import sys
from importlib.util import find_spec

OLDEST = (3, 11)  # as pyproject.toml
PACKAGES = ("omegaconf", "hydra", "torch", "lightning")  # which the programs import
INTERFACE = 1  # raise it when a project's programs must call the library differently
NEEDED_FILES = ("__init__.py", *(f"jobs/{name}.bash" for name in ("job", "slurm", "pbs", "pbs_successor")))
LIBRARY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def require_environment(project, interface):  # type: ignore[no-untyped-def]
    """End the program, with the line to type, if this Python or this library cannot run the project.

    Args:
        project: its folder.
        interface: the number of the library's interface that its programs use.
    """
    missing = [name for name in PACKAGES if not find_spec(name)]
    copy = os.path.join(project, "src", os.path.basename(LIBRARY))
    problem = _problem_of_copy(copy)
    file = os.path.relpath(os.path.join(project, "env.sh"))
    fix = f"Type, in bash or zsh: source {shlex.quote(file)}"
    if sys.version_info < OLDEST:
        reason = "Python {}.{} or newer is needed, and this is {}".format(*OLDEST, sys.version.split()[0])
    elif missing:
        reason = "this Python does not have {}".format(", ".join(missing))
    elif problem:
        reason = f"{copy} is not a whole copy of the library: {problem}"
        fix = "Remove it, or copy all of the library there"
    elif interface != INTERFACE:
        reason = "these programs use interface {} of the library, and the one in {} has {}"
        reason = reason.format(interface, LIBRARY, INTERFACE)
    else:
        reason = _difference_from_pin()
    if reason:
        sys.stderr.write(f"{os.path.basename(sys.argv[0])}: {reason} ({sys.executable}). {fix}\n")
        sys.exit(2)


def _difference_from_pin():  # type: ignore[no-untyped-def]
    """Return how the library differs from the pinned one; "" in the copy of a job, whose environment may be newer."""
    from hpc.config import library  # only here: it is for Python 3.11 and newer

    return library.differs_from_pin()


def _problem_of_copy(copy):  # type: ignore[no-untyped-def]
    """Return what is wrong with a library in src/, which an update may have left; "" if it is whole, or has no sources.

    The copy of a job is not looked at again.
    """
    names = [os.path.join(folder, name) for folder, _, names in os.walk(copy) for name in names]
    if all("__pycache__" in name for name in names) or os.path.isfile(
        os.path.join(copy, "..", "..", "..", "made_by.json")
    ):
        return ""
    lacking = missing_files(copy)
    return "it lacks {}".format(", ".join(lacking[:3])) if lacking else ""


def missing_files(library):  # type: ignore[no-untyped-def]
    """Return the files that a copy of the library lacks: those of NEEDED_FILES, and modules that others import."""
    imported = set()
    for folder, _, names in os.walk(library):
        for name in [name for name in names if name.endswith(".py")]:
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                text = file.read()
            for package, modules in re.findall(r"(?m)^ *from hpc\.(\w+) import ([\w, ]+)$", text):
                imported.update((package, module.split(" as ")[0].strip()) for module in modules.split(","))
            imported.update(re.findall(r"(?m)^ *from hpc\.(\w+)\.(\w+) import ", text))
    lacking = sorted("/".join(pair) + ".py" for pair in imported if not _is_module(os.path.join(library, *pair)))
    return [name for name in NEEDED_FILES if not os.path.isfile(os.path.join(library, name))] + lacking


def _is_module(path):  # type: ignore[no-untyped-def]
    return os.path.exists(path + ".py") or os.path.exists(os.path.join(path, "__init__.py"))
