"""Check that further features of Lightning resume exactly: compare each run with one that was never stopped."""

import ast
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import typed_fixes
from test_resume import COMMON, OWN_CALLBACK, STOPPING, TYPED, assert_same, scalars
from tiers import soak_all_but

pytestmark = pytest.mark.slow

LIMITS = ["+trainer.limit_val_batches=1", "+trainer.limit_test_batches=1"]
WORDS = [*COMMON, *LIMITS, "trainer=cpu", "trainer.max_epochs=2"]
TWO_SCHEDULES = """
import torch
from my_research.module import Classifier

def configure_optimizers(self):
    optimizer = self.make_optimizer(self.parameters())
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=12)
    decay = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
    return [optimizer], [{"scheduler": warm, "interval": "step", "frequency": 2}, {"scheduler": decay}]

Classifier.configure_optimizers = configure_optimizers
"""
LOGGED = """
import torch
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector as Connector
from torchmetrics import MaxMetric, MeanMetric
from my_research.module import Classifier

made, stepped, ended = Classifier.__init__, Classifier.training_step, Connector.update_train_epoch_metrics

def __init__(self, *args, **kwargs):
    made(self, *args, **kwargs)
    self.mean, self.largest = MeanMetric().set_dtype(torch.float64), MaxMetric()

def on_train_epoch_start(self):
    self.mean.set_dtype(torch.float64)  # or else the first values are rounded to single precision
    self.log("train/begun", float(self.trainer.global_step), sync_dist=True)

def training_step(self, batch, batch_idx):
    loss = stepped(self, batch, batch_idx)
    self.log("train/mean", loss, on_step=True, on_epoch=True, sync_dist=True)
    self.log("train/most", loss, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="max")
    self.log("train/sum", loss, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
    if batch_idx in (1, 2):
        self.log("train/early", loss, on_step=True, on_epoch=True, sync_dist=True)
    self.mean.update(loss, weight=len(batch[0]))
    self.largest.update(loss)
    self.log("train/metric", self.mean, on_step=False, on_epoch=True)
    self.log("train/largest", self.largest, on_step=False, on_epoch=True)
    return loss

def update_train_epoch_metrics(self):
    with open(f"{self.trainer.default_root_dir}/epochs-{self.trainer.global_rank}", "a") as stream:
        print({name: float(value) for name, value in self.metrics["log"].items()}, file=stream)
    ended(self)

Classifier.__init__, Classifier.training_step = __init__, training_step
Classifier.on_train_epoch_start = on_train_epoch_start
Connector.update_train_epoch_metrics = update_train_epoch_metrics
"""
# Replaces the shipped DataModule by one as in Lightning's documentation. Each sample draws random numbers.
STOCK = """
import lightning as L, numpy as np, torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, random_split
from my_research.data import digits
from my_research.module import Classifier

class Noisy(Dataset):
    def __init__(self, num, stage=0):
        self.num, self.stage = num, stage

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        return torch.full((1, 8, 8), index / 10 + self.stage) + torch.rand(1, 8, 8), index % 10

class Moody(Sampler):
    def __iter__(self):
        yield from (int(torch.randint(50, ())) for _ in range(50))

    def __len__(self):
        return 50

class Counting(Sampler):
    def __init__(self):
        self.passes, self.generator = 0, np.random.default_rng(3)

    def __iter__(self):
        self.passes += 1
        return iter(self.generator.permutation(50)[:: 1 + self.passes % 2].tolist())

    def __len__(self):
        return 25

class Stock(L.LightningDataModule):
    def __init__(self, global_batch_size, seed, num_classes):
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)
        self.stage = 0

    def train_dataloader(self):
        return LOADERS

    def val_dataloader(self):
        return EVALUATED

    def test_dataloader(self):
        return DataLoader(Noisy(16), batch_size=8)

step = Classifier.training_step

def training_step(self, batch, batch_idx):
    if isinstance(batch, list) and isinstance(batch[0], list):
        there = [part for part in batch if part is not None]
        batch = [torch.cat(parts) for parts in zip(*there)]
    return step(self, batch, batch_idx)

Classifier.training_step = training_step
digits.Digits = Stock
"""


AUGMENTED = """
class Augmented(DataLoader):
    def __iter__(self):
        yield from super().__iter__()
"""


def stock(loaders: str, evaluated: str = "DataLoader(Noisy(16), batch_size=8)", more: str = "") -> str:
    return STOCK.replace("LOADERS", loaders).replace("EVALUATED", evaluated) + more


TWO = "[DataLoader(Noisy(50), 8, shuffle=True, generator=self.generator), DataLoader(Noisy(20), 8, shuffle=True)]"
MANUAL = """
from my_research.module import Classifier

made, step = Classifier.__init__, Classifier.training_step

def __init__(self, *args, **kwargs):
    made(self, *args, **kwargs)
    self.automatic_optimization = False

def training_step(self, batch, batch_idx):
    head, others = self.optimizers()
    loss = step(self, batch, batch_idx)
    self.manual_backward(loss / 3)
    head.step()
    head.zero_grad()
    if (batch_idx + 1) % 3 == 0:
        others.step()
        others.zero_grad()
    return loss

def configure_optimizers(self):
    return self.make_optimizer(self.network.head.parameters()), self.make_optimizer(self.backbone.parameters())

Classifier.__init__, Classifier.training_step = __init__, training_step
Classifier.configure_optimizers = configure_optimizers
"""
SHUFFLED = "DataLoader(Noisy(50), 8, shuffle=True)"
STAGED = """
def on_train_epoch_end(self):
    self.trainer.datamodule.stage += 1

Classifier.on_train_epoch_end = on_train_epoch_end
"""
# What loaders are made of changes within the epoch, too.
STAGED_WITHIN = """
def on_train_batch_end(self, outputs, batch, batch_idx):
    self.trainer.datamodule.stage += 1 + batch_idx

Classifier.on_train_batch_end = on_train_batch_end
"""
ADDED = """
from my_research.module import Classifier

def configure_optimizers(self):
    return self.make_optimizer(self.network.head.parameters())

def on_train_epoch_start(self):
    if self.current_epoch == 1:
        self.trainer.optimizers[0].add_param_group({"params": list(self.backbone.parameters()), "lr": 1e-3})

Classifier.configure_optimizers, Classifier.on_train_epoch_start = configure_optimizers, on_train_epoch_start
"""
# Some parameters lack a gradient, weight decay ignores the learning rate, and an inner optimizer does the steps.
ODD_OPTIMIZER = """
import torch
from my_research.module import Classifier

class Odd(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})
        self.inner = torch.optim.SGD(self.param_groups, 0.01, momentum=0.9)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def step(self, closure):
        loss = closure()
        self.steps = 1 + getattr(self, "steps", 0)
        self.state["steps"] = self.state.get("steps", torch.zeros(1)) + 1
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(0.99 + 0.0001 * (self.steps + self.state["steps"] % 7))
            if parameter.grad is not None:
                state = self.state[parameter]
                state.setdefault("words", ["a"]).append("b")
                state["mean"] = 0.9 * state.get("mean", torch.zeros(())) + 0.1 * parameter.grad.mean()
                parameter.grad.add_(state["mean"] * len(state["words"]))
        self.inner.step()
        return loss

made = Classifier.__init__

def __init__(self, *args, **kwargs):
    made(self, *args, **kwargs)
    self.spare = torch.nn.Linear(2, 2)

def configure_optimizers(self):
    return Odd(self.parameters())

def configure_gradient_clipping(self, *args, **kwargs):
    pass

Classifier.__init__, Classifier.configure_optimizers = __init__, configure_optimizers
Classifier.configure_gradient_clipping = configure_gradient_clipping
"""
# A user's callback averages the network and counts with a metric; a part of the network is compiled.
AVERAGED = (
    OWN_CALLBACK
    + """
from copy import deepcopy
import torch
from torchmetrics import MeanMetric
from my_research.module import Classifier

made = Classifier.__init__

def __init__(self, *args, **kwargs):
    made(self, *args, **kwargs)
    self.network.head = torch.compile(self.network.head, backend="eager")
    self.metrics = {"mean": MeanMetric()}

def on_fit_start(self, trainer, pl_module):
    self.average = deepcopy(pl_module.network)

def on_train_batch_end(self, trainer, pl_module, outputs, *batch):
    for mine, its in zip(self.average.parameters(), pl_module.network.parameters()):
        mine.data.lerp_(its.data, 0.1)
    pl_module.metrics["mean"].update(outputs["loss"])
    pl_module.log("own/average", sum(one.abs().sum() for one in self.average.parameters()))
    pl_module.log("own/mean", pl_module.metrics["mean"].compute())

Classifier.__init__ = __init__
OwnCallback.on_fit_start, OwnCallback.on_train_batch_end = on_fit_start, on_train_batch_end
"""
)
PLAIN = ["callbacks.throughput=null", "callbacks.samples=null"]  # these callbacks read a batch
# State that is copied or drawn when training starts, or counted in validations; a collate function that draws.
STARTED = """
class Collating:
    __module__ = "my_research.collating"

    def __init__(self):
        self.generator = np.random.default_rng(1)

    def __call__(self, samples):
        images, labels = torch.utils.data.default_collate(samples)
        return [images * (1 + float(torch.rand(()))) + self.generator.normal(), labels]

made, begun = Classifier.__init__, Classifier.training_step

def __init__(self, *args, **kwargs):
    made(self, *args, **kwargs)
    self.validations = 0

def on_fit_start(self):
    self.first = next(self.parameters()).detach().clone()

def on_train_start(self):
    self.drawn = torch.rand(()).item()

def on_validation_start(self):
    self.validations += 1

def training_step(self, batch, batch_idx):
    far = (next(self.parameters()) - self.first).square().sum()
    self.log("own/validations", float(self.validations))
    return begun(self, batch, batch_idx) * (1 + self.drawn) + far

Classifier.__init__, Classifier.training_step = __init__, training_step
Classifier.on_fit_start, Classifier.on_train_start = on_fit_start, on_train_start
Classifier.on_validation_start = on_validation_start
"""
# The hook that transfers a batch to the device draws, in the project's DataModule and in a module.
TRANSFERRED = """
import numpy as np, torch
from my_research.data import digits
from my_research.module import Classifier

def changed(self, images):
    return images + torch.rand(()) + np.random.rand() if self.trainer.training else images

class Data(digits.Digits):
    def prepare_inputs(self, inputs):
        return changed(self, super().prepare_inputs(inputs))

def on_after_batch_transfer(self, batch, dataloader_idx):
    return [changed(self, batch[0]), *batch[1:]]
"""
OF_DATA = f"{TRANSFERRED}digits.Digits = Data"
OF_MODULE = f"{TRANSFERRED}Classifier.on_after_batch_transfer = on_after_batch_transfer"
# Batches that follow from more than their samples and random numbers.
IMPURE = """
class Numbering:
    __module__ = "my_research.collating"
    seen = 0

    def __call__(self, samples):
        self.seen += 1
        images, labels = torch.utils.data.default_collate(samples)
        return [images * (1 + self.seen / 9), labels]

made = Classifier.__init__

def __init__(self, *args, **kwargs):
    made(self, *args, **kwargs)
    self.moved, self.moving, self.quiet = 0, np.random.default_rng(3), [1]
    self.register_buffer("places", torch.zeros(2))

def on_after_batch_transfer(self, batch, dataloader_idx):
    self.moved += 1
    self.places[1] += 0.2
    return [batch[0] + self.moved + self.moving.normal() + float(self.places[1]), *batch[1:]]

def on_train_batch_end(self, *batch):
    self.quiet.append(2)

Classifier.__init__, Classifier.on_after_batch_transfer = __init__, on_after_batch_transfer
Classifier.on_train_batch_end = on_train_batch_end
"""
PLATEAU = """
import torch
from my_research.module import Classifier

def configure_optimizers(self):
    optimizer = self.make_optimizer(self.parameters())
    every = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": every, "monitor": "val/loss", "frequency": 1}}

Classifier.configure_optimizers = configure_optimizers
"""
GAPS = """
from my_research.module import Classifier

Classifier.strict_loading = False
"""
LEFT_OUT = """
from my_research.module import Classifier

whole = Classifier.state_dict

def state_dict(self, *args, **kwargs):
    return {name: value for name, value in whole(self, *args, **kwargs).items() if "head" not in name}

Classifier.state_dict = state_dict
"""
RENAMED = """
from my_research.module import Classifier

load = Classifier.load_state_dict
Classifier.load_state_dict = lambda self, weights, strict=True: load(self, weights, strict)
"""
LATE = """
import torch
from my_research.module import Classifier

Classifier.on_train_epoch_start = lambda self: self.register_buffer("mask", torch.ones(2))
"""
LBFGS = """
import torch
from my_research.module import Classifier

Classifier.configure_optimizers = lambda self: torch.optim.LBFGS(self.parameters())
"""
# The saved weights are their average; a callback keeps its input and changes nothing.
HOOKED = (
    OWN_CALLBACK
    + """
from my_research.module import Classifier

def on_train_batch_end(self, *batch):
    weights = self.network.head.state_dict()
    before = getattr(self, "average", weights)
    self.average = {name: before[name].lerp(value, 0.1) for name, value in weights.items()}

def on_save_checkpoint(self, checkpoint):
    checkpoint["trained"] = dict(checkpoint["state_dict"])
    checkpoint["state_dict"] |= {f"network.head.{name}": value for name, value in getattr(self, "average", {}).items()}

def on_load_checkpoint(self, checkpoint):
    checkpoint["state_dict"] = checkpoint.pop("trained")

def given(self, trainer, pl_module, checkpoint):
    self.given = checkpoint["state_dict"]["network.head.weight"]
    self.was = self.given.clone()

def on_train_end(self, trainer, pl_module):
    assert not hasattr(self, "given") or (self.given == self.was).all()

Classifier.on_train_batch_end = on_train_batch_end
Classifier.on_save_checkpoint, Classifier.on_load_checkpoint = on_save_checkpoint, on_load_checkpoint
OwnCallback.on_load_checkpoint, OwnCallback.on_train_end = given, on_train_end
"""
)
CLIPPED = """
from my_research.module import Classifier

def on_train_epoch_start(self):
    self.trainer.gradient_clip_val = 0.1 / (1 + self.current_epoch)

Classifier.on_train_epoch_start = on_train_epoch_start
"""
SHOWN = """
from my_research.module import Classifier

step = Classifier.training_step

def training_step(self, batch, batch_idx):
    shown = self.trainer.logged_metrics.get("val/loss", 0) + 2 * self.trainer.progress_bar_metrics.get("val/loss", 0)
    return step(self, batch, batch_idx) * (1 + 0.01 * float(shown))

validate = Classifier.validation_step

def validation_step(self, batch, batch_idx):
    validate(self, batch, batch_idx)
    self.log("val/each", float(batch_idx), on_step=True, on_epoch=False)  # drawn over the batches of all validations

Classifier.training_step, Classifier.validation_step = training_step, validation_step
"""
# A module writes into a sampler, which determines the next epoch's samples.
HARD = """
from torch.utils.data import WeightedRandomSampler

def on_train_batch_end(self, outputs, batch, batch_idx):
    self.trainer.train_dataloader.sampler.weights[batch_idx * 7 : batch_idx * 7 + 5] = 0.01 * (1 + batch_idx)

Classifier.on_train_batch_end = on_train_batch_end
"""
WEIGHTED = "WeightedRandomSampler(torch.ones(50), 50)"
ALL = "Classifier.configure_optimizers = lambda self: self.make_optimizer(self.parameters())"  # needs no step count
DRAWN = "Subset(Noisy(64), torch.randperm(64)[:NUM].tolist())"
SPLIT = "random_split(Noisy(80), [50, 30], self.generator)[0]"
# Hooks that make loaders take the next file, by a number or by an iterator.
COUNTED = """
import itertools
made = Stock.__init__

def __init__(self, global_batch_size, seed, num_classes):
    made(self, global_batch_size, seed, num_classes)
    self.calls, self.chunk = {"train": 0, "val": 0}, 0
    self.files, self.folds = iter(list(range(20))), itertools.cycle(enumerate(range(10, 13)))

def count(self, split):
    self.calls[split] += 1
    self.chunk += 1
    return self.calls[split] + self.chunk / 7

def following(self):
    return next(self.files) + sum(next(self.folds)) / 7 + float(torch.rand(()))

Stock.__init__, Stock.count, Stock.following = __init__, count, following
"""
ACCUMULATE = "+callbacks.accumulate._target_=lightning.pytorch.callbacks.GradientAccumulationScheduler"
# Overrides, code, and the number of steps after which the run is stopped.
CASES: dict[str, tuple[list[str], str, list[int]]] = {
    "an epoch that ends with an incomplete step": (
        ["+trainer.limit_train_batches=10", "trainer.accumulate_grad_batches=3", "data.global_batch_size=48"],
        "",
        [2, 4, 6],
    ),
    "other micro-batches in each epoch": (
        ["+trainer.limit_train_batches=7", ACCUMULATE, "+callbacks.accumulate.scheduling={0:2,1:3}"],
        TYPED + TWO_SCHEDULES,
        [2, 4, 5],
    ),
    "two schedules of one optimizer": (["data.global_batch_size=128"], TWO_SCHEDULES, [5, 12]),
    "a plateau of an earlier validation": (
        ["data.global_batch_size=128", "+trainer.val_check_interval=4", "+trainer.check_val_every_n_epoch=null"],
        PLATEAU,
        [8, 9, 15],
    ),
    "gradients that manual optimization accumulates": (
        ["trainer.gradient_clip_val=null", "data.global_batch_size=128"],
        MANUAL,
        [5, 18],
    ),
    "the same batches in every epoch": (["+trainer.overfit_batches=3", "trainer.max_epochs=3"], "", [4]),
    "a plain DataLoader": ([], stock("DataLoader(Noisy(50), batch_size=8, shuffle=True)"), [1, 9]),
    "workers that draw random numbers": (
        [],
        stock("DataLoader(Noisy(50), 8, shuffle=True, num_workers=2, persistent_workers=True)"),
        [4, 9],
    ),
    "two loaders, one of which begins again": (PLAIN, stock(TWO), [2, 5, 7]),
    "two loaders, one of which ends early": (PLAIN, stock(f"CombinedLoader({TWO}, 'max_size')"), [2, 5]),
    "loaders of each epoch": ([*PLAIN, "+trainer.reload_dataloaders_every_n_epochs=1"], stock(TWO), [2, 9]),
    "a sampler that draws all the time": (PLAIN, stock("DataLoader(Noisy(50), 8, sampler=Moody())"), [2, 9]),
    "a loader that iterates in its own way": (PLAIN, stock("Augmented(Noisy(50), 8)", more=AUGMENTED), [2, 9]),
    "a sampler that counts and draws by itself": (PLAIN, stock("DataLoader(Noisy(50), 8, sampler=Counting())"), [2, 5]),
    "a part of what could be validated": (
        PLAIN,
        stock(SHUFFLED, "DataLoader(Noisy(16), 8, shuffle=True, generator=self.generator)"),
        [3, 9],
    ),
    "workers that outlive a validation": (
        PLAIN,
        stock(SHUFFLED, "DataLoader(Noisy(16), 8, num_workers=1, persistent_workers=True)"),
        [9],
    ),
    "more data in each epoch": (
        [*PLAIN, "+trainer.reload_dataloaders_every_n_epochs=1", "trainer.max_epochs=3"],
        stock("DataLoader(Noisy(40 + 16 * self.trainer.current_epoch), 8, shuffle=True)"),
        [2, 9],
    ),
    "data that a stage makes": (
        [*PLAIN, "+trainer.reload_dataloaders_every_n_epochs=1", "trainer.max_epochs=3"],
        stock("DataLoader(Noisy(50, self.stage), 8, shuffle=True)", more=STAGED),
        [9, 13],
    ),
    "data of a stage that goes on within the epoch": (
        [*PLAIN, "+trainer.reload_dataloaders_every_n_epochs=1", "trainer.max_epochs=3"],
        stock("DataLoader(Noisy(50, self.stage), 8, shuffle=True)", more=STAGED_WITHIN),
        [9, 13],
    ),
    "parameters that are added while it trains": (["trainer.gradient_clip_val=null"], ADDED, [25]),
    "an optimizer that does more than its learning rate says": ([], ODD_OPTIMIZER, [5, 20]),
    "an average in a callback, and a part that is compiled": (PLAIN, AVERAGED, [5]),
    "a part of the data that is drawn as loaders are made": (
        PLAIN,
        stock(f"DataLoader({SPLIT}, 8, shuffle=True)", f"DataLoader({DRAWN.replace('NUM', '16')}, 8)", ALL),
        [2, 9],
    ),
    "a sampler that the module writes into": (
        PLAIN,
        stock(f"DataLoader(Noisy(50), 8, sampler={WEIGHTED})", more=HARD),
        [3, 9],
    ),
    "another part in each epoch": (
        [*PLAIN, "+trainer.reload_dataloaders_every_n_epochs=1", "trainer.max_epochs=3"],
        stock(f"DataLoader({DRAWN.replace('NUM', '40')}, 8)", f"DataLoader({DRAWN.replace('NUM', '16')}, 8)"),
        [2, 7, 12],
    ),
    "a file for each epoch, which a hook counts": (
        [*PLAIN, "+trainer.reload_dataloaders_every_n_epochs=1", "trainer.max_epochs=3"],
        stock("DataLoader(Noisy(50, self.count('train')), 8)", "DataLoader(Noisy(16, self.count('val')), 8)", COUNTED),
        [2, 9],
    ),
    "a file for two epochs": (
        [*PLAIN, "+trainer.reload_dataloaders_every_n_epochs=2", "trainer.max_epochs=5"],
        stock("DataLoader(Noisy(50, self.count('train')), 8)", "DataLoader(Noisy(16, self.count('val')), 8)", COUNTED),
        [10, 14, 17],
    ),
    "files that iterators give": (
        [*PLAIN, "+trainer.reload_dataloaders_every_n_epochs=1", "trainer.max_epochs=3"],
        stock("DataLoader(Noisy(50, self.following()), 8)", more=COUNTED),
        [2, 9],
    ),
    "values that the Trainer shows": (["data.global_batch_size=128"], SHOWN, [10]),
    "a value of the Trainer that a hook sets": (["data.global_batch_size=128"], CLIPPED, [5, 9]),
    "weights that a hook replaces": (["data.global_batch_size=128"], HOOKED, [5]),
    "what hooks copy, draw and count, and who collates": (
        PLAIN,
        stock("DataLoader(Noisy(50), 8, shuffle=True, collate_fn=Collating())", more=STARTED),
        [3, 9],
    ),
    "what a hook of the data draws as it transfers a batch": (["data.global_batch_size=128"], OF_DATA, [4, 11]),
    "what a hook of the module draws as it transfers a batch": (
        PLAIN,
        stock("DataLoader(Noisy(50), 8, shuffle=True, num_workers=1)", more=OF_MODULE),
        [3],
    ),
    "what an epoch sums up": (["data.global_batch_size=128"], LOGGED, [1, 4, 12]),
}


def stopped(start: Callable, run_dir: Path, words: Sequence[str], stops: Sequence[int], patch: str = "") -> None:
    for step in [*stops, None]:
        start(run_dir, 1, [] if run_dir.exists() else words, step, patch)


COMMONEST = (
    "a plain DataLoader",
    "workers that draw random numbers",
    "an epoch that ends with an incomplete step",
    "a file for two epochs",
)


@pytest.mark.parametrize("what", soak_all_but(CASES, *COMMONEST))
def test_a_run_that_is_stopped_ends_as_one_that_is_not(what: str, start: Callable, tmp_path: Path) -> None:
    words, patch, stops = CASES[what]
    start(tmp_path / "reference", 1, [*WORDS, *words], patch=patch)
    stopped(start, tmp_path / "run", [*WORDS, *words], stops, patch)
    assert_same(tmp_path / "run", tmp_path / "reference")
    points = scalars(tmp_path / "run")["step/loss"]
    assert [step for step, _ in points] == list(range(len(points)))


@pytest.mark.soak
def test_what_making_and_transferring_a_batch_draws_goes_on_on_several_ranks(start: Callable, tmp_path: Path) -> None:
    patch = stock("DataLoader(Noisy(50), 4, shuffle=True, collate_fn=Collating())", more=STARTED + OF_MODULE)
    words = [*WORDS, *PLAIN, "strategy=ddp", "trainer.devices=2", "trainer.max_epochs=1"]
    start(tmp_path / "reference", 2, words, patch=patch)
    start(tmp_path / "run", 2, words, 3, patch)
    start(tmp_path / "run", 2, [], patch=patch)
    assert_same(tmp_path / "run", tmp_path / "reference")


def test_what_else_a_batch_depends_on_is_told_once_at_the_first_save(start: Callable, tmp_path: Path) -> None:
    patch = stock("DataLoader(Noisy(50), 8, collate_fn=Numbering())", more=IMPURE)
    words = [*WORDS, *PLAIN, "trainer.max_epochs=1", "checkpoint.every_n_steps=2"]
    said = start(tmp_path / "run", 1, words, patch=patch)
    (line,) = (line for line in said.splitlines() if "as a batch is made or moved to the device" in line)
    names = re.search(r"other values of them: (.*)\. Try: .* in on_train_batch_start$", line)
    assert names and sorted(names[1].split(", ")) == ["moved", "moving", "places", "seen"], line


# The step draws random numbers, as dropout does.
DRAWING = """
drawn_step = Classifier.training_step
Classifier.training_step = lambda self, *batch: drawn_step(self, *batch) * torch.rand(())
"""


def test_workers_that_outlive_a_validation_draw_nothing_on_several_ranks(start: Callable, tmp_path: Path) -> None:
    evaluated = "DataLoader(Noisy(16), batch_sampler=Own(), num_workers=1, persistent_workers=True)"
    own = "class Own(list):\n    __init__ = lambda self: list.__init__(self, [[0, 1, 2], [3, 4], [5]])\n"
    patch = stock("DataLoader(Noisy(50), 8, shuffle=True)", evaluated, own + DRAWING)
    words = [*WORDS, *PLAIN, "strategy=ddp", "trainer.devices=2"]
    start(tmp_path / "reference", 2, words, patch=patch)
    start(tmp_path / "run", 2, words, 2, patch)
    start(tmp_path / "run", 2, [], patch=patch)
    assert_same(tmp_path / "run", tmp_path / "reference")


# Changes of a module during and after training, and a test that is interrupted once.
ENDED = """
import os, signal
import torch
from pathlib import Path
from my_research.module import Classifier

made = Classifier.__init__

def __init__(self, *args, **kwargs):
    made(self, *args, **kwargs)
    self.warmth = 1.0

def forward(self, inputs):
    return self.network(inputs) * self.warmth

def on_train_batch_end(self, *batch):
    self.warmth *= 1.1

def on_train_end(self):
    with torch.no_grad():
        self.network.head.weight.mul_(float(self.trainer.callback_metrics["val/loss"]))

def on_test_start(self):
    if not (once := Path(self.trainer.default_root_dir) / "once").exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGTERM)

Classifier.__init__, Classifier.forward, Classifier.on_train_end = __init__, forward, on_train_end
Classifier.on_train_batch_end = on_train_batch_end
"""


def test_a_run_that_is_stopped_in_its_test_tests_what_was_trained(start: Callable, tmp_path: Path) -> None:
    words = [*WORDS, "+trainer.limit_train_batches=2"]
    said = start(tmp_path / "reference", 1, words, patch=ENDED)
    assert "on_train_end has changed the weights, so the test uses weights that are not in last.ckpt" in said
    start(tmp_path / "run", 1, words, patch=f"{ENDED}Classifier.on_test_start = on_test_start", code=85)
    start(tmp_path / "run", 1, [], patch=ENDED)
    assert scalars(tmp_path / "run") == scalars(tmp_path / "reference")


@pytest.mark.parametrize("steps", [6, 9])
def test_a_run_of_so_many_steps_goes_on_where_it_ended(steps: int, start: Callable, tmp_path: Path) -> None:
    """Extend a run that ended in the middle of an epoch of nine steps, or at its end."""
    words = [*WORDS, "data.global_batch_size=128"]
    start(tmp_path / "reference", 1, [*words, "trainer.max_steps=12"], patch=TWO_SCHEDULES)
    start(tmp_path / "run", 1, [*words, f"trainer.max_steps={steps}"], patch=TWO_SCHEDULES)
    start(tmp_path / "run", 1, ["trainer.max_steps=12"], patch=TWO_SCHEDULES)
    assert_same(tmp_path / "run", tmp_path / "reference")


@pytest.mark.soak
def test_a_run_with_new_loaders_in_each_epoch_goes_on_where_it_ended(start: Callable, tmp_path: Path) -> None:
    words = [*WORDS, *PLAIN, "+trainer.reload_dataloaders_every_n_epochs=1"]
    patch = stock(f"DataLoader({SPLIT}, batch_size=8, shuffle=True)")
    start(tmp_path / "reference", 1, [*words, "trainer.max_epochs=3"], patch=patch)
    start(tmp_path / "run", 1, [*words, "trainer.max_epochs=2"], patch=patch)
    start(tmp_path / "run", 1, ["trainer.max_epochs=3"], patch=patch)
    assert_same(tmp_path / "run", tmp_path / "reference")


# Values that a checkpoint cannot hold, of which the making of loaders goes on, or which it makes anew.
TAKEN = """
from fractions import Fraction
made = Stock.__init__

def __init__(self, global_batch_size, seed, num_classes):
    made(self, global_batch_size, seed, num_classes)
    self.rest, self.folds = Fraction(0), Fraction(0)

def following(self):
    self.rest += 1
    self.negatives = (index for index in range(10**9))
    self.subset = Subset(Noisy(80), range(int(self.rest), 50))
    self.loader, self.both = DataLoader(self.subset, batch_size=8), [DataLoader(self.subset)] * 2
    return self.loader

def evaluated(self):
    self.folds += 1
    return DataLoader(Noisy(16), batch_size=8)

Stock.__init__, Stock.train_dataloader, Stock.val_dataloader = __init__, following, evaluated
"""


@pytest.mark.parametrize(("reloads", "names"), [("0", {"negatives"}), ("1", {"negatives", "rest", "folds"})])
def test_what_loaders_are_made_from_and_no_checkpoint_can_hold_is_named(
    reloads: str, names: set[str], start: Callable, tmp_path: Path
) -> None:
    words = [*WORDS, *PLAIN, f"+trainer.reload_dataloaders_every_n_epochs={reloads}", "trainer.max_epochs=2"]
    said = start(tmp_path / "run", 1, words, patch=stock("") + TAKEN)
    lines = [line for line in said.splitlines() if "start anew in a resumed run" in line]
    named = {name.strip() for line in lines for name in line.split(": ")[2].split(". Try")[0].split(",")}
    assert named == names, said


# No batch norm, as its statistics differ between ranks; sums that do not depend on the order of addition.
TEXT = [*COMMON, "experiment=text", "trainer=cpu", "trainer.precision=64-true", "trainer.max_epochs=2"]
TEXT += ["model.network.width=16", "model.network.num_layers=1", "data.global_batch_size=8", "trainer.max_steps=-1"]
TEXT += ["+trainer.limit_train_batches=6", "+trainer.limit_test_batches=1", "+trainer.limit_val_batches=0"]
TEXT += ["checkpoint.monitor=null", "trainer.val_check_interval=1.0"]


@pytest.mark.soak
@pytest.mark.parametrize(("before", "after"), [(1, 2), (3, 2)])
def test_what_an_epoch_sums_up_does_not_depend_on_how_many_ranks_do(
    before: int, after: int, start: Callable, tmp_path: Path
) -> None:
    size = f"data.global_batch_size={4 * before * after}"
    start(tmp_path / "reference", 1, [*TEXT, size], patch=LOGGED)
    words = {ranks: [f"strategy={'ddp' if ranks > 1 else 'single'}", f"trainer.devices={ranks}"] for ranks in (1, 2, 3)}
    start(tmp_path / "run", before, [*TEXT, size, *words[before]], 4, LOGGED)
    start(tmp_path / "run", after, words[after], patch=LOGGED)
    mine, its = (
        [ast.literal_eval(line) for line in (tmp_path / name / "epochs-0").read_text().splitlines()]
        for name in ("run", "reference")
    )
    assert len(mine) == len(its) == 2
    for here, there in zip(mine, its, strict=True):
        unlike = {"train/sum", "train/most", "train/largest"}  # these depend on the batch size per rank
        assert {**here, **dict.fromkeys(unlike, 0)} == pytest.approx({**there, **dict.fromkeys(unlike, 0)}, abs=1e-9)
        assert unlike < here.keys()


SWAPPED = """
import torch
from my_research.module import Classifier

def configure_optimizers(self):
    return torch.optim.SGD(self.parameters(), 0.1)

def on_train_epoch_start(self):
    self.trainer.strategy.optimizers = [torch.optim.Adam(self.parameters(), 0.01)]

Classifier.configure_optimizers, Classifier.on_train_epoch_start = configure_optimizers, on_train_epoch_start
"""
REJECTED = {
    "an optimizer of another kind": ([], SWAPPED, "as it was when the checkpoint was made"),
}


@pytest.mark.parametrize("what", REJECTED)
def test_what_cannot_be_repeated_is_rejected(what: str, start: Callable, tmp_path: Path) -> None:
    words, patch, rule = REJECTED[what]
    start(tmp_path / "run", 1, [*WORDS, *words], 3, patch=patch)
    assert rule in start(tmp_path / "run", 1, [], patch=patch, code=2)


LOOKAHEAD = """
import torch
from my_research.module import Classifier

class Lookahead(torch.optim.SGD):
    def state_dict(self):
        return super().state_dict() | {"slow_state": {}}

Classifier.configure_optimizers = lambda self: Lookahead(self.parameters(), 0.1)
"""
FOREIGN = """
import torch
from my_research.module import Classifier

outside = torch.nn.Parameter(torch.ones(2))
Classifier.configure_optimizers = lambda self: self.make_optimizer([*self.parameters(), outside])
"""
NEVER = {
    "strict_loading": ([], GAPS, "A checkpoint must hold all weights"),
    "a state_dict with gaps": ([], LEFT_OUT, "state_dict() without network.head.weight"),
    "a buffer that comes late": ([], LATE, "Parameters and buffers must exist before training begins"),
    "a load_state_dict with other arguments": ([], RENAMED, "must take the same arguments as torch's"),
    "an optimizer around another, of whose parameters a rank has a part": (
        ["trainer.gradient_clip_val=null", "strategy=fsdp", "trainer.devices=1"],
        LOOKAHEAD,
        "its whole state per parameter",
    ),
    "parameters that are none of the model's": ([], FOREIGN, "An optimizer must have parameters of the model only"),
    "weights that a hook replaces, of which a rank has a part": (
        ["strategy=fsdp", "trainer.devices=1"],
        HOOKED.replace('checkpoint["trained"] = ', ""),
        "must not replace weights in state_dict",
    ),
    "LBFGS of parameters of which a rank has a part": (
        ["trainer.gradient_clip_val=null", "strategy=fsdp", "trainer.devices=1"],
        LBFGS,
        "its whole state per parameter",
    ),
    "the clock": (["+trainer.val_check_interval=00:00:10:00"], PLATEAU, "must be a number of batches, not a time"),
}


ANNEALED = """
import torch
from my_research.module import Classifier

step = Classifier.training_step

def configure_optimizers(self):
    optimizer, total = self.make_optimizer(self.parameters()), int(self.trainer.estimated_stepping_batches)
    made = SCHEDULE
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": made, "interval": "step"}}

def on_train_start(self):
    self.total = self.trainer.estimated_stepping_batches

def training_step(self, batch, batch_idx):
    self.log("own/left", 1 - self.global_step / self.total)
    return step(self, batch, batch_idx)

Classifier.configure_optimizers, Classifier.on_train_start = configure_optimizers, on_train_start
Classifier.training_step = training_step
"""
SCHEDULES = {
    "CosineAnnealingLR": "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)",
    "OneCycleLR": "torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total)",
}


@pytest.mark.soak
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_follows_the_length_of_training_follows_the_new_one(
    schedule: str, start: Callable, tmp_path: Path
) -> None:
    patch = ANNEALED.replace("SCHEDULE", SCHEDULES[schedule])
    start(tmp_path / "run", 1, [*WORDS, "trainer.max_epochs=1"], 10, patch=patch)
    said = start(tmp_path / "run", 1, ["trainer.max_epochs=2"], patch=patch)
    points = scalars(tmp_path / "run")
    steps = len(points["step/lr"])
    assert "as the length of training has changed" in said and f"-> {steps}" in said
    after = [value for step, value in points["step/lr"] if step > 10]
    assert after[-1] < 0.01 * max(after) and (schedule == "OneCycleLR" or after == sorted(after, reverse=True))
    assert [round(value * steps) for step, value in points["own/left"] if step > 10] == list(range(steps - 11, 0, -1))


@pytest.mark.soak
def test_a_callback_has_the_arguments_that_are_typed_now(start: Callable, tmp_path: Path) -> None:
    words = [*WORDS, *STOPPING, "trainer.max_epochs=5", "+trainer.limit_train_batches=3"]
    start(tmp_path / "run", 1, words, 4, TYPED)
    start(tmp_path / "run", 1, ["callbacks.stop.patience=9"], patch=TYPED)
    assert len(scalars(tmp_path / "run")["step/loss"]) == 15


@pytest.mark.parametrize("what", NEVER)
def test_what_could_not_go_on_is_rejected_before_the_first_step(what: str, start: Callable, tmp_path: Path) -> None:
    words, patch, rule = NEVER[what]
    said = start(tmp_path / "run", 1, [*WORDS, *words], patch=patch, code=2)
    assert rule in said and not list(tmp_path.glob("run/checkpoints/step-*"))
    for number, typed in enumerate(typed_fixes.retyped([*WORDS, *words], typed_fixes.printed(said))):
        start(tmp_path / f"run-{number}", 1, [*typed, "trainer.max_steps=2"], patch=patch)


@pytest.mark.parametrize(("word", "place"), [("trainer.max_steps=2", "step 4"), ("trainer.max_epochs=1", "epoch 2")])
def test_an_end_that_lies_behind_is_rejected(word: str, place: str, start: Callable, tmp_path: Path) -> None:
    """Reject an end before the resumed position; Lightning would call the run finished."""
    words = [*WORDS, "trainer.max_epochs=3", "+trainer.limit_train_batches=3"]
    start(tmp_path / "run", 1, words, 4)
    config = (tmp_path / "run/config.yaml").read_text()
    said = start(tmp_path / "run", 1, [word], code=2)
    assert f"the run has reached {place}, and must not end before it" in said
    assert (tmp_path / "run/config.yaml").read_text() == config
    (typed,) = typed_fixes.retyped([word], typed_fixes.printed(said))
    start(tmp_path / "run", 1, typed)


def test_who_is_turned_away_leaves_the_verdict_of_the_run(start: Callable, call: Callable, tmp_path: Path) -> None:
    start(tmp_path / "run", 1, WORDS, 3)
    verdict = (tmp_path / "run/verdict").read_text()
    done = call(f"run_dir={tmp_path / 'run'}", *WORDS, "seed=8")
    assert done.returncode == 2 and re.search(r"ConfigError: seed (must|cannot) .*; got 8", done.stderr)
    assert (tmp_path / "run/verdict").read_text() == verdict and "outcome continue" in verdict
