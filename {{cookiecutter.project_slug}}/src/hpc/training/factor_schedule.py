"""A learning-rate schedule that leaves alone what fine-tuning adds to the optimizer."""

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR


class FactorSchedule(LambdaLR):
    """A function's factors on the learning rates; groups that fine-tuning adds later keep the rate it gives them."""

    def get_lr(self) -> list[float | Tensor]:
        scheduled = super().get_lr()
        return [*scheduled, *(group["lr"] for group in self.optimizer.param_groups[len(scheduled) :])]
