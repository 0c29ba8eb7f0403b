"""Parameters that a training step does not use: DDP fails in the second step, unless it looks for them in each."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.seed import isolate_rng

from hpc.data.even_batches import suppressed
from hpc.state import checksums, plain_forms


def find_unused_parameters(module: L.LightningModule, batch: Any, batch_idx: int) -> list[str]:
    """Return the names of trainable parameters that a step leaves without a gradient on some rank.

    The step is one of training with a real batch. It is done once more for this: neither weights, buffers, random
    numbers, metrics nor plain attributes of the module change, and nothing is logged.

    Args:
        batch: the first one, on the device.
    """
    trainer: Any = module.trainer
    arguments = trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, batch_idx)  # as Lightning's own loop
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    with isolate_rng(), suppressed(module), _restored(module):
        with trainer.precision_plugin.train_step_context():
            outputs = module.training_step(*arguments.values())
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:  # this batch is skipped
            is_used = torch.ones(len(named))
        else:
            gradients = torch.autograd.grad(loss.sum(), list(named.values()), allow_unused=True)
            is_used = torch.tensor([float(gradient is not None) for gradient in gradients])
    is_used = is_used.to(module.device)
    dist.all_reduce(is_used, dist.ReduceOp.MIN)
    return [name for name, used in zip(named, is_used.tolist(), strict=True) if not used]


@contextmanager
def _restored(module: L.LightningModule) -> Iterator[None]:
    """Restore what a step may have changed: buffers, weights that are not trained, and plain attributes of parts."""
    tensors = [*module.buffers(), *(parameter for parameter in module.parameters() if not parameter.requires_grad)]
    copies = [tensor.detach().clone() for tensor in tensors]
    attributes = []
    for part in module.modules():
        for name, value in plain_forms.attributes_with_plain_form(part).items():
            with suppress(TypeError, RecursionError):  # it has no plain form after all
                attributes.append((part, name, plain_forms.to_plain(value), checksums.fingerprint(value)))
    yield
    with torch.no_grad():
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)
    for part, name, form, before in attributes:
        if name in vars(part) and checksums.fingerprint(vars(part)[name]) != before:
            plain_forms.set_attribute(part, name, form=form)
