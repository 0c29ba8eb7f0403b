"""Check that slurm/ holds the scripts that submit.py renders, whichever user renders them."""

from pathlib import Path

import pytest

from hpc.config import personal_clusters, project
from hpc.config.errors import ConfigError
from hpc.submit import preset_scripts

RENEW = "the config has changed since slurm/ was written; renew it: rm slurm/*.sbatch; python submit.py --render slurm"


def rendered(folder: Path, *overrides: str) -> dict[str, str]:
    preset_scripts.write_preset_scripts(folder, overrides)
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


@pytest.mark.slow
def test_the_scripts_follow_from_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clusters.yaml").write_text("slurm: {account: mine, partition: mine}")
    monkeypatch.setattr(personal_clusters, "PERSONAL_CLUSTERS", tmp_path / "clusters.yaml")
    kept = {path.name: path.read_text(encoding="utf-8") for path in (project.PROJECT / "slurm").glob("*.sbatch")}
    assert rendered(tmp_path / "slurm") == kept, RENEW


@pytest.mark.slow
def test_an_account_is_named_if_it_is_typed(tmp_path: Path) -> None:
    scripts = rendered(tmp_path, "cluster=slurm", "cluster.account=abc")
    assert len(scripts) > 1 and all("#SBATCH --account=abc\n" in text for text in scripts.values())


@pytest.mark.parametrize(
    ("words", "dry_run", "told"),
    [
        (["trainer=fsdp"], False, "for each preset"),
        (["run_dir=mine"], False, "each job makes its own"),
        (["cluster=slurm"], True, "--dry-run, which writes nothing"),
    ],
)
def test_what_such_scripts_cannot_say_is_rejected(words: list[str], dry_run: bool, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        preset_scripts.write_preset_scripts(tmp_path / "slurm", words, dry_run=dry_run)
    assert not (tmp_path / "slurm").exists()
