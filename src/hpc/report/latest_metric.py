"""The last step and one metric of a run, for the table of runs: of a run that goes on, from its curves."""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hpc.monitor.event_files import read_events
from hpc.run import attempt_log, history
from hpc.run.history import RunRecord


def latest_step_and_metric(run: RunRecord) -> tuple[int | None, str]:
    """Return the last step, and one metric as text: of the last test, else of the last validation."""
    ends = [attempt.end for attempt in run.attempts if attempt.end]
    end = ends[-1] if ends else {}
    tested, validated = (
        {name: value for name, value in end.get(key, {}).items() if isinstance(value, int | float)}
        for key in ("metrics", "validated")
    )
    step = end.get("step")
    if not run.attempts or (run.attempts[-1].end and (tested or validated)):
        return step, _main_metric(tested or validated)
    curve_step, newest_metrics = newest_step_and_validation_metrics(
        *attempt_log.curve_folders(run.path), monitor=history.config_word(run, "checkpoint", "monitor")
    )
    steps = [curve_step, _newest_checkpoint_step(run.path)]
    newest = max((number for number in steps if number is not None), default=step)
    return step if run.attempts[-1].end else newest, _main_metric(tested or newest_metrics)


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


def _newest_checkpoint_step(run_dir: Path) -> int | None:
    """Return the step of the newest checkpoint; None if there is none."""
    names = (re.fullmatch(r"step-(\d+)(-\d+)*(-averaged)?", path.name) for path in run_dir.glob("checkpoints/step-*"))
    return max((int(name[1]) for name in names if name), default=None)


def _main_metric(metrics: Mapping[str, float]) -> str:
    """Return the most telling metric as text: not the loss where there is another."""
    names = [name for name in metrics if not name.endswith("loss")] or list(metrics)
    if not names:
        return "-"
    value = metrics[names[-1]]
    return f"{names[-1]} {value:.0f}" if value >= 1e4 and float(value).is_integer() else f"{names[-1]} {value:.4g}"


def _read_event_file(file: Path) -> tuple[int | None, dict[str, float]]:
    """Return the largest step and the last value of each scalar in one file, as far as it can be read."""
    step, values = None, {}
    with suppress(OSError, ValueError, ImportError):  # the table can do without
        for event in read_events(file):
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    step, values[value.tag] = max(event.step, step or 0), value.simple_value
    return step, values
