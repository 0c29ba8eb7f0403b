"""Check what some work changes in attributes: named where a batch is made, put back where loaders are only checked."""

import math
from typing import Any

import numpy as np
import torch
from test_attributes import Whole, trained

from hpc.state import attributes
from hpc.state.batch_effects import OF_ALL, BatchEffects


def running() -> tuple[Any, Any]:
    module: Any = Whole()
    module.register_buffer("places", torch.zeros(2))
    module.seen, module.nan, module.generator = 0, math.nan, np.random.default_rng(1)
    module.sizes, module.long = {"train": [3, 4], "val": [5]}, [0] * 2000
    module.ring = [1]
    module.ring.append(module.ring)  # leads to itself
    trainer = trained(module)
    trainer.training, trainer.current_epoch, trainer.lightning_module = True, 0, module
    return trainer, module


def test_what_changes_as_a_batch_is_made_is_named_once() -> None:
    trainer, module = running()
    effects = BatchEffects(trainer)
    for number in range(3):
        with effects.watch(OF_ALL):
            module.sizes["train"].append(number)
            module.generator.normal()
            if number == 2:  # attributes are looked up at the first batches, and compared at all of them
                module.seen, module.places[1] = 1, 0.2
    named: set[str] = set()
    effects.print_names(named)
    assert named == {"sizes", "generator", "seen", "places"}


def test_attributes_are_put_back_to_what_they_were_before_some_work() -> None:
    trainer, module = running()
    before = attributes.small_values(trainer, module, owners=OF_ALL)
    module.seen, module.places[1], module.ring[0] = 1, 0.2, 2
    module.sizes["train"].pop()
    drawn = module.generator.normal()
    changed = attributes.differing(before, attributes.small_values(trainer, module, owners=OF_ALL))
    assert sorted(name for _, name, _ in changed) == ["generator", "places", "seen", "sizes"]
    attributes.restore_silently(trainer, module, changed=changed)
    assert (module.seen, module.places.tolist(), module.sizes["train"]) == (0, [0, 0], [3, 4])
    assert module.generator.normal() == drawn
