"""Gradients and losses of all ranks, before anything reads them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS


class CompletesGradients:
    """Mixin for a strategy of several ranks that averages by itself the gradients which DDP or FSDP leaves alone.

    Lightning calls `on_after_backward` before the strategy's own `post_backward`, and there people look at gradients,
    or change them.
    """

    lightning_module: Any
    precision_plugin: Any
    share: float

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Do the same as in Lightning, but let the hooks after backward find the gradients of all ranks."""
        module, precision = self.lightning_module, self.precision_plugin
        self.pre_backward(closure_loss)  # type: ignore[attr-defined]
        closure_loss = precision.pre_backward(closure_loss, module)
        precision.backward(closure_loss, module, optimizer, *args, **kwargs)
        self.complete_gradients()
        closure_loss = precision.post_backward(closure_loss, module)
        self.post_backward(closure_loss)  # type: ignore[attr-defined]
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Give an optimizer that decides by the loss how far to go that of all ranks, so that all go equally far."""

        def mean_loss() -> Any:
            loss = closure()
            if loss is None:
                return None
            tensor = torch.as_tensor(loss, device=self.lightning_module.device).detach()  # it may be a number
            return self.reduce(tensor * self.share)  # type: ignore[attr-defined]

        reads_loss = isinstance(optimizer, LBFGS)
        return super().optimizer_step(optimizer, mean_loss if reads_loss else closure, *args, **kwargs)  # type: ignore[misc]

    def complete_gradients(self) -> None:
        """Average over the ranks what nothing else has averaged. Called on all ranks after each backward."""
