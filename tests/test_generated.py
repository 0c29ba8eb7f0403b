"""A baked project passes its own checks and tests: the product, not the template."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import NOTES, REPO, environment

SOURCES = REPO / "{{cookiecutter.project_slug}}" / "src" / "hpc"


@pytest.mark.parametrize("arguments", [["check"], ["format", "--check", "--diff"]], ids=["lint", "format"])
def test_ruff_is_clean(arguments, project, run):
    done = run([sys.executable, "-m", "ruff", *arguments, "--no-cache", "."], project)
    assert done.returncode == 0, done.stdout


def test_types_are_clean(project, run):
    done = run([sys.executable, "-m", "pyright", "--pythonpath", sys.executable], project)
    assert done.returncode == 0, done.stdout


def test_hpc_is_the_same_in_every_fork(project, awkward_project):
    """Byte for byte, so that an update replaces it, and it is tested where it lies in the template."""
    trees = [project / "src/hpc", awkward_project / "src/hpc", SOURCES]
    contents = [
        {
            path.relative_to(tree): path.read_bytes()
            for path in tree.rglob("*")
            if path.is_file() and path.suffix != ".pyc"
        }
        for tree in trees
    ]
    assert contents[0] == contents[1] == contents[2]


def test_its_own_tests_pass(awkward_project, pytestconfig, capfd):
    """All of them, or those that were asked for by -m."""
    chosen = pytestconfig.option.markexpr
    with capfd.disabled():
        run_tests(awkward_project, *(["-m", chosen] if chosen else []))
    assert not [path for path in awkward_project.parent.rglob("*") if path.name == "canary"]


def run_tests(project: Path, *arguments: str) -> list[str]:
    """Run a project's own tests in the open, and keep what was left out for the last lines; the lines printed."""
    print(f"\n{project.name}: python -m pytest {' '.join(arguments)}", flush=True)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile", *arguments]
    output = []
    with subprocess.Popen(command, cwd=project, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or []:
            print("  " + line, end="", flush=True)
            output.append(line.rstrip())
    said = f"{project.name}: " + re.sub(r"^=+ | =+$", "", output[-1] if output else "no output")
    NOTES.extend([said, *(f"  {line}" for line in output if line.startswith(("FAILED", "ERROR", "SKIPPED", "XFAIL")))])
    assert process.returncode == 0, said
    return output
