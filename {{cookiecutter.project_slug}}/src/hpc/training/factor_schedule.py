"""A learning-rate schedule that leaves param groups alone that fine-tuning adds."""

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR


class InitialGroupsLambdaLR(LambdaLR):
    """LambdaLR for the initial param groups; groups added later keep their own learning rate."""

    def get_lr(self) -> list[float | Tensor]:
        scheduled = super().get_lr()
        return [*scheduled, *(group["lr"] for group in self.optimizer.param_groups[len(scheduled) :])]
