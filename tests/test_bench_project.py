"""Test that benchmarks, which lie in no project, find the library and the modules of the project that they make."""

import re
import sys
from pathlib import Path

import pytest
from conftest import REPO

sys.path.insert(0, str(REPO / "benchmarks"))

from bench_project import make_project

BENCHMARKS = REPO / "benchmarks"
IMPORT = re.compile(r"^ *(from (?:hpc|my_research)[\w.]* import .+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("fork"))


@pytest.mark.slow
def test_what_benchmarks_import_exists(project: Path, tmp_path: Path, run) -> None:
    imports = {line for file in BENCHMARKS.glob("*.py") for line in IMPORT.findall(file.read_text(encoding="utf-8"))}
    assert len(imports) > 20
    script = tmp_path / "bench.py"
    lines = ["from pathlib import Path", "import bench_project", f"bench_project.use_project(Path({str(project)!r}))"]
    script.write_text("\n".join([*lines, *sorted(imports)]), encoding="utf-8")
    done = run([sys.executable, str(script)], tmp_path, env={"PYTHONPATH": str(BENCHMARKS)})
    assert done.returncode == 0, done.stdout
