"""The part files of a prediction: predictions/part-ATTEMPT-RANK-CHUNK.pt, each with the batches of a minute.

A part is a dict with `rank`, `num_ranks` and `batches`. A batch has `loader` (0, if there is one), `number` in that
loader and on that rank, `indices` of its samples in the dataset (int64; None if they are unknown) and `outputs`.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from hpc.checkpoint import plain_data, safe_unpickle
from hpc.config.errors import ConfigError
from hpc.system import files

FOLDER = "predictions"  # in the run directory
CHUNK_SECONDS = 60.0  # a rank that is killed loses the batches of so much time
CHUNK_BYTES = 2**28  # of outputs that wait in memory


@dataclass
class Progress:
    """The batches that earlier attempts have written.

    Attributes:
        parts: number of samples, or of batches without indices, by the name of the part.
        is_done: for each loader, by index of the sample.
        num_passed: for each loader whose samples have no indices, the first batches that all ranks have written.
        num_ranks: among which samples were shared out in the newest attempt; None: nothing is written.
    """

    parts: dict[str, int] = field(default_factory=dict)
    is_done: dict[int, np.ndarray] = field(default_factory=dict)
    num_passed: dict[int, int] = field(default_factory=dict)
    num_ranks: int | None = None


class PartWriter:
    """Collects the batches of one rank, and writes them.

    Attributes:
        parts: as in `Progress`, of this writer.
    """

    def __init__(self, folder: Path, *, attempt: int, rank: int, num_ranks: int) -> None:
        self.folder, self.attempt, self.rank, self.num_ranks = folder, attempt, rank, num_ranks
        self.parts: dict[str, int] = {}
        self._batches: list[dict[str, Any]] = []
        self._num_bytes = 0
        self._written_time = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Return whether the batches that wait should be written now."""
        return self._num_bytes >= CHUNK_BYTES or time.monotonic() - self._written_time >= CHUNK_SECONDS

    def add(self, outputs: Any, *, loader: int, number: int, indices: list[int] | None) -> None:
        """Add a copy of a batch's outputs. Raises `ConfigError` if they are not plain data."""
        batch = {"loader": loader, "number": number, "outputs": copy_to_host(outputs)}
        self._batches.append(batch | {"indices": None if indices is None else torch.tensor(indices)})
        sizes = [leaf.nbytes if isinstance(leaf, Tensor) else 8 for leaf in tree_leaves(outputs)]
        self._num_bytes += sum(sizes)

    def write(self) -> None:
        """Write the batches that wait, as a part that is whole and durable, or absent."""
        if self._batches:
            name = f"part-{self.attempt:03}-{self.rank:05}-{len(self.parts):06}.pt"
            part = {"rank": self.rank, "num_ranks": self.num_ranks, "batches": self._batches}
            files.write_durably(self.folder / name, lambda stream: torch.save(part, stream))
            self.parts[name] = sum(map(num_samples, self._batches))
        self._batches, self._num_bytes, self._written_time = [], 0, time.monotonic()


def copy_to_host(outputs: Any) -> Any:
    """Return a copy of what `predict_step` returned, on the CPU: it may return the same memory for the next batch.

    Raises:
        ConfigError: it holds something that is not plain data.
    """
    if not plain_data.is_plain(outputs):
        rule = f"must return plain data, which a file can hold; it holds a {_foreign_type(outputs)}"
        raise ConfigError("predict_step", None, rule, plain_data.FIX, only_this_rank=True)
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), outputs)


def num_samples(batch: Mapping[str, Any]) -> int:
    """Return the number of samples of a batch; 1 for a batch whose samples have no indices."""
    return 1 if batch["indices"] is None else len(batch["indices"])


def read_part(path: Path) -> dict[str, Any]:
    """Return a part, whose tensors stay in the file until they are used. Raises what a damaged file raises."""
    return safe_unpickle.load_plain(path)


def read_progress(folder: Path) -> Progress:
    """Return the progress in a folder of parts. A damaged part is removed, so that its samples are predicted again."""
    progress = Progress()
    indices: dict[int, list[np.ndarray]] = {}
    numbers: dict[int, dict[int, set[int]]] = {}  # of batches without indices, by loader and rank
    for path in sorted(folder.glob("part-*.pt")):
        try:
            part = read_part(path)
        except Exception as error:  # damage can fail anywhere
            print(f"warning: {path} is damaged, and predicted again: {type(error).__name__}", flush=True)
            path.unlink()
            continue
        progress.parts[path.name], progress.num_ranks = sum(map(num_samples, part["batches"])), part["num_ranks"]
        for batch in part["batches"]:
            if batch["indices"] is None:
                numbers.setdefault(batch["loader"], {}).setdefault(part["rank"], set()).add(batch["number"])
            else:
                indices.setdefault(batch["loader"], []).append(batch["indices"].numpy().copy())
    for loader, arrays in indices.items():
        done = np.concatenate(arrays)
        progress.is_done[loader] = np.zeros(done.max(initial=-1) + 1, bool)
        progress.is_done[loader][done] = True
    for loader, numbers_by_rank in numbers.items():
        firsts = [_num_consecutive(numbers_by_rank.get(rank, set())) for rank in range(progress.num_ranks or 1)]
        progress.num_passed[loader] = min(firsts)
    return progress


def _num_consecutive(numbers: set[int]) -> int:
    """Return the first number from 0 on that is missing."""
    return next(number for number in range(len(numbers) + 1) if number not in numbers)


def _foreign_type(value: Any) -> str:
    """Return the type of the first value in a nest that is not plain data."""
    items = [*value, *value.values()] if type(value) is dict else value if type(value) in (list, tuple, set) else []
    for item in items:
        if not plain_data.is_plain(item):
            return _foreign_type(item)
    return f"{type(value).__module__}.{type(value).__qualname__}"
