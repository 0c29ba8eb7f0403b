"""Check that a secret in `${oc.env:NAME}` reaches the run, and no file that it writes."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import lightning
import pytest
from desk import Desk
from omegaconf import DictConfig, OmegaConf

from hpc.checkpoint import plain_data
from hpc.config import compose, freezing, parse
from hpc.config.errors import ConfigError
from hpc.report import overview
from hpc.run import history

SECRET = "hush-4711"


def holding(folder: Path) -> list[Path]:
    """Return the files whose content or name holds the secret."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if SECRET.encode() in path.read_bytes() or SECRET in path.name]


@pytest.mark.parametrize("cluster", ["slurm", "pbs"])
def test_no_job_script_holds_it(cluster: str, desk: Desk) -> None:
    desk.set.setenv("KEY", SECRET)
    words = ["A=${oc.env:KEY}", "B=${oc.env:KEY}/x", "C='${oc.env:NO,a b}'", "D='${oc.env:NO,${oc.env:KEY}}'"]
    more = ["cluster.node_local=${oc.env:KEY}", "cluster.account=a"]
    typed = [f"cluster={cluster}", "trainer.num_nodes=1", *(f"+cluster.env.{word}" for word in words), *more]
    assert desk.type(*typed, "--dry-run") == 0 and SECRET not in desk.out, desk.err
    assert desk.type(*typed) == 0, desk.err
    assert holding(desk.runs()[0]) == []
    script = "".join(path.read_text() for path in desk.runs()[0].glob("*.sh"))
    exported = [line.strip() for line in script.splitlines() if line.strip()[:9] in {f"export {x}=" for x in "ABCD"}]
    shown = subprocess.run(
        ["bash", "-c", "\n".join([*exported, 'echo "$A|$B|$C|$D"'])],
        env={"PATH": os.defpath, "KEY": SECRET}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shown.stdout.strip() == f"{SECRET}|{SECRET}/x|a b|{SECRET}"
    without = subprocess.run(["bash", "-ec", exported[0]], env={"PATH": os.defpath}, capture_output=True, text=True)
    assert without.returncode and "KEY: is not in this job: export it where" in without.stderr


@pytest.mark.parametrize("value", ["'x\"; id'", "'x`id`'", "'x}\"$(id)'", "'\\\\x'", "'x}; id'"])
def test_a_default_is_no_code(value: str) -> None:
    cfg = compose.compose_overrides(["cluster=slurm"])
    cfg.cluster.env = {"A": "${oc.env:NO," + value + "}"}
    with pytest.raises(ConfigError, match=r"cluster\.env"):
        parse.parse(cfg)


def test_a_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEY", raising=False)
    with pytest.raises(ConfigError, match="environment variable KEY must be set"):
        parse.parse(compose.compose_overrides(["+cluster.env.A=${oc.env:KEY}"]))


def saved_hparams(cfg: DictConfig, module: lightning.LightningModule) -> dict:
    checkpoint = {"hyper_parameters": module.hparams}
    assert plain_data.make_hparams_savable(checkpoint, freezing.map_values_to_references(cfg)) == []
    return checkpoint["hyper_parameters"]


def test_hyperparameters_hold_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", SECRET)
    cfg = compose.compose_overrides(["+cluster.env.A=${oc.env:KEY}"])

    class Module(lightning.LightningModule):
        def __init__(self, token: str, more: dict) -> None:
            super().__init__()
            self.save_hyperparameters()

    module = Module(SECRET, {"deep": [SECRET, 1]})
    assert saved_hparams(cfg, module) == {"token": "${oc.env:KEY}", "more": {"deep": ["${oc.env:KEY}", 1]}}
    assert saved_hparams(cfg, Module(SECRET, OmegaConf.create({"deep": [SECRET]}))) == {
        "token": "${oc.env:KEY}",
        "more": {"deep": ["${oc.env:KEY}"]},
    }
    assert module.hparams.token == SECRET
    words = ["+cluster.env.A='https://me:${oc.env:KEY}@host'", "cluster.options=['${oc.env:KEY} x']"]
    cfg = compose.compose_overrides(words)
    module = Module(f"https://me:{SECRET}@host", {"list": [f"{SECRET} x"]})
    assert SECRET not in str(saved_hparams(cfg, module))


def test_what_is_decoded_stays_a_reference_and_keeps_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"NUMBER": 4, "LIST": [SECRET, 2, 3], "DICT": {"key": f"{SECRET}-2"}}
    words = {name: "${oc.decode:${oc.env:" + name + "}}" for name in values}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value).replace("'", ""))
    cfg = compose.compose_overrides([f"+model.{name}='{word}'" for name, word in words.items()])
    assert SECRET not in freezing.to_frozen_yaml(cfg)
    in_job = OmegaConf.to_container(OmegaConf.create(freezing.to_frozen_yaml(cfg)).model, resolve=True)
    assert isinstance(in_job, dict) and {name: in_job[name] for name in values} == values

    class Module(lightning.LightningModule):
        def __init__(self, a: object, b: object) -> None:
            super().__init__()
            self.save_hyperparameters()

    module = Module(values["LIST"], values["DICT"])
    assert saved_hparams(cfg, module) == {"a": [words["LIST"], 2, 3], "b": {"key": words["DICT"]}}


# A module that keeps the value as a hyperparameter, uses it in `setup`, and logs it by itself.
KEEPS_IT = """
import os
os.environ["KEY"] = SECRET
from my_research.module import Classifier
first, setup = Classifier.__init__, Classifier.setup
def init(self, *args, **kwargs):
    first(self, *args, **kwargs)
    self.save_hyperparameters({"folder": SECRET + "/mnist"})
def set_up(self, stage):
    setup(self, stage)
    assert self.hparams.folder == self.hparams_initial.folder == SECRET + "/mnist"
    self.logger.log_hyperparams(self.hparams)
Classifier.__init__, Classifier.setup = init, set_up
"""


@pytest.mark.slow
def test_no_file_of_a_run_holds_it(start: Callable[..., str], tmp_path: Path) -> None:
    words = ["+cluster.env.A=${oc.env:KEY}", "+logger.tensorboard.comment=${oc.env:KEY}"]
    words.append("+cluster.env.B='${oc.env:KEY}/mnist'")
    patch = KEEPS_IT.replace("SECRET", repr(SECRET))
    start(
        tmp_path / "run",
        1,
        [*words, "trainer.max_steps=2", *(f"+trainer.limit_{kind}_batches=1" for kind in ("val", "test"))],
        patch=patch,
    )
    overview.write_report(history.read_run(tmp_path / "run", "run"))
    assert (tmp_path / "run" / "report.html").exists() and holding(tmp_path) == []
    assert "${oc.env:KEY}" in (tmp_path / "run" / "config.yaml").read_text()
