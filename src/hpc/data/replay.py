"""Ordinary DataLoaders of a run that resumes in the middle of an epoch: their batches up to that place are drawn again.

They are drawn with the random numbers that `noted_batches` has noted. The batches that are done are passed over, and
the next one comes first.
"""

import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
from torch.utils.data import DataLoader

from hpc.config.errors import ConfigError
from hpc.data.noted_batches import (
    PLAIN_LOADER,
    RecordingBatchSampler,
    index_sampler,
    list_samplers,
    wrap_batch_samplers,
)
from hpc.data.sample_randomness import is_seeded
from hpc.data.sampler import EvalBatchSampler, GlobalOrderSampler
from hpc.data.stream_loader import stream_of
from hpc.state import plain_forms


def loader_places(trainer: L.Trainer, *, is_fetched: bool, between_epochs: bool) -> list[dict[str, Any]]:
    """Return the place of each training loader, as plain data; {} for those that know it themselves.

    Args:
        is_fetched: whether the next batch has been fetched.
        between_epochs: whether an epoch begins next.
    """
    combined: Any = trainer.fit_loop._combined_loader
    done, places = trainer.fit_loop.epoch_loop.batch_progress.current.completed, []
    # Lightning fetches a batch more than it needs from loaders of unknown length.
    num_ahead = len(getattr(trainer.fit_loop._data_fetcher, "batches", ())) + is_fetched
    for loader, iterator in zip(combined.flattened, combined._iterator.iterators, strict=True):
        batches = index_sampler(loader)
        if (stream := stream_of(loader)) is not None:
            places.append({} if between_epochs else {"stream": stream.place_after(stream.num_yielded - num_ahead)})
        elif not isinstance(batches, RecordingBatchSampler):
            places.append({})
        elif between_epochs:
            places.append({"own": batches.sampler_states()})
        else:
            repeats_shorter = combined._mode == "max_size_cycle"
            num = iterator._num_yielded - is_fetched if repeats_shorter else min(iterator._num_yielded, done)
            before_next = batches.fetch_effects.state() if is_fetched and batches.fetch_effects else None
            places.append(batches.place_after(num) | {"workers": loader.num_workers, "next": before_next})
    return places


def prepare_loaders(trainer: L.Trainer, places: list[dict[str, Any]], *, num_done: Callable[[int | None], int]) -> None:
    """Let the next iterators of the loaders draw as those that were saved. Raise `ConfigError`.

    Args:
        places: the result of `loader_places` when the run was saved.
        num_done: as of `pass_over_batches`.
    """
    warnings.filterwarnings("ignore", ".*your dataloader is not resumable")  # Lightning's warning; here it is resumable
    wrap_batch_samplers(trainer)
    for loader, place in zip(trainer.fit_loop._combined_loader.flattened, places, strict=False):  # type: ignore
        batches = index_sampler(loader)
        if (stream := stream_of(loader)) is not None and "stream" in place:
            stream.resume_at(place["stream"])
        if isinstance(batches, RecordingBatchSampler):
            if _is_skipped_unfetched(loader) and "begun" in place:
                batches.num_to_skip = num_done(place.get("batches"))
            batches.to_repeat = {key: place[key] for key in ("made", "begun") if key in place}
            batches.restore_samplers(place.get("own", []))


def pass_over_batches(
    trainer: L.Trainer,
    places: list[dict[str, Any]],
    *,
    num_done: Callable[[int | None], int],
    tick: Callable[[], object],
    is_same: bool,
) -> None:
    """Pass over the batches that are done, after iterators were created.

    Args:
        places: the result of `loader_places` when the run was saved.
        num_done: returns how many batches of a loader are done in this layout, from how many were done when it was
            saved (None: unknown).
        tick: called for each batch that is passed over.
        is_same: whether these must be the same batches, as the same ranks resume.

    Raises:
        ConfigError: they are other batches.
    """
    combined: Any = trainer.fit_loop._combined_loader
    for number, (loader, iterator) in enumerate(zip(combined.flattened, combined._iterator.iterators, strict=True)):
        batches, place = index_sampler(loader), places[number] if number < len(places) else {}
        if stream_of(loader) is not None and "stream" in place:
            for _ in range(num_done(place["stream"]["batches"]) - place["stream"]["batches"]):
                next(iterator)
                tick()
        if not isinstance(batches, RecordingBatchSampler):
            continue
        num = num_done(place.get("batches"))
        if num and trainer.is_global_zero:
            is_fetched_again = loader.num_workers and not _is_skipped_unfetched(loader)
            how = ", and fetched again, as the data draw random numbers in workers" if is_fetched_again else ""
            print(f"train: the first {num} batches of epoch {trainer.current_epoch} are passed over{how}", flush=True)
        for _ in range(0 if _is_skipped_unfetched(loader) else num):
            next(iterator) if loader.num_workers else iterator._next_index()
            tick()
        batches.restore_external_sampler_state(place.get("now", []))
        iterator._num_yielded = num
        if batches.fetch_effects:
            batches.fetch_effects.to_restore = place.get("next")
        if is_same and place["sum"] != batches.running_checksums[num]:
            sampler = getattr(batches.batches, "sampler", batches.batches)
            rule = f"{type(sampler).__name__} must give the same batches as before the stop; it has other arguments, "
            rule += "such as another batch size, or gives other samples for the same random numbers"
            fix = f"the values of data as they were; or {PLAIN_LOADER} with shuffle=True"
            raise ConfigError("data", None, rule, fix)
        if loader.num_workers != place.get("workers", loader.num_workers) and trainer.is_global_zero:
            change = f"the number of workers has changed from {place['workers']} to {loader.num_workers}"
            print(f"train: {change}: from here on they draw other random numbers", flush=True)


def _is_skipped_unfetched(loader: Any) -> bool:
    """Return whether batches that workers would fetch are passed over by their indices alone."""
    return bool(loader.num_workers) and is_seeded(loader)


def evaluation_generators(trainer: L.Trainer) -> list[list[Any]]:
    """Return for each validation loader the generators that it draws with, and training does not, as plain data."""
    combined = trainer.fit_loop.epoch_loop.val_loop._combined_loader
    return [
        [plain_forms.to_plain(generator) for _, _, generator in _generators_of_evaluation(trainer, loader)]
        for loader in (combined.flattened if combined is not None else [])
    ]


def restore_evaluation(trainer: L.Trainer, loader: Any, *, saved: list[Any]) -> None:
    """Restore the generators of a validation loader before its iterator is created.

    Args:
        saved: the item of this loader in the result of `evaluation_generators`.
    """
    for (sampler, name, _), form in zip(_generators_of_evaluation(trainer, loader), saved, strict=False):
        plain_forms.set_attribute(sampler, name, form=form)


def _generators_of_evaluation(trainer: L.Trainer, loader: Any) -> list[tuple[Any, str, Any]]:
    """Return the generators of a loader that no training loader has, too."""
    training_loaders: list[Any] = trainer.fit_loop._combined_loader.flattened  # type: ignore[union-attr]
    of_training = {
        id(generator) for training_loader in training_loaders for *_, generator in _generators(training_loader)
    }
    return [entry for entry in _generators(loader) if id(entry[2]) not in of_training]


def _generators(loader: Any) -> list[tuple[Any, str, Any]]:
    """Return (owner, attribute, generator) for each generator that chooses samples of a researcher's loader."""
    has_own_sampler = isinstance(getattr(loader, "sampler", None), GlobalOrderSampler | EvalBatchSampler)
    samplers = [] if has_own_sampler or not isinstance(loader, DataLoader) else list_samplers(loader)
    entries = [
        (sampler, name, value)
        for sampler in samplers
        for name, value in plain_forms.attributes_with_plain_form(sampler).items()
    ]
    return [entry for entry in entries if plain_forms.is_generator(entry[2])]
