"""The code of a run, as it was when the run was submitted, and a note of what made it."""

import compileall
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

from hpc.config.errors import ConfigError, make_printable
from hpc.config.project import PROJECT, project_name

MOST = 100 * 2**20  # bytes; code is smaller, data lie elsewhere
LEFT_OUT = {"runs", "outputs", "build"}  # of the project's own folders, where there is no git to ask
# What lies in the folder of a run or of an array, and of a scaling study, wherever run_dir= or out= has put them.
RESULTS = ("made_by.json", "attempts.jsonl", "study.json")


def refuse(dirty_tree: str) -> None:
    """Raise `ConfigError` where the tree is dirty and `dirty_tree` is "refuse", or where it is too large to be code."""
    changes = _git("status", "--porcelain", "--", ".")
    if changes is None and any((folder / ".git").exists() for folder in (PROJECT, *PROJECT.parents)):
        rule = "git must tell what belongs to the code, and what is ignored; it does not: `git status` fails here"
        fix = f"see `git -C {PROJECT} status`; of another owner: git config --global --add safe.directory {PROJECT}"
        raise ConfigError("code", PROJECT, rule, fix)
    if dirty_tree == "refuse" and (changes is None or changes):
        changed = ", ".join(line[3:] for line in (changes or "").splitlines()[:5])
        why = "git does not know this project" if changes is None else f"changed: {changed}"
        rule = f"jobs run committed code only; {why}"
        raise ConfigError("dirty_tree", dirty_tree, rule, "git commit, or dirty_tree=snapshot")
    sizes = {name: _size(PROJECT / name) for name in files()}
    if (total := sum(sizes.values())) > MOST:
        largest = max(sizes, key=sizes.__getitem__)
        rule = f"each job keeps a copy of the code, {total >> 20} MB here; the largest file is {largest}"
        raise ConfigError("code", None, rule, "name data and results in .gitignore, or move them out of the project")


def take(run_dir: Path) -> Path:
    """Copy the project's code to `code/` in the run directory: what git would commit; without git, everything.

    Raises:
        ConfigError: a file that git tracks is gone before it is copied; others may come and go.
    """
    made_by(run_dir)  # first: who takes a snapshot meanwhile knows this folder by it
    names = files()
    for name in names:
        target = run_dir / "code" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            if (PROJECT / name).is_dir():
                _link(PROJECT / name, target, names)
            else:
                shutil.copy2(PROJECT / name, target)
        except FileNotFoundError:
            if _git("ls-files", "--error-unmatch", "--", name) is not None:
                rule = "went away while the code was copied, and git tracks it"
                raise ConfigError(name, None, rule, "submit again when nobody changes the code") from None
    compileall.compile_dir(run_dir / "code" / "src", quiet=2)  # a file that is no Python yet is left to whoever runs it
    return run_dir / "code"


def files() -> list[str]:
    """The project's files, relative to it: those that git tracks or would track, but for what runs have left.

    Also those of submodules and of clones inside it, of which git tells the folder only. Folders that are links are
    listed as links: what they lead to may be data.
    """
    tracked = _listed("--cached", "--recurse-submodules") or _listed("--cached")  # git knows that word since 2.11
    others = _without_results(_listed("--others", "--exclude-standard"))
    if "train.py" not in (*tracked, *others):  # in a folder that a repository above ignores
        return _below(PROJECT)
    found = []
    for name in (*tracked, *others):
        if (path := PROJECT / name).is_file() or path.is_symlink():
            found += [name] if path.exists() else []
        elif path.is_dir():
            found += _below(path)
    return found


def _below(top: Path) -> list[str]:
    """Where there is no git to ask."""
    found = []
    for folder, folders, names in os.walk(top):
        left_out = {"__pycache__"} | (LEFT_OUT if Path(folder) == PROJECT else set())
        kept = [name for name in folders if not name.startswith(".") and name not in left_out]
        folders[:] = [name for name in kept if not _holds_results(Path(folder, name))]
        links = [name for name in folders if Path(folder, name).is_symlink()]
        shown = [name for name in names if not name.startswith(".")]
        found += [os.path.relpath(os.path.join(folder, name), PROJECT) for name in [*shown, *links]]
    return found


def _link(link: Path, copy: Path, names: Sequence[str]) -> None:
    """Let the copy of a link lead to the same place, or to the copy of that, if files of these names are there."""
    place, home = link.resolve(), PROJECT.resolve()
    if place.is_relative_to(home) and any((home / name).is_relative_to(place) for name in names):
        place = Path(os.path.relpath(place, link.parent.resolve()))
    else:
        said = f"note: {link.relative_to(PROJECT)} leads out of the code: the job uses {place}, and no copy of it"
        print(make_printable(said), file=sys.stderr)
    copy.unlink(missing_ok=True)
    copy.symlink_to(place)


def _listed(*options: str) -> list[str]:
    return [name for name in (_git("ls-files", "-z", *options) or "").split("\0") if name]


def _without_results(names: list[str]) -> list[str]:
    known: dict[Path, bool] = {Path("."): False}  # the project itself may well be the code/ of a run

    def among_results(folder: Path) -> bool:
        if folder not in known:
            known[folder] = among_results(folder.parent) or _holds_results(PROJECT / folder)
        return known[folder]

    return [name for name in names if not among_results(Path(name).parent)]


def _holds_results(folder: Path) -> bool:
    """Is it the folder of a run, of an array of them, or of a scaling study?"""
    run, started, study = ((folder / name).is_file() for name in RESULTS)
    return run or started or (study and any(folder.glob("nodes-*")))


def _size(path: Path) -> int:
    """In bytes; 0 where it went away since it was listed."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def reject_incomplete(venv: Path, code: Path) -> None:
    """Raise `ConfigError` unless env.sh has finished this environment for this code: a job installs nothing."""
    texts = [(code / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    done = subprocess.run(["cksum"], input=b"".join(texts), capture_output=True, check=True).stdout.decode().strip()
    try:
        marked = (venv / f".complete-{project_name()}").read_text(encoding="utf-8")
    except OSError:
        marked = ""
    if marked != f"{done} {venv}":
        rule = "is not the environment of this project's pyproject.toml and constraints.txt; a job installs nothing"
        raise ConfigError("VENV", venv, rule, "source env.sh, then submit again")


def pack_environment(venv: Path) -> None:
    """Keep `<venv>.tar` beside the environment, for jobs that unpack it on each node; renewed when it has changed.

    A virtual environment works wherever it is unpacked, as long as the Python that it was made with is there.

    Raises:
        ConfigError: it cannot be written there.
    """
    packed, aside = Path(f"{venv}.tar"), Path(f"{venv}.tar.{os.getpid()}")
    changed = [
        venv / f".complete-{project_name()}",
        venv / "bin",
        *venv.glob("lib/python*/site-packages"),
    ]  # by pip, too
    if packed.exists() and packed.stat().st_mtime >= max(path.stat().st_mtime for path in changed):
        return
    print(f"packing {venv} into {packed} (once) ...", file=sys.stderr)
    done = subprocess.run(["tar", "-cf", str(aside), "-C", str(venv), "."], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        aside.unlink(missing_ok=True)
        rule = f"packing the environment failed: {(done.stderr.splitlines() or ['tar gave no reason'])[0]}"
        raise ConfigError("cluster.stage_env", True, rule, f"make room beside {venv}, or cluster.stage_env=false")
    aside.replace(packed)


def made_by(run_dir: Path) -> None:
    """`made_by.json`: commit, versions, modules, machine; `code.diff`: what was not committed."""
    known = {
        "commit": (_git("rev-parse", "HEAD") or "").strip() or None,
        "python": sys.version,
        "packages": sorted(filter(None, map(_release, distributions())), key=str.lower),
        "modules": os.environ.get("LOADEDMODULES", "").split(":"),
        "host": socket.gethostname(),
    }
    (run_dir / "made_by.json").write_text(json.dumps(known, indent=1), encoding="utf-8")
    if diff := _git("diff", "HEAD", "--", "."):
        (run_dir / "code.diff").write_text(diff, encoding="utf-8")


def _release(package: Distribution) -> str:
    """`name==version`, looked up in the head of its file: to parse a hundred of them as messages takes long."""
    text = package.read_text("METADATA") or package.read_text("PKG-INFO") or ""
    found = [re.search(rf"(?m)^{key}: (.+)", text) for key in ("Name", "Version")]
    return "==".join(one[1] for one in found if one)


def _git(*arguments: str) -> str | None:
    """What git says of the project; None where there is no git, no repository, or it rejects."""
    command = ["git", "-C", str(PROJECT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="surrogateescape", timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
