"""Test the files that a bake generates, and the answers that it rejects."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml
from conftest import AWKWARD, REPO
from cookiecutter.exceptions import CookiecutterException, FailedHookException, OutputDirExistsException

EXPECTED = REPO / "tests" / "generated_files.txt"


def files(project: Path) -> list[Path]:
    return sorted((path for path in project.rglob("*") if path.is_file() and path.suffix != ".pyc"), key=str)


def text_files(project: Path) -> list[Path]:
    return [path for path in files(project) if path.suffix != ".npz"]


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_generates_exactly_the_expected_files(project):
    """Check the generated files, so that none is added or lost by accident. generated_files.txt lists them."""
    assert [path.relative_to(project).as_posix() for path in files(project)] == EXPECTED.read_text().split()


def test_generates_no_empty_folder(project):
    assert [path for path in project.rglob("*") if path.is_dir() and not any(path.iterdir())] == []


def test_the_default_slug_is_the_one_in_the_makefile(project):
    assert f"PROJECT := {project.name}#" in (REPO / "Makefile").read_text()


@pytest.mark.parametrize("baked", ["project", "awkward_project"])
def test_leaves_no_template_mark(baked, request):
    project = request.getfixturevalue(baked)
    for path in text_files(project):
        verbatim = path.is_relative_to(project / "src")  # where {{ is a brace in an f-string
        marks = r"cookiecutter\." if verbatim else r"cookiecutter\.|\{\{|\{%|\{#"
        assert not re.search(marks, path.relative_to(project).as_posix() + path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize("baked", ["project", "awkward_project"])
def test_every_file_parses(baked, request):
    for path in text_files(request.getfixturevalue(baked)):
        parsed(path)


@pytest.mark.parametrize("key", ["project_name", "description", "author"])
def test_awkward_text_survives_in_every_file_it_is_in(key, bake, awkward_project):
    plain = bake(**{key: "Plaintoken"})
    places = [path.relative_to(plain) for path in text_files(plain) if "Plaintoken" in path.read_text(encoding="utf-8")]
    assert places, f"{key} is asked for and used nowhere"
    for place in places:
        place = Path(str(place).replace("my_research", AWKWARD["package_name"]).replace("plaintoken", "wild_2_thing"))
        texts = parsed(awkward_project / place)
        assert any(AWKWARD[key] in text for text in texts), f"{place} does not hold {AWKWARD[key]}"


def parsed(path: Path) -> list[str]:
    """Return the strings of a file, unquoted by the rules of its format."""
    text = path.read_text(encoding="utf-8")
    match path.suffix:
        case ".py":
            return [
                n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant) and isinstance(n.value, str)
            ]
        case ".toml":
            return [*strings(tomllib.loads(text))]
        case ".yaml":
            return [*strings(yaml.safe_load(text))]
        case ".json":
            return [*strings(json.loads(text))]
        case ".sh" | ".sbatch" | ".bash":
            subprocess.run(["bash", "-n", str(path)], check=True)
            return []  # scripts contain no typed text
        case _:
            return [text]


def strings(node: object):
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict | list):
        for value in [*node, *node.values()] if isinstance(node, dict) else node:
            yield from strings(value)


def test_pyproject_names_the_awkward_project(awkward_project):
    project = tomllib.loads((awkward_project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == AWKWARD["project_slug"]
    assert project["description"] == AWKWARD["description"]
    assert project["authors"] == [{"name": AWKWARD["author"]}]
    assert project["license"] == AWKWARD["license"]


def test_bakes_beside_spaces_and_umlauts(bake, tmp_path):
    project = bake(tmp_path / "Über uns, $(touch canary)")
    assert (project / "train.py").is_file()
    assert names(tmp_path).count("canary") == 0


def test_long_names_and_names_without_latin_letters_get_a_slug(bake):
    assert len(bake(project_name="long " * 100).name) <= 50
    assert bake(project_name="机器学习").name == "ji-qi-xue-xi"
    assert bake(project_name="😀").name == "my-research"


def test_prompts_are_readable():
    asked = json.loads((REPO / "cookiecutter.json").read_text(encoding="utf-8"))
    assert list(asked["__prompts__"]) == [key for key in asked if not key.startswith("_")]
    assert len(asked["__prompts__"]) == 8 and "It asks eight questions" in (REPO / "README.md").read_text()


REJECTED = [
    ({"project_name": " "}, "must not be empty"),
    ({"project_name": "2024 study"}, "project_slug=project-2024-study"),
    ({"project_name": "torch"}, "package_name=torch_project"),
    ({"project_slug": "With Spaces"}, "project_slug=with-spaces"),
    ({"project_slug": "../outside"}, "project_slug=outside"),
    ({"project_slug": "in/side"}, "project_slug=in-side"),
    ({"project_slug": "a-"}, "project_slug=a"),
    ({"project_slug": "$(touch canary)"}, "project_slug=touch-canary"),
    ({"package_name": "class"}, "be a keyword"),
    ({"package_name": "match"}, "be a keyword"),
    ({"package_name": "random"}, "standard library"),
    ({"package_name": "lightning"}, "name of a library"),
    ({"package_name": "sklearn"}, "name of a library"),
    ({"package_name": "pil"}, "name of a library"),
    ({"package_name": "tests"}, "file or folder of the project"),
    ({"package_name": "hpc"}, "the library that runs"),
    ({"package_name": "train"}, "file or folder of the project"),
    ({"package_name": "_private"}, "package_name=private"),
    ({"package_name": "überbau"}, "must be lower-case words"),
    ({"package_name": "a.b"}, "package_name=a_b"),
    ({"package_name": "Model"}, "package_name=model"),
    ({"package_name": "1st"}, "package_name=project_1st"),
    ({"description": "two\nlines"}, "type it as one line"),
    ({"author": "bell\a"}, "type it as one line"),
    ({"author": ""}, "must not be empty"),
    ({"description": "{{ '{{ 7 * 7 }}' }}"}, "contain {{"),
    ({"description": "{{ '{% raw %}' }}"}, "contain {%"),
    ({"project_name": "${oc.env:HOME}"}, "contain ${"),
    ({"license": "Apache2"}, "license=Apache-2.0"),
    ({"license": 'MIT"'}, "license=MIT"),
    ({"license": ""}, "license=LicenseRef-"),
    ({"cluster": "nowhere"}, "must be one of abci3, "),
    ({"cluster": "../train"}, "must be one of abci3, "),
    ({"account": "a b"}, "must contain only"),
    ({"account": "x; touch canary"}, "must contain only"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("answers", "message"), REJECTED, ids=[str(answers) for answers, _ in REJECTED])
def test_rejects_with_reason_and_fix_and_leaves_nothing(answers, message, bake, tmp_path, capfd):
    (tmp_path / "here").mkdir()
    with pytest.raises((CookiecutterException, FileNotFoundError)):
        bake(tmp_path / "here", **answers)
    said = capfd.readouterr().err
    assert any(f"  {key} must " in said for key in (next(iter(answers)), "project_slug", "package_name"))
    assert message in said and "Try: " in said
    assert names(tmp_path) == ["here"]


def test_rejects_every_name_that_would_hide_a_library(template):
    """Check that the hook rejects the project's libraries, and every importable name of the tests' environment."""
    hook = load_hook(template)
    (constraints,) = template.glob("*/constraints.txt")
    pinned, ours = pins(constraints), pins(template / "tests" / "requirements.txt")
    importable = {
        name
        for name, distributions in packages_distributions().items()
        if re.fullmatch(hook["PACKAGE"], name) and {module_name(text) for text in distributions} - (ours - pinned)
    }
    rejected = {*hook["LIBRARIES"].split(), *hook["PROJECT_NAMES"].split(), *hook["STANDARD_MODULES"]}
    assert (pinned | importable) - rejected == set(), "add these to LIBRARIES in hooks/pre_gen_project.py"


def pins(file: Path) -> set[str]:
    return {module_name(name) for name in re.findall(r"^([A-Za-z0-9._-]+)==", file.read_text(), re.MULTILINE)}


def module_name(distribution: str) -> str:
    return re.sub("[-.]", "_", distribution.lower())


def test_accepts_licences_that_setuptools_accepts(template):
    licenses = pytest.importorskip("packaging.licenses")
    for name in load_hook(template)["LICENSES"].split():
        assert licenses.canonicalize_license_expression(name) == name


def load_hook(template: Path) -> dict:
    source = (template / "hooks" / "pre_gen_project.py").read_text(encoding="utf-8")
    names: dict = {"__name__": "hook"}
    exec(source.replace("{{ cookiecutter | tojson }}", "{}"), names)
    return names


@pytest.mark.slow
def test_every_cluster_of_the_template_can_be_answered(template, bake):
    files = list(template.glob("*/configs/cluster/*.yaml"))
    assert {"local", "slurm", "leonardo"} < {path.stem for path in files}
    assert sorted(path.stem for path in files) == load_hook(template)["CLUSTERS"].split()
    for file in files:
        project = bake(cluster=file.stem)
        assert f"\n  - cluster: {file.stem}\n" in (project / "configs" / "train.yaml").read_text()


def test_of_the_shipped_clusters_nothing_is_rendered(template, awkward_project):
    """Check that the shipped cluster files contain no answers, as an update renews these files."""
    (shipped,) = template.glob("*/configs/cluster")
    for file in shipped.iterdir():
        assert (awkward_project / "configs" / "cluster" / file.name).read_bytes() == file.read_bytes()
    assert AWKWARD["account"] in (awkward_project / "configs" / "account.yaml").read_text()


def test_an_existing_folder_is_rejected_and_unchanged(bake, tmp_path):
    (tmp_path / "my-research").mkdir()
    (tmp_path / "my-research" / "mine.txt").write_text("mine")
    with pytest.raises(OutputDirExistsException):
        bake(tmp_path)
    assert names(tmp_path) == ["my-research", "my-research/mine.txt"]


def test_a_rejection_spares_the_folder_it_was_told_to_overwrite(template, settings, tmp_path, run):
    (tmp_path / "my-research").mkdir()
    (tmp_path / "my-research" / "mine.txt").write_text("mine")
    command = [sys.executable, "-m", "cookiecutter", str(template), "--no-input", "--overwrite-if-exists", "license=x"]
    assert run([*command, "--config-file", str(settings)], tmp_path).returncode == 1
    assert names(tmp_path) == ["my-research", "my-research/mine.txt"]


def test_typed_text_is_not_rendered(template, settings, tmp_path):
    """Check the prompts only: cookiecutter itself renders key=value arguments as templates."""
    answers = ["{{ 7 * 7 }}", "ok", "ok_1", "", "", "", "", ""]
    command = [sys.executable, "-m", "cookiecutter", str(template), "--config-file", str(settings)]
    done = subprocess.run(command, cwd=tmp_path, input="\n".join(answers) + "\n", capture_output=True, text=True)
    assert done.returncode == 1
    assert 'project_name must not contain {{, which templates and configs execute; got "{{ 7 * 7 }}"' in done.stderr
    assert names(tmp_path) == []


def test_names_the_next_three_commands(template, settings, tmp_path, run):
    """Check that the printed commands work from another folder and with an awkward path."""
    command = [sys.executable, "-m", "cookiecutter", ".", "--no-input", "--config-file", str(settings)]
    output = tmp_path / "it's $(touch canary)"
    said = run([*command, "--output-dir", str(output)], template, env={"PWD": str(template)}).stdout
    commands = [line.strip() for line in said.split("Next:")[1].strip().splitlines()]
    assert commands[1:] == ["source env.sh", "python train.py"]
    assert run(f"{commands[0]} && pwd", template).stdout.strip() == str(output / "my-research")
    assert "canary" not in names(tmp_path)


@pytest.mark.slow
def test_bakes_from_a_repository_address(template, settings, tmp_path, run):
    """Check baking from a Git repository, as `cookiecutter gh:org/hpc-ml-template` does, but without GitHub."""
    address = f"git+file://{template}"
    command = [sys.executable, "-m", "cookiecutter", address, "--no-input", "--config-file", str(settings)]
    (tmp_path / "out").mkdir()
    done = run([*command, "package_name=cloned"], tmp_path / "out")
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "out" / "my-research" / "src" / "cloned" / "module.py").is_file()


def test_nothing_typed_was_executed(awkward_project):
    for folder in (awkward_project.parent, Path.cwd(), REPO):
        assert "canary" not in os.listdir(folder)
    assert "canary" not in {path.name for path in awkward_project.rglob("*")}


def test_a_failed_hook_fails_the_command(bake, tmp_path):
    with pytest.raises(FailedHookException):
        bake(tmp_path, license="x")
