"""Check that weights which a module changes or reads are the same on one process, with ddp and with fsdp, or told."""

import pickle
import threading
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from changed_weights import Changed, Small, train, whole_weights
from fork import free_port
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn
from torch.distributed import TCPStore

from hpc.config.errors import ConfigError
from hpc.strategies.lockstep import Meeting
from hpc.strategies.parallelize import CompiledForward, _reject_gradient_hooks
from hpc.strategies.sharded_tensors import explain

TOLERANCE = 1e-12


@pytest.mark.slow
def test_weights_changed_in_any_way_at_any_moment_are_the_same(together: Callable[..., list[Any]]) -> None:
    assert together(differences, 2) == [[], []]


def differences(rank: int) -> list[str]:
    """Return the weights that two ranks end with otherwise than one process, or otherwise frozen."""
    modules = {strategy: Changed() for strategy in ("single", "ddp", "fsdp")}
    for strategy, module in modules.items():
        train(rank, strategy, module)
    return [difference for strategy in ("ddp", "fsdp") for difference in compare(modules["single"], modules[strategy])]


def compare(expected: nn.Module, module: nn.Module) -> list[str]:
    expected_weights, weights = whole_weights(expected), whole_weights(module)
    frozen = {name: parameter.requires_grad for name, parameter in expected.named_parameters()}
    return [
        name
        for name, parameter in module.named_parameters()
        if (weights[name] - expected_weights[name]).abs().max() > TOLERANCE or parameter.requires_grad != frozen[name]
    ]


@pytest.mark.slow
def test_weights_are_read_whole_at_any_moment_or_it_is_told(together: Callable[..., list[Any]]) -> None:
    assert together(reads, 2) == [[], []]


def reads(rank: int) -> list[str]:
    """Return what two ranks read otherwise than one process."""
    modules = {strategy: Reading(is_sharded=strategy == "fsdp") for strategy in ("single", "fsdp")}
    for strategy, module in modules.items():
        train(rank, strategy, module)
    expected, given = (modules[strategy].seen for strategy in ("single", "fsdp"))
    pairs = zip(expected, given, strict=True)
    wrong = [f"{one} {other}" for one, other in pairs if abs(one[1] - other[1]) > TOLERANCE or one[0] != other[0]]
    try:
        train(rank, "fsdp", InMixedPrecision(), precision="bf16-mixed")
    except ConfigError as error:
        wrong += [] if "model=head.weight" in str(error) and "on_train_batch_end" in str(error) else [str(error)]
    else:
        wrong.append("a change in a copy of lower precision was not told")
    tuned = {strategy: Tuned() for strategy in ("single", "fsdp")}
    for strategy, module in tuned.items():
        train(rank, strategy, module, callbacks=[BackboneFinetuning(1, initial_denom_lr=1.0)])
    return [*wrong, *compare(tuned["single"], tuned["fsdp"])]


class Reading(Small):
    """Keeps arrays and views of a step, and reads weights in hooks as people do."""

    def __init__(self, is_sharded: bool) -> None:
        super().__init__()
        self.is_sharded = is_sharded
        self.deep = nn.Sequential(nn.Linear(3, 3))
        self.seen: list[tuple[str, float]] = []

    def run_parts(self) -> None:
        """Run parts that hold weights which are sharded with those of other parts, as for samples of an average."""
        with torch.no_grad():
            self.seen += [
                ("part", float(part(torch.ones(1, 3, dtype=self.dtype)).sum())) for part in (self.head, self.deep)
            ]

    def on_train_start(self) -> None:
        self.run_parts()

    def on_train_epoch_end(self) -> None:
        self.run_parts()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.kept = self.head.weight.detach(), self.head.weight.detach().numpy(), [self.head.bias]
        self.seen.append(("array", float(self.kept[1].sum())))
        return self(batch[0]).square().mean()

    def on_train_batch_end(self, *arguments: Any) -> None:
        view, array, (bias,) = self.kept
        float(view.sum()), float(array.sum()), float(bias.sum())  # may be those of the step; freed memory would crash
        weight = self.head.weight
        self.seen += [("norm", weight.norm().item()), ("max", float(weight.max())), ("first", float(weight[0, 0]))]
        self.seen += [("gradient", float(sum(p.grad.norm() ** 2 for p in self.blocks.parameters())))]
        self.seen += [("any", float((weight > 0.4).any())), ("std", weight.detach().std().item())]
        self.run_parts()

    def on_validation_end(self) -> None:
        self.run_parts()
        self.seen += [("all", sum(p.detach().abs().sum().item() for p in self.state_dict().values()))]
        if self.is_sharded:
            with pytest.raises(pickle.PicklingError, match=r"trainer\.save_checkpoint"):
                pickle.dumps(self.state_dict())
            deepest = self.deep[0]
            for read in (lambda: self.head.weight.numpy(), lambda: deepest(torch.ones(1, 3)), lambda: deepcopy(self)):
                with pytest.raises((RuntimeError, AssertionError)) as caught:
                    read()
                explain(caught.value)
                assert "full_tensor()" in caught.value.__notes__[0]


class InMixedPrecision(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.head.weight.data.mul_(0.5)
        return self(batch[0]).square().mean()


class Tuned(Small):
    """Has a backbone, which a callback of Lightning freezes and releases."""

    @property
    def backbone(self) -> nn.Module:
        return self.blocks

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1)


@pytest.mark.slow
def test_a_forward_of_some_ranks_is_told_and_one_of_all_is_served(together: Callable[..., list[Any]]) -> None:
    told, late = together(runs_alone, 2, free_port())
    assert "all ranks must run the network together" in told and "waits for other ranks" in told
    assert not late or "Error" in late  # of a rank whose peer has ended


def runs_alone(rank: int, port: int) -> str:
    """Return the error of a rank. The first runs the network alone, once both have run it outside of a step."""
    store = TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    meeting = Meeting(store)
    over, watcher = threading.Event(), store.clone()

    def watch() -> None:
        while not over.wait(0.1):
            meeting.exchange(watcher)

    threading.Thread(target=watch, daemon=True).start()
    module = Picture()
    try:
        train(rank, "fsdp", module, meeting=meeting)
    except Exception as error:
        return f"{type(error).__name__} after {module.num_pictures} pictures: {error}"
    finally:
        over.set()
    return ""


class Picture(Small):
    num_pictures = 0

    def on_validation_epoch_end(self) -> None:
        with torch.no_grad():
            self(torch.ones(1, 3, dtype=self.dtype))
        self.num_pictures += 1

    def on_validation_end(self) -> None:
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            self(torch.ones(1, 3, dtype=self.dtype))


def test_a_copy_of_a_compiled_module_runs_its_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda method, dynamic: method)
    module = nn.Linear(1, 1)
    module.forward = CompiledForward(module.forward)
    copy = deepcopy(module)
    copy.weight.data.fill_(0.0)
    copy.bias.data.fill_(3.0)
    assert copy(torch.ones(1)) == 3 and module(torch.ones(1)) != 3


def test_a_hook_that_sharding_would_lose_is_told() -> None:
    weight = nn.Parameter(torch.ones(2))
    _reject_gradient_hooks({"weight": weight})
    weight.register_hook(lambda gradient: 0 * gradient)
    with pytest.raises(ConfigError, match="weight: A parameter must have no hook for its gradient"):
        _reject_gradient_hooks({"weight": weight})
