"""Ordinary DataLoaders whose batches are noted: the random state with which each pass over them began, and a checksum.

The order of a loader follows from the random numbers that it draws when its epoch begins. From the notes, another
process draws the same ones; see `replay`.
"""

import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import lightning as L
from torch.utils.data import DataLoader, Sampler

from hpc.config.errors import ConfigError
from hpc.data.map_loaders import unwrap
from hpc.data.rank_samplers import RankSampler
from hpc.data.sample_randomness import is_seeded
from hpc.data.sampler import GlobalOrderSampler
from hpc.data.stream_loader import stream_of
from hpc.state import checksums, plain_forms, randomness
from hpc.state.batch_effects import FetchEffects

NOT_PERSISTENT = (
    "persistent_workers=False is set: if workers outlived an epoch, a resumed run could not repeat their random numbers"
)
PLAIN_LOADER = "a torch.utils.data.DataLoader"


class RecordingBatchSampler(Sampler[Any]):
    """The batches of another sampler, with the random state with which each pass over them began.

    A loader draws the seed of its workers when an iterator is created, and the order of its samples with the first
    batch. So both moments are noted.

    Args:
        batches: the sampler of batches.
        samplers: all samplers that choose samples, with their attributes.
        fetch_effects: what fetching a batch in this process changes; None if workers fetch.

    Attributes:
        at_creation: the random state when the iterator was created.
        at_first_batch: the random state before the first batch of the pass.
        running_checksums: of the first n batches of the pass, at index n.
        to_repeat: the random states of a pass to be repeated by the next one, as `place_after` returned them.
        num_to_skip: batches of the next pass that are drawn and not given.
    """

    def __init__(self, batches: Any, samplers: list[Any], *, fetch_effects: FetchEffects | None) -> None:
        self.batches, self.samplers = batches, samplers
        self.fetch_effects = fetch_effects
        self.at_creation: dict[str, Any] | None = None
        self.at_first_batch: dict[str, Any] | None = None
        self.running_checksums = [0]
        self.to_repeat: dict[str, Any] = {}
        self.num_to_skip = 0
        self._initial_fingerprints = self._fingerprints()
        self._fingerprints_at_repeat: list[dict[str, Any]] = []  # of the samplers when a repeated pass began

    def __getattr__(self, name: str) -> Any:
        if name == "batches":  # missing in a copy that is being made
            raise AttributeError(name)
        return getattr(self.batches, name)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        if self.to_repeat:
            self._restore(self.to_repeat.get("made"))
        # A second iterator may be created before the first one was used: then the first one's state counts.
        if self.at_creation is None or self.at_first_batch is not None:
            self.at_creation, self.at_first_batch = self._capture(), None
        return self._pass()

    def _pass(self) -> Iterator[Any]:
        if self.to_repeat:
            self._restore(self.to_repeat.get("begun"))
            self.to_repeat, self._fingerprints_at_repeat = {}, self._fingerprints()
        self.at_first_batch, self.running_checksums = self._capture(), [0]
        if self.fetch_effects:
            self.fetch_effects.begin_epoch()
        # A local name, as an iterator that was given up may still be read by workers.
        running_checksums, batches = self.running_checksums, iter(self.batches)
        num_to_skip, self.num_to_skip = self.num_to_skip, 0
        while True:
            if self.fetch_effects:
                self.fetch_effects.restore_and_capture()
            if (indices := next(batches, None)) is None:
                return
            running_checksums.append(zlib.crc32(repr(indices).encode(), running_checksums[-1]))
            if len(running_checksums) > num_to_skip + 1:
                yield indices

    def place_after(self, num: int) -> dict[str, Any]:
        """Return the place of this pass after so many batches, as plain data."""
        return {
            "made": self.at_creation,
            "begun": self.at_first_batch,
            "batches": num,
            "sum": self.running_checksums[num],
            "now": self.sampler_states(),
        }

    def sampler_states(self) -> list[dict[str, Any]]:
        """Return the generators of the samplers, and their attributes that have changed, as plain data."""
        states: list[dict[str, Any]] = []
        for sampler, initial in zip(self.samplers, self._initial_fingerprints, strict=True):
            forms = {
                name: plain_forms.to_plain_on_host(value)
                for name, value in plain_forms.attributes_with_plain_form(sampler).items()
                if plain_forms.is_generator(value) or checksums.fingerprint(value) != initial.get(name)
            }
            states.append({name: form for name, form in forms.items() if form != plain_forms.NOT_KEPT})
        return states

    def restore_samplers(self, states: list[dict[str, Any]]) -> None:
        """Restore the samplers' state from the result of `sampler_states`."""
        for sampler, state in zip(self.samplers, states, strict=False):
            _set_attributes(sampler, state)

    def restore_external_sampler_state(self, states: list[dict[str, Any]]) -> None:
        """Restore sampler attributes that were set from outside during the epoch.

        Those that the replay itself changed stay.

        Args:
            states: the result of `sampler_states` at the place within the pass that has been repeated.
        """
        present = self._fingerprints()
        for sampler, state, before, after in zip(
            self.samplers, states, self._fingerprints_at_repeat, present, strict=False
        ):
            unchanged = {name for name in before.keys() & after.keys() if before[name] == after[name]}
            from_outside = {name for name in unchanged if not plain_forms.is_generator(vars(sampler)[name])}
            _set_attributes(sampler, {name: form for name, form in state.items() if name in from_outside})

    def _fingerprints(self) -> list[dict[str, Any]]:
        return [
            {
                name: checksums.fingerprint(value)
                for name, value in plain_forms.attributes_with_plain_form(sampler).items()
            }
            for sampler in self.samplers
        ]

    def _capture(self) -> dict[str, Any]:
        return {"all": randomness.plain_state(), "own": self.sampler_states()}

    def _restore(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            randomness.restore(state["all"])
            self.restore_samplers(state["own"])


def wrap_batch_samplers(trainer: L.Trainer) -> bool:
    """Let training loaders record their batches from now on; return whether any loader was new.

    Loaders that know their place themselves are left as they are. Iterators that exist must be created again.

    Raises:
        ConfigError: a loader iterates in a way of its own.
    """
    combined: Any = trainer.fit_loop._combined_loader
    knows_place = RecordingBatchSampler | GlobalOrderSampler
    plain_loaders = [loader for loader in combined.flattened if stream_of(loader) is None]
    new_loaders = [loader for loader in plain_loaders if not isinstance(index_sampler(loader), knows_place)]
    for loader in new_loaders:
        if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
            rule = "A resumed run must find its place in the data again, which this loader does not make possible"
            raise ConfigError("data", f"{type(loader).__name__}, with an __iter__ of its own", rule, PLAIN_LOADER)
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        # Workers make batches in processes of their own, and change nothing here.
        fetch_effects = None if loader.num_workers else FetchEffects(trainer)
        noted = RecordingBatchSampler(index_sampler(loader), list_samplers(loader), fetch_effects=fetch_effects)
        vars(loader)[name] = noted  # DataLoader does not allow this attribute to be set
        if not is_seeded(loader) and make_workers_short_lived(loader) and trainer.is_global_zero:
            print(f"train: {NOT_PERSISTENT}", flush=True)
    if new_loaders:
        combined.reset()  # also ends workers that exist
    return bool(new_loaders)


def make_workers_short_lived(loader: Any) -> bool:
    """Let the workers of a loader end with each epoch from now on; return whether they would have outlived it."""
    was_persistent = getattr(loader, "persistent_workers", False)
    if was_persistent:
        vars(loader)["persistent_workers"] = False
    return was_persistent


def index_sampler(loader: Any) -> Any:
    """Return the sampler that gives the indices of each batch, or of each sample if a loader makes no batches."""
    return getattr(loader, "_index_sampler", None)


def recorded_sampler(loader: Any) -> Any:
    """Return the sampler that gives the indices of each batch, without what records or wraps it."""
    batches = unwrap(index_sampler(loader))
    return batches.batches if isinstance(batches, RecordingBatchSampler) else batches


def list_samplers(loader: DataLoader) -> list[Any]:
    """Return what chooses samples: samplers, also those inside of them, and a holder of the loader's generator."""
    samplers: list[Any] = []
    to_visit: list[Any] = [loader.batch_sampler, loader.sampler]
    while to_visit:
        sampler = to_visit.pop(0)
        if hasattr(sampler, "__dict__") and all(sampler is not other for other in samplers):
            # What a RankSampler holds of its own follows from the epoch, which Lightning sets.
            samplers += [] if isinstance(sampler, RankSampler) else [sampler]
            to_visit += [getattr(sampler, name, None) for name in ("sampler", "batch_sampler")]
    return [*samplers, SimpleNamespace(generator=loader.generator)]


def _set_attributes(sampler: Any, state: dict[str, Any]) -> None:
    for name, form in state.items():
        plain_forms.set_attribute(sampler, name, form=form)
