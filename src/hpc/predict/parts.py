"""The part files of a prediction: predictions/part-ATTEMPT-RANK-CHUNK.pt, each with the batches of a minute.

A part is a list of batches. A batch is a dict: `loader` (0, if there is one), `number` in that loader and on that rank,
`indices` of its samples in the dataset (int64; None if they are unknown) and `outputs`.
"""

import shlex
import time
from collections.abc import Iterator, Mapping
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpc.checkpoint import plain_data, safe_unpickle
from hpc.config.errors import ConfigError
from hpc.privates.torch import tree_leaves, tree_map_only
from hpc.system import files

FOLDER = "predictions"  # in the run directory
CHUNK_SECONDS = 60.0  # a rank that is killed loses the batches of so much time
CHUNK_BYTES = 2**28  # of outputs that wait in memory


class PartWriter:
    """Collects the batches of one rank, and writes them.

    Args:
        rank: among those that get different samples.

    Attributes:
        num_samples: that are written; a batch counts as one if its samples have no indices.
    """

    def __init__(self, folder: Path, *, attempt: int, rank: int) -> None:
        self.folder, self.attempt, self.rank = folder, attempt, rank
        self.num_samples = 0
        self._batches: list[dict[str, Any]] = []
        self._num_parts, self._num_bytes = 0, 0
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
            file = self.folder / f"part-{self.attempt:03}-{self.rank:05}-{self._num_parts:06}.pt"
            files.write_durably(file, lambda stream: torch.save(self._batches, stream))
            self._num_parts += 1
            self.num_samples += sum(map(num_samples, self._batches))
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


def read_batches(folder: Path, *, rank: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (rank, batch) of all parts, or of those of one rank, in the order in which they were written.

    Tensors stay in the files until they are used.

    Raises:
        ConfigError: a file is damaged.
    """
    for path in sorted(folder.glob(f"part-*-{'*' if rank is None else format(rank, '05')}-*.pt")):
        try:
            batches = safe_unpickle.load_plain(path)
        except Exception as error:  # damage can fail anywhere
            rule = f"{path} is damaged: {type(error).__name__}"
            fix = f"rm {shlex.quote(str(path))}, and resume={folder.parent}, which predicts its samples again"
            raise ConfigError("task", "predict", rule, fix, only_this_rank=True) from None
        for batch in batches:
            yield int(path.name.split("-")[2]), batch


def read_done(folder: Path, *, rank: int) -> dict[int, list[list[int] | None]]:
    """Return the indices of a rank's first batches, by loader: all before the first one that no part holds."""
    done: dict[int, dict[int, Any]] = {}
    for _, batch in read_batches(folder, rank=rank):
        done.setdefault(batch["loader"], {})[batch["number"]] = batch["indices"]
    firsts = {loader: takewhile(batches.__contains__, count()) for loader, batches in done.items()}
    return {
        loader: [None if (indices := done[loader][number]) is None else indices.tolist() for number in numbers]
        for loader, numbers in firsts.items()
    }


def _foreign_type(value: Any) -> str:
    """Return the type of the first value in a nest that is not plain data."""
    items = [*value, *value.values()] if type(value) is dict else value if type(value) in (list, tuple, set) else []
    for item in items:
        if not plain_data.is_plain(item):
            return _foreign_type(item)
    return f"{type(value).__module__}.{type(value).__qualname__}"
