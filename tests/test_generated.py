"""Run the checks and tests of a baked project. test_readme.py runs pyright, as its README says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import NOTES, REPO, environment


@pytest.mark.parametrize("arguments", [["check"], ["format", "--check", "--diff"]], ids=["lint", "format"])
def test_ruff_is_clean(arguments, project, run):
    done = run([sys.executable, "-m", "ruff", *arguments, "--no-cache", "."], project)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_types_of_the_library_are_right(run):
    done = run([sys.executable, "-m", "pyright", "--pythonpath", sys.executable], REPO)
    assert done.returncode == 0, done.stdout


@pytest.mark.soak
def test_its_own_quick_tests_pass(awkward_project, capfd):
    """Run the tests that are not slow in a project as it is baked. test_fork.py runs all tests, with files added."""
    with capfd.disabled():
        run_tests(awkward_project, "-m", "not slow")


def run_tests(project: Path, *arguments: str) -> list[str]:
    """Run a project's own tests with visible output, report skipped tests at the end, and return the printed lines."""
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
