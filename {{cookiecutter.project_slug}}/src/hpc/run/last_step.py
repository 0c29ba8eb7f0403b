"""How far a run has come that has not said so itself: from its curves and its checkpoints. No torch."""

import re
from contextlib import suppress
from pathlib import Path


def scalars(*folders: Path) -> tuple[int | None, dict[str, float]]:
    """The step of the newest scalars, and the newest validation metrics, from TensorBoard's files."""
    files = [file for folder in folders for file in folder.glob("events.out.tfevents.*")]
    files.sort(key=lambda file: file.name, reverse=True)  # their names begin with the time
    step, validated = None, {}
    for file in files:
        steps, values = _events(file)
        step = max((some for some in (step, steps) if some is not None), default=None)
        validated = validated or {tag: value for tag, value in values.items() if tag.startswith("val/")}
        if step is not None and validated:
            break
    return step, validated


def saved(run_dir: Path) -> int | None:
    """The step of the newest checkpoint."""
    found = (re.fullmatch(r"step-(\d+)(-averaged)?", path.name) for path in run_dir.glob("checkpoints/step-*"))
    return max((int(name[1]) for name in found if name), default=None)


def _events(file: Path) -> tuple[int | None, dict[str, float]]:
    """The largest step and the last value of each scalar in one file, as far as it can be read."""
    step, values = None, {}
    with suppress(Exception):  # whatever comes of a damaged file, or of a missing library: the table can do without
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

        for event in LegacyEventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    step, values[value.tag] = max(event.step, step or 0), value.simple_value
    return step, values
