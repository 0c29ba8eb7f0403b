"""Bake and update forks with the real cookiecutter and cruft, on a git history of the template that is made here."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import AWKWARD, REPO, commit
from test_bake import names
from test_readme import README, commands

PACKAGE = f"src/{AWKWARD['package_name']}"
CHANGED = ("src/hpc/run/stacks.py", f"{PACKAGE}/module.py", "configs/train.yaml", "constraints.txt")
ADDED, REMOVED, DELETED_BY_THE_FORK = "src/hpc/run/added.py", "slurm/gpu.sbatch", "container.def"
NEWER, NEWEST = "v98.0.0", "v99.0.0"
Cruft = Callable[..., str]

pytestmark = pytest.mark.slow


def add_first_line(file: Path, line: str) -> None:
    file.write_text(f"# {line}\n{file.read_text(encoding='utf-8')}", encoding="utf-8")


def add_last_line(file: Path, line: str) -> None:
    with file.open("a", encoding="utf-8") as text:
        text.write(f"# {line}\n")


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def read_link(project: Path) -> dict:
    return json.loads((project / ".cruft.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def history(template, tmp_path_factory) -> Path:
    """Make a repository of the template with two newer versions, and with the tag `present` on this one."""
    repository = tmp_path_factory.mktemp("history") / "hpc-ml-template"
    git(template, "clone", "--quiet", str(template), str(repository))
    git(repository, "tag", "present")
    (rendered,) = repository.glob("*cookiecutter.project_slug*")
    for name in (*CHANGED, DELETED_BY_THE_FORK):
        add_first_line(rendered / name.replace(PACKAGE, "src/{{cookiecutter.package_name}}"), "newer")
    (rendered / ADDED).write_text('"""Added."""\n')
    (rendered / REMOVED).unlink()
    commit(repository, "newer")
    git(repository, "tag", NEWER)
    version = rendered / "src/hpc/__init__.py"
    version.write_text(re.sub('__version__ = ".+"', '__version__ = "99.0.0"', version.read_text()))
    commit(repository, "newest")
    git(repository, "tag", NEWEST)
    return repository


@pytest.fixture(scope="module")
def bake_from(settings, run) -> Callable[..., tuple[str, Path]]:
    """Return the function bake_from(template, folder, *words), which returns what is printed and the project."""

    def bake_from(template: str, folder: Path, *words: str) -> tuple[str, Path]:
        command = [sys.executable, "-m", "cookiecutter", template, "--no-input", "--config-file", str(settings), *words]
        done = run([*command, *(f"{key}={value}" for key, value in AWKWARD.items())], folder, env={"PWD": str(folder)})
        assert done.returncode == 0, done.stdout
        return done.stdout, folder / AWKWARD["project_slug"]

    return bake_from


@pytest.fixture(scope="module")
def present_fork(history, bake_from, run, tmp_path_factory) -> Path:
    """Bake the present version with awkward answers, and commit the fork to git as the README says."""
    folder = tmp_path_factory.mktemp("present") / "Ein Ordner für 'alles' "
    folder.mkdir()
    said, fork = bake_from(f"git+file://{history}", folder, "--checkout", "present")
    assert "cruft" not in said
    into_git = [command for command in commands(README["project"]) if command.startswith("git ")]
    done = run(" && ".join(into_git), fork, env=IDENTITY)
    assert done.returncode == 0 and git(fork, "log", "--oneline") and not git(fork, "status", "--short"), done.stdout
    return fork


IDENTITY = {f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


@pytest.fixture
def fork(present_fork, tmp_path) -> Path:
    shutil.copytree(present_fork, tmp_path / "fork")
    return tmp_path / "fork"


@pytest.fixture(scope="module")
def cruft(run, settings) -> Cruft:
    """Return the function cruft(folder, *words), which returns what cruft prints."""

    def cruft(folder: Path, *words: str, fails: bool = False) -> str:
        done = run(["cruft", *words], folder, env={"COOKIECUTTER_CONFIG": str(settings), "COLUMNS": "300"})
        assert (done.returncode != 0) == fails, done.stdout
        return done.stdout

    return cruft


def edit(fork: Path, add_line: Callable[[Path, str], None]) -> None:
    for name in CHANGED:
        add_line(fork / name, "mine")


# -- A bake leaves a link to the template --


def test_a_bake_from_an_address_notes_the_commit_and_the_answers(present_fork, history, cruft):
    assert read_link(present_fork) == {
        "template": f"file://{history}",
        "commit": git(history, "rev-parse", "present"),
        "checkout": "present",
        "context": {"cookiecutter": {"cluster": "local", **AWKWARD}},
        "directory": None,
    }
    assert cruft(present_fork, "diff") == "", "the noted answers make the same project, and the hooks print nothing"
    assert "up to date" in cruft(present_fork, "check", "--checkout", "present")
    assert "out of date" in cruft(present_fork, "check", fails=True)


def test_a_bake_from_a_folder_notes_its_absolute_path(history, bake_from):
    _, project = bake_from("hpc-ml-template", history.parent)
    link = read_link(project)
    assert link["template"] == str(history) and link["commit"] == git(history, "rev-parse", "HEAD")


def test_user_and_password_in_the_template_s_address_are_not_noted(history, settings, bake_from, tmp_path):
    stored = settings.parent / "clones" / "stored"
    git(history, "clone", "--quiet", str(history), str(stored))
    git(stored, "remote", "set-url", "origin", "https://me:secret@example.org/template")
    _, project = bake_from("stored", tmp_path)
    assert read_link(project)["template"] == "https://example.org/template"


def test_uncommitted_changes_of_the_template_are_told(history, bake_from, tmp_path):
    shutil.copytree(history, tmp_path / "template")
    (tmp_path / "template" / "README.md").write_text("changed")
    said, project = bake_from("template", tmp_path)
    assert "The template has uncommitted changes. `cruft update` will treat them as your own changes." in said
    assert read_link(project)["commit"] == git(history, "rev-parse", "HEAD")


def test_a_repository_that_is_no_template_is_not_noted(history, settings, run, tmp_path):
    """Bake from a relative path where PWD is not the working directory, as in a program that has changed it."""
    (tmp_path / "elsewhere" / "hpc-ml-template").mkdir(parents=True)
    (tmp_path / "elsewhere" / "hpc-ml-template" / "notes.txt").write_text("mine")
    commit(tmp_path / "elsewhere" / "hpc-ml-template")
    command = [sys.executable, "-m", "cookiecutter", history.name, "--no-input", "--config-file", str(settings)]
    done = run([*command, "-o", str(tmp_path)], history.parent, env={"PWD": str(tmp_path / "elsewhere")})
    assert done.returncode == 0 and "git gives no commit" in done.stdout
    assert not (tmp_path / "my-research" / ".cruft.json").exists()


def test_a_bake_without_git_says_how_to_link_it_later(history, settings, bake_from, cruft, tmp_path):
    """Bake from a copy of the files, as a download has them, inside the git repository of another template."""
    (tmp_path / "cookiecutter.json").write_text("{}")
    git(history, "clone", "--quiet", "--branch", "present", str(history), str(tmp_path / "template"))
    shutil.rmtree(tmp_path / "template" / ".git")
    commit(tmp_path)
    said, project = bake_from("template", tmp_path)
    assert "git gives no commit or no address of the template template." in said
    assert not (project / ".cruft.json").exists()

    (line,) = re.findall(r"^  (cruft link \S+ --checkout v\S+)$", said, re.MULTILINE)
    assert line.endswith(f" v{present_version()}")
    words = [f"file://{history}", "--checkout", "present"]
    typed = "\n".join({**AWKWARD, "license": f"{AWKWARD['license']}\nlocal"}.values()) + "\n\n"
    linked = subprocess.run(
        [sys.executable, "-m", "cruft", "link", *words], cwd=project, input=typed, capture_output=True, text=True,
        env=os.environ | {"COOKIECUTTER_CONFIG": str(settings)},
    )  # fmt: skip
    assert linked.returncode == 0, linked.stdout + linked.stderr
    assert cruft(project, "diff") == ""


def test_cruft_bakes_the_same_project(history, present_fork, cruft, tmp_path):
    words = [f"file://{history}", "--checkout", "present", "--no-input", "--extra-context", json.dumps(AWKWARD)]
    cruft(tmp_path, "create", *words)
    project = tmp_path / AWKWARD["project_slug"]
    assert read_link(project)["context"]["cookiecutter"].items() >= AWKWARD.items()
    differences = ["diff", "--recursive", "--exclude=.git", "--exclude=.cruft.json", str(present_fork), str(project)]
    assert subprocess.run(differences, capture_output=True, text=True).stdout == ""


def test_cruft_rejects_answers_as_cookiecutter_does(history, cruft, tmp_path):
    answers = json.dumps({"package_name": "torch", "cluster": "nowhere"})
    said = cruft(tmp_path, "create", str(history), "--no-input", "--extra-context", answers, fails=True)
    assert "package_name must not be the name of a library" in said and "cluster must be one of berzelius, " in said
    assert names(tmp_path) == []


# -- An update brings the newer template --


def test_an_update_keeps_edits(fork, cruft, run):
    edit(fork, add_last_line)  # of src/hpc/, too
    (fork / DELETED_BY_THE_FORK).unlink()
    mine = [fork / PACKAGE / "models" / "mine.py", fork / "configs" / "experiment" / "mine.yaml"]
    for file in mine:
        file.write_text("# mine\n")
    before = commit(fork)
    (update,) = (command for command in commands(README["project"]) if command.startswith("cruft update"))
    done = run(f"{update} --skip-apply-ask", fork)
    assert done.returncode == 0, done.stdout

    for name in CHANGED:
        lines = (fork / name).read_text(encoding="utf-8").splitlines()
        assert (lines[0], lines[-1]) == ("# newer", "# mine"), name
    assert [file.read_text() for file in mine] == ["# mine\n"] * 2
    changes = git(fork, "diff", "--name-status", before).split("\n")
    expected = {*(f"M\t{name}" for name in CHANGED), "M\tsrc/hpc/__init__.py", "M\t.cruft.json"}
    assert {*changes} == expected | {f"A\t{ADDED}", f"D\t{REMOVED}"}, "nothing else changes"
    assert run("PYTHONPATH=src python -c 'import hpc; print(hpc.__version__)'", fork).stdout == "99.0.0\n"
    composed = run("python train.py --cfg job", fork)
    assert composed.returncode == 0, composed.stdout
    assert "up to date" in cruft(fork, "check")


def test_an_update_to_a_version_brings_this_one(fork, cruft, history):
    cruft(fork, "update", "--skip-apply-ask", "--checkout", NEWER)
    assert (fork / CHANGED[0]).read_text().startswith("# newer\n") and (fork / ADDED).exists()
    assert "99.0.0" not in (fork / "src/hpc/__init__.py").read_text()
    assert read_link(fork)["commit"] == git(history, "rev-parse", NEWER)


def test_lines_that_both_changed_are_a_conflict(fork, cruft):
    edit(fork, add_first_line)
    commit(fork)
    said = cruft(fork, "update", "--skip-apply-ask")
    assert git(fork, "diff", "--name-only", "--diff-filter=U").split("\n") == sorted(CHANGED)
    for name in CHANGED:
        assert f"Applied patch to '{name}' with conflicts." in said
        both = r"<<<<<<< ours\n# mine\n=======\n# newer\n>>>>>>> theirs\n"
        assert re.match(both, (fork / name).read_text(encoding="utf-8")), name
    assert (fork / ADDED).exists() and not (fork / REMOVED).exists()


def leave_git(fork: Path) -> None:
    shutil.rmtree(fork / ".git")


def commit_for_the_first_time(fork: Path) -> None:
    leave_git(fork)
    commit(fork)


def edit_what_the_template_removes_or_adds(fork: Path) -> None:
    add_last_line(fork / REMOVED, "mine")
    (fork / ADDED).write_text("# mine\n")
    commit(fork)


@pytest.mark.parametrize("prepare", [leave_git, commit_for_the_first_time, edit_what_the_template_removes_or_adds])
def test_where_git_cannot_merge_the_template_s_lines_lie_beside_the_file(prepare, fork, cruft):
    edit(fork, add_first_line)
    prepare(fork)
    mine = {name: (fork / name).read_bytes() for name in (*CHANGED, ADDED, REMOVED) if (fork / name).exists()}
    said = cruft(fork, "update", "--skip-apply-ask")
    kept = [*CHANGED, *((ADDED, REMOVED) if prepare is edit_what_the_template_removes_or_adds else ())]
    assert [name for name in kept if (fork / name).read_bytes() != mine[name]] == []
    assert [name for name in CHANGED if "+# newer" not in (fork / f"{name}.rej").read_text(encoding="utf-8")] == []
    assert [name for name in kept if f"error: {name}: " not in said and f"patch failed: {name}:" not in said] == []
    assert "99.0.0" in (fork / "src/hpc/__init__.py").read_text()
    left = cruft(fork, "diff")
    assert [name for name in (*CHANGED, *set(kept) & {ADDED}) if f"/{name}\n" not in left] == []


def test_an_update_waits_until_all_is_committed(fork, cruft):
    edit(fork, add_last_line)
    before = git(fork, "diff")
    said = cruft(fork, "update", "--skip-apply-ask", fails=True)
    assert "make sure your git working tree is clean" in said and git(fork, "diff") == before


def test_a_deleted_link_is_told_and_comes_back_from_git(fork, cruft):
    (fork / ".cruft.json").unlink()
    assert "Was unable to locate a `.cruft.json` state file" in cruft(fork, "update", "--skip-apply-ask", fails=True)
    git(fork, "checkout", "HEAD", "--", ".cruft.json")
    cruft(fork, "update", "--skip-apply-ask")
    assert (fork / CHANGED[0]).read_text().startswith("# newer\n")


# -- Versions --


def present_version() -> str:
    (package,) = REPO.glob("*cookiecutter.project_slug*/src/hpc/__init__.py")
    (version,) = re.findall(r'^__version__ = "(\d+\.\d+\.\d+)"$', package.read_text(), re.MULTILINE)
    return version


def test_the_changelog_s_newest_version_is_that_of_hpc():
    versions = re.findall(r"^## (\d+\.\d+\.\d+) - \d{4}-\d\d-\d\d$", (REPO / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == present_version()
    assert versions == sorted(versions, key=lambda text: [int(number) for number in text.split(".")], reverse=True)
