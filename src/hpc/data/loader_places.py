"""The places of training loaders, saved and set: an order is listed again from its place on, a stream goes on."""

import warnings
from collections.abc import Callable
from typing import Any

import lightning as L

from hpc.config.errors import ConfigError
from hpc.data import sampler_state
from hpc.data.position import training_loaders
from hpc.data.sample_order import order_of
from hpc.data.stream_loader import stream_of


def loader_places(trainer: L.Trainer, *, is_fetched: bool, between_epochs: bool) -> list[dict[str, Any]]:
    """Return the place of each training loader beside how many batches are done, as plain data.

    Args:
        is_fetched: whether the next batch has been fetched.
        between_epochs: whether an epoch begins next.
    """
    # Lightning fetches a batch more than it needs from loaders of unknown length.
    num_ahead = len(getattr(trainer.fit_loop._data_fetcher, "batches", ())) + is_fetched
    places: list[dict[str, Any]] = []
    for loader in training_loaders(trainer):
        if (order := order_of(loader)) is not None:
            places.append(order.state(between_epochs=between_epochs))
        elif (stream := stream_of(loader)) is not None and not between_epochs:
            places.append({"stream": stream.place_after(stream.num_yielded - num_ahead)})
        else:
            places.append({})
    return places


def prepare_loaders(trainer: L.Trainer, places: list[dict[str, Any]]) -> None:
    """Let the next iterators of the loaders begin with what `loader_places` has saved. Raise `ConfigError`."""
    warnings.filterwarnings("ignore", ".*your dataloader is not resumable")  # Lightning's warning; here it is resumable
    for loader, place in zip(training_loaders(trainer), places, strict=False):
        if (stream := stream_of(loader)) is not None and "stream" in place:
            stream.resume_at(place["stream"])
        if (order := order_of(loader)) is not None:
            sampler_state.restore(order.sampler, place.get("before", place.get("now", [])))


def pass_over_skipped(
    trainer: L.Trainer, places: list[dict[str, Any]], *, num: int, tick: Callable[[], object]
) -> None:
    """Pass over batches of streams whose samples are left out, after iterators were created.

    Args:
        num: of batches since the save.
        tick: called for each batch that is passed over.
    """
    combined: Any = trainer.fit_loop._combined_loader
    for loader, iterator, place in zip(combined.flattened, combined._iterator.iterators, places, strict=False):
        for _ in range(num if stream_of(loader) is not None and "stream" in place else 0):
            next(iterator)
            tick()


def finish_orders(trainer: L.Trainer, places: list[dict[str, Any]], *, is_same: bool) -> None:
    """Set what samplers held when the run was saved, once the first batch is there.

    Args:
        is_same: whether the orders must be those of the save.

    Raises:
        ConfigError: they are others.
    """
    for loader, place in zip(training_loaders(trainer), places, strict=False):
        if (order := order_of(loader)) is None:
            continue
        if is_same and place.get("checksum") != order.checksum and "checksum" in place:
            name = type(order.sampler).__name__
            rule = f"{name} must give the same samples as before the stop; it has other arguments, or gives other "
            rule += "samples for the same random numbers"
            fix = "the values of data as they were; or a torch.utils.data.DataLoader with shuffle=True"
            raise ConfigError("data", None, rule, fix)
        sampler_state.restore(order.sampler, place.get("now", []))
