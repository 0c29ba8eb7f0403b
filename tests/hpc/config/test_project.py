"""Check which project a program, a child process or a notebook belongs to."""

import subprocess
import sys
from pathlib import Path

import pytest
from fork import REPO

from hpc.config import project

FIND = "from hpc.config import project; print(project.PROJECT)"


@pytest.fixture
def projects(tmp_path: Path) -> list[Path]:
    """Return two projects, of which the second lies in the first."""
    folders = [tmp_path / "outer", tmp_path / "outer" / "inner"]
    for folder in folders:
        (folder / "configs").mkdir(parents=True)
        (folder / "configs" / "train.yaml").touch()
        (folder / "tools").mkdir()
        (folder / "tools" / "check.py").write_text(FIND)
    return folders


def found(words: list[str], folder: Path, named: Path | None = None) -> str:
    """Return the last line that Python prints."""
    environ = {"PYTHONPATH": str(REPO / "src")} | ({project.VARIABLE: str(named)} if named else {})
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environ, capture_output=True, text=True, timeout=60)
    return (done.stdout or done.stderr).strip().splitlines()[-1]


def test_a_program_belongs_to_the_nearest_project_above_it(projects: list[Path], tmp_path: Path) -> None:
    outer, inner = projects
    for folder in projects:
        assert found([str(folder / "tools" / "check.py")], outer, named=tmp_path) == str(folder)
    (tmp_path / "link.py").symlink_to(inner / "tools" / "check.py")
    assert found([str(tmp_path / "link.py")], outer) == str(inner)


def test_a_child_process_is_told_and_a_notebook_is_where_it_is(projects: list[Path]) -> None:
    outer, inner = projects
    assert found(["-c", FIND], inner / "tools", named=outer) == str(outer)
    assert found(["-c", FIND], inner / "tools") == str(inner)


def test_a_program_of_an_environment_belongs_to_no_project(projects: list[Path]) -> None:
    """Check pytest of another project's environment, which lies in that project."""
    outer, inner = projects
    python = inner / ".venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", python.parents[1]], check=True)
    (python.parent / "pytest").write_text(FIND)
    command = [python, python.parent / "pytest"]
    environ = {"PYTHONPATH": str(REPO / "src")}
    done = subprocess.run(command, cwd=outer, env=environ, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{outer}\n", done.stderr


def test_without_a_project_it_is_said_where_one_was_looked_for(tmp_path: Path) -> None:
    assert "call the train.py of a project, or go into its folder first" in found(["-c", FIND], tmp_path)
    with pytest.raises(ImportError, match=rf"no folder above {tmp_path} has configs/train\.yaml"):
        project.find_project("-c", working_folder=tmp_path, named=None)


def test_packages_and_single_files_in_src_are_the_researchers(projects: list[Path]) -> None:
    sources = projects[0] / "src"
    for name in ("alpha", "torch.old"):  # the latter is a backup: nobody imports it
        (sources / name).mkdir(parents=True)
        (sources / name / "__init__.py").touch()
    (sources / "mine.py").touch()
    code = "from hpc.config import project; print(project.researcher_packages(), project.is_project_code('mine.Net'))"
    assert found(["-c", code], projects[0]) == f"{('alpha', 'mine')} True"
