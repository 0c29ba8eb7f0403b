"""What a module freezes as training begins and releases later: on several ranks all must train it together."""

from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

SHOWN = 4  # names of parameters


def shown(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


class FollowsReleased:
    """For a strategy of several ranks, which decides as it is set up whose gradients they sum."""

    lightning_module: Any
    alone: dict[str, nn.Parameter] | None = None  # what ranks have not trained together yet; None: training begins

    def released(self, names: list[str]) -> None:
        """Called on all ranks with what is trained as training begins; then before a step that first trains others.

        What was trained before, and is frozen and released again, is none of these.
        """
        raise NotImplementedError

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)  # type: ignore[misc]
        if trainer.state.fn == TrainerFn.FITTING:
            weights, self.alone = dict(self.lightning_module.named_parameters()), None
            self._follow(weights)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._follow(self.alone or {})
        return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def trained_alone(self) -> list[nn.Parameter]:
        """What has been released since this step began."""
        return [weight for weight in (self.alone or {}).values() if weight.requires_grad]

    def _follow(self, alone: dict[str, nn.Parameter]) -> None:
        if new := [name for name, weight in alone.items() if weight.requires_grad]:
            self.released(new)
        if new or self.alone is None:
            left = alone if self.alone is None else self.alone
            self.alone = {name: weight for name, weight in left.items() if not weight.requires_grad}
