"""Ordinary DataLoaders, gone on with in the middle of an epoch: their batches up to that place are drawn once more.

The order of a loader follows from the random numbers that are drawn when its epoch begins. They are noted there, so
that another process draws the same ones, passes over the batches that are done, and has the next one before it.
"""

import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, Sampler

from ..config import Refused
from . import randomness
from .sampler import GlobalBatchSampler

PLAIN = "a torch.utils.data.DataLoader"


class NotedBatches(Sampler[Any]):
    """The batches of another sampler, with the random state that each pass over them began with.

    A loader draws the seed of its workers when an iterator is made, and the order of its samples with the first batch.
    """

    def __init__(self, batches: Any, generators: list[torch.Generator]) -> None:
        self.batches, self.generators = batches, generators
        self.made: dict[str, Any] | None = None  # random state when the iterator was made
        self.begun: dict[str, Any] | None = None  # and before its first batch
        self.before: Any = None  # and before the last one: without workers, making it may draw numbers
        self.sums = [0]  # of the first n batches
        self.again: dict[str, Any] = {}  # what `place` returned, of a pass that is to be repeated
        self.next: Any = None  # random state for the batch that comes next

    def __getattr__(self, name: str) -> Any:
        if name == "batches":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.batches, name)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        if self.again:
            self._restore(self.again.get("made"))
        if self.made is None or self.begun is not None:  # an iterator may be made anew before it is used
            self.made, self.begun = self._random(), None
        return self._pass()

    def _pass(self) -> Iterator[Any]:
        if self.again:
            self._restore(self.again.get("begun"))
            self.again = {}
        self.begun, self.sums = self._random(), [0]
        sums, batches = self.sums, iter(self.batches)  # an iterator that was given up may still read on
        while True:
            if self.next is not None:
                randomness.restore(self.next)
                self.next = None
            self.before = randomness.of_host()
            if (indices := next(batches, None)) is None:
                return
            sums.append(zlib.crc32(repr(indices).encode(), sums[-1]))
            yield indices

    def place(self, num: int) -> dict[str, Any]:
        """Return where this pass is after so many batches."""
        return {"made": self.made, "begun": self.begun, "batches": num, "sum": self.sums[num]}

    def _random(self) -> dict[str, Any]:
        return {"all": randomness.state(), "own": [generator.get_state() for generator in self.generators]}

    def _restore(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            randomness.restore(state["all"])
            for generator, own in zip(self.generators, state["own"], strict=False):
                generator.set_state(own)


def note(trainer: L.Trainer) -> bool:
    """Note from now on where loaders are that do not know it themselves; were there any new ones?

    Iterators that were made before must be made anew. Raises `Refused`.
    """
    combined: Any = trainer.fit_loop._combined_loader
    known = NotedBatches | GlobalBatchSampler
    new = [loader for loader in combined.flattened if not isinstance(_batches(loader), known)]
    for loader in new:
        if not isinstance(loader, DataLoader):
            rule = "an interrupted run must find its place in the data again, and of this it is not known"
            raise Refused("data", type(loader).__name__, rule, PLAIN)
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        vars(loader)[name] = NotedBatches(_batches(loader), _generators(loader))  # a DataLoader lets nobody set it
        if loader.persistent_workers:
            vars(loader)["persistent_workers"] = False
            if trainer.is_global_zero:
                said = "train: persistent_workers=False, as random numbers of workers"
                print(f"{said} that outlive an epoch could not be repeated by a run that goes on", flush=True)
    if new:
        combined.reset()  # also workers that are there already
    return bool(new)


def places(trainer: L.Trainer, is_fetched: bool, between_epochs: bool) -> list[dict[str, Any]]:
    """Where each loader is, as plain data; {} for those that know it themselves.

    Args:
        is_fetched: was the next batch fetched already?
        between_epochs: is the next thing to happen the beginning of an epoch?
    """
    combined: Any = trainer.fit_loop._combined_loader
    done, found = trainer.fit_loop.epoch_loop.batch_progress.current.completed, []
    for loader, iterator in zip(combined.flattened, combined._iterator.iterators, strict=True):
        batches = _batches(loader)
        if not isinstance(batches, NotedBatches):
            found.append({})
        elif between_epochs:
            found.append({"own": [generator.get_state() for generator in batches.generators]})
        else:
            cycles = combined._mode == "max_size_cycle"
            num = iterator._num_yielded - is_fetched if cycles else min(iterator._num_yielded, done)
            before = randomness.state(batches.before) if is_fetched and not loader.num_workers else None
            found.append(batches.place(num) | {"workers": loader.num_workers, "next": before})
    return found


def prepare(trainer: L.Trainer, found: list[dict[str, Any]]) -> None:
    """Before iterators are made: let them be those that were left. Raises `Refused`."""
    warnings.filterwarnings("ignore", ".*your dataloader is not resumable")  # Lightning's; here it is
    note(trainer)
    for loader, place in zip(trainer.fit_loop._combined_loader.flattened, found, strict=False):  # type: ignore
        batches = _batches(loader)
        if isinstance(batches, NotedBatches):
            batches.again = {key: place[key] for key in ("made", "begun") if key in place}
            for generator, own in zip(batches.generators, place.get("own", ()), strict=False):
                generator.set_state(own)


def skip(
    trainer: L.Trainer,
    found: list[dict[str, Any]],
    num: Callable[[int | None], int],
    tick: Callable[[], object],
    *,
    is_same: bool,
) -> None:
    """After iterators were made: pass over the batches that are done.

    Args:
        num: how many they were, None: not known → how many they are now.
        tick: called for each of them.
        is_same: must they be the same ones, as the same ranks go on?

    Raises:
        Refused: they are others.
    """
    combined: Any = trainer.fit_loop._combined_loader
    for number, (loader, iterator) in enumerate(zip(combined.flattened, combined._iterator.iterators, strict=True)):
        batches, place = _batches(loader), found[number] if number < len(found) else {}
        if not isinstance(batches, NotedBatches):
            continue
        many = num(place.get("batches"))
        if many and trainer.is_global_zero:
            read = " and read once more, as workers draw random numbers" if loader.num_workers else ""
            print(f"train: the first {many} batches of epoch {trainer.current_epoch} are passed over{read}", flush=True)
        for _ in range(many):
            next(iterator) if loader.num_workers else iterator._next_index()
            tick()
        iterator._num_yielded, batches.next = many, place.get("next") if not loader.num_workers else None
        if is_same and place["sum"] != batches.sums[many]:
            sampler = getattr(batches.batches, "sampler", batches.batches)
            rule = f"{type(sampler).__name__} must give the same samples for the same random numbers"
            raise Refused("data", None, rule, f"{PLAIN} with shuffle=True, or a sampler with set_epoch(epoch)")
        if loader.num_workers != place.get("workers", loader.num_workers) and trainer.is_global_zero:
            said = f"train: {place['workers']} -> {loader.num_workers} workers"
            print(f"{said}: random numbers that they draw are others from here on", flush=True)


def _batches(loader: Any) -> Any:
    return getattr(loader, "_index_sampler", None)


def _generators(loader: DataLoader) -> list[torch.Generator]:
    """Those that a researcher has made for this loader."""
    owners, found = [loader, loader.sampler, loader.batch_sampler], {}
    owners += [getattr(owner, "sampler", None) for owner in owners]
    for owner in owners:
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
    return list(found.values())
