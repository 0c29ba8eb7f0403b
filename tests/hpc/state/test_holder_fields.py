"""Check which attributes of a module and its data count as the researcher's own, and so are saved."""

import ast
from pathlib import Path

import lightning as L
import pytest
from torch import nn

import hpc
from hpc.data.data_module import DataModule
from hpc.state import holder_fields


def test_attributes_that_are_left_out_are_those_that_hpc_sets() -> None:
    assigned = set()
    for file in Path(str(hpc.__path__[0])).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                assigned |= {node.attr} if ast.unparse(node.value) == "self" else set()
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
                assigned.add(getattr(holder_fields, ast.unparse(node.args[1]), None))
    left_out = holder_fields.MODULE_ATTRIBUTES | holder_fields.DATA_MODULE_ATTRIBUTES
    assert left_out <= assigned


def test_private_attributes_of_the_data_module_are_left_out() -> None:
    private = {name for name in vars(DataModule(global_batch_size=8)) if name.startswith("_")}
    assert private - vars(L.LightningDataModule()).keys() == holder_fields.DATA_MODULE_ATTRIBUTES


@pytest.mark.parametrize("name", ["_told", "_splits", "_datasets"])
@pytest.mark.parametrize("kind", [L.LightningModule, L.LightningDataModule])
def test_attributes_of_researchers_are_saved(kind: type, name: str) -> None:
    owner = type("Own", (kind,), {})()
    setattr(owner, name, 1)
    owner_name = "module " if kind is L.LightningModule else "DataModule"
    assert dict(holder_fields.unsaved_fields(owner_name, owner))[name] == 1


def test_only_attributes_of_researchers_are_saved_of_their_data_module() -> None:
    owner = type("Own", (DataModule,), {})(global_batch_size=8)
    owner._told = 1
    fields = dict(holder_fields.unsaved_fields("DataModule", owner))
    assert fields["_told"] == 1 and not fields.keys() & holder_fields.DATA_MODULE_ATTRIBUTES


def test_the_parameters_of_an_lstm_are_no_attributes_of_it() -> None:
    """Where fsdp restores them, torch's own list of them holds weak references, which no checkpoint can hold."""
    lstm = nn.LSTM(2, 2)
    assert vars(lstm).keys() >= holder_fields.RNN_WEIGHTS  # as this version of torch names them
    lstm._flat_weight_refs = [None]
    names = [name for name, _ in holder_fields.unsaved_fields("module lstm", lstm)]
    assert "hidden_size" in names and not holder_fields.RNN_WEIGHTS & set(names)
