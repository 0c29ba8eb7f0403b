"""Values that hooks set on the Trainer while a run trains, and that optimizers keep in attributes.

Only changes since training began are saved: all else is in the config, which may say something else on a resume.
"""

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from hpc.checkpoint import weights
from hpc.state import checksums, plain_forms, restorable

CLIPPING = ("gradient_clip_val", "gradient_clip_algorithm")
LIMITS = tuple(f"limit_{stage}_batches" for stage in ("train", "val", "test"))
TRAINER_SETTINGS = (*CLIPPING, *LIMITS)
TRAINER = "trainer"
# Attributes that torch itself keeps on any optimizer; the last one is set by schedules.
TORCH_ATTRIBUTES = vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))])).keys() | {"_opt_called"}
InitialSettings = dict[tuple[str, str], tuple[Any, Any]]  # by owner and name: fingerprint and plain form
ChangedSettings = list[tuple[str, str, Any, Any]]  # owner, name, plain form when training began, plain form now


def record_initial(trainer: L.Trainer) -> InitialSettings:
    """Return the settings before training begins."""
    values = dict(_settings(trainer)).items()
    return {key: (checksums.fingerprint(value), plain_forms.to_plain_on_host(value)) for key, value in values}


def find_changed(trainer: L.Trainer, initial: InitialSettings) -> ChangedSettings:
    """Return the settings that are new or have changed since `record_initial`.

    In place of a value that has no plain form: `plain_forms.NOT_KEPT`.
    """
    absent = object(), plain_forms.NOT_KEPT
    return [
        (*key, initial.get(key, absent)[1], plain_forms.to_plain_on_host(value))
        for key, value in _settings(trainer)
        if initial.get(key, absent)[0] != checksums.fingerprint(value)
    ]


def restore(trainer: L.Trainer, changed: ChangedSettings) -> None:
    """Set the result of `find_changed`, but not where the config has another value for the Trainer now.

    Prints what cannot be restored.
    """
    owners, lost = dict(_owners(trainer)), []
    for owner, name, initial, form in changed:
        if owner not in owners or (owner == TRAINER and getattr(trainer, name, None) != initial):
            continue
        if name in TORCH_ATTRIBUTES or (owner == TRAINER and name not in TRAINER_SETTINGS):  # never saved: forged
            continue
        if form == plain_forms.NOT_KEPT:
            lost.append(f"{owner}.{name}")
        elif owner == TRAINER:
            setattr(trainer, name, plain_forms.from_plain(form, {"member": lambda _, key: GradClipAlgorithmType[key]}))
        else:
            restorable.set_attribute(owners[owner], name, form=form)
    if lost and trainer.is_global_zero:
        print(f"warning: a checkpoint cannot hold these, so they start anew: {', '.join(lost)}", flush=True)


def _settings(trainer: L.Trainer) -> Iterator[tuple[tuple[str, str], Any]]:
    addresses = {weights.storage_address(weight) for weight in trainer.lightning_module.parameters()} - {0}
    for owner_name, owner in _owners(trainer):
        if owner_name == TRAINER:
            values = {name: getattr(trainer, name) for name in TRAINER_SETTINGS}
        else:
            values = plain_forms.attributes_with_plain_form(owner)
        for name, value in values.items():
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            are_weights = not addresses.isdisjoint(map(weights.storage_address, tensors))
            if name not in TORCH_ATTRIBUTES and not are_weights:
                yield (owner_name, name), value


def _owners(trainer: L.Trainer) -> Iterator[tuple[str, Any]]:
    """Yield the Trainer and the optimizers, also those inside of others. DeepSpeed saves its own by itself."""
    yield TRAINER, trainer
    for number, optimizer in enumerate([] if isinstance(trainer.strategy, DeepSpeedStrategy) else trainer.optimizers):
        name = f"optimizer {number}"
        yield name, optimizer
        inner = {key: value for key, value in vars(optimizer).items() if isinstance(value, Optimizer)}
        yield from ((f"{name}.{key}", value) for key, value in inner.items())
