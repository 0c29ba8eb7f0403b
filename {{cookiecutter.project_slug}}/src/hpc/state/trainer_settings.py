"""Values that hooks set on the Trainer, and those that optimizers keep in attributes, while a run trains.

Only what has changed since training began is kept: the rest is what the config says, and says otherwise if it is typed.
"""

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from hpc.checkpoint import weights
from hpc.state import checksums, plain_forms

CLIPPING = ("gradient_clip_val", "gradient_clip_algorithm")
LIMITS = tuple(f"limit_{stage}_batches" for stage in ("train", "val", "test"))
TRAINER = "trainer"
Built = dict[tuple[str, str], tuple[Any, Any]]  # of an owner and a name: what tells a change, and the plain form
Changed = list[tuple[str, str, Any, Any]]  # owner, name, plain form when training began, plain form now


def built(trainer: L.Trainer) -> Built:
    """What is there before training begins."""
    return {place: (checksums.mark(value), plain_forms.kept(value)) for place, value in _all(trainer)}


def changed(trainer: L.Trainer, before: Built) -> Changed:
    """What is there now and was not in `built`, or was another; `forms.NOT_KEPT` for what has no plain form."""
    nothing = object(), plain_forms.NOT_KEPT
    return [
        (*place, before.get(place, nothing)[1], plain_forms.kept(value))
        for place, value in _all(trainer)
        if before.get(place, nothing)[0] != checksums.mark(value)
    ]


def restore(trainer: L.Trainer, state: Changed) -> None:
    """Set what `changed` returned, unless the config says something else of the Trainer now. Tells what cannot be."""
    owners, lost = dict(_owners(trainer)), []
    for owner, name, was, form in state:
        if owner not in owners or (owner == TRAINER and getattr(trainer, name) != was):
            continue
        if form == plain_forms.NOT_KEPT:
            lost.append(f"{owner}.{name}")
        else:
            plain_forms.put(owners[owner], name, form)
    if lost and trainer.is_global_zero:
        print(f"warning: these begin anew, as a checkpoint does not hold them: {', '.join(lost)}", flush=True)


def _all(trainer: L.Trainer) -> Iterator[tuple[tuple[str, str], Any]]:
    of_model = {weights.storage(one) for one in trainer.lightning_module.parameters()} - {0}
    for owner, one in _owners(trainer):
        values = plain_forms.data_of(one) if owner != TRAINER else {name: getattr(trainer, name) for name in NAMES}
        for name, value in values.items():
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            if name not in TORCHS and of_model.isdisjoint(map(weights.storage, tensors)):  # else these are weights
                yield (owner, name), value


def _owners(trainer: L.Trainer) -> Iterator[tuple[str, Any]]:
    """Also optimizers that others have in themselves; DeepSpeed saves all that its own have."""
    yield TRAINER, trainer
    for number, optimizer in enumerate([] if isinstance(trainer.strategy, DeepSpeedStrategy) else trainer.optimizers):
        name = f"optimizer {number}"
        yield name, optimizer
        inside = {key: one for key, one in vars(optimizer).items() if isinstance(one, Optimizer)}
        yield from ((f"{name}.{key}", one) for key, one in inside.items())


NAMES = (*CLIPPING, *LIMITS)
TORCHS = vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))])).keys() | {"_opt_called"}  # the last by schedules
