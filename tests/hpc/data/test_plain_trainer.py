"""A plain Lightning Trainer that is given the order of samples ends with the same bits."""

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from hpc.data.shared_loaders import shard_dataloader
from hpc.strategies.single import Single

NUM_EPOCHS = 3


class Net(L.LightningModule):
    """A network whose steps draw random numbers, and which is validated."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = (self.layers(inputs + torch.rand(())) - targets).square().mean()
        self.losses.append(float(loss))
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.losses.append(float((self.layers(batch[0]) - batch[1]).square().mean()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.05)


class Given(Sampler[int]):
    """One given order after the other."""

    def __init__(self, orders: list[list[int]]) -> None:
        self.orders, self.epoch = orders, 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(self.orders[self.epoch - 1])

    def __len__(self) -> int:
        return len(self.orders[0])


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(50, 3, generator=generator), torch.randn(50, 1, generator=generator))


def fitted(loader: DataLoader, strategy: Any) -> Net:
    L.seed_everything(5)
    module = Net()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=NUM_EPOCHS, logger=False, num_sanity_val_steps=0,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader, DataLoader(data(), batch_size=16))
    return module


def test_a_plain_trainer_that_is_given_the_order_ends_with_the_same_bits() -> None:
    shuffled = DataLoader(data(), batch_size=8, shuffle=True)
    ours = fitted(shuffled, Single(device=torch.device("cpu")))
    orders = []
    for epoch in range(NUM_EPOCHS):
        order: Any = shard_dataloader(shuffled, RunningStage.TRAINING, rank=0, num_ranks=1)[0].batch_sampler
        order.go_to(epoch, 0)
        orders.append([index for batch in order for index in batch])
    plain = fitted(DataLoader(data(), batch_size=8, sampler=Given(orders)), "auto")
    assert len(ours.losses) == NUM_EPOCHS * (7 + 4) and ours.losses == plain.losses
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))
    other = fitted(DataLoader(data(), batch_size=8, sampler=Given(orders[::-1])), "auto")
    assert other.losses != ours.losses, "another order is seen"
