"""Batches of an ordinary DataLoader, noted with the random state that each pass over them begins with."""

import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import lightning as L
from torch.utils.data import DataLoader, Sampler

from hpc.config.errors import ConfigError
from hpc.data.sampler import GlobalBatchSampler
from hpc.state import checksums, plain_forms, randomness
from hpc.state.batch_effects import FetchEffects

NOT_PERSISTENT = (
    "persistent_workers=False, as random numbers of workers that outlive an epoch could not be repeated by a run"
)
NOT_PERSISTENT += " that goes on"
PLAIN_LOADER = "a torch.utils.data.DataLoader"


class NotedBatches(Sampler[Any]):
    """The batches of another sampler, with the random state that each pass over them began with.

    A loader draws the seed of its workers when an iterator is made, and the order of its samples with the first batch.
    """

    def __init__(self, batches: Any, samplers: list[Any], fetched: FetchEffects | None) -> None:
        self.batches, self.samplers = batches, samplers
        self.marks = self._marks()
        self.made: dict[str, Any] | None = None  # random state when the iterator was made
        self.begun: dict[str, Any] | None = None  # and before its first batch
        self.sums = [0]  # of the first n batches
        self.again: dict[str, Any] = {}  # what `place` returned, of a pass that is to be repeated
        self.fetched = fetched
        self.repeated: list[dict[str, Any]] = []  # marks of what the samplers were as the pass was begun once more

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
            self.again, self.repeated = {}, self._marks()
        self.begun, self.sums = self._random(), [0]
        if self.fetched:
            self.fetched.begin_epoch()
        sums, batches = self.sums, iter(self.batches)  # an iterator that was given up may still read on
        while True:
            if self.fetched:
                self.fetched.before_batch()
            if (indices := next(batches, None)) is None:
                return
            sums.append(zlib.crc32(repr(indices).encode(), sums[-1]))
            yield indices

    def place(self, num: int) -> dict[str, Any]:
        """Return where this pass is after so many batches."""
        return {"made": self.made, "begun": self.begun, "batches": num, "sum": self.sums[num], "now": self.own()}

    def put_from_outside(self, now: list[dict[str, Any]]) -> None:
        """Give the samplers what a module, say, had written into them: the next pass begins with it.

        Args:
            now: what `own` returned within the pass that has been repeated, which makes its own changes again.
        """
        for sampler, state, begun, present in zip(self.samplers, now, self.repeated, self._marks(), strict=False):
            same = {name for name in begun.keys() & present.keys() if begun[name] == present[name]}
            outside = {name for name in same if not plain_forms.is_generator(vars(sampler)[name])}
            self._put(sampler, {name: form for name, form in state.items() if name in outside})

    def _marks(self) -> list[dict[str, Any]]:
        return [
            {name: checksums.fingerprint(value) for name, value in plain_forms.data_attributes(one).items()}
            for one in self.samplers
        ]

    def _random(self) -> dict[str, Any]:
        return {"all": randomness.plain_state(), "own": self.own()}

    def _restore(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            randomness.restore(state["all"])
            self.restore(state["own"])

    def own(self) -> list[dict[str, Any]]:
        """What samplers draw or count with: their generators, and what has changed since they were made."""
        found: list[dict[str, Any]] = []
        for sampler, before in zip(self.samplers, self.marks, strict=True):
            kept = {
                name: plain_forms.to_plain_on_host(value)
                for name, value in plain_forms.data_attributes(sampler).items()
                if plain_forms.is_generator(value) or checksums.fingerprint(value) != before.get(name)
            }
            found.append({name: form for name, form in kept.items() if form != plain_forms.NOT_KEPT})
        return found

    def restore(self, own: list[dict[str, Any]]) -> None:
        """Let the samplers be what they were when `own` was asked."""
        for sampler, state in zip(self.samplers, own, strict=False):
            self._put(sampler, state)

    def _put(self, sampler: Any, state: dict[str, Any]) -> None:
        for name, form in state.items():
            plain_forms.set_attribute(sampler, name, form=form)


def make_workers_short_lived(loader: Any) -> bool:
    """Would its workers outlive an epoch? From now on they do not."""
    was = getattr(loader, "persistent_workers", False)
    if was:
        vars(loader)["persistent_workers"] = False
    return was


def note_batches(trainer: L.Trainer) -> bool:
    """Note from now on where loaders are that do not know it themselves; were there any new ones?

    Iterators that were made before must be made anew. Raises `ConfigError`.
    """
    combined: Any = trainer.fit_loop._combined_loader
    known = NotedBatches | GlobalBatchSampler
    new = [loader for loader in combined.flattened if not isinstance(index_sampler(loader), known)]
    for loader in new:
        if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
            rule = "an interrupted run must find its place in the data again, and of this it is not known"
            raise ConfigError("data", f"{type(loader).__name__}, with an __iter__ of its own", rule, PLAIN_LOADER)
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        # Workers make batches in processes of their own.
        fetched = None if loader.num_workers else FetchEffects(trainer)
        vars(loader)[name] = NotedBatches(
            index_sampler(loader), chain_of_samplers(loader), fetched
        )  # nobody may set it
        if make_workers_short_lived(loader) and trainer.is_global_zero:
            print(f"train: {NOT_PERSISTENT}", flush=True)
    if new:
        combined.reset()  # also workers that are there already
    return bool(new)


def index_sampler(loader: Any) -> Any:
    return getattr(loader, "_index_sampler", None)


def chain_of_samplers(loader: DataLoader) -> list[Any]:
    """What chooses samples: samplers, those that they are made of, and the loader's generator."""
    found: list[Any] = []
    next_ones: list[Any] = [loader.batch_sampler, loader.sampler]
    while next_ones:
        one = next_ones.pop(0)
        if hasattr(one, "__dict__") and all(one is not other for other in found):
            found.append(one)
            next_ones += [getattr(one, name, None) for name in ("sampler", "batch_sampler")]
    return [*found, SimpleNamespace(generator=loader.generator)]
