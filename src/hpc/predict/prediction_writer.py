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
from hpc.data.shared_loaders import data_rank_and_size
from hpc.launch.object_gather import all_gather_objects
from hpc.predict import join
from hpc.predict.parts import FOLDER, PartWriter, read_done
from hpc.predict.rest_of_loader import is_repeated, leave_out_first, sample_indices
from hpc.system.files import parse_json, read_text, write_atomically
from hpc.training.attempt import Attempt

ORIGIN_FILE = "made_from.json"  # in the folder of the parts: what all of them must have been computed from


class PredictionWriter(L.Callback):
    """Writes what `predict_step` returns, and passes over batches that all ranks have written in earlier attempts.

    It is no `BasePredictionWriter`: with one, Lightning asks a loader for the indices of a batch that another rank's
    repeats, and fails.

    Args:
        ckpt: the checkpoint that this rank has loaded, not a link to it.

    Attributes:
        is_joined: whether an earlier attempt has predicted everything and joined it.
    """

    parts: PartWriter

    def __init__(self, run: Attempt, ckpt: str | None) -> None:
        self.run, self.folder, self.ckpt = run, run.run_dir / FOLDER, ckpt
        self.is_joined = False
        self._origin: dict[str, Any] | None = None  # what ORIGIN_FILE says; None: this is the first attempt
        self._num_done: dict[int, int] = {}  # batches that all ranks have written, by loader
        self._samples_done = 0  # samples of this rank in these batches
        self._num_batches: dict[int, int] = {}  # of this rank that are written or wait for it, by loader
        self._loaders: list[Any] = []
        self._is_writing_rank = True

    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        """Let Lightning's loop get what is still to be predicted. It asks for the loaders after this."""
        self.run.watch.report_progress(0, "looking for predictions that are written")
        found = (join.is_joined(self.run.run_dir), self._read_origin()) if trainer.is_global_zero else None
        self.is_joined, self._origin = trainer.strategy.broadcast(found)
        if self.is_joined:
            trainer.limit_predict_batches = 0
            return
        place = data_rank_and_size(trainer.strategy)
        self._reject_other_ranks(place["num_ranks"])
        ranks, ckpts = zip(*all_gather_objects((place["rank"], self.ckpt)), strict=True)
        if len(set(ckpts)) > 1:
            rule = f"must be the same on all ranks, but it was a link that changed: {' and '.join(sorted({*ckpts}))}"
            raise ConfigError("ckpt", None, rule, f"ckpt={ckpts[0]}")
        self._is_writing_rank = ranks.index(place["rank"]) == trainer.global_rank  # one of a tensor-parallel group
        self.parts = PartWriter(self.folder, attempt=self.run.number, rank=place["rank"])
        self._pass_over_done(trainer, read_done(self.folder, rank=place["rank"]))

    def on_predict_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        """Check that the data are as they were in the first attempt, or note them."""
        sizes = [sized_len(getattr(loader, "dataset", None)) for loader in self._loaders]  # type: ignore[arg-type]
        if self._origin is None and trainer.is_global_zero:
            self._require_claim()
            self.folder.mkdir(exist_ok=True)
            origin = {"ckpt": self.ckpt, "samples": sizes, "ranks": data_rank_and_size(trainer.strategy)["num_ranks"]}
            write_atomically(self.folder / ORIGIN_FILE, json.dumps(origin))
        trainer.strategy.barrier()  # the folder is there
        if self._origin is not None and (before := self._origin["samples"]) != sizes:
            rule = f"A prediction must go on with the data that it began with, of {before} samples; there are {sizes}"
            raise ConfigError("data", None, rule, "the data as they were, or a new run_dir=")

    def on_predict_batch_end(
        self,
        trainer: Any,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        loader, number = self._loaders[dataloader_idx], batch_idx + self._num_done.get(dataloader_idx, 0)
        if is_repeated(loader, batch_idx):
            return
        self._num_batches[dataloader_idx] = number + 1
        if self._is_writing_rank:
            self.parts.add(outputs, loader=dataloader_idx, number=number, indices=sample_indices(loader, number))
            if self.parts.is_due:
                self._write_part()

    def write_before_stop(self) -> dict[str, float]:
        """Write what is computed before all ranks stop, which call this, and return how many samples are predicted."""
        self._write_part()
        num_samples = sum(all_gather_objects(self._samples_done + self.parts.num_samples))
        if self.run.claim:
            print(f"{num_samples} samples are predicted so far", flush=True)
        return {"predict/samples": num_samples}

    def finish(self, trainer: Any) -> int:
        """Write what is computed and join the parts, and return the number of samples. All ranks call this.

        Not a hook of the loop, as Lightning calls no hook where nothing is left to predict.

        Raises:
            ConfigError: parts are missing or damaged.
            RuntimeError: the result could not be written.
        """
        self._write_part()
        place = data_rank_and_size(trainer.strategy)
        counts = dict(all_gather_objects((place["rank"], self._num_batches)))
        if not any(counts.values()):
            return 0
        outcome: dict[str, Any] = {"num_samples": 0, "rejection": None}

        def join_parts() -> None:
            if not trainer.is_global_zero:
                return
            self._require_claim()
            try:
                outcome["num_samples"] = join.join(
                    self.run.run_dir,
                    [counts[rank] for rank in range(place["num_ranks"])],
                    num_loaders=len(self._loaders),
                    report_progress=self._report_join,
                )
            except ConfigError as error:
                outcome["rejection"] = error.parts()

        writer = trainer.strategy.writer
        try:
            writer.start(join_parts)
            writer.wait(lambda is_writing: self._report_join() if is_writing else None)
        except CheckpointNotWritten as error:
            raise RuntimeError(f"the predictions were not joined; their parts are in {self.folder}: {error}") from error
        outcome = trainer.strategy.broadcast(outcome)
        if outcome["rejection"]:
            raise ConfigError(*outcome["rejection"])
        if trainer.is_global_zero:
            paths = " ".join(map(str, join.output_files(self.run.run_dir, len(self._loaders))))
            print(f"predictions in {paths}", flush=True)
        return outcome["num_samples"]

    def _read_origin(self) -> dict[str, Any] | None:
        file = self.folder / ORIGIN_FILE
        return parse_json(read_text(file)) if file.exists() else None

    def _reject_other_ranks(self, num_ranks: int) -> None:
        if self._origin is not None and (before := self._origin.get("ranks")) != num_ranks:
            rule = f"A prediction must go on with as many ranks as it began with ({before or 'of an earlier version'})"
            raise ConfigError("trainer.devices", num_ranks, rule, "as many as before, or a new run_dir=")

    def _pass_over_done(self, trainer: Any, done: dict[int, list[list[int] | None]]) -> None:
        """Let the loaders leave out batches that all ranks have written, so that each rank has equally many others."""
        numbers = all_gather_objects({loader: len(batches) for loader, batches in done.items()})
        common = {loader: min(number.get(loader, 0) for number in numbers) for loader in done}
        self._num_done = {loader: num for loader, num in common.items() if num}
        self._num_batches = dict(self._num_done)
        kept = [batch for loader, num in self._num_done.items() for batch in done[loader][:num]]
        self._samples_done = sum(1 if indices is None else len(indices) for indices in kept) * self._is_writing_rank
        limit, process = trainer.limit_predict_batches, trainer.strategy.process_dataloader
        if self._num_done:
            trainer.limit_predict_batches = 1.0  # the limit is that of all batches, not of the rest
            if trainer.is_global_zero:
                print("batches that all ranks have predicted already are passed over", flush=True)

        def process_and_leave_out(dataloader: object) -> object:
            loader, number = process(dataloader), len(self._loaders)
            if self._num_done:
                batches = done.get(number, [])[: self._num_done.get(number, 0)]
                loader = leave_out_first(loader, batches, limit=limit, report_progress=self._report_passing)
            self._loaders.append(loader)
            return loader

        trainer.strategy.process_dataloader = process_and_leave_out

    def _write_part(self) -> None:
        self._require_claim()
        self.parts.write()

    def _require_claim(self) -> None:
        """Raise PermissionError if another attempt has taken over."""
        if self.run.claim and not self.run.claim.may_write():
            raise PermissionError(errno.EPERM, "another attempt has taken over", str(self.run.run_dir))

    def _report_passing(self) -> None:
        self.run.watch.report_progress(0, "passing over batches that are predicted")

    def _report_join(self) -> None:
        self.run.watch.report_progress(0, "joining the predictions")


def checkpoint_to_load(run_dir: Path, ckpt: str | None) -> str | None:
    """Return the checkpoint with which a prediction began: a link such as last.ckpt may lead to another one by now."""
    try:
        return str(parse_json(read_text(run_dir / FOLDER / ORIGIN_FILE))["ckpt"])
    except (OSError, ValueError, KeyError, TypeError):
        return str(Path(ckpt).resolve()) if ckpt else None


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
