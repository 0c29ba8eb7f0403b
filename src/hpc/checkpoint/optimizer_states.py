"""States of optimizers by the names of parameters, as another strategy numbers the parameters otherwise.

torch.distributed.checkpoint.state_dict (torch 2.13) creates missing states by a step with a learning rate of 0. Some
optimizers change weights even then, some need a closure for a step, and parameters that have had no gradient so far get
a state. So here the checkpoint says which states there are.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from hpc.checkpoint import safe_unpickle, weights
from hpc.config.errors import ConfigError

States = dict[str, dict[str, Any]]  # by the name of a parameter, then by the name of a state
# In the state of a schedule, what has a value for each group of parameters.
OF_GROUPS = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")


def state_by_name(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return `optimizer.state_dict()` with names in place of numbers; also of optimizers inside of the optimizer.

    Of one that keeps its state in another way it is returned as it is, and fits where no rank has only a part of it.
    """
    if keeps_whole_state(optimizer):
        nothing: dict[str, Any] = {"state": {}, "beside": {}, "on_device": [], "param_groups": [], "inner": []}
        return nothing | {"kind": type(optimizer).__qualname__, "whole": optimizer.state_dict()}
    names: dict[Any, str] = {
        parameter: weights.without_compile_prefix(name) for name, parameter in module.named_parameters()
    }
    state: dict[Any, Any] = optimizer.state
    beside = {key: value for key, value in state.items() if not isinstance(key, Tensor)}  # a number of steps, say
    groups = [
        group | {"params": [names[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    return {
        # Sorted, so that the same state is the same bytes after a resume.
        "state": {
            name: dict(sorted(state[parameter].items())) for parameter, name in names.items() if parameter in state
        },
        "kind": type(optimizer).__qualname__,
        "beside": beside,
        "on_device": [key for key, value in beside.items() if not _is_on_host(value)],
        "param_groups": groups,
        "inner": [state_by_name(module, inner) for inner in _inner_optimizers(optimizer)],
    }


def split_tensors(name: str, saved: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the result of `state_by_name` into the tensors, by the name of their optimizer, and the rest."""
    tensors: States = {}
    rest: States = {}
    for parameter, states in saved["state"].items():
        tensors[parameter] = {key: value for key, value in states.items() if isinstance(value, Tensor)}
        if others := {key: value for key, value in states.items() if not isinstance(value, Tensor)}:
            rest[parameter] = others
    by_optimizer: dict[str, Any] = {name: {"state": tensors}}
    rest_of_inner = []
    for number, inner in enumerate(saved["inner"]):
        inner_tensors, inner_rest = split_tensors(f"{name}_{number}", inner)
        by_optimizer |= inner_tensors
        rest_of_inner.append(inner_rest)
    return by_optimizer, {**saved, "state": rest, "inner": rest_of_inner}


def restore(module: nn.Module, optimizer: Optimizer, *, name: str, saved: Mapping[str, Any], path: Path) -> None:
    """Give an optimizer the state that it had.

    Args:
        name: which of the run's optimizers it is.
        saved: the rest, see `split_tensors`.
        path: the checkpoint, which has the tensors.

    Raises:
        ConfigError: the checkpoint is damaged, of another kind of optimizer, or has parameters that the module lacks.
    """
    parameters = {weights.without_compile_prefix(name): parameter for name, parameter in module.named_parameters()}
    if (kind := type(optimizer).__qualname__) != saved["kind"]:
        rule = f"must be {saved['kind']}, as it was when the checkpoint was made"
        fix = f"{saved['kind']}, made in configure_optimizers, or a new run"
        raise ConfigError("the optimizer", kind, rule, fix)
    if "whole" in saved:
        optimizer.load_state_dict(saved["whole"])
        return
    _add_missing_groups(optimizer, saved["param_groups"], parameters=parameters)
    states = _read_tensors(parameters, name, path=path)
    dtypes = {(parameter, key): value.dtype for parameter, state in states.items() for key, value in state.items()}
    for parameter, state in saved["state"].items():
        states.setdefault(parameter, {}).update(state)
    groups = _match_saved_groups(optimizer, saved, parameters=parameters)
    state_of = {parameters[parameter]: state for parameter, state in states.items()}
    _load_state_dict_by_index(optimizer, state_of, groups=groups, beside=_global_optimizer_state(saved, parameters))
    for parameter in states:  # torch has cast all of it to the parameter's dtype
        own = optimizer.state[parameters[parameter]]
        own.update({key: value.to(dtypes[parameter, key]) for key, value in own.items() if (parameter, key) in dtypes})
    for number, (inner, state) in enumerate(zip(_inner_optimizers(optimizer), saved["inner"], strict=False)):
        groups = inner.param_groups  # it may share them with the optimizer that it is in
        restore(module, inner, name=f"{name}_{number}", saved=state, path=path)
        for group, new in zip(groups, inner.param_groups, strict=True):
            group.update(new)
        inner.param_groups = groups


def match_groups(lists: list[list[Any]], module: nn.Module, optimizer: Optimizer, *, saved: Mapping[str, Any]) -> None:
    """Change lists in place: from a value for each saved group to one for each present group of the optimizer.

    Tensor parallelism splits groups, so a run that moves to it or from it has other groups than were saved.
    """
    groups = saved["param_groups"]
    parameters = {weights.without_compile_prefix(name): parameter for name, parameter in module.named_parameters()}
    number_of = {parameters[name]: number for number, group in enumerate(groups) for name in group["params"]}
    first = [group["params"][0] for group in optimizer.param_groups if group["params"]]
    numbers = [number_of[parameter] for parameter in first if parameter in number_of]
    if numbers == list(range(len(groups))) or len(numbers) < len(optimizer.param_groups):
        return
    for values in lists:
        if len(values) == len(groups):
            values[:] = [values[number] for number in numbers]


def lists_of_groups(schedules: list[dict[str, Any]]) -> list[list[Any]]:
    """Return the lists, in the states of schedules, that have a value for each group of parameters."""
    found: list[list[Any]] = []
    for state in schedules:
        found += [state[key] for key in OF_GROUPS if isinstance(state.get(key), list)]
        found += lists_of_groups(state.get("_schedulers", []))  # of one after another
    return found


def keeps_whole_state(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has one state of all its parameters, or further state beside those of parameters."""
    return isinstance(optimizer, LBFGS) or bool(optimizer.state_dict().keys() - {"state", "param_groups"})


def _inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that an optimizer has in attributes, as SAM has, which takes two steps."""
    inner = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    return [value for value in inner if value.state is not optimizer.state]


def _add_missing_groups(
    optimizer: Optimizer, groups: list[dict[str, Any]], *, parameters: Mapping[str, nn.Parameter]
) -> None:
    """Add the groups that were added while the run trained."""
    existing = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for group in groups:
        if unknown := [name for name in group["params"] if name not in parameters]:
            rule = f"must have the parameters of the checkpoint's optimizer; it lacks {', '.join(unknown[:3])}"
            raise ConfigError("model", None, rule, "the model that the run had")
        members = [parameters[name] for name in group["params"]]
        if members and existing.isdisjoint(members):
            optimizer.add_param_group(group | {"params": members})


def _read_tensors(parameters: Mapping[str, nn.Parameter], optimizer: str, *, path: Path) -> States:
    """Read the tensors of an optimizer, each rank its part."""
    states: States = {}
    for full_name, entry in safe_unpickle.read_metadata(path).state_dict_metadata.items():
        if not full_name.startswith(f"{optimizer}.state.") or not isinstance(entry, TensorStorageMetadata):
            continue
        of_parameter = full_name.removeprefix(f"{optimizer}.state.")
        name = max((name for name in parameters if of_parameter.startswith(f"{name}.")), key=len)
        states.setdefault(name, {})[of_parameter.removeprefix(f"{name}.")] = _empty_like(parameters[name], entry)
    with safe_unpickle.convert_unpickling_errors(path, "resume"):
        load_tensors({optimizer: {"state": states}}, storage_reader=safe_unpickle.Reader(path))
    return states


def _empty_like(parameter: nn.Parameter, entry: TensorStorageMetadata) -> Tensor:
    """Return an empty state, sharded as the optimizer would have made it: like the parameter, or of another shape."""
    dtype = entry.properties.dtype
    if entry.size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if isinstance(parameter, DTensor) and entry.size.numel() > 1:
        return parameter.detach().new_empty(entry.size, dtype=dtype)
    return torch.empty(entry.size, dtype=dtype)


def _match_saved_groups(
    optimizer: Optimizer, saved: Mapping[str, Any], *, parameters: Mapping[str, nn.Parameter]
) -> list[dict]:
    """Return for each present group the saved one with its first parameter; the present one where there is none."""
    group_of = {parameters[name]: group for group in saved["param_groups"] for name in group["params"]}
    groups = optimizer.param_groups
    return [group_of.get(group["params"][0], group) if group["params"] else group for group in groups]


def _global_optimizer_state(saved: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> dict[Any, Any]:
    """Return the state that belongs to no parameter, on the host or on the parameters' device, as it was."""
    device = next(iter(parameters.values())).device
    return {
        key: tree_map_only(Tensor, lambda tensor: tensor.to(device), value) if key in saved["on_device"] else value
        for key, value in saved["beside"].items()
    }


def _is_on_host(value: Any) -> bool:
    return all(leaf.device.type == "cpu" for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _load_state_dict_by_index(
    optimizer: Optimizer, states: Mapping[nn.Parameter, Any], *, groups: list[dict], beside: dict[Any, Any]
) -> None:
    """Call `optimizer.load_state_dict`, which wants numbers of parameters and moves each state to its device."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = {parameter: number for number, parameter in enumerate(parameters)}
    members = [[numbers[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    optimizer.load_state_dict(
        {
            "state": {numbers[parameter]: dict(state) for parameter, state in states.items()} | beside,
            "param_groups": [group | {"params": params} for group, params in zip(groups, members, strict=True)],
        }
    )
