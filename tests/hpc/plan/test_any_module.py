"""Check the traces of modules as researchers bring them: any batch, loss, networks, optimizers and data."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchmetrics import MeanSquaredError, MetricCollection

from hpc.jobs.hardware import machine_from_cluster
from hpc.plan import module_source
from hpc.plan.example_batches import UnreadableData
from hpc.plan.measured_step import NotTraceable
from hpc.plan.memory import predict_memory
from hpc.plan.prediction import with_loader_batch
from hpc.plan.setup import ParallelLayout
from hpc.plan.step_time import predict_step
from hpc.plan.trace_types import Trace
from hpc.plan.tracer import trace_parameters, trace_step
from hpc.training.dry_run import explain

WIDTH = 16


class Data(L.LightningDataModule):
    """Batches of four of any samples."""

    def __init__(self, samples: Any, **loading: Any) -> None:
        super().__init__()
        self.samples, self.loading = samples, {"batch_size": 4} | loading

    def setup(self, stage: str) -> None:
        assert stage == "fit" and self.trainer.world_size == 1

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.samples, **self.loading)


class Regression(L.LightningModule):
    """Map x to y by least squares, with what modules ask of a Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))
        self.errors = MetricCollection([MeanSquaredError()])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        prediction = self.net(batch["x"]).squeeze(1)
        self.log_dict(self.errors(prediction, batch["y"]))
        self.log("lr", self.optimizers().param_groups[0]["lr"] * self.trainer.max_steps)
        self.logger.experiment.add_scalar("step", self.global_step + self.current_epoch)
        assert self.device.type == "cpu" and batch_idx == 0
        return {"loss": F.mse_loss(prediction, batch["y"]), "prediction": prediction}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters())
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)]


SAMPLES = [{"x": torch.zeros(WIDTH), "y": torch.tensor(0.0)}] * 6


def traced(make: Callable[[], L.LightningModule], samples: Any = SAMPLES, **options: Any) -> Trace:
    loading = options.pop("loading", {})
    return trace_step(make, make_data=lambda: Data(samples, **loading), **options)


def flops(trace: Trace, direction: str = "forward") -> float:
    """Return the FLOPs of an example."""
    return sum(work.count * work.flops.per_example for work in getattr(trace, direction))


def peak(trace: Trace, examples: int) -> float:
    """Return the most bytes of activations."""
    return max(level.activations.at(examples) for level in trace.levels)


PRODUCTS = 2 * (WIDTH * 32 + 32)  # of a forward pass of Regression


class Lengths(L.LightningModule):
    """Compute with the lengths of texts."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)

    def training_step(self, batch: list[str] | str, batch_idx: int) -> Tensor:
        texts = [batch] if isinstance(batch, str) else batch
        return self.net(torch.tensor([[float(len(text))] for text in texts])).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Divided(Data):
    """Divides the batch size among the ranks, as a known template does."""

    def setup(self, stage: str) -> None:
        if 6 % self.trainer.world_size:
            raise RuntimeError("6 samples are not divisible")
        self.loading["batch_size"] = 6 // self.trainer.world_size


class DividedDown(Data):
    """Divides an odd batch size, and leaves what is left over away."""

    def setup(self, stage: str) -> None:
        self.loading["batch_size"] = 7 // self.trainer.world_size


@pytest.mark.parametrize(
    ("data", "divides", "of_config", "of_loader"),
    [(Divided, True, 24, 6), (DividedDown, True, 26, 7), (Data, False, 24, 4)],
)
def test_a_loader_may_divide_the_batch_size_by_the_ranks(data: Any, divides: bool, of_config: int, of_loader: int):
    trace = trace_step(Regression, make_data=lambda: data(SAMPLES))
    assert trace.loader_divides_by_ranks is divides
    layout = ParallelLayout(nodes=1, devices=4, micro_batch=of_config)
    assert with_loader_batch(layout, trace).micro_batch == (of_config // 4 if divides else of_config)
    assert with_loader_batch(replace(layout, devices=1, micro_batch=0), trace).micro_batch == of_loader


@pytest.mark.parametrize("batch_size", [4, None])
def test_a_batch_may_be_strings(batch_size: int | None):
    trace = traced(Lengths, ["one", "another"] * 4, loading={"batch_size": batch_size})
    assert not trace.by_parameters and trace.num_parameters == 2


def test_a_batch_may_be_a_dict_and_the_loss_any_function():
    trace = traced(Regression)
    assert flops(trace) == PRODUCTS and flops(trace, "backward") == 2 * PRODUCTS - 2 * WIDTH * 32
    assert trace.num_parameters == sum(p.numel() for p in Regression().parameters())
    assert (trace.unit, trace.loader_batch_size, trace.note) == ("samples", 4, "")
    assert trace.optimizer_states == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize("precision", [("bf16", None), ("32", "bf16"), ("64", None)])
def test_inputs_and_parameters_have_the_runs_precision(precision: tuple[str, str | None]):
    class Checks(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            kind = {"bf16": torch.bfloat16, "32": torch.float32, "64": torch.float64}[precision[0]]
            assert batch["x"].dtype == next(self.parameters()).dtype == kind
            assert self.net(batch["x"]).dtype == (torch.bfloat16 if "bf16" in precision else kind)
            return super().training_step(batch, batch_idx)

    traced(Checks, parameters=precision[0], autocast=precision[1])


class GAN(L.LightningModule):
    """Two networks that are optimized by hand: two backward passes in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Linear(8, WIDTH)
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch: Any) -> None:
        (real,) = batch
        first, second = self.optimizers()
        fake = self.generator(torch.randn(len(real), 8, device=self.device))
        self.toggle_optimizer(first)
        self.manual_backward(-self.discriminator(fake).mean())
        self.clip_gradients(first, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        loss = self.discriminator(fake.detach()).mean() - self.discriminator(real).mean()
        self.manual_backward(loss)
        second.step()
        second.zero_grad()
        for schedule in self.lr_schedulers():
            schedule.step()
        self.log("loss", loss, prog_bar=True)

    def configure_optimizers(self) -> Any:
        networks = self.generator, self.discriminator
        optimizers = [torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9) for network in networks]
        return optimizers, [torch.optim.lr_scheduler.ConstantLR(optimizer) for optimizer in optimizers]


def test_all_backward_passes_of_manual_optimization_are_measured():
    trace = traced(GAN, TensorDataset(torch.zeros(8, WIDTH)))
    generator, discriminator = 2 * 8 * WIDTH, 2 * (WIDTH * 32 + 32)
    assert flops(trace) == generator + 3 * discriminator
    # Of the first pass, inputs of both layers and the generator's weights; the discriminator is toggled off.
    assert flops(trace, "backward") == (discriminator + generator) + 2 * (discriminator + 2 * 32)
    assert trace.optimizer_states == pytest.approx(1)
    assert peak(trace, 8) > 8 * (WIDTH + 2 * 32) * 4


class Graphs:
    """A batch as libraries for graphs make it: `to` changes the batch itself."""

    def __init__(self, sizes: list[int]) -> None:
        self.x = torch.zeros(sum(sizes), WIDTH)
        self.graph = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        self.num_graphs = len(sizes)

    def to(self, device: Any) -> "Graphs":
        self.x, self.graph = self.x.to(device), self.graph.to(device)
        return self


class GraphNetwork(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 32)

    def training_step(self, batch: Graphs, batch_idx: int) -> Tensor:
        return self.layer(batch.x).new_zeros(batch.num_graphs, 32).index_add(0, batch.graph, self.layer(batch.x)).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def test_a_batch_may_be_an_object_whose_samples_differ_in_size():
    trace = traced(GraphNetwork, [3, 7, 5], loading={"collate_fn": Graphs})
    assert "differ in size" in trace.note and trace.unit == "samples"
    assert flops(trace) == 2 * 7 * 2 * WIDTH * 32  # of the largest, which each graph of a batch repeats
    assert peak(trace, 0) < 4 * (WIDTH * 32 + 32) + 100  # gradients on their way, but no fixed number of nodes


class Output(dict):
    """As Hugging Face's ModelOutput: a dict with attributes."""

    __getattr__ = dict.__getitem__


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor]:
        return (hidden_states + self.inner(hidden_states),)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.h, self.head = nn.Embedding(10, WIDTH), nn.ModuleList([Layer(), Layer()]), nn.Linear(WIDTH, 10)

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Output:
        x = self.embed(input_ids)
        for layer in self.h:
            (x,) = layer(hidden_states=x)
        logits = self.head(x)
        return Output(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)


class LanguageModel(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None

    def configure_model(self) -> None:
        self.model = Transformer()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return {"optimizer": torch.optim.AdamW(self.parameters())}


TEXT = [{"input_ids": torch.zeros(12, dtype=torch.int64), "labels": torch.zeros(12, dtype=torch.int64)}] * 3


def test_blocks_are_found_in_a_network_that_computes_its_own_loss():
    trace = traced(LanguageModel, TEXT)
    assert [group.name for group in trace.blocks] == ["block 0", "block 1"]
    assert (trace.unit, trace.tokens_per_example) == ("tokens", 12)
    assert trace.blocks[0].num_parameters == WIDTH * WIDTH + WIDTH
    assert flops(trace) == 12 * (2 * 2 * WIDTH * WIDTH + 2 * WIDTH * 10)
    assert any(level.is_head for level in trace.levels) and not all(level.is_head for level in trace.levels)


class Siamese(LanguageModel):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(**batch).loss + self.model(**batch).loss


class Recomputes(LanguageModel):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return checkpoint(self.model, **batch, use_reentrant=False).loss


@pytest.mark.parametrize("make", [Siamese, Recomputes])
def test_blocks_may_run_more_than_once(make: Any):
    trace, once = traced(make, TEXT), traced(LanguageModel, TEXT)
    assert trace.groups == once.groups and len(trace.blocks) == 2
    total = sum(flops(trace, direction) for direction in ("forward", "backward"))
    forward, backward = (flops(once, direction) for direction in ("forward", "backward"))
    assert total == (2 * (forward + backward) if make is Siamese else pytest.approx(2 * forward + backward))


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Pairs(Regression):
    def training_step(self, batch: Pair, batch_idx: int) -> Any:
        return super().training_step({"x": batch.x, "y": batch.y}, batch_idx)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        while True:
            yield Pair(torch.zeros(WIDTH), torch.tensor(0.0))


@pytest.mark.parametrize(
    ("samples", "loading", "batch_size"),
    [
        (Stream(), {}, 4),
        (list(range(6)), {"batch_size": None, "collate_fn": lambda _: Pair(torch.zeros(7, WIDTH), torch.zeros(7))}, 7),
        ([Pair(torch.zeros(WIDTH), torch.tensor(0.0))] * 9, {"batch_size": 1, "batch_sampler": [[0, 1], [2]]}, None),
    ],
)
def test_samples_come_from_any_loader(samples: Any, loading: dict[str, Any], batch_size: int | None):
    if "batch_sampler" in loading:
        loading["batch_size"] = 1
    trace = traced(Pairs, samples, loading=loading)
    assert trace.loader_batch_size == batch_size and flops(trace) == PRODUCTS


class Item(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch["x"]).mean()
        self.last = loss.item()  # a value
        return loss


class Branch(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch["x"]).mean() if batch["x"].sum() > 0 else None  # a branch


class Numpy(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch["x"]).mean() * np.asarray(batch["y"]).max()  # an array


class Nothing(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Item, r"`self.last = loss.item\(\)  # a value`: it needs the value of a tensor.*_local_scalar_dense"),
        (Branch, r"# a branch`: it needs the value of a tensor"),
        (Numpy, r"# an array`: RuntimeError: .*numpy"),
        (Nothing, r"training_step must return a loss, .* returned NoneType"),
    ],
)
def test_what_cannot_be_traced_says_where_and_is_planned_by_parameters(make: Any, message: str):
    with pytest.raises(NotTraceable, match=message) as caught:
        traced(make)
    assert f"{Path(__file__).name}:" in str(caught.value) or make is Nothing
    trace = trace_parameters(make, "32", tensor_parallel=1, reason=str(caught.value))
    assert trace.num_parameters == traced(Regression).num_parameters and trace.by_parameters
    assert trace.optimizer_states == pytest.approx(2, abs=0.1)
    assert not (trace.forward or trace.levels)


class Unreadable(Dataset):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return np.load("/no/such/file.npy")  # where the data would be


def test_data_that_cannot_be_read_say_why():
    with pytest.raises(UnreadableData, match=r"# where the data would be`: FileNotFoundError: .*/no/such/file"):
        traced(Regression, Unreadable())


class NeedsValues(LanguageModel):
    """Its constructor looks at values, as those with a stochastic depth do."""

    def configure_model(self) -> None:
        pass

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 2)]
        self.model = Transformer()
        self.model.head.weight = self.model.embed.weight


def test_a_constructor_may_need_values():
    trace = traced(NeedsValues, TEXT, parameters="bf16")
    assert trace.num_parameters == traced(LanguageModel, TEXT).num_parameters - 10 * WIDTH


def test_the_modules_own_example_needs_no_data():
    class Own(Pairs):
        def example_batch(self, num_examples: int) -> Pair:
            return Pair(torch.zeros(num_examples, WIDTH), torch.zeros(num_examples))

    assert flops(trace_step(Own)) == PRODUCTS
    with pytest.raises(UnreadableData, match="neither"):
        trace_step(Pairs)


class Contrastive(L.LightningModule):
    """A loss on all pairs of a batch, as SimCLR and CLIP have it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        codes = self.net(batch["x"])
        return F.cross_entropy(codes @ codes.T, torch.arange(len(codes)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_loss_on_all_pairs_of_a_batch_grows_with_its_square():
    trace, batch = traced(Contrastive), 4096
    assert peak(trace, batch) >= 4 * batch**2
    assert sum(work.count * work.flops.per_pair for work in trace.forward) == 2 * 4
    assert not any(level.activations.per_pair for level in traced(Regression).levels)


class Wide(nn.Module):
    """A block that keeps more than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor]:
        return (self.net(hidden_states),)


class Deep(Siamese):
    def configure_model(self) -> None:
        self.model = Transformer()
        self.model.h = nn.ModuleList(Wide() for _ in range(8))


class Checkpointed(Deep):
    """The same step with its blocks checkpointed by hand."""

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.model.h:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


@pytest.mark.slow
def test_checkpointing_is_planned_where_blocks_run_twice():
    trace, by_hand = traced(Deep, TEXT), traced(Checkpointed, TEXT)
    again = traced(Deep, TEXT, checkpointing=True)
    setup = ParallelLayout(nodes=1, devices=1, micro_batch=64, single=True)
    memory, memory_by_hand = (predict_memory(one, setup) for one in (again, by_hand))
    assert memory == memory_by_hand and memory.activations < predict_memory(trace, setup).activations
    machine = machine_from_cluster("A100", None)
    assert predict_step(again, setup, machine) == predict_step(by_hand, setup, machine)
    assert Trace.from_json(trace.to_json()) == trace


class ByHand(Deep):
    """Optimizes by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.optimizers().zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


@pytest.mark.slow
def test_checkpointing_is_planned_with_manual_optimization():
    plain, again = (traced(ByHand, TEXT, checkpointing=checkpointing) for checkpointing in (False, True))
    assert peak(again, 64) < 0.7 * peak(plain, 64)
    automatic = traced(Deep, TEXT)
    assert flops(plain) == flops(automatic) and flops(plain, "backward") == flops(automatic, "backward")


class EachSample(Regression):
    """Computes the loss sample by sample, so that a step has more operations the larger its batch is."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        predictions = self.net(batch["x"])
        return torch.stack([prediction.square().sum() for prediction in predictions]).mean()


def test_operations_that_all_batches_have_are_compared_where_others_have_none():
    """Check that products stay products with weights, whose bytes do not grow with the batch."""
    trace, plain = traced(EachSample), traced(Regression)
    assert flops(trace) == flops(plain) and flops(trace, "backward") == flops(plain, "backward")
    for direction in ("forward", "backward"):
        products, known = ([w for w in getattr(one, direction) if w.flops.at(1)] for one in (trace, plain))
        assert set(products) == set(known) and all(work.bytes.fixed for work in products)


@pytest.mark.parametrize("make", [Item, Branch, Numpy])
def test_a_step_that_reads_values_is_measured_on_real_samples(make: Any, monkeypatch: pytest.MonkeyPatch):
    samples = [{"x": torch.ones(WIDTH), "y": torch.tensor(1.0)}] * 6
    real, fake = traced(make, samples, is_real=True), traced(Regression, samples)
    assert flops(real) == flops(fake) and real.num_parameters == fake.num_parameters
    monkeypatch.setattr(module_source, "MAX_REAL_STEP_BYTES", 100)
    with pytest.raises(NotTraceable, match="parameters take more than 1e-07 GB"):
        traced(make, samples, is_real=True)


def test_a_constructor_that_needs_values_makes_no_large_module(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module_source, "MAX_REAL_BYTES", 100)
    with pytest.raises(NotTraceable, match="parameters take more than 1e-07 GB of this machine"):
        traced(NeedsValues, TEXT)


def test_the_line_of_an_error_is_the_researchers(tmp_path: Path):
    """Check it for libraries that lie outside the environment, as those of a module or an image do."""
    library = tmp_path / "opt" / "site-packages" / "site_library.py"
    library.parent.mkdir(parents=True)
    library.write_text("def fail():\n    raise ValueError('no')\n")
    scope: dict[str, Any] = {}
    exec(compile(library.read_text(), str(library), "exec"), scope)
    try:
        scope["fail"]()  # here
    except ValueError as error:
        assert re.match(rf"{Path(__file__).name}:\d+, `scope.*# here`: ValueError: no", explain(error))
