"""Check that a config is parsed into typed sections, and that all that is wrong with it is told at once."""

import pickle
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hpc.config import compose, parse, personal_clusters, project, rules
from hpc.config.errors import ConfigError, ConfigErrors
from hpc.config.sections import Config


def parsed(*words: str) -> Config:
    return parse.parse(compose.compose_overrides(list(words)))


def problems(*words: str, for_job: bool = False) -> dict[str, str]:
    with pytest.raises(ConfigErrors) as caught:
        parse.parse(compose.compose_overrides(list(words)), for_job=for_job)
    assert all(f"{problem}" in str(caught.value) for problem in caught.value.problems)
    return {problem.key: problem.rule for problem in caught.value.problems}


def test_sections_are_typed() -> None:
    cfg = parsed("cluster=slurm", "trainer=ddp", "checkpoint.every_minutes=5", "+cluster.env.A=1")
    assert (cfg.trainer.devices, cfg.trainer.accelerator, cfg.strategy.kind) == (4, "gpu", "ddp")
    assert isinstance(cfg.checkpoint.every_minutes, float) and cfg.cluster.env == {"A": "1"}
    assert type(cfg.cluster.env) is dict and type(cfg.cluster.options) is list


def test_the_trainer_gets_all_its_arguments_as_they_are_composed() -> None:
    cfg = parsed("trainer.limit_val_batches=3", "trainer.max_time={hours: 1}")
    assert cfg.trainer.arguments is cfg.node.trainer and cfg.trainer.arguments.limit_val_batches == 3
    assert "gradient_clip_algorithm" not in cfg.trainer.arguments  # which Lightning chooses


def test_references_to_the_run_directory_follow_it() -> None:
    cfg = parsed()
    cfg.run_dir = "/runs/x"
    assert cfg.logger.tensorboard.save_dir == cfg.node.trainer.default_root_dir == "/runs/x"


def test_all_problems_are_told_at_once() -> None:
    words = ["seed=-1", "checkpoint.keep=0", "checkpoint.mode=most", "trainer.devices=two", "faults.retries=x"]
    told = problems(*words, "cluster.time=1:30", "name=bash", "task=test", "data.global_batch_size=many")
    keys = ["seed", "checkpoint.keep", "checkpoint.mode", "trainer.devices", "faults.retries", "cluster.time", "name"]
    assert set(told) == {*keys, "task"}  # the batch is compared with the devices, which are unknown


def test_keys_without_a_value_and_broken_rules_are_told_together() -> None:
    told = problems("data=images", "model=resnet18", "checkpoint.keep=0", "seed=x")
    assert set(told) == {"data.dir", "checkpoint.keep", "seed"}
    told = problems("cluster=massive_m3", "cluster.account=null", "trainer=ddp", "faults.retries=0", for_job=True)
    assert any(key.startswith("cluster.account, ") for key in told) and "faults.retries" in told


def test_a_key_is_told_once_and_what_follows_from_it_is_not() -> None:
    for word in ("trainer.num_nodes=0", "trainer.devices=0", "strategy.tensor_parallel_size=0"):
        with pytest.raises(ConfigError) as caught:
            parsed(word)
        assert not isinstance(caught.value, ConfigErrors) and caught.value.key == word.partition("=")[0]


def test_all_wrong_arguments_are_told_at_once() -> None:
    told = problems("model.optimizer.lr=fast", "+model.network.dephts=[1]", "+trainer.max_epoch=2")
    assert set(told) == {"model.optimizer.lr", "model.network.dephts", "trainer.max_epoch"}


def test_several_problems_are_one_error_that_can_be_sent() -> None:
    error = ConfigErrors([ConfigError("a", 1, "must be 2", "a=2"), ConfigError("b", 3, "must be 4", "b=4")])
    assert (error.key, error.fix) == ("a", "a=2")
    assert str(error) == "a must be 2; got 1.\n  Try: a=2\nConfigError: b must be 4; got 3.\n  Try: b=4"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_every_rule_takes_parts_of_the_config() -> None:
    parts = {*parse.section_parser.SECTIONS, *(key for key in vars(parsed()))}
    for rule in rules.RULES:
        assert set(parse.inspect.signature(rule).parameters) <= parts, rule.__name__
    assert len(set(rules.RULES)) == len(rules.RULES)


@pytest.fixture
def personal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import shutil

    shutil.copytree(project.CONFIGS, tmp_path / "configs")
    monkeypatch.setattr(compose, "CONFIGS", tmp_path / "configs")
    monkeypatch.setattr(personal_clusters, "PERSONAL_CLUSTERS", tmp_path / "clusters.yaml")
    text = "slurm: {account: mine, time: '2:00:00', env: {A: mine, B: mine}}\npbs: {acount: x}\n"
    (tmp_path / "clusters.yaml").write_text(text)
    return tmp_path


def test_personal_values_come_after_the_cluster_and_before_what_is_typed(personal: Path) -> None:
    cluster = compose.compose_overrides(["cluster=slurm", "cluster.time=3:00:00", "+cluster.env.B=typed"]).cluster
    assert (cluster.account, cluster.time, cluster.env) == ("mine", "3:00:00", {"A": "mine", "B": "typed"})
    assert compose.compose_overrides(["cluster=leonardo"]).cluster.account != "mine"
    assert compose.compose_overrides(["cluster=slurm"], personal=False).cluster.account != "mine"
    file = personal / "configs" / "experiment" / "there.yaml"
    file.write_text("# @package _global_\ndefaults: [{override /cluster: slurm}]\ncluster: {time: '4:00:00'}\n")
    cluster = compose.compose_overrides(["experiment=there"]).cluster
    assert (cluster.account, cluster.time) == ("mine", "4:00:00")


def test_personal_values_that_would_not_count_are_told(personal: Path) -> None:
    with pytest.raises(ConfigError, match=r"pbs\.acount cannot be set, .*: account.*\n.*/clusters\.yaml without it"):
        compose.compose_overrides(["cluster=pbs"])
    train = personal / "configs" / "train.yaml"
    train.write_text("\n".join(line for line in train.read_text().splitlines() if "personal@" not in line))
    compose.compose_overrides(["cluster=local"])
    with pytest.raises(ConfigError, match=r"Try: the line '- optional personal@cluster: \$\{cluster\}' below"):
        compose.compose_overrides(["cluster=slurm"])


def test_what_is_composed_is_what_is_saved() -> None:
    cfg = parsed("cluster=slurm")
    assert OmegaConf.to_container(cfg.node, resolve=False)["trainer"]["devices"] == 1
    assert cfg.node.cluster == compose.compose_overrides(["cluster=slurm"]).cluster
