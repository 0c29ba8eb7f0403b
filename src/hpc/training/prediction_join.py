"""Join the parts of a prediction into predictions.pt, in the order of the dataset."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from hpc.config.errors import ConfigError
from hpc.system import files
from hpc.training.prediction_parts import FOLDER, read_part

JOINED_FOLDER = f"{FOLDER}.joined"  # the parts, while they are removed


@dataclass
class Batch:
    """A batch in a part.

    Attributes:
        position: in the part.
        order: (rank, number), for a loader whose samples have no indices.
        indices: of its samples in the dataset; None: unknown.
        num: of its samples; 0: unknown.
        spec: the dicts and tuples around what it has per sample; None: it has anything else, too.
        forms: of what it has per sample: dtype and shape of one sample for a tensor; None: a list.
        rows: of its samples in the result; -1: another batch has that sample, too.
    """

    part: str
    position: int
    order: tuple[int, int]
    indices: np.ndarray | None
    num: int
    spec: TreeSpec | None
    forms: list[tuple[torch.dtype, torch.Size] | None]
    rows: np.ndarray


def output_files(run_dir: Path, num_loaders: int) -> list[Path]:
    """Return the file of each loader: predictions.pt, or predictions-0.pt and so on if there are several."""
    names = ["predictions.pt"] if num_loaders == 1 else [f"predictions-{k}.pt" for k in range(num_loaders)]
    return [run_dir / name for name in names]


def is_joined(run_dir: Path, num_loaders: int) -> bool:
    """Return whether an earlier attempt has joined all parts."""
    return not (run_dir / FOLDER).exists() and all(path.exists() for path in output_files(run_dir, num_loaders))


def join(run_dir: Path, parts: Mapping[str, int], *, num_loaders: int, report_progress: Callable[[], None]) -> int:
    """Write the files of all loaders, remove the parts, and return the number of samples.

    One part is in memory at a time, and the result of one loader: torch.save needs it whole.

    Args:
        parts: number of samples by name.

    Raises:
        ConfigError: a part is missing.
    """
    folder = run_dir / FOLDER
    if num_missing := sum(num for name, num in parts.items() if not (folder / name).is_file()):
        rule = f"{num_missing} of {sum(parts.values())} predicted samples are missing: files are gone from {folder}"
        raise ConfigError("task", "predict", rule, f"resume={run_dir}, which predicts them again")
    batches: dict[int, list[Batch]] = {loader: [] for loader in range(num_loaders)}
    for name, position, rank, batch in _read_batches(folder, sorted(parts)):
        batches[batch["loader"]].append(_describe(batch, part=name, position=position, rank=rank))
        report_progress()
    num_samples = 0
    for loader, path in enumerate(output_files(run_dir, num_loaders)):
        result, num = _join_loader(folder, batches[loader], report_progress)
        files.write_durably(path, lambda stream, result=result: torch.save(result, stream))
        num_samples += num
    folder.rename(run_dir / JOINED_FOLDER)  # from here on the files count
    shutil.rmtree(run_dir / JOINED_FOLDER, ignore_errors=True)
    return num_samples


def _read_batches(folder: Path, names: list[str]) -> Iterator[tuple[str, int, int, dict[str, Any]]]:
    """Yield the name of the part, the position in it, the rank, and the batch."""
    for name in names:
        part = read_part(folder / name)
        for position, batch in enumerate(part["batches"]):
            yield name, position, part["rank"], batch


def _describe(batch: dict[str, Any], *, part: str, position: int, rank: int) -> Batch:
    leaves, spec = _flatten(batch["outputs"])
    indices = None if batch["indices"] is None else batch["indices"].numpy().copy()
    lengths = {_length(leaf) for leaf in leaves}
    common_length = next(iter(lengths)) if len(lengths) == 1 else None
    num = common_length or 0 if indices is None else len(indices)
    is_per_sample = num > 0 and lengths == {num}
    forms = [_form(leaf) for leaf in leaves] if is_per_sample else []
    order = (rank, batch["number"])
    return Batch(part, position, order, indices, num, spec if is_per_sample else None, forms, np.empty(0, np.int64))


def _flatten(outputs: Any) -> tuple[list[Any], TreeSpec]:
    """Return what dicts and tuples hold; a list counts as values, one per sample."""
    return tree_flatten(outputs, is_leaf=lambda value: isinstance(value, list))


def _length(leaf: Any) -> int | None:
    """Return the number of rows of a tensor or the length of a list; None for anything else."""
    if isinstance(leaf, Tensor):
        return len(leaf) if leaf.ndim else None
    return len(leaf) if isinstance(leaf, list) else None


def _form(leaf: Any) -> tuple[torch.dtype, torch.Size] | None:
    return (leaf.dtype, leaf.shape[1:]) if isinstance(leaf, Tensor) else None


def _join_loader(folder: Path, batches: list[Batch], report_progress: Callable[[], None]) -> tuple[dict[str, Any], int]:
    """Return the content of a loader's file, and its number of samples; of batches, if their samples are unknown."""
    is_per_sample = all(batch.spec is not None and batch.spec == batches[0].spec for batch in batches)
    has_indices = all(batch.indices is not None for batch in batches)
    if not has_indices:
        batches = list({batch.order: batch for batch in sorted(batches, key=lambda batch: batch.order)}.values())
    indices = _place_samples(batches) if has_indices else None
    if not is_per_sample:
        return _join_batches(folder, batches, indices, report_progress)
    if not has_indices:
        ends = np.cumsum([batch.num for batch in batches])
        for batch, end in zip(batches, ends, strict=True):
            batch.rows = np.arange(end - batch.num, end)
    num = len(indices) if indices is not None else sum(batch.num for batch in batches)
    outputs = _join_samples(folder, batches, num, report_progress)
    return {"indices": None if indices is None else torch.from_numpy(indices), "outputs": outputs}, num


def _place_samples(batches: list[Batch]) -> np.ndarray:
    """Set the rows of each batch, in the order of the dataset, and return the indices of all rows.

    Of a sample that comes several times, as with a sampler that draws with replacement, the first one counts.
    """
    all_indices = np.concatenate([batch.indices for batch in batches] or [np.empty(0, np.int64)])  # type: ignore[misc]
    indices, first = np.unique(all_indices, return_index=True)
    rows = np.full(len(all_indices), -1)
    rows[first] = np.arange(len(indices))
    for batch, end in zip(batches, np.cumsum([batch.num for batch in batches]), strict=True):
        batch.rows = rows[end - batch.num : end]
    return indices


def _join_samples(folder: Path, batches: list[Batch], num: int, report_progress: Callable[[], None]) -> Any:
    """Return the outputs with all samples in place of those of a batch: tensors with `num` rows, lists of `num`."""
    if not batches:
        return []
    columns: list[Any] = []
    for forms in zip(*(batch.forms for batch in batches), strict=True):
        form = forms[0]
        is_tensor = all(other == form for other in forms)
        # Tensors whose shape differs between batches, such as texts, stay a list with one for each sample.
        columns.append(torch.empty((num, *form[1]), dtype=form[0]) if form and is_tensor else [None] * num)
    by_place = {(batch.part, batch.position): batch for batch in batches}
    for name, position, _, content in _read_batches(folder, sorted({batch.part for batch in batches})):
        if (batch := by_place.get((name, position))) is None:
            continue
        kept = np.flatnonzero(batch.rows >= 0)
        for column, leaf in zip(columns, _flatten(content["outputs"])[0], strict=True):
            if isinstance(column, Tensor):
                column[torch.from_numpy(batch.rows[kept])] = leaf[torch.from_numpy(kept)]
            else:
                for place in kept.tolist():
                    column[batch.rows[place]] = _copy(leaf[place])
        report_progress()
    assert batches[0].spec is not None
    return tree_unflatten(columns, batches[0].spec)


def _join_batches(
    folder: Path, batches: list[Batch], indices: np.ndarray | None, report_progress: Callable[[], None]
) -> tuple[dict[str, Any], int]:
    """Return lists of the indices and of the outputs of each batch, in the order of their first samples."""
    if indices is not None:
        batches = sorted(
            (batch for batch in batches if (batch.rows >= 0).any()), key=lambda batch: batch.rows[batch.rows >= 0].min()
        )
    numbers = {(batch.part, batch.position): number for number, batch in enumerate(batches)}
    outputs: list[Any] = [None] * len(batches)
    for name, position, _, content in _read_batches(folder, sorted({batch.part for batch in batches})):
        if (number := numbers.get((name, position))) is not None:
            outputs[number] = _copy(content["outputs"])
        report_progress()
    known = [torch.from_numpy(batch.indices) for batch in batches if batch.indices is not None]
    return {"indices": None if indices is None else known, "outputs": outputs}, len(
        batches if indices is None else indices
    )


def _copy(value: Any) -> Any:
    """Return a value whose tensors are no longer parts of the mapped file."""
    return tree_map_only(Tensor, lambda tensor: tensor.clone(), value)
