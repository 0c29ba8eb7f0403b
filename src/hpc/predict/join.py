"""Join the parts of a prediction into predictions.pt, in the order of the dataset."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpc.config.errors import ConfigError
from hpc.predict.parts import FOLDER, read_batches
from hpc.privates.torch import TreeSpec, tree_flatten, tree_map_only, tree_unflatten
from hpc.system import files

JOINED_FOLDER = f"{FOLDER}.joined"  # the parts, while they are removed


@dataclass
class Batch:
    """A batch of a rank.

    Attributes:
        indices: of its samples in the dataset; None: unknown.
        outputs: of `predict_step`.
        leaves, spec: the outputs without the dicts and tuples around them, and these. A list counts as one value per
            sample.
        num: number of samples, if each leaf has one row or one value per sample; else None.
    """

    indices: np.ndarray | None
    outputs: Any
    leaves: list[Any]
    spec: TreeSpec
    num: int | None


def output_files(run_dir: Path, num_loaders: int) -> list[Path]:
    """Return the file of each loader: predictions.pt, or predictions-0.pt and so on if there are several."""
    names = ["predictions.pt"] if num_loaders == 1 else [f"predictions-{k}.pt" for k in range(num_loaders)]
    return [run_dir / name for name in names]


def is_joined(run_dir: Path) -> bool:
    """Return whether an earlier attempt has joined all parts."""
    return not (run_dir / FOLDER).exists() and any(output_files(run_dir, num)[0].exists() for num in (1, 2))


def join(
    run_dir: Path, counts: Sequence[dict[int, int]], *, num_loaders: int, report_progress: Callable[[], None]
) -> int:
    """Write the files of all loaders, remove the parts, and return the number of samples.

    All results are in memory: torch.save needs that of a loader whole.

    Args:
        counts: of each rank, the number of its batches by loader.

    Raises:
        ConfigError: a batch is missing.
    """
    batches = _read_all(run_dir / FOLDER, counts, num_loaders=num_loaders, report_progress=report_progress)
    num_samples = 0
    for path, of_loader in zip(output_files(run_dir, num_loaders), batches, strict=True):
        result, num = join_batches(of_loader, report_progress)
        files.write_durably(path, lambda stream, result=result: torch.save(result, stream))
        num_samples += num
    (run_dir / FOLDER).rename(run_dir / JOINED_FOLDER)  # from here on the files count
    shutil.rmtree(run_dir / JOINED_FOLDER, ignore_errors=True)
    return num_samples


def _read_all(
    folder: Path, counts: Sequence[dict[int, int]], *, num_loaders: int, report_progress: Callable[[], None]
) -> list[list[Batch]]:
    """Return the batches of each loader by rank and number; of one that was computed twice, the later one."""
    batches: dict[tuple[int, int, int], Batch] = {}
    for rank, batch in read_batches(folder):
        if batch["number"] < counts[rank].get(batch["loader"], 0):
            batches[batch["loader"], rank, batch["number"]] = _describe(batch)
        report_progress()
    expected = sum(sum(numbers.values()) for numbers in counts)
    if num_missing := expected - len(batches):
        rule = f"{num_missing} of {expected} predicted batches are missing: files are gone from {folder}"
        raise ConfigError("task", "predict", rule, f"resume={folder.parent}, which predicts them again")
    keys = sorted(batches)
    return [[batches[key] for key in keys if key[0] == loader] for loader in range(num_loaders)]


def _describe(batch: dict[str, Any]) -> Batch:
    outputs = tree_map_only(Tensor, torch.clone, batch["outputs"])  # out of the mapped file
    indices = None if batch["indices"] is None else batch["indices"].numpy().copy()
    leaves, spec = tree_flatten(outputs, is_leaf=lambda value: isinstance(value, list))
    lengths = {_length(leaf) for leaf in leaves}
    num = lengths.pop() if len(lengths) == 1 else None
    is_per_sample = bool(num) and (indices is None or num == len(indices))
    return Batch(indices, outputs, leaves, spec, num if is_per_sample else None)


def _length(leaf: Any) -> int | None:
    """Return the number of rows of a tensor or the length of a list; None for anything else."""
    has_rows = isinstance(leaf, list) or (isinstance(leaf, Tensor) and leaf.ndim > 0)
    return len(leaf) if has_rows else None


def join_batches(batches: list[Batch], report_progress: Callable[[], None]) -> tuple[dict[str, Any], int]:
    """Return the content of a loader's file, and its number of samples; of batches, if their samples are unknown."""
    is_per_sample = all(batch.num and batch.spec == batches[0].spec for batch in batches)
    of_batches = [batch.indices for batch in batches if batch.indices is not None]
    if len(of_batches) < len(batches):  # of a stream
        if not is_per_sample:
            return {"indices": None, "outputs": [batch.outputs for batch in batches]}, len(batches)
        num = sum(batch.num or 0 for batch in batches)
        return {"indices": None, "outputs": _join_samples(batches, np.arange(num), num, report_progress)}, num
    all_indices = np.concatenate(of_batches or [np.empty(0, np.int64)])
    if not is_per_sample:
        order = sorted(range(len(batches)), key=lambda number: of_batches[number].min())
        known = [torch.from_numpy(of_batches[number]) for number in order]
        return {"indices": known, "outputs": [batches[number].outputs for number in order]}, len(np.unique(all_indices))
    # Of a sample that comes several times, as with a sampler that draws with replacement, the first one counts.
    indices, first = np.unique(all_indices, return_index=True)
    rows = np.full(len(all_indices), -1)
    rows[first] = np.arange(len(indices))
    outputs = _join_samples(batches, rows, len(indices), report_progress)
    return {"indices": torch.from_numpy(indices), "outputs": outputs}, len(indices)


def _join_samples(batches: list[Batch], rows: np.ndarray, num: int, report_progress: Callable[[], None]) -> Any:
    """Return the outputs with all samples in place of those of a batch: tensors with `num` rows, lists of `num`.

    Args:
        rows: of all samples of the batches, in the result; -1: left out.
    """
    if not batches:
        return []
    columns = [_empty_column(leaves, num) for leaves in zip(*(batch.leaves for batch in batches), strict=True)]
    end = 0
    for batch in batches:
        begin, end = end, end + (batch.num or 0)
        kept = np.flatnonzero(rows[begin:end] >= 0)
        for column, leaf in zip(columns, batch.leaves, strict=True):
            if isinstance(column, Tensor):
                column[torch.from_numpy(rows[begin:end][kept])] = leaf[torch.from_numpy(kept)]
            else:
                for place in kept.tolist():
                    value = leaf[place]  # cloned: a file of a view would hold the whole batch
                    column[rows[begin + place]] = value.clone() if isinstance(value, Tensor) else value
        batch.leaves, batch.outputs = [], None  # frees them: the result takes their place
        report_progress()
    return tree_unflatten(columns, batches[0].spec)


def _empty_column(leaves: Sequence[Any], num: int) -> Any:
    """Return room for the rows of all samples. Tensors whose shape differs between batches stay a list of rows."""
    forms = {(leaf.dtype, leaf.shape[1:]) if isinstance(leaf, Tensor) else None for leaf in leaves}
    form = forms.pop() if len(forms) == 1 else None
    return [None] * num if form is None else torch.empty((num, *form[1]), dtype=form[0])
