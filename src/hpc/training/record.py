"""Record an attempt: its start and end, the config, code and versions that made it, and its result."""

import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from hpc.checkpoint.on_disk import Checkpoint
from hpc.config import compose
from hpc.config.errors import make_printable
from hpc.config.project import LIBRARY, PROJECT
from hpc.config.sections import Config
from hpc.logging import loggers, positions
from hpc.run import attempt_log, changes, frozen_config, snapshot
from hpc.system import files
from hpc.training.attempt import Attempt


def begin_logging(run: Attempt, references: Mapping[str, str]) -> list[Logger]:
    """Build the loggers, and record the start of the attempt before they get anything.

    Args:
        references: stand for secrets, as `map_values_to_references` returns them.
    """
    loggers_by_name: dict[str, Logger] = {}
    starts, writer = attempt_log.read_starts(run.run_dir), positions.new_writer(run.number)
    if not run.cfg.trainer.arguments.get("fast_dev_run"):  # Lightning would replace them by one that answers any name
        loggers_by_name = loggers.build_loggers(
            run.cfg, run.checkpoint, starts=starts, writer=writer, is_writing=run.claim is not None
        )
    run_loggers = list(loggers_by_name.values())
    loggers.hide_secrets(run_loggers, references)
    if run.claim:  # after whatever may be rejected, so that a rejection leaves no run behind
        _begin_attempt_logs(run, loggers_by_name, starts=starts, writer=writer)
        loggers.restrict_writing(run_loggers, run.claim.may_write)
    loggers.tolerate_failures(run_loggers)
    return run_loggers


def _begin_attempt_logs(
    run: Attempt, loggers_by_name: Mapping[str, Logger], *, starts: Sequence[Mapping[str, Any]], writer: str
) -> None:
    """Record the start of the attempt, on rank 0, before anything is logged: its config, code and versions.

    The logs of earlier attempts are cut back to the checkpoint that the run resumes from. A changed config is written
    when the first batch is there, as Lightning may reject it until then.

    Args:
        loggers_by_name: as `build_loggers` returns them.
        starts: the start events of the run's earlier attempts.
        writer: the ending of this attempt's event files.
    """
    cfg, run_dir, checkpoint = run.cfg, run.run_dir, run.checkpoint
    run_loggers, writers = list(loggers_by_name.values()), positions.writers(starts)
    words = compose.select_overrides(run.process.arguments)
    # Logs that were there before the first attempt are not the run's own.
    foreign = starts[0].get("logs", {}) if starts else positions.read_positions(run_dir, run_loggers, writers=writers)
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
    kept = _positions_at(cfg, checkpoint, words=words) if checkpoint else foreign
    positions.truncate_logs(run_dir, run_loggers, positions=kept, writers=writers)
    positions.warn_of_late_clock(run_loggers, time.time())
    loggers.print_limits(run_loggers)
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
        writer=writer,
        logger_ids=loggers.start_ids(loggers_by_name),
        logs=foreign,
        reached=positions.read_positions(run_dir, run_loggers, writers=writers),
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
    for event in attempt_log.read_events(cfg.run_path):
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
    attempt_log.append_json_line(run_dir / "attempts.jsonl", event | {"logs": positions.flush_logs(trainer)})
