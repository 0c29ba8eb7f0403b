"""Check that clusters come from the project's own configs/cluster/ and from the folder shipped with hpc."""

import shutil
from pathlib import Path

import pytest
from fork import ANSWERS

from hpc.config import command_parser, compose, project, typed_words
from hpc.config.errors import ConfigError

SHIPPED = {file.stem for file in project.shipped_clusters(project.CONFIGS).glob("*.yaml")} - {"base"}


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    """Return a project's configs/ with `leonardo` and a cluster that hpc does not ship."""
    shutil.copytree(project.CONFIGS, tmp_path / "configs")
    folder = tmp_path / "configs" / "cluster"
    (folder / "leonardo.yaml").write_text("defaults: [base]\nname: leonardo\npartition: ours\n")
    (folder / "mine.yaml").write_text("defaults: [base]\nname: mine\nscheduler: slurm\n")
    return tmp_path / "configs"


def cluster(configs: Path, *words: str):
    return compose.compose_overrides(list(words), configs=configs).cluster


def test_a_file_of_the_project_takes_the_place_of_the_shipped_one(configs: Path) -> None:
    ours, shipped = (cluster(folder, "cluster=leonardo") for folder in (configs, project.CONFIGS))
    assert (ours.partition, ours.gpus_per_node) == ("ours", None)
    assert (shipped.partition, shipped.gpus_per_node) == ("boost_usr_prod", 4)


def test_a_file_of_the_project_stands_beside_the_shipped_ones(configs: Path) -> None:
    mine, slurm = cluster(configs, "cluster=mine"), cluster(configs, "cluster=slurm")
    assert mine.keys() == slurm.keys() == cluster(configs, "cluster=local").keys()
    assert (mine.name, mine.scheduler, slurm.request) == ("mine", "slurm", "--gpus-per-node={gpus}")
    (configs / "cluster" / "debug.yaml").write_text("defaults: [slurm]\nname: debug\npartition: test\n")
    debug = cluster(configs, "cluster=debug")
    assert (debug.partition, debug.request) == ("test", "--gpus-per-node={gpus}")


def test_choices_are_those_of_both_folders(configs: Path) -> None:
    assert compose.config_groups(configs)["cluster"] == sorted({*SHIPPED, "local", "mine"})
    assert compose.config_groups()["cluster"] == sorted({*SHIPPED, "local"}) and len(SHIPPED) > 20
    (configs / "cluster" / "leonardo.yaml").unlink()
    assert compose.config_groups(configs)["cluster"] == sorted({*SHIPPED, "local", "mine"})
    shutil.rmtree(configs / "cluster")
    assert compose.config_groups(configs)["cluster"] == sorted(SHIPPED)
    assert cluster(configs, "cluster=slurm").name == "slurm"


def test_help_lists_both_in_one_line(configs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "CONFIGS", configs)
    lines = command_parser.make_parser(None).format_help().splitlines()
    (line,) = [line for line in lines if line.startswith("  cluster=")]
    assert line == f"  cluster={' | '.join(sorted({*SHIPPED, 'local', 'mine'}))}"
    assert any("clusters also in src/hpc/jobs/cluster/" in line for line in lines)


def test_a_copy_of_a_project_has_the_clusters_that_lie_in_it(configs: Path) -> None:
    folder = configs.parent / project.SHIPPED_CLUSTERS
    shutil.copytree(project.shipped_clusters(project.CONFIGS), folder)
    file = folder / "slurm.yaml"
    file.write_text(file.read_text().replace("cores_per_gpu: 8", "cores_per_gpu: 7"))
    (folder / "vega.yaml").unlink()
    assert cluster(configs, "cluster=slurm").cores_per_gpu == 7
    assert cluster(project.CONFIGS, "cluster=slurm").cores_per_gpu == 8
    assert set(compose.config_groups(configs)["cluster"]) == SHIPPED - {"vega"} | {"local", "mine"}
    with pytest.raises(ConfigError):
        cluster(configs, "cluster=vega")


def test_a_searched_folder_comes_last(configs: Path, tmp_path: Path) -> None:
    for name in ("leonardo", "slurm", "theirs"):
        file = tmp_path / "shared" / "cluster" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"defaults: [base]\nname: {name}\npartition: theirs\n")
    searched = f"hydra.searchpath=[file://{tmp_path}/shared]"
    names = ("leonardo", "slurm", "theirs")
    assert [cluster(configs, searched, f"cluster={name}").partition for name in names] == ["ours", None, "theirs"]


def test_an_unknown_cluster_is_rejected_with_the_two_places(configs: Path) -> None:
    with pytest.raises(ConfigError) as rejected:
        cluster(configs, "cluster=leonrdo")
    assert rejected.value.fix.startswith("cluster=leonardo, or add configs/cluster/leonrdo.yaml")
    assert "src/hpc/jobs/cluster/" in rejected.value.fix and ", mine, " in rejected.value.rule


def test_the_account_is_the_projects_unless_the_cluster_names_one(configs: Path) -> None:
    assert {cluster(configs, f"cluster={name}").account for name in ("slurm", "local", "mine")} == {ANSWERS["account"]}
    with (configs / "cluster" / "mine.yaml").open("a") as file:
        file.write("account: of mine\n")
    assert cluster(configs, "cluster=mine").account == "of mine"
    assert cluster(configs, "cluster=mine", "cluster.account=typed").account == "typed"


def test_what_hpc_ships_names_no_code() -> None:
    """Check that shipped cluster files name no classes.

    Only files in configs/ decide which classes a run directory may name.
    """
    for file in project.shipped_clusters(project.CONFIGS).iterdir():
        assert file.suffix == ".yaml" and not typed_words.CODE_KEYS.search(file.read_text())
