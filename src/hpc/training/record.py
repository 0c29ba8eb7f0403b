"""Record an attempt: its start and end, the config, code and versions that made it, and its result."""

import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import OmegaConf

from hpc.checkpoint.on_disk import Checkpoint
from hpc.config import compose
from hpc.config.conversion import flatten
from hpc.config.errors import make_printable
from hpc.config.freezing import to_frozen_yaml
from hpc.config.project import LIBRARY, PROJECT
from hpc.config.sections import Config
from hpc.run import attempt_log, changes, frozen_config, snapshot
from hpc.system import files
from hpc.training import log_positions, loggers
from hpc.training.attempt import Attempt


def begin_attempt_logs(run: Attempt, run_loggers: Sequence[Logger]) -> None:
    """Record the start of the attempt, on rank 0, before anything is logged: its config, code and versions.

    The logs of earlier attempts are cut back to the checkpoint that the run resumes from. A changed config is written
    when the first batch is there, as Lightning may reject it until then.
    """
    cfg, run_dir, checkpoint = run.cfg, run.run_dir, run.checkpoint
    starts = attempt_log.read_starts(run_dir)
    words = compose.select_overrides(run.process.arguments)
    # Logs that were there before the first attempt are not the run's own.
    foreign_positions = starts[0].get("logs", {}) if starts else log_positions.read_positions(run_dir, run_loggers)
    if (run_dir / "config.yaml").exists() and cfg.task == "train":
        changes.grant_permission(run_dir, cfg.resume_allow)
        run.keep_config = frozen_config.prepare_change(run_dir, cfg.node, words=words)
    else:
        if not (run_dir / "config.yaml").exists() and PROJECT.parent.resolve() != run_dir.resolve():
            # Otherwise this is the run's copy of the code, and whoever made it did so.
            snapshot.write_provenance(run_dir)
        frozen_config.create_or_replace(run_dir, cfg.node, words=words)
    code = files.source_checksum(PROJECT, LIBRARY)
    _note_other_code(run_dir, code, earlier_code=starts[-1].get("code") if starts else None)
    positions = _positions_at(cfg, checkpoint, words=words) if checkpoint else foreign_positions
    log_positions.truncate_logs(run_dir, run_loggers, positions=positions, events=attempt_log.read_events(run_dir))
    log_positions.warn_of_late_clock(run_loggers, time.time())
    loggers.print_limits(run_loggers)
    if run.claim:
        loggers.restrict_writing(run_loggers, run.claim.may_write)
    attempt_log.record_start(
        run_dir,
        run.number,
        environ=os.environ,
        from_step=checkpoint.step if checkpoint else 0,
        words=words,
        code=code,
        launcher=run.process.place.launcher,
        hosts=run.hosts,
        world_size=cfg.trainer.num_nodes * cfg.trainer.devices,
        gpus_per_node=0 if cfg.trainer.accelerator == "cpu" else cfg.trainer.devices,
        log_dirs=loggers.curve_folders(run_dir, run_loggers),
        writer=loggers.writer_name(),
        logs=foreign_positions,
        reached=log_positions.read_positions(run_dir, run_loggers),
    )


def _note_other_code(run_dir: Path, code: str, *, earlier_code: object) -> None:
    """Print a note if a run resumes with other source files than those it has.

    Args:
        code: checksum of the source files that train now.
        earlier_code: checksum that the last attempt recorded; None: there is none.
    """
    snapshot_dir, note = run_dir / "code", ""
    if (snapshot_dir / "train.py").is_file() and not snapshot_dir.samefile(PROJECT):
        if files.source_checksum(snapshot_dir, LIBRARY) != code:
            command = shlex.join(["python", f"{snapshot_dir}/train.py", f"resume={run_dir}"])
            note = f"the code of {PROJECT} trains now, and differs from the run's own. To use the latter: {command}"
    elif earlier_code not in (None, code):
        note = f"the code of {PROJECT} has changed since the last attempt of this run"
    if note:
        print(make_printable(f"note: {note}"), file=sys.stderr, flush=True)


def _positions_at(cfg: Config, checkpoint: Checkpoint, *, words: Sequence[str]) -> Mapping[str, int]:
    """Return how far the logs had come at a checkpoint, or at the end of training if no step is left after it.

    Args:
        words: the overrides of this start; one of the Trainer's may extend training.
    """
    has_trainer_override = any(word.lstrip("+~").startswith("trainer") for word in words)
    is_extended = has_trainer_override and not 0 <= (cfg.trainer.max_steps or -1) <= checkpoint.step
    if is_extended and not checkpoint.details.get("stopped_early"):
        return checkpoint.details.get("logs", {})
    # The batches are compared, too: a callback may stop training between two micro-batches, and part of that step is
    # done again.
    end = ["trained", checkpoint.attempt, checkpoint.step, checkpoint.details.get("batches")]
    for event in attempt_log.read_events(Path(cfg.run_dir)):
        if end == [event.get(key) for key in ("event", "attempt", "trained_step", "trained_batches")]:
            return event["logs"]
    return checkpoint.details.get("logs", {})


@rank_zero_only
def record_training_end(trainer: L.Trainer, attempt: int) -> None:
    """Record how far the logs are when training ends within an epoch, whose values are logged after the last save."""
    run_dir = Path(trainer.default_root_dir)
    event = {"event": "trained", "time": time.time(), "attempt": attempt}
    event["trained_step"] = trainer.global_step  # not `step`, which stands for a step that a checkpoint holds
    event["trained_batches"] = trainer.fit_loop.epoch_loop.batch_progress.total.completed
    attempt_log.append_json_line(run_dir / "attempts.jsonl", event | {"logs": flush_logs(trainer)})


def flush_logs(trainer: L.Trainer) -> dict[str, int]:
    """Write the logs to the disk, and return how far each file has come; see `log_positions.read_positions`."""
    run_dir = Path(trainer.default_root_dir)
    loggers.flush(trainer.loggers)
    log_positions.truncate_late_writes(run_dir, trainer.loggers, events=attempt_log.read_events(run_dir))
    return log_positions.read_positions(run_dir, trainer.loggers)


@rank_zero_only
def log_config(trainer: L.Trainer, cfg: Config) -> None:
    """Log the resolved config: as a text for TensorBoard's TEXT page, as hyperparameters for all others but CSV."""
    text = to_frozen_yaml(cfg.node)
    values: Any = OmegaConf.to_container(OmegaConf.create(text))
    for logger in loggers.tensorboard_loggers(trainer):
        logger.experiment.add_text("config", f"```yaml\n{text}```")
    for logger in trainer.loggers:
        if not isinstance(logger, TensorBoardLogger | CSVLogger):
            logger.log_hyperparams(values)


@rank_zero_only
def log_result(trainer: L.Trainer, cfg: Config, *, metrics: dict[str, Any]) -> None:
    """Log the hyperparameters and the final metrics for TensorBoard's HPARAMS page, which reads scalars by name."""
    # Imported here, as only the rank that writes needs TensorBoard.
    from torch.utils.tensorboard.summary import hparams
    from torch.utils.tensorboard.writer import FileWriter

    values = flatten(OmegaConf.create(to_frozen_yaml(cfg.node)))
    sections = ("model.", "data.", "trainer.", "strategy.", "seed")
    shown = {key: value for key, value in values.items() if key.startswith(sections)}
    plain = {key: value if isinstance(value, bool | int | float) else _to_utf8(value) for key, value in shown.items()}
    for logger in loggers.tensorboard_loggers(trainer):
        # Not logger.log_hyperparams: it would write each metric a second time, as another point of its curve.
        writer = FileWriter(logger.log_dir)
        for summary in hparams(plain, dict.fromkeys(metrics, 0)):
            writer.add_summary(summary)
        writer.close()


def _to_utf8(value: Any) -> str:
    """Return the text of a value in UTF-8, as TensorBoard requires; a path may hold other bytes."""
    return str(value).encode(errors="backslashreplace").decode()
