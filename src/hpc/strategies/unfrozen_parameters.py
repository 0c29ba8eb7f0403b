"""Parameters that a module freezes when training starts and releases later: all ranks must train them together."""

from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from torch import nn


class TracksUnfrozenParameters:
    """Mixin for a strategy of several ranks that decides at its setup whose gradients the ranks sum.

    Attributes:
        frozen: parameters by name that have been frozen ever since training started; None: it is just starting.
    """

    lightning_module: Any
    frozen: dict[str, nn.Parameter] | None = None

    def on_unfrozen(self, names: list[str]) -> None:
        """Train these parameters from now on, on all ranks.

        Called at setup with all trainable parameters, then before a step with parameters that become trainable for the
        first time.
        """
        raise NotImplementedError

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)  # type: ignore[misc]
        if trainer.state.fn == TrainerFn.FITTING:
            parameters, self.frozen = dict(self.lightning_module.named_parameters()), None
            self._register_unfrozen(parameters)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._register_unfrozen(self.frozen or {})
        return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def unfrozen_in_this_step(self) -> list[nn.Parameter]:
        """Return the parameters that have been released since this step began."""
        return [parameter for parameter in (self.frozen or {}).values() if parameter.requires_grad]

    def _register_unfrozen(self, candidates: dict[str, nn.Parameter]) -> None:
        """Report those of the candidates that are trained now, and remember the others as frozen."""
        if released := [name for name, parameter in candidates.items() if parameter.requires_grad]:
            self.on_unfrozen(released)
        if released or self.frozen is None:
            rest = candidates if self.frozen is None else self.frozen  # `on_unfrozen` may have added some
            self.frozen = {name: parameter for name, parameter in rest.items() if not parameter.requires_grad}
