"""A module whose weights are changed in every usual way at every moment, each in a target of its own.

Ranks of a test train it with a plain Trainer and the project's strategies.
"""

import os
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.plugins.precision import DoublePrecision
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from hpc.strategies.ddp import DDP
from hpc.strategies.fsdp import FSDP
from hpc.strategies.parallelize import ModuleChanges
from hpc.strategies.single import Single

KEEP, TAKE = 0.9, 0.1
Way = Callable[[nn.Module, nn.Module], object]


def pairs(target: nn.Module, online: nn.Module) -> Any:
    return zip(target.parameters(), online.parameters(), strict=True)


def averages(target: nn.Module, online: nn.Module) -> dict[str, Tensor]:
    ahead = dict(online.named_parameters())
    return {name: KEEP * value.detach() + TAKE * ahead[name].detach() for name, value in target.named_parameters()}


def data_in_place(target: nn.Module, online: nn.Module) -> None:
    for t, o in pairs(target, online):
        t.data.mul_(KEEP).add_(o.data, alpha=TAKE)


def data_assigned(target: nn.Module, online: nn.Module) -> None:
    for t, o in pairs(target, online):
        t.data = KEEP * t.data + TAKE * o.data


def data_assigned_and_used(target: nn.Module, online: nn.Module) -> None:
    for t, o in pairs(target, online):
        t.data = t.data.clone()
        t.data.lerp_(o.data, TAKE)


def data_copied(target: nn.Module, online: nn.Module) -> None:
    for t, o in pairs(target, online):
        t.data.copy_(t.data * KEEP + o.data * TAKE)


@torch.no_grad()
def in_place(target: nn.Module, online: nn.Module) -> None:
    for t, o in pairs(target, online):
        t.lerp_(o, TAKE)


@torch.no_grad()
def copied(target: nn.Module, online: nn.Module) -> None:
    for t, o in pairs(target, online):
        t.copy_(KEEP * t + TAKE * o)


def detached(target: nn.Module, online: nn.Module) -> None:
    for t, o in pairs(target, online):
        t.detach().mul_(KEEP).add_(TAKE * o.detach())


def of_many(target: nn.Module, online: nn.Module) -> None:
    torch._foreach_lerp_([t.data for t in target.parameters()], [o.data for o in online.parameters()], TAKE)


def loaded(target: nn.Module, online: nn.Module) -> None:
    target.load_state_dict(averages(target, online))


def loaded_by_assignment(target: nn.Module, online: nn.Module) -> None:
    target.load_state_dict(averages(target, online), assign=True)


def replaced(target: Any, online: nn.Module) -> None:
    for name, value in averages(target, online).items():
        part, _, attribute = name.rpartition(".")
        setattr(target.get_submodule(part), attribute, nn.Parameter(value))


def normalized(target: nn.Module, online: nn.Module) -> None:
    for t, o in pairs(target, online):
        t.data = o.data / o.data.norm() * float(o.data.abs().max())


def clipped(target: nn.Module, online: nn.Module) -> None:
    in_place(target, online)
    for t in target.parameters():
        t.data.clamp_(-0.2, 0.2)


def drawn(target: nn.Module, online: nn.Module) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        for t, o in pairs(target, online):
            nn.init.uniform_(t, -0.1, 0.1)
            t.data += o.data + 0.1 * torch.randn_like(t.data)


def released(target: nn.Module, online: nn.Module) -> None:
    """Freeze and release by turns."""
    for t in target.parameters():
        t.requires_grad_(not t.requires_grad)


WAYS: list[Way] = [
    data_in_place, data_assigned, data_assigned_and_used, data_copied, in_place, copied, detached, of_many, loaded,
    loaded_by_assignment, replaced, normalized, clipped, drawn, released,
]  # fmt: skip
# FSDP puts the shards back when a whole state is loaded, so the rest of the step has no whole parameters.
NOT_IN_STEP = ("loaded", "loaded_by_assignment")
IN_STEP = ("training_step", "on_before_zero_grad", "on_before_backward", "validation_step")
HOOKS = (
    *IN_STEP, "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_after_backward",
    "on_before_optimizer_step", "optimizer_step", "on_train_batch_end", "on_validation_start",
    "on_validation_epoch_end", "on_validation_end", "on_train_epoch_end", "callback", "after_forward",
)  # fmt: skip
OF_BLOCKS = ("-on_train_batch_end", "-on_validation_end")  # where targets of blocks are changed, too
MOMENTS = {
    f"{way.__name__}-{hook}": way
    for hook in HOOKS
    for way in WAYS
    if (hook, way.__name__) not in [(hook, name) for hook in IN_STEP for name in NOT_IN_STEP]
}


class Changed(L.LightningModule):
    """Blocks and a head that are trained, and a target of the head, or of the blocks, for each way and moment."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.head = nn.Linear(3, 3)
        self.targets = nn.ModuleDict({name: deepcopy(self.head) for name in MOMENTS}).requires_grad_(False)
        of_blocks = [name for name in MOMENTS if name.endswith(OF_BLOCKS)]
        self.teachers = nn.ModuleDict({name: deepcopy(self.blocks) for name in of_blocks}).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.head.weight.mark = "kept"

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x)

    def change(self, hook: str) -> None:
        for way in WAYS:
            name = f"{way.__name__}-{hook}"
            if name in self.targets:
                way(self.targets[name], self.head)
            if name in self.teachers:
                way(self.teachers[name], self.blocks)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.change("training_step")
        targets = [target(batch[0]) for name, target in self.targets.items() if name.endswith("-training_step")]
        return (self.scale * self(batch[0]) - 0.01 * sum(targets)).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self(batch[0])
        if batch_idx == 0:
            self.change("validation_step")

    def on_validation_end(self) -> None:
        self.change("on_validation_end")
        self(torch.ones(1, 3, dtype=self.dtype))
        self.change("after_forward")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.change("optimizer_step")

    def configure_optimizers(self) -> Any:
        assert self.head.weight.mark == "kept"
        trained = [*self.blocks.parameters(), *self.head.parameters(), self.scale]
        return torch.optim.SGD(trained, 0.1, momentum=0.9)

    def configure_callbacks(self) -> list[L.Callback]:
        return [Caller()]


class Small(L.LightningModule):
    """The same without targets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.head = nn.Linear(3, 3)

    forward = Changed.forward

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def _hook(name: str) -> Callable[..., None]:
    return lambda self, *arguments: self.change(name)


for _name in HOOKS:
    if _name not in Changed.__dict__ and _name not in ("callback", "after_forward"):
        setattr(Changed, _name, _hook(_name))


class Caller(L.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any) -> None:
        pl_module.change("callback")


def samples(num_ranks: int, dtype: torch.dtype) -> DataLoader:
    """Return eight samples in two batches, which the strategy shares out among the ranks."""
    inputs = torch.linspace(-1, 1, 24, dtype=dtype).sin().reshape(8, 3)
    return DataLoader(TensorDataset(inputs), batch_size=4 // num_ranks)


def train(rank: int, strategy: str, module: L.LightningModule, precision: Any = "64-true", **options: Any) -> L.Trainer:
    """Train a module on this rank, with another one or alone."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"} if strategy != "single" else {}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # the group exists already
    kinds = {
        "single": lambda: Single(device="cpu"),
        "ddp": DDP,
        "fsdp": lambda: FSDP(data_parallel_size=2, tensor_parallel_size=1),
    }
    made: Any = kinds[strategy]()
    made.changes = ModuleChanges(precision=precision, compile=options.pop("compile", False))
    made.meeting = options.pop("meeting", None)
    plugins = [DoublePrecision()] if precision == "64-true" else []
    num_ranks = 1 if strategy == "single" else 2
    trainer = L.Trainer(
        accelerator="cpu", devices=num_ranks, strategy=made, max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        plugins=[*plugins, *([TorchElasticEnvironment()] if num_ranks > 1 else [])],
        precision=None if plugins else precision, gradient_clip_val=0.5, **options,
    )  # fmt: skip
    loader = samples(num_ranks, torch.float64 if plugins else torch.float32)
    trainer.fit(module, loader, loader)
    return trainer


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in module.named_parameters()
    }
