"""Check that clusters are files of configs/cluster/, whose defaults are in the library."""

import shutil
from pathlib import Path

import pytest
from fork import ANSWERS

from hpc.config import arguments, command_parser, compose, defaults, parse, personal_clusters, project, typed_words
from hpc.config.errors import ConfigError
from hpc.jobs import job, pbs

SHIPPED = {file.stem for file in (project.CONFIGS / "cluster").glob("*.yaml")}


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    """Return a project's configs/ with another `leonardo` and a cluster of its own."""
    shutil.copytree(project.CONFIGS, tmp_path / "configs")
    folder = tmp_path / "configs" / "cluster"
    (folder / "leonardo.yaml").write_text("defaults: [base]\nname: leonardo\npartition: ours\n")
    (folder / "mine.yaml").write_text("defaults: [base]\nname: mine\nscheduler: slurm\n")
    return tmp_path / "configs"


def cluster(configs: Path, *words: str):
    return compose.compose_overrides(list(words), configs=configs).cluster


def test_a_cluster_has_the_keys_of_the_library(configs: Path) -> None:
    mine, slurm = cluster(configs, "cluster=mine"), cluster(configs, "cluster=slurm")
    assert mine.keys() == slurm.keys() == cluster(configs, "cluster=local").keys()
    assert (mine.name, mine.scheduler, slurm.request) == ("mine", "slurm", "--gpus-per-node={gpus}")
    (configs / "cluster" / "debug.yaml").write_text("defaults: [slurm]\nname: debug\npartition: test\n")
    debug = cluster(configs, "cluster=debug")
    assert (debug.partition, debug.request) == ("test", "--gpus-per-node={gpus}")


def test_choices_are_the_files_of_the_folder(configs: Path) -> None:
    assert compose.config_groups()["cluster"] == sorted(SHIPPED) and len(SHIPPED) > 20
    (configs / "cluster" / "leonardo.yaml").unlink()
    assert compose.config_groups(configs)["cluster"] == sorted({*SHIPPED, "mine"} - {"leonardo"})


def test_help_lists_them_in_one_line(configs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "CONFIGS", configs)
    lines = command_parser.make_parser(None).format_help().splitlines()
    (line,) = [line for line in lines if line.startswith("  cluster=")]
    assert line == f"  cluster={' | '.join(sorted({*SHIPPED, 'mine'}))}"


def test_a_copy_of_a_jobs_code_has_the_defaults_that_lie_in_it(configs: Path) -> None:
    defaults.write(configs)
    file = configs / "cluster" / "base.yaml"
    file.write_text(file.read_text().replace("rendezvous_seconds: 300", "rendezvous_seconds: 301"))
    assert cluster(configs, "cluster=slurm").rendezvous_seconds == 301
    assert cluster(project.CONFIGS, "cluster=slurm").rendezvous_seconds == 300


def test_a_cluster_has_the_name_of_its_file(configs: Path) -> None:
    (configs / "cluster" / "other.yaml").write_text("defaults: [slurm]\n")
    with pytest.raises(ConfigError, match=r"must be the name of the cluster's file, other\.yaml; got slurm"):
        cluster(configs, "cluster=other")


@pytest.mark.parametrize("place", ["file", "word", "personal"])
def test_keys_that_clusters_do_not_have_are_one_sentence(
    place: str, configs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, prefix, file = ["cluster=mine"], "cluster.", "configs/cluster/mine.yaml"
    if place == "file":
        with (configs / "cluster" / "mine.yaml").open("a") as text:
            text.write("setup: [module load a]\nmax_time: '2:00:00'\n")
    elif place == "word":
        words += ["+cluster.setup=['module load a']", "+cluster.max_time='2:00:00'"]
    else:
        prefix, file = "mine.", str(configs / "clusters.yaml")
        Path(file).write_text("mine: {setup: [module load a], max_time: '2:00:00'}\n")
        monkeypatch.setattr(personal_clusters, "PERSONAL_CLUSTERS", Path(file))
    with pytest.raises(ConfigError) as rejected:
        arguments.check_files(parse.parse(compose.compose_overrides(words, configs=configs)))
    assert not hasattr(rejected.value, "problems") and len(str(rejected.value).splitlines()) == 2
    assert str(rejected.value).startswith(f"{prefix}setup, {prefix}max_time cannot be set, as clusters have no such k")
    assert rejected.value.fix.startswith(f"{file} without them;")


def test_one_such_key_comes_with_the_one_that_may_be_meant(configs: Path) -> None:
    with (configs / "cluster" / "mine.yaml").open("a") as file:
        file.write("acount: a\n")
    with pytest.raises(ConfigError, match=r"cluster\.acount cannot be set.* no such key \(similar: account\)\.\n.*it;"):
        parse.parse(compose.compose_overrides(["cluster=mine"], configs=configs))


@pytest.mark.parametrize("name", ["lumi_g", "dardel"])
def test_gpus_of_amd_need_an_image_unless_a_person_says_that_the_environment_is_for_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"cluster={name}", "trainer=ddp"]
    with pytest.raises(ConfigError, match=rf"^cluster\.container must have a value for a job on cluster={name}\."):
        parse.parse(compose.compose_overrides(words), for_job=True)
    parse.parse(compose.compose_overrides([*words, "cluster.container='singularity run my.sif'"]), for_job=True)
    monkeypatch.setattr(personal_clusters, "PERSONAL_CLUSTERS", tmp_path / "clusters.yaml")
    (tmp_path / "clusters.yaml").write_text(f"{name}: {{required: [account]}}\n")
    parse.parse(compose.compose_overrides(words), for_job=True)


def test_a_cluster_that_charges_a_group_needs_its_option_and_no_account() -> None:
    words = ["cluster=abci3", "trainer=ddp"]
    with pytest.raises(ConfigError, match=r"^cluster\.options must have a value for a job on cluster=abci3\."):
        parse.parse(compose.compose_overrides(words), for_job=True)
    cfg = parse.parse(compose.compose_overrides([*words, "cluster.options=['-P mine']"]), for_job=True)
    script = pbs.render_job_script(job.job_from_config(cfg))
    assert "#PBS -P mine\n" in script and "#PBS -A" not in script


def test_a_searched_folder_comes_last(configs: Path, tmp_path: Path) -> None:
    for name in ("leonardo", "slurm", "theirs"):
        file = tmp_path / "shared" / "cluster" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"defaults: [base]\nname: {name}\npartition: theirs\n")
    searched = f"hydra.searchpath=[file://{tmp_path}/shared]"
    names = ("leonardo", "slurm", "theirs")
    assert [cluster(configs, searched, f"cluster={name}").partition for name in names] == ["ours", None, "theirs"]


def test_an_unknown_cluster_is_rejected_with_the_place(configs: Path) -> None:
    with pytest.raises(ConfigError) as rejected:
        cluster(configs, "cluster=leonrdo")
    assert rejected.value.fix.startswith("cluster=leonardo, or add configs/cluster/leonrdo.yaml")
    assert ", mine, " in rejected.value.rule


def test_the_account_is_the_projects_unless_the_cluster_names_one(configs: Path) -> None:
    assert {cluster(configs, f"cluster={name}").account for name in ("slurm", "local", "mine")} == {ANSWERS["account"]}
    with (configs / "cluster" / "mine.yaml").open("a") as file:
        file.write("account: of mine\n")
    assert cluster(configs, "cluster=mine").account == "of mine"
    assert cluster(configs, "cluster=mine", "cluster.account=typed").account == "typed"


def test_a_cluster_names_no_code() -> None:
    for file in (project.CONFIGS / "cluster").glob("*.yaml"):
        assert not typed_words.CODE_KEYS.search(file.read_text())
