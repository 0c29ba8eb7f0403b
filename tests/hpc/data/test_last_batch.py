"""Train on samples that ranks and batches do not divide: steps, weights and means are those of one process."""

import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.plugins.precision import DoublePrecision
from lightning.pytorch.trainer.states import RunningStage
from tiers import soak_all_but
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from hpc.data.rank_steps import RankSteps
from hpc.data.shared_loaders import shard_dataloader

LAYOUTS = [("ddp", 2), ("ddp", 3), ("fsdp", 2), ("deepspeed", 2)]  # strategies and ranks
SIZE = 12  # samples of all ranks in a micro-batch
CASES = [
    *({"num_samples": number} for number in (48, 49, 50, 51, 53, 59)),
    *({"num_samples": number, "accumulate": 3} for number in (49, 53, 72)),
    *({"num_samples": number, "manual": True} for number in (49, 53)),
]


class Net(L.LightningModule):
    """Logs and counts in the usual ways."""

    def __init__(self, *, manual: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.mean = nn.Linear(3, 5), nn.Linear(5, 1), MeanMetric().set_dtype(torch.float64)
        self.automatic_optimization, self.at_steps = not manual, []
        self.num_steps = 0  # that a rank without a sample makes, too

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.second(self.first(batch[0]).tanh()) - batch[1]).square().mean()
        self.mean.update(loss.detach(), len(batch[0]))
        self.num_steps += 1
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        number = float(len(batch[0]))
        self.log("samples", number, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        if not self.automatic_optimization:
            optimizer, schedule = self.optimizers(), self.lr_schedulers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            schedule.step()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.at_steps.append(float(self.trainer.callback_metrics["loss_step"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.2, momentum=0.9)
        total = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=total + 1)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fit(
    strategy: str,
    num_samples: int,
    *,
    num_ranks: int,
    accumulate: int = 1,
    manual: bool = False,
    is_single_precision: bool = False,
) -> dict[str, Any]:
    """Train two epochs on this rank, and return what must be the same on any number of ranks."""
    from hpc.strategies.ddp import DDP
    from hpc.strategies.fsdp import FSDP
    from hpc.strategies.single import Single

    generator = torch.Generator().manual_seed(1)
    dtype = torch.float32 if is_single_precision else torch.float64
    inputs = torch.randn(num_samples, 4, dtype=torch.float64, generator=generator).to(dtype)
    inputs[-7:] *= 3  # so that the last samples matter
    data = DataLoader(TensorDataset(inputs[:, :3], inputs[:, 3:]), batch_size=SIZE // num_ranks)
    single = partial(Single, device=torch.device("cpu"))
    fsdp = partial(FSDP, data_parallel_size=num_ranks, tensor_parallel_size=1)
    chosen: Any = {"ddp": DDP, "fsdp": fsdp, "single": single, "deepspeed": _make_deepspeed}[strategy]()
    plugins: list[Any] = [] if is_single_precision else [DoublePrecision()]
    plugins += [TorchElasticEnvironment()] if num_ranks > 1 else []
    module = Net(manual=manual)
    trainer = L.Trainer(
        accelerator="cpu", devices=num_ranks, strategy=chosen, max_epochs=2, accumulate_grad_batches=accumulate,
        plugins=plugins, logger=False,
        use_distributed_sampler=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data)
    weights = (getattr(weight, "full_tensor", lambda weight=weight: weight)() for weight in module.parameters())
    return {
        "weights": torch.cat([weight.detach().flatten() for weight in weights]).tolist(),
        "steps": trainer.global_step,
        "steps that the module counts": module.num_steps,
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "mean of the epoch": float(trainer.callback_metrics["loss_epoch"]),
        "samples": float(trainer.callback_metrics["samples"]),
        "metric": float(module.mean.compute()),
        "means of steps": module.at_steps,
    }


def _make_deepspeed() -> Any:
    from hpc.strategies.deepspeed import DeepSpeed

    return DeepSpeed(stage=1, logging_batch_size_per_gpu=SIZE // 2)


def fits(rank: int, num_ranks: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    places: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": num_ranks}
    places |= {
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
        "TORCHELASTIC_RUN_ID": "tests",
    }
    os.environ |= {name: str(value) for name, value in places.items()}
    torch.set_num_threads(1)
    return [fit(num_ranks=num_ranks, **case) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("layout", soak_all_but(LAYOUTS, ("ddp", 2), ("fsdp", 2)))
def test_steps_weights_and_means_are_those_of_one_process(
    layout: tuple[str, int], together: Callable[..., list[Any]]
) -> None:
    strategy, num_ranks = layout
    is_deepspeed = strategy == "deepspeed"  # it rejects an incomplete step, and a module in double precision
    cases = [
        case | {"is_single_precision": is_deepspeed} for case in CASES if strategy == "ddp" or "manual" not in case
    ]
    cases = [case | {"strategy": strategy} for case in cases if not (is_deepspeed and "accumulate" in case)]
    per_rank = together(fits, num_ranks, num_ranks, cases)
    for case, *found in zip(cases, *per_rank, strict=True):
        alone = fit(num_ranks=1, **case | {"strategy": "single"})
        for results in found:
            for name, value in alone.items():
                tolerance = 1e-4 if is_deepspeed else 1e-7 if name == "metric" else 1e-9
                near = pytest.approx(value, rel=tolerance, abs=1e-5 if is_deepspeed else 1e-12)
                assert results[name] == near, (case, name)


@pytest.mark.parametrize(("manual", "num_loaders"), [(False, 1), (True, 1), (False, 2)])
def test_samples_that_may_not_count_alike_are_told(
    manual: bool, num_loaders: int, capsys: pytest.CaptureFixture[str]
) -> None:
    class Strategy(RankSteps, SimpleNamespace):
        pass

    for number in (48, 49):
        data = DataLoader(TensorDataset(torch.zeros(number)), batch_size=SIZE // 2)
        loaders = [shard_dataloader(data, RunningStage.TRAINING, rank=0, num_ranks=2)[0]] * num_loaders
        fit_loop = SimpleNamespace(_combined_loader=SimpleNamespace(flattened=loaders))
        trainer = SimpleNamespace(fit_loop=fit_loop, num_training_batches=number // 12 + 1, is_global_zero=True)
        module = SimpleNamespace(trainer=trainer, automatic_optimization=not manual)
        Strategy(lightning_module=module)._note_unweighted_samples()
        told = "the last batch of an epoch has 1 sample for 2 ranks" in capsys.readouterr().out
        assert told == (number == 49 and (manual or num_loaders == 2))
