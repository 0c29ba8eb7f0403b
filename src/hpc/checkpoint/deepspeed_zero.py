"""The weights in a checkpoint folder of DeepSpeed: the flat pieces of each, as views of memory-mapped files.

ZeRO keeps fp32 masters in the optimizer's files, one file per rank. ZeRO-1 and 2 make one flat vector of each optimizer
group and cut it into one partition per rank; ZeRO-3 cuts each parameter into one piece per rank.

DeepSpeed's own zero_to_fp32 (0.19.8) is not used: it executes what the files name, needs DeepSpeed, leaves out the
frozen parameters of ZeRO-1, and holds all weights of ZeRO-1 and 2 in memory at once, on each rank.
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


def find_model_file(folder: Path) -> Path | None:
    """Return the first model file of a checkpoint folder of DeepSpeedStrategy; None where there is none."""
    candidates = [folder / "checkpoint" / name for name in (MODEL_WHOLE, MODEL_PARTED.format(0))]
    return _only_file(*candidates) if any(file.is_file() for file in candidates) else None


def read_pieces(file: Path) -> dict[str, Pieces]:
    """Return the pieces and the shape of each weight, by name.

    Raises:
        ConfigError: files of two runs lie in the folder.
        Exception: a file is missing, damaged, or names more than plain data, see `safe_unpickle.describe_error`.
    """
    state = safe_unpickle.load_plain(file)
    module: dict[str, Tensor] = state["module"]
    groups, tied = state["param_shapes"], state["shared_params"] or {}
    if file.name != MODEL_WHOLE:  # ZeRO-3: parameters in `module` are empty, buffers are whole
        pieces = {name: _one_piece(module[name]) for name in state["buffer_names"]} | _zero3_pieces(file.parent, state)
    else:
        pieces = {name: _one_piece(value) for name, value in module.items()}
        if groups and any(module[name].dtype != torch.float32 for shapes in groups for name in shapes):
            pieces |= _fp32_masters(_optimizer_states(file.parent), groups)
    return pieces | {alias: pieces[name] for alias, name in tied.items() if name in pieces}


def _one_piece(value: Tensor) -> Pieces:
    return [value], value.shape


def _only_file(*files: Path) -> Path:
    """Return the only file that exists; the first when none does, so that opening it names what is missing."""
    existing = [file for file in files if file.is_file()]
    if len(existing) > 1:
        rule = f"must hold the files of one run, but {existing[0].name} and {existing[1].name} come from two"
        raise ConfigError("ckpt", existing[0].parent, rule, "remove the files of the older run")
    return existing[0] if existing else files[0]


def _optimizer_states(folder: Path) -> list[dict[str, Any]]:
    """Return the optimizer states of all data-parallel ranks, in order of rank. Files of bf16 runs have a prefix."""
    name = _only_file(*(folder / (prefix + OPTIMIZER) for prefix in ("", "bf16_"))).name
    ranks = safe_unpickle.load_plain(folder / name)["optimizer_state_dict"]["partition_count"]
    count = max(ranks) if isinstance(ranks, list) else ranks
    files = [folder / name.replace("rank_0", f"rank_{rank}", 1) for rank in range(count)]
    return [safe_unpickle.load_plain(file)["optimizer_state_dict"] for file in files]


def _fp32_masters(states: list[dict[str, Any]], groups: list[dict[str, torch.Size]]) -> dict[str, Pieces]:
    """Return the pieces of each parameter in the flat vector of its group (ZeRO-1 and 2)."""
    pieces: dict[str, Pieces] = {}
    paddings = states[0].get("param_alignment_paddings") or [[0] * len(shapes) for shapes in groups]
    for index, shapes in enumerate(groups):
        partitions, start = [state["single_partition_of_fp32_groups"][index] for state in states], 0
        for (name, shape), padding in zip(shapes.items(), paddings[index], strict=True):
            pieces[name] = list(_span(partitions, start, shape.numel())), shape
            start += shape.numel() + padding
        # A group is padded to a multiple of 2 x ranks.
        if not 0 <= sum(partition.numel() for partition in partitions) - start < 2 * len(states):
            raise ValueError("partitions do not add up to the parameters")
    return pieces


def _zero3_pieces(folder: Path, model_state: dict[str, Any]) -> dict[str, Pieces]:
    """Return the equal pieces of each parameter, one per rank, the last one padded (ZeRO-3)."""
    states, start = _optimizer_states(folder), 0
    pieces: dict[str, Pieces] = {}
    for name, shape in (item for shapes in model_state["param_shapes"] for item in shapes.items()):
        length = math.ceil(shape.numel() / len(states))
        flats = [state["fp32_flat_groups"] for state in states]
        pieces[name] = [piece for groups in flats for piece in _span(groups, start, length)], shape
        start += length
    if start != sum(group.numel() for group in states[0]["fp32_flat_groups"]):
        raise ValueError("partitions do not add up to the parameters")
    frozen: dict[str, torch.Size] = model_state["frozen_param_shapes"] or {}
    if not frozen:
        return pieces
    ranks = [safe_unpickle.load_plain(folder / MODEL_PARTED.format(rank)) for rank in range(len(states))]
    return pieces | {name: ([rank["frozen_param_fragments"][name] for rank in ranks], frozen[name]) for name in frozen}


def _span(flats: Sequence[Tensor], start: int, length: int) -> Iterator[Tensor]:
    """Yield views of `length` elements from `start` on, counted through the `flats` one after another."""
    for flat in flats:
        piece = flat[start : start + length]
        yield piece
        start, length = max(start - flat.numel(), 0), length - piece.numel()
