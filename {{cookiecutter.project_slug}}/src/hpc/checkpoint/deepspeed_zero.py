"""How DeepSpeed lays out weights in a checkpoint folder: the flat pieces of each, views of memory-mapped files.

ZeRO keeps fp32 masters in the optimizer's files, one file per rank. ZeRO-1 and 2 make one flat vector of each optimizer
group and cut it into one partition per rank; ZeRO-3 cuts each parameter into one piece per rank.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpc.checkpoint import safe_unpickle
from hpc.config.errors import ConfigError

MODEL_WHOLE, MODEL_PARTED = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_model_states.pt"
OPTIMIZER = "zero_pp_rank_0_mp_rank_00_optim_states.pt"

Pieces = tuple[list[Tensor], torch.Size]  # in order, flattened; the last may be padded beyond the size


def model_file(folder: Path) -> Path | None:
    """The first file of a checkpoint folder of DeepSpeedStrategy; None where there is none."""
    models = [folder / "checkpoint" / name for name in (MODEL_WHOLE, MODEL_PARTED.format(0))]
    return _only(*models) if any(file.is_file() for file in models) else None


def pieces(file: Path) -> dict[str, Pieces]:
    """The pieces and the shape of each weight, by name.

    Raises:
        ConfigError: files of two runs lie in the folder.
        Exception: a file is missing, damaged, or names more than plain data, see `inert.rule`.
    """
    state = safe_unpickle.plain(file)
    module: dict[str, Tensor] = state["module"]
    groups, tied = state["param_shapes"], state["shared_params"] or {}
    if file.name != MODEL_WHOLE:  # ZeRO-3: parameters in `module` are empty, buffers are whole
        found = {name: _whole(module[name]) for name in state["buffer_names"]} | _gathered(file.parent, state)
    else:
        found = {name: _whole(value) for name, value in module.items()}
        if groups and any(module[name].dtype != torch.float32 for shapes in groups for name in shapes):
            found |= _masters(_shards(file.parent), groups)
    return found | {alias: found[name] for alias, name in tied.items() if name in found}


def _whole(value: Tensor) -> Pieces:
    return [value], value.shape


def _only(*files: Path) -> Path:
    """The one file that is there; the first when none is, so that opening it tells what lacks."""
    there = [file for file in files if file.is_file()]
    if len(there) > 1:
        rule = f"{there[0].name} and {there[1].name} come from two runs, and one of them is stale"
        raise ConfigError("ckpt", there[0].parent, rule, "remove the files of the older run")
    return there[0] if there else files[0]


def _shards(folder: Path) -> list[dict[str, Any]]:
    """The optimizer states of all data-parallel ranks, in order of rank. Files of bf16 runs have a prefix."""
    name = _only(*(folder / (prefix + OPTIMIZER) for prefix in ("", "bf16_"))).name
    ranks = safe_unpickle.plain(folder / name)["optimizer_state_dict"]["partition_count"]
    count = max(ranks) if isinstance(ranks, list) else ranks
    files = [folder / name.replace("rank_0", f"rank_{rank}", 1) for rank in range(count)]
    return [safe_unpickle.plain(file)["optimizer_state_dict"] for file in files]


def _masters(shards: list[dict[str, Any]], groups: list[dict[str, torch.Size]]) -> dict[str, Pieces]:
    """ZeRO-1/2: where each parameter lies in the flat vector of its group."""
    found: dict[str, Pieces] = {}
    paddings = shards[0].get("param_alignment_paddings") or [[0] * len(shapes) for shapes in groups]
    for index, shapes in enumerate(groups):
        flat, start = [shard["single_partition_of_fp32_groups"][index] for shard in shards], 0
        for (name, shape), padding in zip(shapes.items(), paddings[index], strict=True):
            found[name] = list(_span(flat, start, shape.numel())), shape
            start += shape.numel() + padding
        # A group is padded to a multiple of 2 x ranks.
        if not 0 <= sum(partition.numel() for partition in flat) - start < 2 * len(shards):
            raise ValueError("partitions do not add up to the parameters")
    return found


def _gathered(folder: Path, state: dict[str, Any]) -> dict[str, Pieces]:
    """ZeRO-3: equal pieces of each parameter, one per rank, the last one padded."""
    shards, start = _shards(folder), 0
    found: dict[str, Pieces] = {}
    for name, shape in (item for shapes in state["param_shapes"] for item in shapes.items()):
        length = math.ceil(shape.numel() / len(shards))
        found[name] = [piece for shard in shards for piece in _span(shard["fp32_flat_groups"], start, length)], shape
        start += length
    if start != sum(group.numel() for group in shards[0]["fp32_flat_groups"]):
        raise ValueError("partitions do not add up to the parameters")
    frozen: dict[str, torch.Size] = state["frozen_param_shapes"] or {}
    ranks = [safe_unpickle.plain(folder / MODEL_PARTED.format(rank)) for rank in range(len(shards))] if frozen else []
    return found | {name: ([rank["frozen_param_fragments"][name] for rank in ranks], frozen[name]) for name in frozen}


def _span(flats: Sequence[Tensor], start: int, length: int) -> Iterator[Tensor]:
    """Views of `length` elements from `start` on, counted through the `flats` one after another."""
    for flat in flats:
        piece = flat[start : start + length]
        yield piece
        start, length = max(start - flat.numel(), 0), length - piece.numel()
