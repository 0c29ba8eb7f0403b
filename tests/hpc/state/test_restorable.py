"""Check that a checkpoint, which anybody may have written, sets what training changes, never what was configured."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from test_attributes import trained
from torch import nn

from hpc.config.errors import ConfigError
from hpc.packed import staged_data, staging
from hpc.state import attributes, plain_forms, trainer_settings


class Files(L.LightningDataModule):
    """Data as a researcher writes them, with a folder, files and a command from the config."""

    def __init__(self, root: str, files: list[str], command: str | None = None, beta: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.root, self.files, self.command, self.beta, self.phase = root, files, command, beta, "warm-up"

    @property
    def shown(self) -> str:
        return self.root

    @shown.setter
    def shown(self, value: str) -> None:
        self.root = value


class Names(list): ...


class Net(L.LightningModule):
    def __init__(self, options: dict[str, Any], path: Path, space: SimpleNamespace, names: Names) -> None:
        super().__init__()
        self.space, self.names = space, names
        self.options, self.path, self.layer = options, path, nn.Linear(1, 1)


Names.__module__ = Net.__module__ = Files.__module__ = "my_research.forged"


def made() -> tuple[Any, Net]:
    module = Net(
        {"tokenizer": "bpe.json", "width": 3}, Path("/data/vocabulary"), SimpleNamespace(file="a"), Names("ab")
    )
    trainer = trained(module, is_global_zero=True)
    trainer.datamodule = Files("/data", ["a.npy", "b.npy"])
    return trainer, module


def shown_state(trainer: Any, module: Net) -> str:
    data = trainer.datamodule
    weights = [name for name, _ in module.named_parameters()]
    given = (module.options, module.path, module.space, module.names)
    return repr((vars(data), dict(data.hparams), weights, vars(module).keys(), given))


EVIL = "$(touch canary)"
FORGED = [
    ("DataModule", "root", EVIL),
    ("DataModule", "command", EVIL),
    ("DataModule", "root", None),
    ("DataModule", "root", b"/data"),
    ("DataModule", "files", ["a.npy", EVIL]),
    ("DataModule", "files", {plain_forms.KIND: "set", "parts": [["a.npy", EVIL]]}),
    ("DataModule", "_hparams", {"root": EVIL}),
    ("DataModule", "__dict__", {"root": EVIL}),
    ("DataModule", "shown", EVIL),
    ("DataModule", "setup", EVIL),
    ("DataModule/_hparams (AttributeDict)", "root", EVIL),
    ("DataModule/_hparams (AttributeDict)", "", {"root": EVIL}),
    ("module /space (SimpleNamespace)", "file", EVIL),
    ("module /names (Names)", "", ["a", EVIL]),
    ("module ", "options", {"tokenizer": EVIL, "width": 3}),
    ("module ", "path", EVIL),
    ("module ", "layer", None),
    ("module ", "_modules", {}),
    ("module ", "_parameters", {}),
    ("parameter layer.weight", "data", torch.zeros(3)),
]


@pytest.mark.parametrize(("owner", "name", "form"), FORGED, ids=[f"{owner}.{name}" for owner, name, _ in FORGED])
def test_what_the_config_gave_is_not_set(owner: str, name: str, form: Any, capfd: pytest.CaptureFixture) -> None:
    trainer, module = made()
    before = shown_state(trainer, module)
    attributes.restore_silently(trainer, module, changed=[(owner, name, form)])
    attributes.restore(trainer, module, changed=[(owner, name, form)])
    assert shown_state(trainer, module) == before
    assert "start anew" in capfd.readouterr().out


def test_what_training_changes_is_set() -> None:
    trainer, module = made()
    before, data = attributes.record_initial(trainer, module), trainer.datamodule
    data.files.reverse()
    data.beta, data.phase, data.hparams.beta, module.options["width"] = 0.5, "main", 0.5, 4
    module.best_name, module.space.step = "b.npy", 7
    module.names.reverse()
    changed = attributes.find_changed(trainer, module, initial=before)
    again, other = made()
    attributes.restore(again, other, changed=changed)
    data = again.datamodule
    assert (data.files, data.beta, data.phase, data.hparams.beta) == (["b.npy", "a.npy"], 0.5, "main", 0.5)
    assert (other.options["width"], other.best_name, other.space.step, other.names) == (4, "b.npy", 7, ["b", "a"])


@pytest.mark.parametrize(("name", "form"), [("stage", True), ("node_local", EVIL), ("num_workers", 10**6)])
def test_nothing_that_the_projects_own_data_were_given_is_set(name: str, form: Any) -> None:
    trainer, module = made()
    trainer.datamodule = data = staged_data.StagedDataModule(global_batch_size=2)
    attributes.restore_silently(trainer, module, changed=[("DataModule", name, form)])
    assert (data.stage, data.node_local, data.num_workers) == (False, None, 0)


def test_other_places_of_a_checkpoint_set_no_more() -> None:
    """Check what is restored beside attributes: settings of the Trainer and of optimizers, samplers."""
    trainer, module = made()
    trainer.optimizers = [torch.optim.SGD(module.parameters())]
    forged = [("trainer", "default_root_dir", None, EVIL), ("optimizer 0", "state", None, {}), ("trainer", "x", 1, 1)]
    before = (vars(trainer).copy(), trainer.optimizers[0].state)
    trainer_settings.restore(trainer, forged)
    assert (vars(trainer), trainer.optimizers[0].state) == before
    with pytest.raises(ConfigError, match=r"must not set root of a Files.*\n"):
        plain_forms.set_attribute(trainer.datamodule, "root", EVIL)


@pytest.mark.parametrize("folder", ["$(touch {})", "`touch {}`", '"; touch {}; "', "${{X:-$(touch {})}}", "/tmp/$NOPE"])
def test_the_folder_on_a_node_reaches_no_shell(folder: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    with pytest.raises(ConfigError, match="with \\$NAME or \\$\\{NAME\\} for variables"):
        staging.node_local_folder(folder.format(canary))
    assert not canary.exists()
