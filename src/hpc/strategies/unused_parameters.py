"""Parameters that a training step leaves unused: DDP fails in the second step, unless it looks for them in each."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed import all_reduce

from hpc.config.errors import ConfigError, join_names
from hpc.privates.lightning import ddp_options
from hpc.privates.torch import require_reduced_gradients


class FindsUnusedParameters:
    """Mixin for DDP, which lets the first training step with a real batch show whether parameters are left unused.

    In that step the gradients are averaged here. Only a module that leaves some unused pays for looking for them. One
    that optimizes by itself does so in each of its backward passes.

    Attributes:
        unused: names of trainable parameters that had no gradient in that step on some rank; None: it was not done yet.
        wrapped: the parameters that DDP takes care of: those that were trained when it was made.
        wrapped_names: their names at that time.
        wrapped_before: these in the run that is resumed, to be wrapped again: on more than two ranks, the sums of
            gradients depend on which parameters are added up together.
    """

    lightning_module: Any
    model: Any
    world_size: int
    unused: list[str] | None = None
    wrapped: Sequence[nn.Parameter] = ()
    wrapped_names: Collection[str] = ()
    wrapped_before: Collection[str] = ()
    _is_first_step = False
    _trained: Mapping[str, nn.Parameter] = MappingProxyType({})  # in that step

    def configure_ddp(self) -> None:
        if not self.lightning_module.automatic_optimization:
            self.unused = self.unused or ["what its other backward passes train"]
        if ddp_options(self).keys() & {"find_unused_parameters", "static_graph"}:
            self.unused = self.unused or []  # the config decides
        elif self.unused:
            ddp_options(self)["find_unused_parameters"] = True
            if self.lightning_module.trainer.is_global_zero:
                note = "DDP looks for unused parameters in each step, as the module's steps leave unused"
                print(f"train: {note} {join_names(self.unused)}", flush=True)
        named = list(self.lightning_module.named_parameters())
        frozen = [p for name, p in named if not p.requires_grad and name in self.wrapped_before]
        for parameter in frozen:
            parameter.requires_grad = True
        self.wrapped = [parameter for _, parameter in named if parameter.requires_grad]
        self.wrapped_names, self.wrapped_before = [name for name, parameter in named if parameter.requires_grad], ()
        super().configure_ddp()  # type: ignore[misc]
        for parameter in frozen:
            parameter.requires_grad = False

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.model.require_backward_grad_sync:  # of batches that are accumulated, DDP would reduce this one alone
            self._wrap_to_look()  # an earlier call of this step's closure may have left some unused
        self._is_first_step = self.unused is None and self.model.require_backward_grad_sync
        if not self._is_first_step:
            return super().training_step(*args, **kwargs)  # type: ignore[misc]
        self._trained = {name: p for name, p in self.lightning_module.named_parameters() if p.requires_grad}
        self.model.require_backward_grad_sync = False  # read by the forward of DDP, and by nothing after it
        outputs = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self.model.require_backward_grad_sync = True
        return outputs

    def complete_gradients(self) -> None:
        if self._is_first_step:
            self._is_first_step = False
            # Of all, as an earlier batch of this step may have left gradients of what is frozen now, on some ranks.
            unused = self.average_gradients({**dict(self.lightning_module.named_parameters()), **self._trained})
            self.unused = [name for name in self._trained if name in unused]
            self._trained = {}
        elif getattr(self.model, "require_backward_grad_sync", False):  # there is no DDP in an evaluation
            self._reject_unfinished()
        super().complete_gradients()  # type: ignore[misc]

    def _reject_unfinished(self) -> None:
        """Raise `ConfigError` if DDP still waits for gradients, so that it has not averaged those that there are."""
        try:
            require_reduced_gradients(self.model)
        except RuntimeError:
            if self.model.find_unused_parameters:
                raise
            named = self.lightning_module.named_parameters()
            names = [name for name, p in named if p.requires_grad and p.grad is None]
            rule = "With strategy=ddp, each step must use all parameters that the first step has used, on all ranks; "
            rule += "on this rank it has left some unused"
            fix = "+strategy.lightning.find_unused_parameters=true"
            raise ConfigError("model", join_names(names) or None, rule, fix, only_this_rank=True) from None

    def before_step(self) -> None:
        super().before_step()  # type: ignore[misc]
        self._wrap_to_look()

    def _wrap_to_look(self) -> None:
        """Wrap the module anew if the first step has left parameters unused, for which DDP does not look yet."""
        is_configured = ddp_options(self).keys() & {"find_unused_parameters", "static_graph"}
        if self.unused and not is_configured and not self.model.find_unused_parameters:
            self._wrap_again()

    def newly_frozen(self) -> list[str]:
        """Return the parameters that are frozen now, and of which DDP waits for gradients."""
        if ddp_options(self).keys() & {"find_unused_parameters", "static_graph"}:
            return []  # it waits for none, or the config decides
        if all(parameter.requires_grad for parameter in self.wrapped):
            return []
        wrapped, named = set(map(id, self.wrapped)), self.lightning_module.named_parameters()
        return [name for name, p in named if id(p) in wrapped and not p.requires_grad]

    def _wrap_again(self) -> None:
        raise NotImplementedError

    def average_gradients(self, parameters: Mapping[str, nn.Parameter]) -> set[str]:
        """Average gradients over the ranks. Return the names of those parameters that have none on some of them."""
        has_gradient = [parameter.grad is not None for parameter in parameters.values()]
        num_ranks = torch.tensor(has_gradient, device=self.lightning_module.device).int()
        all_reduce(num_ranks)
        num_ranks_of = dict(zip(parameters, num_ranks.tolist(), strict=True))
        for name in [name for name in parameters if num_ranks_of[name]]:
            parameter = parameters[name]
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
            all_reduce(gradient.div_(self.world_size))
            parameter.grad = gradient
        return {name for name in parameters if num_ranks_of[name] < self.world_size}
