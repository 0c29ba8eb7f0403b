"""The code of a run, as it was when the run was submitted, and a note of what made it.

A script of slurm/, which a person submits, calls this when its run starts: python -sPm hpc.run.snapshot RUN_DIR
"""

import compileall
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import Distribution, distributions
from pathlib import Path

from hpc.config import defaults, library
from hpc.config.errors import ConfigError, exit_on_config_error, make_printable
from hpc.config.project import HPC, LIBRARY, PROJECT
from hpc.run import interpreter

MAX_BYTES = 100 * 2**20  # code is smaller, and data lie elsewhere
LEFT_OUT = {"runs", "outputs", "build"}  # of the project's own folders, where there is no git to ask
# Files in the folder of a run, of an array, and of a scaling study, wherever run_dir= or out= has put these.
RESULTS = ("made_by.json", "attempts.jsonl", "scaling.csv")


def reject_unsuitable_code(dirty_tree: str) -> None:
    """Raise `ConfigError` where the code cannot be copied: uncommitted though `dirty_tree=refuse`, or too large."""
    changes = _git("status", "--porcelain", "--", ".")
    if changes is None and any((folder / ".git").exists() for folder in (PROJECT, *PROJECT.parents)):
        rule = f"cannot be listed, because `git status` fails in {PROJECT}"
        fix = f"see `git -C {PROJECT} status`; of another owner: git config --global --add safe.directory {PROJECT}"
        raise ConfigError("the project's code", None, rule, fix)
    if dirty_tree == "refuse" and (changes is None or changes):
        changed = ", ".join(line[3:] for line in (changes or "").splitlines()[:5])
        why = "git does not know this project" if changes is None else f"these files have changed: {changed}"
        rule = f"jobs must run committed code, but {why}"
        raise ConfigError("dirty_tree", dirty_tree, rule, "git commit, or dirty_tree=snapshot")
    sizes = {name: _size_bytes(PROJECT / name) for name in project_files()}
    if (total := sum(sizes.values())) > MAX_BYTES:
        largest = max(sizes, key=sizes.__getitem__)
        rule = f"must be at most {MAX_BYTES >> 20} MB, as each job keeps a copy; it has {total >> 20} MB"
        fix = f"name data and results in .gitignore, or move them out; the largest file is {largest}"
        raise ConfigError("the project's code", None, rule, fix)


def copy_code(run_dir: Path) -> Path:
    """Copy the project's code, and this library, to `code/` in the run directory, and return that folder.

    The code is what git would commit; without git, all but hidden files and results. No update changes the run then.

    Raises:
        ConfigError: a file that git tracks is gone before it is copied; others may come and go.
    """
    write_provenance(run_dir)  # first: another process that copies code meanwhile knows this folder by it
    names, copy = project_files(), run_dir / "code.part"
    shutil.rmtree(copy, ignore_errors=True)  # of a start that was ended meanwhile
    for name in names:
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            if (PROJECT / name).is_dir():
                _copy_link(PROJECT / name, target, names)
            else:
                shutil.copy2(PROJECT / name, target)
        except FileNotFoundError:
            if _git("ls-files", "--error-unmatch", "--", name) is not None:
                rule = "must not disappear while the code is copied, as git tracks it"
                raise ConfigError(name, None, rule, "submit again when nobody changes the code") from None
    _copy_library(copy / "src")
    defaults.write(copy / "configs")  # as they are today, also for a later library that reads these configs
    code = copy.rename(run_dir / "code")
    compileall.compile_dir(code / "src", quiet=2)  # invalid Python is left to whoever runs it
    return code


def _copy_library(sources: Path) -> None:
    """Copy this library, from wherever it is imported, with its version and requirements."""
    if not (sources / HPC / "__init__.py").exists():  # otherwise a person's own copy
        with suppress(FileNotFoundError, shutil.Error):  # a file that goes away meanwhile is found to be missing below
            shutil.copytree(LIBRARY, sources / HPC, dirs_exist_ok=True)
        if lacking := interpreter.missing_files(sources / HPC):
            rule = f"must not change while it is copied, but now lacks {', '.join(lacking[:3])}"
            fix = "source env.sh, and start this again when nobody else installs into this environment"
            raise ConfigError("the library hpc", str(LIBRARY), rule, fix)
    if not any(sources.glob("hpc_ml-*.dist-info")):
        metadata = sources / f"hpc_ml-{library.library_version()}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(library.read_metadata(), encoding="utf-8")


def project_files() -> list[str]:
    """Return the project's files, relative to it: those that git tracks or would track, without the results of runs.

    Files of submodules and of clones inside the project are included, of which git names the folder only. Folders that
    are links are listed as links: they may lead to data.
    """
    tracked = _git_files("--cached", "--recurse-submodules") or _git_files("--cached")  # the option is of git 2.11
    others = _without_results(_git_files("--others", "--exclude-standard"))
    if "train.py" not in (*tracked, *others):  # in a folder that a repository above ignores
        return _files_without_git(PROJECT)
    names = []
    for name in (*tracked, *others):
        if (path := PROJECT / name).is_file() or path.is_symlink():
            names += [name] if path.exists() else []
        elif path.is_dir():
            names += _files_without_git(path)
    return names


def _files_without_git(top: Path) -> list[str]:
    """Return the files below a folder, relative to the project, where there is no git to ask."""
    paths = []
    for folder, folders, names in os.walk(top):
        left_out = {"__pycache__"} | (LEFT_OUT if Path(folder) == PROJECT else set())
        candidates = [name for name in folders if not name.startswith(".") and name not in left_out]
        folders[:] = [name for name in candidates if not _holds_results(Path(folder, name))]
        links = [name for name in folders if Path(folder, name).is_symlink()]
        # Pipes and sockets are left out, as git leaves them out.
        files = [name for name in names if not name.startswith(".") and os.path.isfile(os.path.join(folder, name))]
        paths += [os.path.relpath(os.path.join(folder, name), PROJECT) for name in [*files, *links]]
    return paths


def _copy_link(link: Path, copy: Path, names: Sequence[str]) -> None:
    """Let the copy of a link lead to the same place, or to the copy of that place if files of these names are in it."""
    target, project = link.resolve(), PROJECT.resolve()
    if target.is_relative_to(project) and any((project / name).is_relative_to(target) for name in names):
        target = Path(os.path.relpath(target, link.parent.resolve()))
    else:
        note = f"note: {link.relative_to(PROJECT)} leads out of the code; the job uses {target} itself, not a copy"
        print(make_printable(note), file=sys.stderr)
    copy.unlink(missing_ok=True)
    copy.symlink_to(target)


def _git_files(*options: str) -> list[str]:
    return [name for name in (_git("ls-files", "-z", *options) or "").split("\0") if name]


def _without_results(names: list[str]) -> list[str]:
    is_result: dict[Path, bool] = {Path("."): False}  # the project itself may well be the code/ of a run

    def is_among_results(folder: Path) -> bool:
        if folder not in is_result:
            is_result[folder] = is_among_results(folder.parent) or _holds_results(PROJECT / folder)
        return is_result[folder]

    return [name for name in names if not is_among_results(Path(name).parent)]


def _holds_results(folder: Path) -> bool:
    """Return whether this is the folder of a run, of an array of them, or of a scaling study."""
    is_run, is_started, is_study = ((folder / name).is_file() for name in RESULTS)
    return is_run or is_started or (is_study and any(folder.glob("nodes-*")))


def _size_bytes(path: Path) -> int:
    """Return the size of a file; 0 if it is gone since it was listed."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def write_provenance(run_dir: Path) -> None:
    """Write `made_by.json`: commit, versions, modules, machine; and `code.diff`: what was not committed."""
    facts = {
        "commit": (_git("rev-parse", "HEAD") or "").strip() or None,
        "hpc": library.library_version(),
        "hpc_origin": library.describe_origin(),
        "python": sys.version,
        "packages": sorted(filter(None, map(_name_and_version, distributions())), key=str.lower),
        "modules": os.environ.get("LOADEDMODULES", "").split(":"),
        "host": socket.gethostname(),
    }
    (run_dir / "made_by.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    if diff := _git("diff", "HEAD", "--", "."):
        (run_dir / "code.diff").write_text(diff, encoding="utf-8")


def _name_and_version(package: Distribution) -> str:
    """Return `name==version`, read from the head of the metadata: to parse a hundred of them as messages takes long."""
    text = package.read_text("METADATA") or package.read_text("PKG-INFO") or ""
    fields = [re.search(rf"(?m)^{key}: (.+)", text) for key in ("Name", "Version")]
    return "==".join(field[1] for field in fields if field)


def _git(*arguments: str) -> str | None:
    """Return the output of git in the project; None where there is no git, no repository, or git fails."""
    command = ["git", "-C", str(PROJECT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="surrogateescape", timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


if __name__ == "__main__":
    with exit_on_config_error():
        if difference := library.differs_from_pin():  # another project that shares the environment has replaced it
            fix = "source env.sh on a login node, then submit this script again"
            raise ConfigError("the library hpc", None, f"must be the pinned one, but {difference}", fix)
        reject_unsuitable_code("snapshot")
        copy_code(Path(sys.argv[1]))
