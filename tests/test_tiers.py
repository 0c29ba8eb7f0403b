"""Check that the tests which `make long` has by name are there: a stale name would go unnoticed."""

import subprocess
import sys
from collections import Counter
from fnmatch import fnmatchcase

import pytest
from conftest import REPO
from tiers import LONG


@pytest.fixture(scope="module")
def collected():
    """Return the names of the cases that `make long` collects, {test: [case, ...]}; of a test without cases, [""]."""
    command = [sys.executable, "-m", "pytest", "-m", "long", "--collect-only", "-q", "-p", "no:cacheprovider"]
    cases = {}
    for folder in (["tests/hpc"], ["--ignore", "tests/hpc"]):
        lines = subprocess.run([*command, *folder], cwd=REPO, capture_output=True, text=True).stdout.splitlines()
        for line in (line for line in lines if "::" in line):
            test, _, case = line.removeprefix("tests/").removesuffix("]").partition("[")
            cases.setdefault(test, []).append(case)
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("test", LONG)
def test_what_is_long_is_there(test, collected):
    for pattern in LONG[test] or ["*"]:
        assert [case for case in collected[test] if fnmatchcase(case, pattern)], pattern


def test_no_two_files_of_tests_have_one_name() -> None:
    """Check what pytest needs, which imports a file of tests by its name alone: it would collect only one of them."""
    names = Counter(path.name for path in (REPO / "tests" / "hpc").rglob("test_*.py"))
    assert not {name for name, count in names.items() if count > 1}
