"""Bake and update forks with the real cookiecutter and cruft, on a git history of the template that is made here."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import quote

import pytest
from conftest import AWKWARD, REPO, commit
from test_bake import names
from test_readme import README, commands

PACKAGE = f"src/{AWKWARD['package_name']}"
CHANGED = ("train.py", f"{PACKAGE}/module.py", "configs/train.yaml", "constraints.txt")
ADDED, REMOVED, DELETED_BY_THE_FORK = f"{PACKAGE}/added.py", "slurm/gpu.sbatch", "container.def"
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


def read_pin(project: Path) -> str:
    (pin,) = re.findall(r'^    "hpc-ml\[deepspeed,search\] @ (.+)",$', (project / "pyproject.toml").read_text(), re.M)
    return pin


def read_link(project: Path) -> dict:
    return json.loads((project / ".cruft.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module", autouse=True)
def _by_its_address() -> Iterator[None]:
    """Pin the library as for a user, not the folder of this repository."""
    folder = os.environ.pop("HPC_ML_FOLDER")
    yield
    os.environ["HPC_ML_FOLDER"] = folder


@pytest.fixture(scope="module")
def history(template, tmp_path_factory) -> Path:
    """Make a repository of the template with two newer versions, and with the tag `present` on this one."""
    repository = tmp_path_factory.mktemp("history") / "hpc-ml-template"
    git(template, "clone", "--quiet", str(template), str(repository))
    git(repository, "tag", "present")
    (rendered,) = repository.glob("*cookiecutter.project_slug*")
    for name in (*CHANGED, DELETED_BY_THE_FORK):
        add_first_line(rendered / name.replace(PACKAGE, "src/{{cookiecutter.package_name}}"), "newer")
    (rendered / ADDED.replace(PACKAGE, "src/{{cookiecutter.package_name}}")).write_text('"""Added."""\n')
    (rendered / REMOVED).unlink()
    commit(repository, "newer")
    git(repository, "tag", NEWER)
    version = repository / "src/hpc/version.py"  # only the library changes
    version.write_text(re.sub('RELEASE = ".+"', 'RELEASE = "99.0.0"', version.read_text()))
    commit(repository, "newest")
    git(repository, "tag", NEWEST)
    return repository


@contextmanager
def served(repository: Path, folder: Path) -> Iterator[str]:
    """Serve a repository on the loopback interface, and return its address."""
    git(repository, "clone", "--quiet", "--bare", str(repository), str(folder / "hpc-ml-template.git"))
    git(folder / "hpc-ml-template.git", "update-server-info")
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    handler.log_message = lambda *_: None  # type: ignore[attr-defined]
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/hpc-ml-template.git"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def address(history, tmp_path_factory) -> Iterator[str]:
    with served(history, tmp_path_factory.mktemp("served")) as address:
        yield address


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
def present_fork(address, bake_from, run, tmp_path_factory) -> Path:
    """Bake the present version with awkward answers, and commit the fork to git as the README says."""
    folder = tmp_path_factory.mktemp("present") / "Ein Ordner für 'alles' "
    folder.mkdir()
    said, fork = bake_from(address, folder, "--checkout", "present")
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


def test_a_bake_from_an_address_notes_the_commit_and_the_answers(present_fork, address, history, cruft):
    assert read_link(present_fork) == {
        "template": address,
        "commit": git(history, "rev-parse", "present"),
        "checkout": "present",
        "context": {"cookiecutter": {"cluster": "local", **AWKWARD}},
        "directory": None,
    }
    assert read_pin(present_fork) == f"git+{address}@{git(history, 'rev-parse', 'present')}"
    assert cruft(present_fork, "diff") == "", "the noted answers make the same project, and the hooks print nothing"
    assert "up to date" in cruft(present_fork, "check", "--checkout", "present")
    assert "out of date" in cruft(present_fork, "check", fails=True)


def test_a_bake_from_a_folder_notes_its_absolute_path(history, bake_from):
    said, project = bake_from("hpc-ml-template", history.parent)
    link = read_link(project)
    assert read_pin(project) == history.as_uri()
    assert f"This project uses the library hpc-ml from the folder {history}, as it is there" in said
    assert f"cruft link ADDRESS --checkout {link['commit']}" in said
    assert link["template"] == str(history) and link["commit"] == git(history, "rev-parse", "HEAD")


def test_user_and_password_in_the_template_s_address_are_not_noted(history, settings, bake_from, tmp_path):
    stored = settings.parent / "clones" / "stored"
    git(history, "clone", "--quiet", str(history), str(stored))
    git(stored, "remote", "set-url", "origin", "https://me:secret@example.org/template")
    _, project = bake_from("stored", tmp_path)
    assert read_link(project)["template"] == "https://example.org/template"
    assert read_pin(project) == f"git+https://example.org/template@{git(stored, 'rev-parse', 'HEAD')}"


@pytest.mark.parametrize(
    ("origin", "pinned"),
    [
        ("https://me:secret@example.org/template", "git+https://example.org/template"),
        ("ssh://git@example.org:2222/template.git", "git+ssh://git@example.org:2222/template.git"),
        ("git@example.org:us/template.git", "git+ssh://git@example.org/us/template.git"),
    ],
)
def test_a_clone_that_is_as_its_origin_has_it_counts_as_that_address(origin, pinned, history, bake_from, tmp_path):
    clone = tmp_path / "clone"
    git(history, "clone", "--quiet", str(history), str(clone))
    git(clone, "remote", "set-url", "origin", origin)
    head = git(clone, "rev-parse", "HEAD")
    (tmp_path / "1").mkdir()
    said, project = bake_from(str(clone), tmp_path / "1")
    link = read_link(project)
    assert (link["template"], link["commit"]) == (origin.replace("me:secret@", ""), head)
    assert read_pin(project) == f"{pinned}@{head}" and "folder" not in said
    (clone / "README.md").write_text("mine")
    (tmp_path / "2").mkdir()
    assert read_pin(bake_from(str(clone), tmp_path / "2")[1]) == clone.as_uri(), "not as its origin has it"
    commit(clone)
    (tmp_path / "3").mkdir()
    assert read_pin(bake_from(str(clone), tmp_path / "3")[1]) == clone.as_uri(), "never pushed"


@pytest.mark.parametrize(
    ("template", "pinned"),
    [
        ("https://example.org/t.git", "git+https://example.org/t.git@1"),
        ("git+https://me:x@example.org/t", "git+https://example.org/t@1"),
        ("ssh://git:x@example.org/t", "git+ssh://git@example.org/t@1"),
        ("git@example.org:us/t", "git+ssh://git@example.org/us/t@1"),
        ("ana@example.org:us/t.git", "git+ssh://ana@example.org/~/us/t.git@1"),
        ("ana@example.org:/srv/t.git", "git+ssh://ana@example.org/srv/t.git@1"),
        ("an-alias:us/t", "git+ssh://an-alias/us/t@1"),
        ("file:///srv/t.git", "git+file://localhost/srv/t.git@1"),
        ("git+file:///srv/t.git", "git+file://localhost/srv/t.git@1"),
        ("BARE", "git+file://localhostBARE@1"),
        ("FOLDER", "file://FOLDER"),
        ("FOLDER/../template", "file://FOLDER"),
    ],
)
def test_the_pin_follows_from_template_and_commit(template, pinned, tmp_path):
    source = (REPO / "hooks" / "post_gen_project.py").read_text(encoding="utf-8")
    hook: dict = {"__name__": "hook"}
    exec(source.replace("{{ cookiecutter | tojson }}", "{}"), hook)
    folder = tmp_path / "it's a" / "template"
    folder.mkdir(parents=True)
    (folder / "cookiecutter.json").touch()
    places = {"BARE": tmp_path / "bare one.git", "FOLDER": folder}
    for name, place in places.items():
        template, pinned = template.replace(name, str(place)), pinned.replace(name, quote(str(place)))
    assert hook["pin"](template, "1") == pinned


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["x.zip"], "unzip it, and give the folder"),
        (["FOLDER", "--checkout", "present"], "check that version out in the folder, without --checkout"),
    ],
)
def test_a_template_that_no_project_could_install_is_rejected(words, sentence, history, settings, run, tmp_path):
    git(history, "archive", "--prefix=t/", "--output", str(tmp_path / "x.zip"), "HEAD")
    words = [str(history) if word == "FOLDER" else word for word in words]
    (tmp_path / "out").mkdir()
    options = ["--no-input", "--config-file", str(settings), "--output-dir", str(tmp_path / "out")]
    done = run([sys.executable, "-m", "cookiecutter", *words, *options], tmp_path, env={"PWD": str(tmp_path)})
    assert done.returncode != 0 and sentence in done.stdout and names(tmp_path / "out") == [], done.stdout


def test_uncommitted_changes_of_the_template_are_told(history, bake_from, tmp_path):
    shutil.copytree(history, tmp_path / "template")
    (tmp_path / "template" / "README.md").write_text("changed")
    said, project = bake_from("template", tmp_path)
    assert "The template has uncommitted changes. `cruft update` will treat them as your own changes." in said
    assert read_link(project)["commit"] == git(history, "rev-parse", "HEAD")


def test_a_folder_that_is_not_where_the_hook_looks_is_rejected(history, settings, run, tmp_path):
    """Bake from a relative path where PWD is not the working directory, as in a program that has changed it."""
    (tmp_path / "elsewhere" / "hpc-ml-template").mkdir(parents=True)
    command = [sys.executable, "-m", "cookiecutter", history.name, "--no-input", "--config-file", str(settings)]
    done = run([*command, "-o", str(tmp_path)], history.parent, env={"PWD": str(tmp_path / "elsewhere")})
    assert done.returncode != 0 and "the absolute path of the folder" in done.stdout
    assert not (tmp_path / "my-research").exists()


def test_a_bake_without_git_says_how_to_link_it_later(history, address, settings, bake_from, cruft, tmp_path):
    """Bake from a copy of the files, as a download has them, inside the git repository of another template."""
    (tmp_path / "cookiecutter.json").write_text("{}")
    git(history, "clone", "--quiet", "--branch", "present", str(history), str(tmp_path / "template"))
    shutil.rmtree(tmp_path / "template" / ".git")
    commit(tmp_path)
    said, project = bake_from("template", tmp_path)
    assert "git gives no commit or no address of the template template." in said
    assert f"uses the library hpc-ml from the folder {tmp_path / 'template'}, as it is there" in said
    assert "cruft link ADDRESS --checkout COMMIT\n" in said and "@ git+ADDRESS@COMMIT" in said
    assert not (project / ".cruft.json").exists()

    assert read_pin(project) == (tmp_path / "template").as_uri()
    words = [address, "--checkout", "present"]
    typed = "\n".join({**AWKWARD, "license": f"{AWKWARD['license']}\nlocal"}.values()) + "\n\n"
    linked = subprocess.run(
        [sys.executable, "-m", "cruft", "link", *words], cwd=project, input=typed, capture_output=True, text=True,
        env=os.environ | {"COOKIECUTTER_CONFIG": str(settings)},
    )  # fmt: skip
    assert linked.returncode == 0, linked.stdout + linked.stderr
    file = project / "pyproject.toml"  # the second line that the hook prints for a folder
    pin = f"git+{address}@{git(history, 'rev-parse', 'present')}"
    file.write_text(file.read_text().replace(read_pin(project), pin))
    assert cruft(project, "diff") == ""


def test_cruft_bakes_the_same_project(address, present_fork, cruft, tmp_path):
    words = [address, "--checkout", "present", "--no-input", "--extra-context", json.dumps(AWKWARD)]
    cruft(tmp_path, "create", *words)
    project = tmp_path / AWKWARD["project_slug"]
    assert read_link(project)["context"]["cookiecutter"].items() >= AWKWARD.items()
    differences = ["diff", "--recursive", "--exclude=.git", "--exclude=.cruft.json", str(present_fork), str(project)]
    assert subprocess.run(differences, capture_output=True, text=True).stdout == ""


def test_cruft_rejects_answers_as_cookiecutter_does(history, cruft, tmp_path):
    answers = json.dumps({"package_name": "torch", "cluster": "nowhere"})
    said = cruft(tmp_path, "create", str(history), "--no-input", "--extra-context", answers, fails=True)
    assert "package_name must not be the name of a library" in said and "cluster must be one of abci3, " in said
    assert names(tmp_path) == []


# -- An update brings the newer template --


def test_an_update_keeps_edits(fork, cruft, run):
    edit(fork, add_last_line)
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
    expected = {*(f"M\t{name}" for name in CHANGED), "M\tpyproject.toml", "M\t.cruft.json"}
    assert {*changes} == expected | {f"A\t{ADDED}", f"D\t{REMOVED}"}, "nothing else changes"
    assert read_pin(fork).endswith(f"@{read_link(fork)['commit']}")
    rejected = run("python train.py --cfg job", fork)
    assert rejected.returncode == 2 and "and pyproject.toml pins git+http" in rejected.stdout, rejected.stdout
    assert "up to date" in cruft(fork, "check")


def test_an_update_to_a_version_brings_this_one(fork, cruft, history):
    cruft(fork, "update", "--skip-apply-ask", "--checkout", NEWER)
    assert (fork / CHANGED[0]).read_text().startswith("# newer\n") and (fork / ADDED).exists()
    newer, newest = (git(history, "rev-parse", name) for name in (NEWER, NEWEST))
    assert read_link(fork)["commit"] == newer and read_pin(fork).endswith(f"@{newer}")
    before = commit(fork)
    cruft(fork, "update", "--skip-apply-ask")
    lines = [line for line in git(fork, "diff", "--unified=0", before).splitlines() if re.match(r"[+-](?![+-])", line)]
    changes = [line for line in lines if re.match(r'. +("hpc-ml|"_?commit"|"checkout")', line)]
    assert len(lines) == len(changes) and read_pin(fork).endswith(f"@{newest}"), "an update of the library is its pin"


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
    assert read_pin(fork).endswith(f"@{read_link(fork)['commit']}")
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


def test_the_real_pip_installs_the_pinned_commit_and_replaces_it_by_another(present_fork, address, history, tmp_path):
    """Check commits of one release, which pip would keep if they had one version."""
    venv = tmp_path / "an environment"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    commits = [git(history, "rev-parse", name) for name in ("present", NEWER, NEWEST)]
    assert len(set(commits)) == 3
    install = """
import sys
from pathlib import Path
import env
venv, pin = Path(sys.argv[1]), sys.argv[2]
packages = next(venv.glob("lib/python3*/site-packages"))
assert not env.is_installed(pin, packages)
env.install_library(venv / "bin" / "python", pin, None)
assert env.is_installed(pin, packages)
"""
    versions = []
    for pinned in commits:
        command = [sys.executable, "-c", install, str(venv), f"git+{address}@{pinned}"]
        done = subprocess.run(command, cwd=present_fork, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        ask = "from importlib.metadata import version; import hpc; print(version('hpc-ml'))"
        told = subprocess.run([venv / "bin" / "python", "-c", ask], cwd=tmp_path, capture_output=True, text=True)
        versions.append(told.stdout.strip())
    releases = [present_version(), present_version(), "99.0.0"]
    assert versions == [f"{release}+g{pinned}" for release, pinned in zip(releases, commits, strict=True)]


# -- From a project of the last version that had the library in its src/ --


@pytest.fixture(scope="module")
def moved(last_with_a_copy, template, tmp_path_factory) -> Iterator[str]:
    """Serve a repository whose commit `old` has hpc in the project, and whose newest commit is the present template."""
    repository = tmp_path_factory.mktemp("moved") / "template"
    git(REPO, "clone", "--quiet", "--no-local", str(REPO), str(repository))
    git(repository, "checkout", "--quiet", "-B", "main", last_with_a_copy)
    git(repository, "tag", "old")
    git(repository, "rm", "--quiet", "-r", ".")
    shutil.copytree(template, repository, dirs_exist_ok=True, symlinks=True, ignore=shutil.ignore_patterns(".git"))
    commit(repository, "hpc becomes a library")
    with served(repository, tmp_path_factory.mktemp("served")) as address:
        yield address


@pytest.fixture
def old_fork(moved, bake_from, tmp_path) -> Path:
    _, fork = bake_from(moved, tmp_path, "--checkout", "old")
    assert (fork / "src" / "hpc" / "jobs").is_dir() and not (fork / "env.py").exists()
    commit(fork)
    return fork


def test_an_update_takes_hpc_out_of_the_project(old_fork, cruft):
    (old_fork / "src" / "hpc" / "run" / "__pycache__").mkdir()
    (old_fork / "src" / "hpc" / "run" / "__pycache__" / "stacks.cpython-311.pyc").touch()
    add_last_line(old_fork / PACKAGE / "module.py", "mine")
    commit(old_fork)
    said = cruft(old_fork, "update", "--skip-apply-ask")
    assert "error" not in said and not git(old_fork, "diff", "--name-only", "--diff-filter=U"), said
    left = [path for path in (old_fork / "src" / "hpc").rglob("*") if path.is_file()]
    assert [path.suffix for path in left] == [".pyc"]
    assert read_pin(old_fork).endswith(f"@{read_link(old_fork)['commit']}") and (old_fork / "env.py").exists()
    assert (old_fork / PACKAGE / "module.py").read_text().endswith("# mine\n")


def test_a_cluster_of_the_fork_s_own_stays_where_an_update_ships_that_name(old_fork, cruft):
    """Check all of them: if git took the file for the renamed one of src/hpc, it would replace the fork's silently."""
    folder = old_fork / "configs" / "cluster"
    names = [
        path.stem for path in (old_fork / "src" / "hpc" / "jobs" / "cluster").glob("*.yaml") if path.stem != "base"
    ]
    for name in names:
        (folder / f"{name}.yaml").write_text(f"defaults: [base]\nname: {name}\npartition: ours\n")
    commit(old_fork)
    cruft(old_fork, "update", "--skip-apply-ask")
    conflicts = git(old_fork, "diff", "--name-only", "--diff-filter=U").split("\n")
    assert len(names) > 20 and set(conflicts) == {f"configs/cluster/{name}.yaml" for name in names}
    assert [name for name in names if "partition: ours\n" not in (folder / f"{name}.yaml").read_text()] == []
    assert read_pin(old_fork).endswith(f"@{read_link(old_fork)['commit']}") and (old_fork / "env.py").exists()


def test_an_update_keeps_an_edited_file_of_hpc_and_the_programs_tell_so(old_fork, cruft, run):
    add_last_line(old_fork / "src" / "hpc" / "run" / "stacks.py", "mine")
    commit(old_fork)
    cruft(old_fork, "update", "--skip-apply-ask")
    left = [path for path in (old_fork / "src" / "hpc").rglob("*.py")]
    assert left == [old_fork / "src" / "hpc" / "run" / "stacks.py"] and "# mine" in left[0].read_text()
    done = run("python train.py --help", old_fork)
    assert done.returncode == 2 and "is not a whole copy of the library" in done.stdout, done.stdout


# -- Versions --


def present_version() -> str:
    text = (REPO / "src" / "hpc" / "version.py").read_text()
    (version,) = re.findall(r'^RELEASE = "(\d+\.\d+\.\d+)"$', text, re.MULTILINE)
    return version


def test_the_changelog_s_newest_version_is_that_of_hpc():
    versions = re.findall(r"^## (\d+\.\d+\.\d+) - \d{4}-\d\d-\d\d$", (REPO / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == present_version()
    assert versions == sorted(versions, key=lambda text: [int(number) for number in text.split(".")], reverse=True)
