"""Where in its epoch a run is, counted in global batches: the same place for any number of ranks and micro-steps."""

from typing import Any

import lightning as L

from .sampler import ResumableLoader


def of(trainer: L.Trainer) -> dict[str, Any]:
    """As it is saved, between two optimizer steps."""
    loop, accumulate = trainer.fit_loop.epoch_loop, trainer.accumulate_grad_batches
    return {
        "epoch": trainer.current_epoch,
        "global_batch": loop.batch_progress.current.completed // accumulate,
        "accumulate": accumulate,
        "global_batches": int(trainer.num_training_batches) // accumulate,
        "stepped": loop._batches_that_stepped,
        "stopped_early": trainer.should_stop,
    }


def go_to(loops: dict[str, Any], position: dict[str, Any], accumulate: int) -> dict[str, int]:
    """Set Lightning's counters for a run that may cut its global batches into other micro-steps now; its start."""
    progress = loops["epoch_loop.batch_progress"]
    ended = progress["current"]["completed"] // position["accumulate"] >= position["global_batches"]
    epochs, global_batch = (0, 0) if ended else divmod(position["global_batch"], position["global_batches"])
    in_all = progress["total"]["completed"] // position["accumulate"]
    for counter, global_batches in ((progress["current"], global_batch), (progress["total"], in_all)):
        done = global_batches * accumulate
        ahead = counter["ready"] - counter["completed"]  # one: the batch that is fetched
        counter.update(ready=done + ahead, started=done, processed=done, completed=done)
    for counter in loops["epoch_progress"].values():  # samples that were left out may reach into another epoch
        counter.update({name: count + epochs for name, count in counter.items()})
    return {"epoch": position["epoch"] + epochs, "global_batch": global_batch}


def start_at(trainer: L.Trainer, start: dict[str, int]) -> None:
    """Let the loaders begin there. They have begun already where the schedule asked how many batches there are."""
    loop = trainer.fit_loop
    for loader in loop._combined_loader.flattened if loop._combined_loader else ():
        if isinstance(loader, ResumableLoader):
            loader.load_state_dict(start)
    iter(loop._data_fetcher)  # type: ignore[call-overload]
