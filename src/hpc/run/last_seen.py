"""The last heartbeat of an attempt, and its last step, if it has not recorded its end. Imports no torch."""

import re
from contextlib import suppress
from pathlib import Path

from hpc.run.event_records import read_events

SILENT_SECONDS = 60  # without a heartbeat, of which there is one every 2 s: a file server shows some of them late


def last_beat(run_dir: Path, attempt: int) -> float:
    """Return the unix time of the last heartbeat; 0 if there is none."""
    return modified_time(run_dir / "claims" / f"{attempt:06}.beat")


def modified_time(path: Path) -> float:
    """Return the unix time at which a file was last modified; 0 if there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def newest_step_and_validation_metrics(*folders: Path, monitor: str) -> tuple[int | None, dict[str, float]]:
    """Return the step of the newest scalars and the newest validation metrics in TensorBoard's files.

    Args:
        monitor: a metric of validation, whose name may be any. Others are known by names that begin with "val".
    """
    files = [file for folder in folders for file in folder.glob("events.out.tfevents.*")]
    files.sort(key=lambda file: file.name, reverse=True)  # their names begin with the time
    step, validation_metrics = None, {}
    for file in files:
        file_step, values = _read_event_file(file)
        step = max((number for number in (step, file_step) if number is not None), default=None)
        validation_metrics = validation_metrics or {
            tag: value for tag, value in values.items() if tag == monitor or tag.startswith(("val/", "val_"))
        }
        if step is not None and validation_metrics:
            break
    return step, validation_metrics


def newest_checkpoint_step(run_dir: Path) -> int | None:
    """Return the step of the newest checkpoint; None if there is none."""
    names = (re.fullmatch(r"step-(\d+)(-\d+)*(-averaged)?", path.name) for path in run_dir.glob("checkpoints/step-*"))
    return max((int(name[1]) for name in names if name), default=None)


def _read_event_file(file: Path) -> tuple[int | None, dict[str, float]]:
    """Return the largest step and the last value of each scalar in one file, as far as it can be read."""
    step, values = None, {}
    with suppress(OSError, ValueError, ImportError):  # the table can do without
        for event in read_events(file):
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    step, values[value.tag] = max(event.step, step or 0), value.simple_value
    return step, values
