"""Check that objects of a foreign run directory are built only if the fork's own files trust their classes."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from fork import PACKAGE
from omegaconf import DictConfig

from hpc.checkpoint import trained
from hpc.config import arguments, build, compose, parse, project, trust
from hpc.config.errors import ConfigError
from hpc.run import command_line, frozen_config


@pytest.fixture(scope="module")
def cfg() -> DictConfig:
    cfg = compose.compose_overrides([])
    arguments.check_files(parse.parse(cfg))
    return cfg


@pytest.fixture
def run(cfg: DictConfig, tmp_path: Path) -> Path:
    cfg.run_dir = str(tmp_path / "run")
    (tmp_path / "run").mkdir()
    frozen_config.create_or_replace(tmp_path / "run", cfg, words=[f"run_dir={tmp_path / 'run'}"])
    return tmp_path / "run"


def edit(run_dir: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = yaml.safe_load((run_dir / "config.yaml").read_text())
    change(content)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(content))


def node(target: object, **more: object) -> dict[str, object]:
    return {"_target_": target, **more}


TOUCH = "touch {canary}"
PIPES = "torch.utils.data.datapipes.iter"
PICKLES = node(f"{PIPES}.IterableWrapper", iterable=["{folder}/bomb.pickle"])
HOSTILE: dict[str, dict[str, object]] = {
    "a function of the project": node("hpc.jobs.job_states.run_command", _args_=["touch", "{canary}"]),
    "a module that a module imports": node("hpc.jobs.job_states.subprocess.run", args=["touch", "{canary}"]),
    "the same of torch": node("torch.nn.parallel.distributed.os.system", command=TOUCH),
    "the same of lightning": node("lightning.pytorch.trainer.trainer.os.system", command=TOUCH),
    "the standard library": node("os.system", command=TOUCH),
    "a class of it": node("subprocess.Popen", args=["touch", "{canary}"]),
    "a class that starts programs": node(
        "torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler",
        entrypoint="touch", args=["{canary}"], env={}, stdout="/dev/null", stderr="/dev/null", local_rank_id=0,
    ),
    "a class of another, reached through a trusted one": node("lightning.pytorch.trainer.trainer.Path", _args_=["/"]),
    "torch.hub": node("torch.hub.load", repo_or_dir="{folder}", model="model", source="local"),
    "pickles": node("numpy.load", file="{folder}/bomb.npy", allow_pickle=True),
    "torch's pickles": node("torch.load", f="{folder}/bomb.pt", weights_only=False),
    "C++": node("torch.utils.cpp_extension.load", name="x", sources=["{folder}/x.cpp"]),
    "a package of a run": node("torch.package.PackageImporter", _args_=["{folder}/x"]),
    "Hydra": node("hydra.utils.get_method", path="os.system"),
    "an entry of _args_": node("torch.nn.Sequential", _args_=[node("os.system", command=TOUCH)]),
    "below another": node("torch.nn.Sequential", _args_=[node("torch.nn.Linear", in_features=node("os.getpid"))]),
    "in part": node("os.system", _partial_=True, _args_=[TOUCH]),
    "no recursion": node("os.system", _recursive_=False, _convert_="object", command=TOUCH),
    "an import path of ours": node("torch.nn.Identity", _check_="hpc.jobs.job_states.run_command"),
    "another import path": node("torch.nn.Identity", _check_="os.system"),
    "a check of another kind": node("torch.nn.Identity", _check_=f"{PACKAGE}.module.Classifier"),
    "computed": node("${oc.env:SHELL}"),
    "referred to": node("${name}"),
    "made of text": {"inner": "${oc.create:'{\"_tar\\x67et_\": os.system}'}"},
    "made of text by a resolver whose name is computed": {
        "word": "create",
        "inner": "${oc.${model.word}:'{\"_tar\\x67et_\": os.system}'}",
    },
    "pickles that a pipe of torch decodes": node(
        "torch.nn.ModuleList",
        modules=node(
            f"{PIPES}.RoutedDecoder",
            _args_=[node(f"{PIPES}.FileOpener", mode="rb", datapipe=PICKLES)],
        ),
    ),
    "a logger that deletes what lies there": node(
        "lightning.pytorch.loggers.csv_logs.ExperimentWriter", log_dir="{folder}"
    ),
    "a logger that nobody names": node("lightning.pytorch.loggers.CometLogger", workspace="{folder}"),
    "a demo that downloads": node("lightning.pytorch.demos.WikiText2", data_dir="{folder}", download=False),
    "a metric that downloads": node("torchmetrics.text.BERTScore", model_name_or_path="{folder}"),
    "the same by another way": node("torchmetrics.text.bert.BERTScore", model_name_or_path="{folder}"),
    "a class of no concern": node("lightning.pytorch.callbacks.progress.rich_progress._RichProgressTheme"),
    "a class of hpc, reached through another module": node("hpc.data.data_module.GlobalOrderSampler"),
    "a number": node(7),
    "a list": node(["os", "system"]),
    "nothing": node(""),
    "escape codes": node("\x1b]0;owned\x07"),
    "another alphabet": node("os.ѕystem"),
}  # fmt: skip


def filled(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {key: filled(one, folder) for key, one in value.items()}
    if isinstance(value, list):
        return [filled(one, folder) for one in value]
    if isinstance(value, str):
        return value.replace("{canary}", str(folder / "canary")).replace("{folder}", str(folder))
    return value


@pytest.mark.slow
@pytest.mark.parametrize("place", ["model", "callbacks.mine"])
@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_of_a_run_directory_is_executed(name: str, place: str, run: Path, tmp_path: Path) -> None:
    (tmp_path / "hubconf.py").write_text(f"import os\nos.system('touch {tmp_path}/canary')\n")
    (tmp_path / "bomb.pickle").write_bytes(b"cos\nsystem\n(S'touch %b/canary'\ntR." % str(tmp_path).encode())
    (tmp_path / "metrics.csv").write_text("precious")
    hostile = filled(HOSTILE[name], tmp_path)

    def change(content: dict[str, Any]) -> None:
        above, _, last = place.rpartition(".")
        (content[above] if above else content)[last] = hostile

    edit(run, change)
    with pytest.raises(ConfigError) as resumed:
        cfg = command_line.compose_resumed(run, [])
        build.build(cfg.model)  # as train.py would
    with pytest.raises(ConfigError) as loaded:
        trained.load(run)
    assert "\x1b" not in f"{resumed.value}{loaded.value}"
    assert (tmp_path / "metrics.csv").exists() and "trust" in loaded.value.fix  # rejected, not because building failed
    assert not (tmp_path / "canary").exists()


def test_a_run_cannot_bring_its_own_list(run: Path, tmp_path: Path) -> None:
    """Check that neither its config, nor its code, nor its recorded overrides can extend the trusted classes."""
    shutil.copytree(project.CONFIGS, run / "code/configs")
    (run / "code/configs/trusted.yaml").write_text("- os\n- builtins\n")
    (run / "made_by.json").write_text("{}")
    (run / "code/configs/callbacks/default.yaml").write_text(
        f"evil:\n  _target_: os.system\n  command: touch {tmp_path}/canary\n"
    )
    (run / "overrides.json").write_text("[]")
    with pytest.raises(ConfigError, match="trusted package"):
        command_line.compose_resumed(run, ["trainer=cpu"])
    evil = tmp_path / "evil/callbacks"
    evil.mkdir(parents=True)
    (evil / "evil.yaml").write_text(f"evil:\n  _target_: os.system\n  command: touch {tmp_path}/canary\n")
    shutil.rmtree(run / "code")
    (run / "overrides.json").write_text(json.dumps([f"hydra.searchpath=[file://{tmp_path}/evil]", "callbacks=evil"]))
    with pytest.raises(ConfigError, match="trusted package"):
        command_line.compose_resumed(run, ["seed=1"])
    assert not (tmp_path / "canary").exists()


def test_a_link_to_this_project_makes_no_run_its_own(run: Path) -> None:
    (run / "code").symlink_to(project.PROJECT)
    (run / "made_by.json").write_text("{}")
    edit(run, lambda content: content.update(model=node("os.getpid")))
    with pytest.raises(ConfigError, match="trusted package"):
        command_line.compose_resumed(run, [])


def test_what_the_fork_trusts_is_built(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Build a class of a trusted package, and one of another package once the fork's own file names it."""
    edit(run, lambda content: content["callbacks"].update(mine=node("lightning.pytorch.callbacks.Timer")))
    assert command_line.compose_resumed(run, []).callbacks.mine
    edit(run, lambda content: content["callbacks"].update(mine=node("fractions.Fraction")))
    with pytest.raises(ConfigError, match="a line - fractions in"):
        command_line.compose_resumed(run, [])
    (tmp_path / "trusted.yaml").write_text("- torch.optim\n- lightning\n- torchmetrics\n- fractions\n")
    monkeypatch.setattr(trust, "TRUSTED_FILE", tmp_path / "trusted.yaml")
    trust.trusted_packages.cache_clear()
    try:
        assert command_line.compose_resumed(run, []).callbacks.mine
        (tmp_path / "trusted.yaml").write_text("fractions: yes\n")
        trust.trusted_packages.cache_clear()
        with pytest.raises(ConfigError, match="must be a list of packages"):
            command_line.compose_resumed(run, [])
    finally:
        monkeypatch.undo()
        trust.trusted_packages.cache_clear()


def test_all_that_is_shipped_is_trusted() -> None:
    for file in project.CONFIGS.rglob("*.yaml"):
        for kind, name in trust.TARGETS.findall(file.read_text()):
            assert not trust.broken_rule(name, f"_{kind}_"), (file, name)


def test_reading_a_run_imports_nothing_that_is_named(run: Path) -> None:
    """Check that reading a run imports no class it names, so that submit.py resume= answers at once."""
    import subprocess
    import sys

    code = (
        f"import sys; sys.path[:0] = [{str(project.PROJECT / 'src')!r}]; from pathlib import Path\n"
        f"from hpc.run import command_line; command_line.compose_resumed(Path({str(run)!r}), [])\n"
        "assert not {'torch', 'lightning'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ, timeout=60)
