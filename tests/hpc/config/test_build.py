"""Check that a node of the config builds what `hydra.utils.instantiate` builds of the same YAML, whoever wrote it."""

import functools
import random
from typing import Any

import hydra.utils
import pytest
import yaml
from foreign_classes import Kept
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from hpc.config import arguments, build, compose, project, signatures, trust
from hpc.config.errors import ConfigError

# Targets with how many values each takes in `_args_`, and the names that it takes.
TARGETS: dict[str, tuple[range, list[str]]] = {
    "foreign_classes.Kept": (range(3), ["a", "b", "cfg"]),
    "foreign_classes.Child": (range(3), ["a", "b"]),
    "foreign_classes.Kept.of_width": (range(1), ["width", "a"]),
    "foreign_classes.Child.of_width": (range(1), ["width", "b"]),
    "foreign_classes.Settings": (range(2, 3), []),
    "foreign_classes.add": (range(2, 3), []),
    "builtins.tuple": (range(1, 2), []),
    "builtins.list": (range(1, 2), []),
    "builtins.dict": (range(1), ["a", "b"]),
    "types.SimpleNamespace": (range(1), ["a", "b"]),
    "collections.OrderedDict": (range(1), ["a", "b"]),
}
ITERABLES = ("builtins.tuple", "builtins.list")


def drawn_value(rng: random.Random, depth: int) -> Any:
    plain = [1, 0.5, "text", None, True, [1, 2], {"x": {"y": 3}}, "${top.number}", "${top.names}", [{"deep": [1]}]]
    if depth > 2 or rng.random() < 0.6:
        return rng.choice(plain)
    return rng.choice([drawn_node, lambda *a: [drawn_node(*a), 1], lambda *a: {"in": drawn_node(*a)}])(rng, depth + 1)


def drawn_node(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    target = rng.choice(list(TARGETS))
    numbers, names = TARGETS[target]
    node: dict[str, Any] = {"_target_": target}
    if num_args := rng.choice(numbers):
        values = (
            [3, 4][:num_args]
            if target != "foreign_classes.Kept"
            else [drawn_value(rng, depth) for _ in range(num_args)]
        )
        node["_args_"] = [[1, {"z": 2}]] if target in ITERABLES else values
    node |= {name: drawn_value(rng, depth) for name in names if rng.random() < 0.7 and name != "width"}
    if rng.random() < 0.4:
        node["_convert_"] = rng.choice(["none", "partial", "object", "all"])
    if rng.random() < 0.2:
        node["_recursive_"] = rng.random() < 0.5
    if rng.random() < 0.2:
        node["_partial_"] = True
    return node


def described(value: Any) -> Any:
    """Return what can be compared: the types of all parts, and their content."""
    if isinstance(value, functools.partial) or hasattr(value, "func"):
        return "partial", value.func, described(value.args), described(value.keywords)
    if OmegaConf.is_config(value):
        return type(value), described(list(value.items()) if isinstance(value, DictConfig) else list(value))
    if isinstance(value, dict):
        return type(value), described(list(value.items()))
    if isinstance(value, list | tuple):
        return type(value), [described(item) for item in value]
    return (type(value), described(vars(value))) if hasattr(value, "__dict__") else (type(value), value)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_it_builds_what_hydra_builds(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        node = drawn_node(rng)
        text = yaml.safe_dump({"top": {"number": 7, "names": ["a", "b"]}, "model": node}, default_flow_style=seed % 2)
        cfg = OmegaConf.create(text)
        for key, inner in signatures.find_targets(OmegaConf.to_container(cfg.model, resolve=True), "model"):
            assert list(arguments.node_problems(key, inner)) == []
        assert described(build.build(cfg.model)) == described(hydra.utils.instantiate(cfg.model)), text


def test_what_a_node_itself_builds_later_is_not_checked() -> None:
    node = {"_target_": "foreign_classes.Kept", "_recursive_": False, "a": {"_target_": "torch.optim.SGD"}}
    assert [key for key, _ in signatures.find_targets(node, "model")] == ["model"]


def test_an_error_of_a_constructor_says_which_arguments_it_was_given(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs/model").mkdir(parents=True)
    (tmp_path / "configs/model/mine.yaml").write_text("a: {_target_: foreign_classes.fails}")
    monkeypatch.setattr(build, "CONFIGS", tmp_path / "configs")
    monkeypatch.setattr(build, "researcher_packages", lambda: ("foreign_classes",))
    monkeypatch.setenv("KEY", "hush")
    inner = {"_target_": "foreign_classes.fails", "width": "${top}", "key": "${oc.env:KEY}"}
    cfg = OmegaConf.create({"top": 3, "model": {"_target_": "foreign_classes.Kept", "net": inner}})
    with pytest.raises(InstantiationException) as raised:
        build.build(cfg.model)
    (note,) = raised.value.__notes__
    assert "The arguments are those of model.net (configs/model/mine.yaml):" in note
    assert "width: 3" in note and "${oc.env:KEY}" in note and "hush" not in note
    monkeypatch.setattr(build, "CONFIGS", tmp_path / "nothing")
    with pytest.raises(InstantiationException) as raised:
        build.build(OmegaConf.create({"model": inner | {"width": 4}}).model)
    assert "those of model (the config)" in raised.value.__notes__[0]


def test_a_broken_file_of_configs_stops_nobody(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.yaml").mkdir()
    broken = {"a": "a: [", "b": "_target_: nowhere.Net", "c": "_target_: json.nothing", "d": "a: *x", "e": "\xff: {"}
    for name, text in broken.items():
        (tmp_path / f"{name}.yaml").write_bytes(text.encode("latin-1"))
    (tmp_path / "f.yaml").write_text("_target_: fractions.Fraction")
    monkeypatch.setattr(project, "CONFIGS", tmp_path)
    monkeypatch.setattr(signatures, "_known", {})
    signatures.remember_all()
    assert isinstance(signatures._known["fractions.Fraction"], signatures.Signature)
    said = capsys.readouterr().err
    assert all(f"a run that uses {tmp_path}/{name}.yaml will be rejected: " in said for name in broken)
    assert "fractions.Fraction" in trust.names_in_configs.__wrapped__()["_target_"]
    of_defaults = {"lightning.pytorch.Trainer", "hpc.training.step_overhead.DataWaitClock"}
    assert of_defaults <= set(signatures._known), "the first check of a config would import them"


def test_a_first_start_says_what_a_resume_would_reject(capsys: pytest.CaptureFixture[str]) -> None:
    cfg = compose.compose_overrides(["run_dir=runs/x"])
    trust.print_untrusted(cfg)
    OmegaConf.update(cfg, "model.size", {"_target_": "builtins.tuple", "_args_": [[1, 2]]}, force_add=True)
    trust.print_untrusted(cfg)
    assert capsys.readouterr().out == ""
    OmegaConf.update(cfg, "model.size", {"_target_": "fractions.Fraction", "_args_": [1, 2]}, force_add=True)
    trust.print_untrusted(cfg)
    said = capsys.readouterr().out
    assert (
        "note: model.size._target_='fractions.Fraction' is built in this run" in said
        and "a line - fractions in" in said
    )
    with pytest.raises(ConfigError, match="must be in a trusted package"):
        trust.reject_untrusted(cfg, cfg.run_dir and trust.Path("runs/x"))


def test_targets_in_flow_style_are_found(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.yaml").write_text(
        "net: {_target_: my_net.make, inner: {'_target_': \"torch.nn.init.normal_\"}} # _target_: os.system\n"
        "# {_target_: os.getpid}\n- _target_: pytorch_lightning.loggers.CSVLogger\nnot_target_: os.kill\n"
    )
    monkeypatch.setattr(project, "CONFIGS", tmp_path)
    names = trust.names_in_configs.__wrapped__()["_target_"]
    own = {"my_net.make", "torch.nn.init.normal_", "lightning.pytorch.loggers.CSVLogger"}
    assert names == own | {"lightning.pytorch.Trainer", "hpc.training.step_overhead.DataWaitClock"}


def test_a_config_that_is_gone_since_it_was_listed_is_left_out(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.yaml").write_text("_target_: fractions.Fraction")
    monkeypatch.setattr(trust, "config_files", lambda: [tmp_path / "gone.yaml", tmp_path / "x.yaml"])
    assert "fractions.Fraction" in trust.names_in_configs.__wrapped__()["_target_"]


def test_kept_objects_are_alike() -> None:
    """Check that the comparison sees a difference: plain lists in place of Hydra's."""
    cfg = OmegaConf.create({"model": {"_target_": "foreign_classes.Kept", "a": [1]}})
    assert described(hydra.utils.instantiate(cfg.model)) != described(Kept(a=[1]))
