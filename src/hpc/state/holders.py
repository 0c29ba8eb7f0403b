"""Find the objects that keep attributes in a run, each under a name that is the same in every attempt.

These are the module, its parts and parameters, the DataModule, datasets, the objects that collate their samples, and
callbacks of the researcher's own. In their attributes, also within lists and dicts, are further ones: objects of the
researcher's own classes, networks that no checkpoint has (an average, say), and objects with a `state_dict`, as an
optimizer that the module steps by itself. The name of a further object ends with its class, so that nothing is ever put
into an object of another class.
"""

from collections import Counter, deque
from collections.abc import Iterator
from enum import Enum
from types import SimpleNamespace
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from torch import Tensor, nn
from torchmetrics import Metric

from hpc.checkpoint import weights
from hpc.config.project import HPC, researcher_packages
from hpc.state import checksums, plain_forms
from hpc.state.holder_fields import DATASET, SAVED, has_state_dict, slots, unsaved_fields

SIMPLE_TYPES = {bool, int, float, str, type(None), Tensor}
DATA, COLLATE = "DataModule", "collate "  # beginnings of names, as are DATASET and SAVED
MAX_ENTRIES, MAX_DEPTH = 1000, 10  # a longer or deeper container is one value
VIEW = "a view of a weight"


def find_holders(trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
    """Return all objects that keep attributes, by their names; first those that Lightning knows."""
    found = dict(_lightning_holders(trainer, module))
    queue, seen = deque(found.items()), {id(holder) for holder in found.values()}
    while queue:
        owner_name, owner = queue.popleft()
        for name, value in unsaved_fields(owner_name, owner) if not has_state_dict(owner) else ():
            for path, holder in _holders_in(f"{owner_name}/{name}", value):
                for part_name, part in _network_parts(path, holder).items():
                    if id(part) not in seen:
                        seen.add(id(part))
                        found[part_name] = part
                        queue.append((part_name, part))
    return found


def _network_parts(name: str, holder: Any) -> dict[str, Any]:
    """Return an object by its name and, if it is a network, the parts of it by theirs."""
    if not isinstance(holder, nn.Module):
        return {name: holder}
    parts = holder.named_modules()
    return {f"{name}/{path} ({type(part).__qualname__})" if path else name: part for path, part in parts}


class HolderNames:
    """The names of a run's objects: of those that keep attributes, and `VIEW` for another view of a weight."""

    def __init__(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.holders = find_holders(trainer, module)
        self._names = {id(holder): name for name, holder in self.holders.items()}
        buffers = [
            buffer
            for part in module.modules()
            if not isinstance(part, Metric)  # whose buffers are each rank's own
            for name, buffer in part._buffers.items()
            if buffer is not None and name not in part._non_persistent_buffers_set  # torch says it nowhere else
        ]
        self._weight_addresses = {_storage_address(tensor) for tensor in (*module.parameters(), *buffers)} - {0}

    def get(self, value: Any) -> str | None:
        """Return the name of an object; None if it has none."""
        name = self._names.get(id(value))
        is_view = name is None and isinstance(value, Tensor) and _storage_address(value) in self._weight_addresses
        return VIEW if is_view else name


def root_owner(owner_name: str) -> str:
    """Return the name of the object that Lightning knows and in which this one was found."""
    return owner_name.partition("/")[0]


def shown_name(owner_name: str, name: str) -> str:
    """Return the attribute name to print: that of the outermost object."""
    return owner_name.split("/")[1].partition(" (")[0] if "/" in owner_name else name


def _lightning_holders(trainer: L.Trainer, module: L.LightningModule) -> Iterator[tuple[str, Any]]:
    """Yield the objects that Lightning knows. Callbacks of libraries save themselves; progress bars keep no state."""
    yield from ((f"{SAVED}optimizer {number}", optimizer) for number, optimizer in enumerate(trainer.optimizers))
    schedules = (config.scheduler for config in trainer.lr_scheduler_configs)
    yield from ((f"{SAVED}schedule {number}", schedule) for number, schedule in enumerate(schedules))
    yield from ((f"module {name}", part) for name, part in module.named_modules())
    yield from ((f"parameter {name}", parameter) for name, parameter in module.named_parameters())
    data: Any = getattr(trainer, "datamodule", None)
    if data is not None:
        yield DATA, data
    loaders = trainer.fit_loop._combined_loader
    for number, loader in enumerate(loaders.flattened if loaders is not None else []):
        if hasattr(dataset := getattr(loader, "dataset", None), "__dict__"):
            yield f"{DATASET}{number}", dataset
        collate = getattr(loader, "collate_fn", None)
        if is_holder(collate := getattr(collate, "__self__", collate)):
            yield f"{COLLATE}{number}", collate
    counts = Counter[str]()
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        kind = type(callback)
        if not kind.__module__.startswith(("lightning.", f"{HPC}.")) and not isinstance(callback, ProgressBar):
            counts[kind.__qualname__] += 1
            yield f"callback {kind.__qualname__} {counts[kind.__qualname__]}", callback


def _holders_in(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield a value, or its entries, that keep attributes."""
    if type(value) in SIMPLE_TYPES:
        return
    if is_holder(value):
        yield f"{name} ({type(value).__qualname__})", value
    elif isinstance(value, dict | list | tuple | deque) and len(value) <= MAX_ENTRIES and depth < MAX_DEPTH:
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            if type(entry) not in SIMPLE_TYPES:
                yield from _holders_in(f"{name}[{key!r}]", entry, depth + 1)


def is_holder(value: Any) -> bool:
    """Return whether the attributes of an object are saved one by one."""
    kind = type(value)
    if isinstance(value, (Enum, BaseException, tuple, *checksums.BY_IDENTITY)):
        return False
    if isinstance(value, nn.Module | nn.Parameter | SimpleNamespace) or has_state_dict(value):
        return True
    if isinstance(value, dict | list | set | deque):
        return kind not in plain_forms.CONTAINERS
    is_own_class = kind.__module__.partition(".")[0] in researcher_packages()
    return is_own_class and (hasattr(value, "__dict__") or bool(slots(value)))


def _storage_address(tensor: Tensor) -> int:
    try:
        return weights.storage_address(tensor)
    except (RuntimeError, NotImplementedError):  # a sparse tensor has none
        return 0
