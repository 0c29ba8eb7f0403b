"""Ordinary DataLoaders, gone on with in the middle of an epoch: their batches up to that place are drawn once more.

The order of a loader follows from the random numbers that are drawn when its epoch begins. They are noted there, so
that another process draws the same ones, passes over the batches that are done, and has the next one before it.
"""

import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
from torch.utils.data import DataLoader

from hpc.config.errors import ConfigError
from hpc.data.noted_batches import PLAIN_LOADER, NotedBatches, chain_of_samplers, index_sampler, note_batches
from hpc.data.sampler import EvalBatchSampler, GlobalBatchSampler
from hpc.state import plain_forms


def loader_places(trainer: L.Trainer, *, is_fetched: bool, between_epochs: bool) -> list[dict[str, Any]]:
    """Where each loader is, as plain data; {} for those that know it themselves.

    Args:
        is_fetched: was the next batch fetched already?
        between_epochs: is the next thing to happen the beginning of an epoch?
    """
    combined: Any = trainer.fit_loop._combined_loader
    done, found = trainer.fit_loop.epoch_loop.batch_progress.current.completed, []
    for loader, iterator in zip(combined.flattened, combined._iterator.iterators, strict=True):
        batches = index_sampler(loader)
        if not isinstance(batches, NotedBatches):
            found.append({})
        elif between_epochs:
            found.append({"own": batches.own()})
        else:
            cycles = combined._mode == "max_size_cycle"
            num = iterator._num_yielded - is_fetched if cycles else min(iterator._num_yielded, done)
            before = batches.fetched.state() if is_fetched and batches.fetched else None
            found.append(batches.place(num) | {"workers": loader.num_workers, "next": before})
    return found


def prepare_loaders(trainer: L.Trainer, found: list[dict[str, Any]]) -> None:
    """Before iterators are made: let them be those that were left. Raises `ConfigError`."""
    warnings.filterwarnings("ignore", ".*your dataloader is not resumable")  # Lightning's; here it is
    note_batches(trainer)
    for loader, place in zip(trainer.fit_loop._combined_loader.flattened, found, strict=False):  # type: ignore
        batches = index_sampler(loader)
        if isinstance(batches, NotedBatches):
            batches.again = {key: place[key] for key in ("made", "begun") if key in place}
            batches.restore(place.get("own", []))


def pass_over_batches(
    trainer: L.Trainer,
    found: list[dict[str, Any]],
    *,
    num_done: Callable[[int | None], int],
    tick: Callable[[], object],
    is_same: bool,
) -> None:
    """After iterators were made: pass over the batches that are done.

    Args:
        num_done: how many they were, None: not known → how many they are now.
        tick: called for each of them.
        is_same: must they be the same ones, as the same ranks go on?

    Raises:
        ConfigError: they are others.
    """
    combined: Any = trainer.fit_loop._combined_loader
    for number, (loader, iterator) in enumerate(zip(combined.flattened, combined._iterator.iterators, strict=True)):
        batches, place = index_sampler(loader), found[number] if number < len(found) else {}
        if not isinstance(batches, NotedBatches):
            continue
        many = num_done(place.get("batches"))
        if many and trainer.is_global_zero:
            read = " and read once more, as workers draw random numbers" if loader.num_workers else ""
            print(f"train: the first {many} batches of epoch {trainer.current_epoch} are passed over{read}", flush=True)
        for _ in range(many):
            next(iterator) if loader.num_workers else iterator._next_index()
            tick()
        batches.put_from_outside(place.get("now", []))
        iterator._num_yielded = many
        if batches.fetched:
            batches.fetched.to_restore = place.get("next")
        if is_same and place["sum"] != batches.sums[many]:
            sampler = getattr(batches.batches, "sampler", batches.batches)
            rule = f"{type(sampler).__name__} must give the same samples for the same random numbers"
            raise ConfigError(
                "data", None, rule, f"{PLAIN_LOADER} with shuffle=True, or a sampler with set_epoch(epoch)"
            )
        if loader.num_workers != place.get("workers", loader.num_workers) and trainer.is_global_zero:
            said = f"train: {place['workers']} -> {loader.num_workers} workers"
            print(f"{said}: random numbers that they draw are others from here on", flush=True)


def evaluation_generators(trainer: L.Trainer) -> list[list[Any]]:
    """The generators that each loader of a validation draws with, and training does not, as plain data."""
    combined = trainer.fit_loop.epoch_loop.val_loop._combined_loader
    loaders = combined.flattened if combined is not None else []
    return [[plain_forms.to_plain(generator) for _, _, generator in _generators_alone(trainer, one)] for one in loaders]


def restore_evaluation(trainer: L.Trainer, loader: Any, *, saved: list[Any]) -> None:
    """Before an iterator of a loader is made: what `of_evaluation` returned for it."""
    for (sampler, name, _), form in zip(_generators_alone(trainer, loader), saved, strict=False):
        plain_forms.set_attribute(sampler, name, form=form)


def _generators_alone(trainer: L.Trainer, loader: Any) -> list[tuple[Any, str, Any]]:
    loaders: list[Any] = trainer.fit_loop._combined_loader.flattened  # type: ignore[union-attr]
    of_training = {id(generator) for one in loaders for *_, generator in _generators(one)}
    return [place for place in _generators(loader) if id(place[2]) not in of_training]


def _generators(loader: Any) -> list[tuple[Any, str, Any]]:
    """Whose they are, under which name."""
    ours = isinstance(getattr(loader, "sampler", None), GlobalBatchSampler | EvalBatchSampler)
    samplers = [] if ours or not isinstance(loader, DataLoader) else chain_of_samplers(loader)
    data = [
        (sampler, name, value) for sampler in samplers for name, value in plain_forms.data_attributes(sampler).items()
    ]
    return [place for place in data if plain_forms.is_generator(place[2])]
