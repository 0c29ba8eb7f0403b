"""Check that attributes of a module, its data and callbacks that Lightning does not save are restored on resume."""

import enum
import io
import itertools
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary
from test_resume import COMMON, OWN_CALLBACK, assert_same, scalars
from tiers import soak_all_but
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import MeanMetric
from torchmetrics.wrappers import MetricTracker, Running

from hpc.resume.initial_values import InitialValues, without_computed
from hpc.state import attributes, checksums, holder_fields, plain_forms, trainer_settings

WORDS = [*COMMON, "+trainer.limit_val_batches=1", "+trainer.limit_test_batches=1", "+trainer.limit_train_batches=5"]
WORDS += ["trainer=cpu", "trainer.max_epochs=3"]
KEEPS = (
    OWN_CALLBACK
    + """
import lightning as L
import torch
from torchmetrics import MaxMetric, MeanMetric, MetricCollection
from torchmetrics.wrappers import MetricTracker, MinMaxMetric, Running
from hpc.resume.resume import Resume
from my_research.module import Classifier

made, stepped = Classifier.__init__, Classifier.training_step

def __init__(self, *args, **kwargs):
    made(self, *args, **kwargs)
    self.temperature = 1.0
    self.register_buffer("smooth", torch.zeros(()), persistent=False)
    self.register_buffer("transferred", torch.zeros(()))
    self.last, self.least = Running(MeanMetric(), 3), MinMaxMetric(MeanMetric())
    self.tracked = MetricTracker(MaxMetric(), maximize=True)
    next(self.network.parameters()).requires_grad_(False)

def on_train_start(self):
    self.outputs = []

def on_train_epoch_start(self):
    self.temperature = 1 / (1 + self.current_epoch)
    self.tracked.increment()
    if self.current_epoch == 1:
        next(self.network.parameters()).requires_grad_(True)

def on_after_batch_transfer(self, batch, dataloader_idx):
    if self.training:
        self.transferred += 1
    return batch

def training_step(self, batch, batch_idx):
    self.log("own/transferred", self.transferred.clone())
    loss = stepped(self, batch, batch_idx)
    self.smooth = 0.9 * self.smooth + 0.1 * loss.detach()
    self.outputs.append(loss)
    for metric in (self.last, self.least, self.tracked):
        metric.update(loss.detach())
    own = next(callback for callback in self.trainer.callbacks if isinstance(callback, OwnCallback))
    own.seen = getattr(own, "seen", 0) + 1
    self.log_dict({"own/last": self.last.compute(), "own/most": self.tracked.compute(), "own/seen": float(own.seen)})
    self.log_dict({f"own/{name}": value for name, value in self.least.compute().items()})
    return loss * self.temperature * (1 + self.smooth)

def on_train_epoch_end(self):
    self.log("own/outputs", torch.stack(self.outputs).mean())
    self.outputs.clear()

Classifier.__init__, Classifier.on_train_start = __init__, on_train_start
Classifier.on_train_epoch_start, Classifier.on_train_epoch_end = on_train_epoch_start, on_train_epoch_end
Classifier.on_after_batch_transfer, Classifier.training_step = on_after_batch_transfer, training_step
"""
)
# Lightning zeroes gradients at each step; this module does so at every third step.
GATHERS = """
from my_research.module import Classifier

def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
    if batch_idx % 3 == 0:
        optimizer.zero_grad()

Classifier.optimizer_zero_grad = optimizer_zero_grad
"""


@pytest.mark.slow
@pytest.mark.parametrize("stop", soak_all_but([3, 5, 7, 10], 5))  # in the middle of epochs, and when one has ended
@pytest.mark.parametrize("patch", [KEEPS, GATHERS], ids=["keeps", "gathers"])
def test_a_run_that_goes_on_has_what_was_kept(patch: str, stop: int, start: Callable, tmp_path: Path) -> None:
    start(tmp_path / "reference", 1, WORDS, patch=patch)
    start(tmp_path / "run", 1, WORDS, stop - 1, patch)
    said = start(tmp_path / "run", 1, [], patch=patch)
    assert_same(tmp_path / "run", tmp_path / "reference")
    if patch is KEEPS:
        (told,) = [line for line in said.splitlines() if "attributes are restored" in line]
        assert "smooth" in told and ("temperature" in told) is (stop > 5)  # it changes in the second epoch
        assert len(scalars(tmp_path / "run")["own/outputs"]) == 3


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.view, self.width, self.table = self.weight.detach(), 2, torch.zeros(3)


class Whole(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.running = Part(), Running(MeanMetric(), 2)


class Own(L.Callback):
    stage = 0


def trained(module: Whole, *callbacks: L.Callback, datasets: tuple = (), is_global_zero: bool = False) -> Any:
    loaders = [SimpleNamespace(dataset=dataset) for dataset in datasets]
    return SimpleNamespace(
        datamodule=None,
        fit_loop=SimpleNamespace(_combined_loader=SimpleNamespace(flattened=loaders)),
        callbacks=list(callbacks),
        optimizers=[],
        lr_scheduler_configs=[],
        is_global_zero=is_global_zero,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )


def test_what_has_changed_is_kept_and_nothing_else() -> None:
    module, callback = Whole(), Own()
    trainer = trained(module, callback, ModelSummary())
    before = attributes.record_initial(trainer, module)
    assert attributes.find_changed(trainer, module, initial=before) == []
    with torch.no_grad():
        module.part.weight.add_(1)  # and so its view
    module.part.table[1] = 7
    module.part.weight.requires_grad_(False)
    vars(module.part)["odd"] = object()  # not storable in a checkpoint
    callback.stage = 2
    module.running.update(torch.tensor(1.0))
    kept = attributes.find_changed(trainer, module, initial=before)
    assert {(owner, name) for owner, name, _ in kept} == {
        ("module part", "table"),
        ("module part", "odd"),
        ("parameter part.weight", "requires_grad"),
        ("callback Own 1", "stage"),
        ("module running", "_num_vals_seen"),
    }
    again, other = Whole(), Own()
    again.part.width = 5  # deliberately built with another value
    attributes.restore(trained(again, other), again, changed=kept)
    assert (again.part.table[1], again.part.weight.requires_grad, other.stage, again.part.width) == (7, False, 2, 5)
    assert again.running._num_vals_seen == 1
    attributes.restore(trained(again), again, changed=[("callback Gone 1", "stage", 3)])


class Memory:
    """An object of the fork's own."""

    def __init__(self) -> None:
        self.seen: deque = deque(maxlen=3)


Memory.__module__ = "my_research.memory"


def test_arrays_generators_containers_and_own_objects_are_kept(capfd: pytest.CaptureFixture) -> None:
    def made() -> Any:
        module: Any = Whole()
        module.memory, module.prototypes, module.counts = Memory(), np.zeros((2, 3)), Counter()
        module.generators = [np.random.default_rng(1), torch.Generator().manual_seed(1), random.Random(1)]
        module.rng = np.random.default_rng(2)
        module.by_class, module.rate, module.odd = defaultdict(list), np.float32(0.5), defaultdict(lambda: 0)
        return module

    module = made()
    trainer = trained(module)
    before = attributes.record_initial(trainer, module)
    assert attributes.find_changed(trainer, module, initial=before) == []
    module.memory.seen.extend(range(5))
    module.prototypes[1] += 2
    module.counts.update("aab")
    module.by_class[3].append(np.int64(7))
    module.rate *= 2
    module.odd[1] = 2
    module.rng.normal(size=5)
    numpys, torchs, pythons = module.generators
    _ = numpys.normal(size=5), torch.rand(5, generator=torchs), pythons.random()
    stream = io.BytesIO()
    torch.save(attributes.find_changed(trainer, module, initial=before), stream)
    state = torch.load(io.BytesIO(stream.getvalue()), weights_only=True)

    again = made()
    shared = again.rng
    attributes.restore(trained(again, is_global_zero=True), again, changed=state)
    assert (list(again.memory.seen), again.memory.seen.maxlen) == ([2, 3, 4], 3)
    assert (again.prototypes == module.prototypes).all() and again.counts == Counter("aab")
    assert again.by_class == {3: [7]} and again.by_class.default_factory is list
    assert (again.rate, type(again.rate)) == (1, np.float32)
    assert shared is again.rng and shared.normal() == module.rng.normal()
    assert again.generators[0].normal() == numpys.normal() and again.generators[2].random() == pythons.random()
    assert torch.equal(torch.rand(2, generator=again.generators[1]), torch.rand(2, generator=torchs))
    assert again.odd == {}
    told = capfd.readouterr().out.splitlines()
    assert (
        "a checkpoint cannot hold these attributes, so they start anew in a resumed run: odd." in told[1]
        and "odd" not in told[0]
    )


def test_what_a_dataset_has_changed_is_told(capfd: pytest.CaptureFixture) -> None:
    dataset, module = SimpleNamespace(stage=0, size=3, rng=np.random.default_rng(1)), Whole()
    trainer = trained(module, datasets=(dataset,), is_global_zero=True)
    before = attributes.record_initial(trainer, module)
    dataset.stage = 2
    dataset.rng.normal()
    state = attributes.find_changed(trainer, module, initial=before)
    dataset.stage = 0
    attributes.restore(trainer, module, changed=state)
    assert (
        "a checkpoint cannot hold these attributes, so they start anew in a resumed run: stage, rng."
        in capfd.readouterr().out
    )
    assert dataset.stage == 0


def test_one_entry_of_many_is_a_change_and_so_is_what_a_full_deque_has_lost() -> None:
    losses, memory, bank = [0.0] * 50_000, deque(range(200_000), maxlen=200_000), np.zeros((50_000, 2))
    before = [checksums.fingerprint(one) for one in (losses, memory, bank)]
    assert before == [checksums.fingerprint(one) for one in (losses, memory, bank)]
    losses[3], bank[7, 1] = 1.0, 1.0
    memory.append(-1)
    assert not any(was == checksums.fingerprint(one) for was, one in zip(before, (losses, memory, bank), strict=True))


class Phase(enum.Enum):
    WARM, MAIN = 1, 2


class Pair(NamedTuple):
    rate: float
    num: int


@dataclass(slots=True)
class Slotted:
    rate: float = 1.0


class Bank(list): ...


class Table(dict): ...


for kind in (Slotted, Bank, Table):
    kind.__module__ = Memory.__module__


def carried(module: Any, again: Any, before: Any, *callbacks: Any, now: Any = ()) -> None:
    """Transfer attributes from one run to another, as a checkpoint does."""
    stream = io.BytesIO()
    torch.save(attributes.find_changed(trained(module, *callbacks), module, initial=before), stream)
    state = torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    attributes.restore(trained(again, *now, is_global_zero=True), again, changed=state)


def odd() -> Any:
    module: Any = Whole()
    module.phase, module.pair, module.space, module.slotted = Phase.WARM, Pair(1.0, 0), SimpleNamespace(a=1), Slotted()
    module.bank, module.table, module.count = Bank(), Table(a=1), Counter()
    module.meters, module.by_name = [Memory(), Memory(), Memory()], {"a": Memory(), 2: [Memory(), Memory()], "n": 0}
    module.centre, module.seen = torch.zeros(2), torch.zeros(2)
    module.of_file = np.zeros(2, ">f4")
    module.part.register_buffer("scratch", torch.zeros(2), persistent=False)
    del module.part._buffers["scratch"]  # torch goes on to list its name
    module.rate = 0.5
    module.save_hyperparameters({"temperature": 1.0, "width": 3})
    module.own = torch.optim.Adam(module.part.parameters(), 0.1)
    module.schedules = [torch.optim.lr_scheduler.StepLR(module.own, 2, gamma) for gamma in (0.5, 0.1)]
    return module


def test_a_buffer_of_a_metric_is_each_ranks_own() -> None:
    def counting() -> Any:
        module: Any = L.LightningModule()
        module.mean = MeanMetric()
        module.mean.register_buffer("num_seen", torch.zeros(()))
        return module

    module, again = counting(), counting()
    before = attributes.record_initial(trained(module), module)
    assert not attributes.find_changed(trained(module), module, initial=before)
    module.mean.num_seen += 3
    changed = attributes.find_changed(trained(module), module, initial=before)
    attributes.restore(trained(again), again, changed=changed)
    assert [name for _, name, _ in changed] == ["num_seen"] and again.mean.num_seen == 3


def test_values_of_every_kind_go_on_and_each_object_has_its_own() -> None:
    module, again = odd(), odd()
    before = attributes.record_initial(trained(module), module)
    module.phase, module.pair, module.space.a, module.slotted.rate = Phase.MAIN, Pair(0.5, 3), 2, 0.5
    module.bank.append(1.5)
    module.table["a"] = 7
    module.count[np.int64(3)] += 2
    for number, memory in enumerate([*module.meters, module.by_name["a"], *module.by_name[2]]):
        memory.seen.append(number)
    module.by_name["n"] = 9
    module.ds_weight, module.gradient_norm = 0.25, 7.0  # user names that only resemble library names
    module.centre.data.add_(1)
    module.seen.numpy()[1] = 4
    module.of_file[1] = 6
    module.hparams.temperature = 0.5
    module.part.weight.sum().backward()
    module.own.step()
    module.schedules[1].step()
    again.hparams.width, bank = 5, again.bank  # deliberately another value
    carried(module, again, before)
    assert (again.phase, again.pair, again.space.a, again.slotted.rate) == (Phase.MAIN, (0.5, 3), 2, 0.5)
    assert (Phase.WARM.value, Phase.WARM.name, type(again.pair)) == (1, "WARM", Pair)
    assert again.bank is bank and (list(bank), again.table["a"], again.count[3]) == ([1.5], 7, 2)
    memories = [*again.meters, again.by_name["a"], *again.by_name[2]]
    assert [list(memory.seen) for memory in memories] == [[number] for number in range(6)]
    assert (again.ds_weight, again.gradient_norm) == (0.25, 7.0)
    assert again.by_name["n"] == 9 and again.centre.tolist() == [1, 1] and again.seen.tolist() == [0, 4]
    assert again.of_file.tolist() == [0, 6]
    assert (again.hparams.temperature, again.hparams.width) == (0.5, 5)
    assert again.own.state_dict()["state"][0]["exp_avg"].tolist() == pytest.approx([0.1, 0.1])
    assert [schedule.last_epoch for schedule in again.schedules] == [0, 1]


def test_what_cannot_go_on_is_told(capfd: pytest.CaptureFixture) -> None:
    def made() -> Any:
        module: Any = Whole()
        module.numbers, module.unused = (
            itertools.chain([1, 2]),
            itertools.chain([1, 2]),
        )  # no iterator over one container
        module.act = torch.relu
        module.batches, module.late, module.later = (one for one in "abc"), None, None
        ring: list[Any] = [0]
        ring.append(ring)  # leads to itself
        module.ring = ring
        return module

    module, again = made(), made()
    before = attributes.record_initial(trained(module), module)
    next(module.numbers)
    module.late, module.act, module.ring[0] = Memory(), torch.tanh, 1
    module.later = torch.optim.SGD(module.parameters(), 0.1)
    carried(module, again, before)
    anew, unseen = capfd.readouterr().out.splitlines()
    assert "so they start anew in a resumed run: numbers, act, late, later, ring." in anew
    assert "it cannot be detected whether training changes them: batches." in unseen
    assert again.late is again.later is None


class Layered(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.TransformerEncoderLayer(4, 1, 8), nn.ReLU())
        self.head, self.tracked = nn.Linear(4, 4), MetricTracker(MeanMetric(), True)
        self.head.register_forward_hook(looks)
        self.loss_fn = partial(torch.add, alpha=1)

    def trains(self) -> None:
        """Change parts that a checkpoint does not hold."""
        self.body[0].activation = torch.tanh
        self.body[1] = nn.Tanh()
        self.head._forward_hooks.clear()
        self.body.register_forward_pre_hook(partial(looks, more=1))
        self.head.weight.register_hook(lambda gradient: 2 * gradient)
        self.loss_fn = partial(torch.add, alpha=2)


def looks(*_: Any, more: int = 0) -> None: ...


def test_layers_hooks_and_functions_that_training_has_changed_are_told(capfd: pytest.CaptureFixture) -> None:
    module = Layered()
    before = attributes.record_initial(trained(module), module)
    module.tracked.increment()
    module.head.register_full_backward_hook(nn.Module._maybe_warn_non_full_backward_hook)  # a library's own
    changed = {(owner, name) for owner, name, _ in attributes.find_changed(trained(module), module, initial=before)}
    assert not [owner for owner, name in changed if name in holder_fields.STRUCTURE]
    module.trains()
    named: set[str] = set()
    attributes.print_unsaved(attributes.find_changed(trained(module), module, initial=before), named)
    layers = {"layers of body", "hooks of body", "hooks of head", "hooks of head.weight"}
    assert named == {"loss_fn", "activation", *layers}
    assert "Try: state_dict() and load_state_dict() of the object" in capfd.readouterr().out


class Averaging(L.Callback):
    average: Any = None


def test_objects_that_training_makes_are_told_and_those_beside_them_go_on(capfd: pytest.CaptureFixture) -> None:
    module, again, callback, its = odd(), odd(), Averaging(), Averaging()
    before = attributes.record_initial(trained(module, callback), module)
    callback.average = deepcopy(module.part).requires_grad_(False)
    module.meters.append(Memory())
    module.meters[0].seen.append(7)
    changed = attributes.find_changed(trained(module, callback), module, initial=before)
    named: set[str] = set()
    attributes.print_unsaved(changed, named)
    assert named == {"average", "meters"}
    assert "so they start anew in a resumed run: meters, average. Try:" in capfd.readouterr().out
    attributes.print_unsaved(changed, named)
    assert not capfd.readouterr().out, "each is told once"
    carried(module, again, before, callback, now=[its])
    assert its.average is None and [list(memory.seen) for memory in again.meters] == [[7], [], []]


def test_an_average_that_is_made_before_training_goes_on() -> None:
    module, again, callback, its = Whole(), Whole(), Averaging(), Averaging()
    for averaging, network in ((callback, module), (its, again)):
        averaging.average = deepcopy(network.part).requires_grad_(False)
    before = attributes.record_initial(trained(module, callback), module)
    callback.average.weight.data.fill_(5)
    carried(module, again, before, callback, now=[its])
    assert its.average.weight.tolist() == [5, 5] and not its.average.weight.requires_grad
    assert again.part.weight.tolist() == [1, 1] and again.part.weight.requires_grad


def started(module: Any, trainer: Any) -> InitialValues:
    """Begin training: a sanity check counts, and hooks copy weights, and set numbers, a folder and an object."""
    initial = InitialValues()
    initial.given(trainer, module)
    names = (*trainer_settings.TRAINER_SETTINGS, "lightning_module")
    vars(trainer).update(dict.fromkeys(names), lightning_module=module)
    module.validated = module.__dict__.get("validated", 0) + 1
    module.first = {"weight": module.part.weight.detach().clone()}
    module.total, module.folder, module.drawn, module.odd = trainer.max_epochs * 10, "/here", torch.rand(()), lambda: 0
    module.memory = Memory()
    initial.begin_training(trainer, module)
    return initial


def test_what_hooks_have_set_until_training_began_is_saved_and_told_apart() -> None:
    module: Any = Whole()
    trainer = trained(module)
    trainer.max_epochs = 3
    initial = started(module, trainer)
    module.memory.seen.append(3)
    module.total += 1
    changed, of_start = initial.changed(trainer, module)
    forms = {name: form for _, name, form in changed}
    assert forms.keys() == {
        "validated",
        "first",
        "total",
        "folder",
        "drawn",
        "memory",
        "seen",
    }  # the odd one is made again
    assert forms["total"] == 31 and {name for _, name in of_start} == forms.keys() - {"total", "seen"}
    module.odd = lambda: 1
    named: set[str] = set()
    attributes.print_unsaved(initial.changed(trainer, module)[0], named)
    assert named == {"odd"}


@pytest.mark.parametrize("is_same_plan", [True, False])
def test_numbers_of_another_length_of_training_are_those_that_its_hooks_have_set(
    is_same_plan: bool, capfd: pytest.CaptureFixture
) -> None:
    """Check that a drawn number goes on, a folder never does, and copies of weights always do."""
    module, again = Whole(), Whole()
    trainer, its = trained(module), trained(again, is_global_zero=True)
    trainer.max_epochs, its.max_epochs = 3, 3 if is_same_plan else 5
    changed, of_start = started(module, trainer).changed(trainer, module)
    with torch.no_grad():
        again.part.weight.add_(1)
    initial: Any = started(again, its)
    again.folder = "/there"
    places: Any = {(owner, name) for owner, name in of_start}
    left = without_computed(its, again, changed=changed, of_start=places, is_same_plan=is_same_plan)
    attributes.restore(its, again, changed=left)
    assert again.first["weight"].tolist() == [1, 1] and torch.equal(again.drawn, module.drawn)
    assert (again.total, again.folder) == (30 if is_same_plan else 50, "/there") and initial
    note = "note: these attributes are as hooks set them when training starts, not as in the checkpoint"
    assert f"{note}: {'folder' if is_same_plan else 'total, folder'}\n" in capfd.readouterr().out


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.bool, torch.complex128, torch.uint8])
def test_a_mark_sees_one_element_of_a_tensor_and_its_place(kind: torch.dtype) -> None:
    tensor = torch.zeros(3, 5, 7).to(kind)
    found = [checksums.fingerprint(tensor)]
    for place in range(20):
        tensor.data.zero_()
        tensor.data.view(-1)[place] = 1
        found.append(checksums.fingerprint(tensor.transpose(0, 1)))
    assert len(set(found)) == 21
    assert checksums.fingerprint(tensor) == checksums.fingerprint(tensor.clone()) and checksums.fingerprint(
        torch.empty(0)
    ) == checksums.fingerprint(torch.empty(0))


class Added(TorchDispatchMode):
    """A mode that records the number of elements of each sum."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.sum.dim_IntList:
            self.counts.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_what_a_device_adds_up_is_added_up_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = torch.arange(103, dtype=torch.int32)
    square = bits[:100].view(10, 10)
    wanted = [*square.sum(1), *square.sum(0), *bits[100:]]
    for most, count in ((2**24, 1), (20, 5)):
        monkeypatch.setattr(checksums, "PIECE", most)
        with Added() as added:
            assert checksums._row_column_sums(bits).tolist() == torch.stack(wanted).tolist()
        assert added.counts == [100 // count] * 2 * count + [10 * count]


def test_a_tensor_goes_on_where_it_was_on_the_host_or_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_forms, "is_plain", lambda value: True)  # FakeTensorMode's generator has its own class
    with FakeTensorMode():  # as if there were a GPU
        kept = plain_forms.to_plain_on_host({"there": torch.ones(2, device="cuda"), "here": [torch.ones(2)]})
    assert kept["there"][plain_forms.KIND] == plain_forms.ON_DEVICE and isinstance(kept["here"][0], torch.Tensor)
    assert kept["there"]["parts"][0].device.type == "cpu"
    owner = SimpleNamespace()
    form = {"there": {plain_forms.KIND: plain_forms.ON_DEVICE, "parts": [torch.ones(2)]}, "here": [torch.ones(2)]}
    plain_forms.set_attribute(owner, "losses", form=form, device="meta")
    assert owner.losses["there"].device.type == "meta" and owner.losses["here"][0].device.type == "cpu"
