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
    followed: tuple[nn.Parameter, ...] = ()  # none before training begins
    _names: tuple[str, ...] = ()
    _trained: list[bool]

    def released(self, names: list[str]) -> None:
        """Called on all ranks with what is trained as training begins; then before a step that first trains others."""
        raise NotImplementedError

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)  # type: ignore[misc]
        if trainer.state.fn == TrainerFn.FITTING:
            self._trained = []
            self._follow()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if [parameter.requires_grad for parameter in self.followed] != self._trained:
            self._follow()
        return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def _follow(self) -> None:
        names, weights = zip(*self.lightning_module.named_parameters(), strict=True)
        trained = [weight.requires_grad for weight in weights]
        before = {name for name, one in zip(self._names, self._trained, strict=False) if one}
        if new := [name for name, one in zip(names, trained, strict=True) if one and name not in before]:
            self.released(new)
        self._names, self.followed, self._trained = names, weights, trained
