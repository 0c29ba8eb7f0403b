"""Parameters that a module freezes when training starts and releases later: all ranks must train them together."""

from collections.abc import Collection
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from torch import nn


class TracksUnfrozenParameters:
    """Mixin for a strategy of several ranks that decides at its setup whose gradients the ranks sum.

    Attributes:
        frozen: parameters by name that have been frozen ever since training started; None: it is just starting.
        frozen_before: names of those in the run that is resumed; None: nothing is resumed.
    """

    lightning_module: Any
    frozen: dict[str, nn.Parameter] | None = None
    frozen_before: Collection[str] | None = None

    def on_unfrozen(self, names: list[str]) -> None:
        """Train these parameters from now on, on all ranks.

        Called at setup with all trainable parameters, then before a step with parameters that become trainable for the
        first time.
        """
        raise NotImplementedError

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)  # type: ignore[misc]
        if trainer.state.fn == TrainerFn.FITTING:
            named, self.frozen = dict(self.lightning_module.named_parameters()), None
            self.on_unfrozen([name for name, parameter in named.items() if parameter.requires_grad])
            names = named if self.frozen_before is None else self.frozen_before
            self.frozen = {name: p for name, p in named.items() if not p.requires_grad and name in names}

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.note_unfrozen()
        return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def note_unfrozen(self) -> None:
        """Call `on_unfrozen` with the parameters that are trained from this step on."""
        if released := [name for name, parameter in (self.frozen or {}).items() if parameter.requires_grad]:
            self.on_unfrozen(released)  # which may find others that are frozen now
            self.frozen = {name: p for name, p in (self.frozen or {}).items() if not p.requires_grad}

    def frozen_to_save(self) -> list[str]:
        """Return the names in `frozen` of parameters that no other has replaced in the module."""
        named = dict(self.lightning_module.named_parameters())
        return sorted(name for name, parameter in (self.frozen or {}).items() if named.get(name) is parameter)

    def unfrozen_in_this_step(self) -> list[nn.Parameter]:
        """Return the parameters that have been released since this step began."""
        return [parameter for parameter in (self.frozen or {}).values() if parameter.requires_grad]
