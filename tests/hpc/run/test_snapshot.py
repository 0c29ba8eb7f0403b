"""Check the record of the software that made a run."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

from hpc.config import library
from hpc.run import snapshot


def test_made_by_has_the_versions_of_this_package_and_of_all_others(tmp_path: Path) -> None:
    snapshot.write_provenance(tmp_path)
    facts = json.loads((tmp_path / "made_by.json").read_text())
    assert facts["hpc"] == library.library_version() and facts["python"] == sys.version
    assert f"torch=={version('torch')}" in facts["packages"]
