"""The points of a scaling study in the file scaling.json of its folder: written at submission, read by a report."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc.config.errors import ConfigError
from hpc.system import files

FILE = "scaling.json"


@dataclass(frozen=True)
class PointSizes:
    """What differs between the runs of a study, and what their speed is compared by."""

    nodes: int
    devices: int
    global_batch_size: int | None
    learning_rate: float | None

    @property
    def name(self) -> str:
        """The name of its run directory in the folder of the study."""
        return f"nodes-{self.nodes}"


def save_points(folder: Path, points: Sequence[PointSizes]) -> None:
    """Write the points into the folder of a study."""
    files.write_atomically(folder / FILE, json.dumps([asdict(point) for point in points], indent=1))


def load_points(folder: Path) -> list[PointSizes]:
    """Return the points of a study by their number of nodes; none of a new folder.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        points = [_point(values) for values in files.parse_json(files.read_text(folder / FILE))]
        return sorted(points, key=lambda point: point.nodes)
    except (FileNotFoundError, NotADirectoryError):  # what cannot be a folder is rejected where it is made
        return []
    except (OSError, ValueError, TypeError) as error:
        rule = f"must be a file of tools/scale.py, but cannot be read ({getattr(error, 'strerror', None) or error})"
        raise ConfigError(str(folder / FILE), None, rule, "out=<a new folder>") from None


def _point(values: dict[str, Any]) -> PointSizes:
    point = PointSizes(**values)
    sizes = [point.nodes, point.devices, 1 if point.global_batch_size is None else point.global_batch_size]
    if not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError("a size is no number above 0")
    if point.learning_rate is not None and not isinstance(point.learning_rate, int | float):
        raise ValueError("a learning rate is no number")
    return point
