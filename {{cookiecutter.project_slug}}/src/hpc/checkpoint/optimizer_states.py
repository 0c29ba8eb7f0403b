"""Optimizers' states, named as the parameters are, as another strategy numbers these otherwise.

torch.distributed.checkpoint.state_dict makes a state that is missing by a step of the optimizer. That changes weights
where a learning rate of 0 does not keep them (decoupled weight decay), fails where a step wants a closure, and makes
states for parameters that have none as they had no gradient so far. So here a checkpoint says which states there are.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from hpc.checkpoint import safe_unpickle, weights
from hpc.config.errors import ConfigError

State = dict[str, dict[str, Any]]  # what an optimizer keeps of a parameter, by the parameter's name and its own


def named(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """As `optimizer.state_dict()`, with names in place of numbers; also of optimizers that it has in itself."""
    names: dict[Any, str] = {parameter: weights.bare(name) for name, parameter in module.named_parameters()}
    state: dict[Any, Any] = optimizer.state
    beside = {key: value for key, value in state.items() if not isinstance(key, Tensor)}  # a number of steps, say
    groups = [group | {"params": [names[one] for one in group["params"]]} for group in optimizer.param_groups]
    return {
        # In an order that is the same after a resume, so that the same state is the same bytes.
        "state": {name: dict(sorted(state[one].items())) for one, name in names.items() if one in state},
        "kind": type(optimizer).__qualname__,
        "beside": beside,
        "on_device": [key for key, value in beside.items() if not _is_on_host(value)],
        "param_groups": groups,
        "inner": [named(module, one) for one in _inner(optimizer)],
    }


def split(name: str, saved: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `named` has returned: the tensors, by the name of their optimizer, and the rest."""
    state, inner = saved["state"], []
    of_tensors = {
        one: {key: value for key, value in of.items() if isinstance(value, Tensor)} for one, of in state.items()
    }
    rest = {one: {key: value for key, value in of.items() if key not in of_tensors[one]} for one, of in state.items()}
    tensors: dict[str, Any] = {name: {"state": of_tensors}}
    for number, one in enumerate(saved["inner"]):
        its, others = split(f"{name}_{number}", one)
        tensors |= its
        inner.append(others)
    return tensors, {**saved, "state": {one: of for one, of in rest.items() if of}, "inner": inner}


def restore(module: nn.Module, optimizer: Optimizer, name: str, saved: Mapping[str, Any], path: Path) -> None:
    """Give an optimizer the state that it had.

    Args:
        name: which of the run's optimizers it is.
        saved: the rest, see `split`.
        path: the checkpoint, which has the tensors.

    Raises:
        ConfigError: the checkpoint is damaged, of another kind of optimizer, or has parameters that the module lacks.
    """
    parameters = {weights.bare(name): parameter for name, parameter in module.named_parameters()}
    if (kind := type(optimizer).__qualname__) != saved["kind"]:
        rule = f"an optimizer must be of the kind that it was when the checkpoint was made: {saved['kind']}"
        raise ConfigError("model.optimizer", kind, rule, f"{saved['kind']}, made in configure_optimizers, or a new run")
    _grow(optimizer, saved["param_groups"], parameters)
    state = _tensors(parameters, name, path)
    dtypes = {(one, key): value.dtype for one, of in state.items() for key, value in of.items()}
    for one, of in saved["state"].items():
        state.setdefault(one, {}).update(of)
    groups = _groups(optimizer, saved, parameters)
    _load(optimizer, {parameters[one]: of for one, of in state.items()}, groups, _beside(saved, parameters))
    for one in state:  # torch has cast all of it to the parameter's dtype
        own = optimizer.state[parameters[one]]
        own.update({key: value.to(dtypes[one, key]) for key, value in own.items() if (one, key) in dtypes})
    for number, (one, its) in enumerate(zip(_inner(optimizer), saved["inner"], strict=False)):
        groups = one.param_groups  # it may share them with the one that it is in
        restore(module, one, f"{name}_{number}", its, path)
        for group, new in zip(groups, one.param_groups, strict=True):
            group.update(new)
        one.param_groups = groups


def _inner(optimizer: Optimizer) -> list[Optimizer]:
    """Such as SAM has, which takes two steps."""
    inside = [one for one in vars(optimizer).values() if isinstance(one, Optimizer)]
    return [one for one in inside if one.state is not optimizer.state]


def _grow(optimizer: Optimizer, groups: list[dict[str, Any]], parameters: Mapping[str, nn.Parameter]) -> None:
    """Groups that were added while the run trained are added here, too."""
    known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for group in groups:
        if unknown := [name for name in group["params"] if name not in parameters]:
            rule = "an optimizer's groups must be of parameters that the model has"
            raise ConfigError("model.optimizer", ", ".join(unknown[:3]), rule, "the model that the run had")
        those = [parameters[name] for name in group["params"]]
        if those and known.isdisjoint(those):
            optimizer.add_param_group(group | {"params": those})


def _tensors(parameters: Mapping[str, nn.Parameter], optimizer: str, path: Path) -> State:
    found: State = {}
    for full, entry in safe_unpickle.described(path).state_dict_metadata.items():
        if not full.startswith(f"{optimizer}.state.") or not isinstance(entry, TensorStorageMetadata):
            continue
        of = full.removeprefix(f"{optimizer}.state.")
        name = max((name for name in parameters if of.startswith(f"{name}.")), key=len)
        found.setdefault(name, {})[of.removeprefix(f"{name}.")] = _empty(parameters[name], entry)
    with safe_unpickle.rejections(path, "resume"):
        load_tensors({optimizer: {"state": found}}, storage_reader=safe_unpickle.Reader(path))
    return found


def _empty(parameter: nn.Parameter, entry: TensorStorageMetadata) -> Tensor:
    """Shared out as the optimizer would have made it: like the parameter, or of another shape."""
    dtype = entry.properties.dtype
    if entry.size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if isinstance(parameter, DTensor) and entry.size.numel() > 1:
        return parameter.detach().new_empty(entry.size, dtype=dtype)
    return torch.empty(entry.size, dtype=dtype)


def _groups(optimizer: Optimizer, saved: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> list[dict]:
    """For each group of now what was set for its first parameter."""
    of = {parameters[name]: group for group in saved["param_groups"] for name in group["params"]}
    return [of[now["params"][0]] if now["params"] and now["params"][0] in of else now for now in optimizer.param_groups]


def _beside(saved: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> dict[Any, Any]:
    """What belongs to no parameter, where it was: on the host, or where parameters are."""
    device = next(iter(parameters.values())).device
    return {
        key: tree_map_only(Tensor, lambda one: one.to(device), value) if key in saved["on_device"] else value
        for key, value in saved["beside"].items()
    }


def _is_on_host(value: Any) -> bool:
    return all(one.device.type == "cpu" for one in tree_leaves(value) if isinstance(one, Tensor))


def _load(optimizer: Optimizer, state: Mapping[nn.Parameter, Any], groups: list[dict], beside: dict[Any, Any]) -> None:
    """torch moves each state to where its parameter is, and numbers parameters."""
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = {parameter: number for number, parameter in enumerate(order)}
    shares = [[numbers[one] for one in group["params"]] for group in optimizer.param_groups]
    optimizer.load_state_dict(
        {
            "state": {numbers[parameter]: dict(of) for parameter, of in state.items()} | beside,
            "param_groups": [group | {"params": share} for group, share in zip(groups, shares, strict=True)],
        }
    )
