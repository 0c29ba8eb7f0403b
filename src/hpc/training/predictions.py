"""`task=predict`: each rank writes its part of the predictions as it goes; at the end, they are joined."""

import errno
import json
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.model_helpers import is_overridden

from hpc.checkpoint.writer import CheckpointNotWritten
from hpc.config.errors import ConfigError
from hpc.data.pending_batches import RestOfStream, all_gather, is_repeated, leave_out_done, sample_indices
from hpc.data.shared_loaders import data_rank_and_size
from hpc.system.files import parse_json, read_text, write_atomically
from hpc.training import prediction_join
from hpc.training.attempt import Attempt
from hpc.training.prediction_parts import FOLDER, PartWriter, Progress, read_progress

ORIGIN_FILE = "made_from.json"  # in the folder of the parts: what all of them must have been computed from


class PredictionWriter(L.Callback):
    """Writes what `predict_step` returns, and passes over samples that an earlier attempt has written.

    Args:
        ckpt: the checkpoint that this rank has loaded, not a link to it.

    Attributes:
        num_samples: that are predicted, once all are; None: nothing was.
    """

    parts: PartWriter

    def __init__(self, run: Attempt, ckpt: str) -> None:
        self.run, self.folder, self.ckpt = run, run.run_dir / FOLDER, ckpt
        self.num_samples: int | None = None
        self._progress = Progress()
        self._is_joined = False
        self._first_numbers: dict[int, int] = {}  # of batches that a stream still has, by loader
        self._is_writing_rank = True

    def on_predict_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self.run.watch.report_progress(0, "looking for predictions that are written")
        rejection, self._is_joined, self._progress = trainer.strategy.broadcast(
            self._read_or_begin(trainer) if trainer.is_global_zero else None
        )
        if rejection:
            raise ConfigError(*rejection)
        place = data_rank_and_size(trainer.strategy)
        ranks, ckpts = zip(*all_gather((place["rank"], self.ckpt)), strict=True)
        if len(set(ckpts)) > 1:
            rule = f"must be the same on all ranks, but it was a link that changed: {' and '.join(sorted({*ckpts}))}"
            raise ConfigError("ckpt", None, rule, f"ckpt={ckpts[0]}")
        self._is_writing_rank = ranks.index(place["rank"]) == trainer.global_rank  # one of a tensor-parallel group
        self.parts = PartWriter(self.folder, attempt=self.run.number, **place)
        if self._is_joined or self._progress.parts:
            self._pass_over_done(trainer, place)

    def on_predict_batch_end(
        self,
        trainer: Any,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        loader = trainer.predict_loop._combined_loader.flattened[dataloader_idx]
        if not self._is_writing_rank or is_repeated(loader, batch_idx):
            return
        number = batch_idx + self._first_numbers.get(dataloader_idx, 0)
        indices = sample_indices(loader, batch_idx)
        self.parts.add(outputs, loader=dataloader_idx, number=number, indices=indices)
        if self.parts.is_due:
            self._write_part()

    def on_predict_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        num_loaders = trainer.predict_loop.num_dataloaders
        written = self._write_and_count()
        outcome: dict[str, Any] = {"num_samples": written, "rejection": None}

        def join() -> None:
            if not trainer.is_global_zero or self._is_joined:
                return
            self._require_claim()
            try:
                outcome["num_samples"] = prediction_join.join(
                    self.run.run_dir, self._progress.parts, num_loaders=num_loaders, report_progress=self._report_join
                )
            except ConfigError as error:
                outcome["rejection"] = error.parts()

        writer = trainer.strategy.writer
        try:
            writer.start(join)
            writer.wait(lambda is_writing: self._report_join() if is_writing else None)
        except CheckpointNotWritten as error:
            raise RuntimeError(f"the predictions were not joined; their parts are in {self.folder}: {error}") from error
        outcome = trainer.strategy.broadcast(outcome)
        if outcome["rejection"]:
            raise ConfigError(*outcome["rejection"])
        self.num_samples = outcome["num_samples"]
        if trainer.is_global_zero:
            paths = " ".join(map(str, prediction_join.output_files(self.run.run_dir, num_loaders)))
            print(f"predictions in {paths}", flush=True)

    def write_before_stop(self) -> dict[str, float]:
        """Write what is computed before all ranks stop, which call this, and return how many samples are predicted."""
        num_samples = self._write_and_count()
        if self.run.claim:
            print(f"{num_samples} samples are predicted so far", flush=True)
        return {"predict/samples": num_samples}

    def _read_or_begin(self, trainer: Any) -> tuple[list[str | None] | None, bool, Progress]:
        """Return the parts of a `ConfigError`, or None; whether all parts are joined already; and the progress."""
        loaders = trainer.predict_loop._combined_loader.flattened
        if prediction_join.is_joined(self.run.run_dir, len(loaders)):
            return None, True, Progress()
        progress = read_progress(self.folder)
        try:
            self._check_origin(loaders, has_parts=bool(progress.parts))
            num_ranks = data_rank_and_size(trainer.strategy)["num_ranks"]
            if progress.num_passed and progress.num_ranks != num_ranks:
                rule = f"Samples without indices (a stream) must be predicted by {progress.num_ranks} ranks to the end"
                raise ConfigError("trainer.devices", num_ranks, rule, "as many as before, or a new run_dir=")
        except ConfigError as error:
            return error.parts(), False, progress
        return None, False, progress

    def _check_origin(self, loaders: list[Any], *, has_parts: bool) -> None:
        """Raise `ConfigError` unless the data are as they were in the first attempt, and note them there."""
        sizes = [sized_len(getattr(loader, "dataset", None)) for loader in loaders]  # type: ignore[arg-type]
        path = self.folder / ORIGIN_FILE
        if not has_parts:
            self._require_claim()
            self.folder.mkdir(exist_ok=True)
            write_atomically(path, json.dumps({"ckpt": self.ckpt, "samples": sizes}))
        elif (before := parse_json(read_text(path))["samples"]) != sizes:
            rule = f"A prediction must go on with the data that it began with, of {before} samples; there are {sizes}"
            raise ConfigError("data", None, rule, "the data as they were, or a new run_dir=")

    def _pass_over_done(self, trainer: Any, place: dict[str, int]) -> None:
        """Let the loaders give only what is still to be computed, in equally many batches on each rank."""
        loop = trainer.predict_loop
        combined = loop._combined_loader
        loop.teardown()  # ends the workers that have begun to fetch
        loaders = list(combined.flattened)
        for number, loader in enumerate(loaders):
            limit = loop.max_batches[number]
            if self._is_joined:
                loop.max_batches[number] = 0
            elif num_passed := self._progress.num_passed.get(number):
                loaders[number] = RestOfStream(loader, num_passed, report_progress=self._report_passing)
                self._first_numbers[number] = num_passed
                loop.max_batches[number] = max(0, limit - num_passed)
            elif (is_done := self._progress.is_done.get(number)) is not None:
                loop.max_batches[number] = len(leave_out_done(loader, is_done, limit=limit, **place))
        combined.flattened = loaders
        loop.reset()
        if trainer.is_global_zero and not self._is_joined:
            print(f"{sum(self._progress.parts.values())} samples are predicted already, and passed over", flush=True)

    def _write_part(self) -> None:
        self._require_claim()
        self.parts.write()

    def _write_and_count(self) -> int:
        """Write what is computed, learn what all ranks have written, and return the number of samples."""
        self._write_part()
        for parts in all_gather(self.parts.parts):
            self._progress.parts |= parts
        return sum(self._progress.parts.values())

    def _require_claim(self) -> None:
        """Raise PermissionError if another attempt has taken over."""
        if self.run.claim and not self.run.claim.may_write():
            raise PermissionError(errno.EPERM, "another attempt has taken over", str(self.run.run_dir))

    def _report_passing(self) -> None:
        self.run.watch.report_progress(0, "passing over batches that are predicted")

    def _report_join(self) -> None:
        self.run.watch.report_progress(0, "joining the predictions")


def checkpoint_to_load(run_dir: Path, ckpt: str) -> str:
    """Return the checkpoint with which a prediction began: a link such as last.ckpt may lead to another one by now."""
    try:
        return str(parse_json(read_text(run_dir / FOLDER / ORIGIN_FILE))["ckpt"])
    except (OSError, ValueError, KeyError, TypeError):
        return str(Path(ckpt).resolve())


def require_predict_hooks(module: L.LightningModule, data: L.LightningDataModule) -> None:
    """Raise `ConfigError` unless the module and the data have what `task=predict` calls."""
    has_loader = is_overridden("predict_dataloader", data) or is_overridden("predict_dataloader", module)
    missing = [] if is_overridden("predict_step", module) else [f"{type(module).__name__}.predict_step"]
    missing += [] if has_loader else [f"{type(data).__name__}.predict_dataloader"]
    if missing:
        rule = f"must not be predict without {' and '.join(missing)}, which Lightning's Trainer.predict calls"
        methods = {"predict_step": "(self, batch, batch_idx)", "predict_dataloader": "(self)"}
        fix = " and ".join(f"def {name}{methods[name]}" for name in (word.rpartition(".")[2] for word in missing))
        raise ConfigError("task", "predict", rule, f"add {fix}")
