"""Plain weights from a checkpoint of any strategy. Nothing in a checkpoint is ever executed.

Classes that a pickle may name become inert records, any other name is refused. So neither DeepSpeed nor a process
group is needed to read what many processes wrote.
"""

import io
import math
import pickle
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .config import Refused

# Where the classes live that torch.distributed.checkpoint pickles into `.metadata`.
DCP = "torch.distributed.checkpoint"
METADATA_MODULES = {f"{DCP}.filesystem", f"{DCP}.metadata", "pathlib", "pathlib._local", "torch", "torch.serialization"}
# What DeepSpeed pickles into its optimizer files, besides what torch.load allows anyway.
DEEPSPEED_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
MODEL_WHOLE, MODEL_PARTED = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_model_states.pt"
OPTIMIZER = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
FIX = "ckpt=<a .ckpt file or folder that Lightning finished writing>"


def load(module: nn.Module, path: str | Path) -> None:
    """Copy a checkpoint's weights into `module`, converted to its dtypes and devices.

    Call it before the module is sharded; every process reads the same checkpoint. Of tied parameters (two names, one
    tensor) either name will do.

    Raises:
        Refused: `path` is no readable checkpoint, or its keys and shapes are not those of `module.state_dict()`.
        ValueError: the module has no memory yet (meta device).
    """
    wanted = {key: value for key, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    if any(value.is_meta for value in wanted.values()):
        raise ValueError("weights cannot be copied into a module on the meta device: materialize it first")
    found = read(path)
    if misfits := _misfits(found, wanted):
        raise Refused("ckpt", path, misfits, "compose the model that the checkpoint was trained with")
    with torch.no_grad():
        for key, value in found.items():
            wanted[key].copy_(value)


@torch.no_grad()
def read(path: str | Path) -> dict[str, Tensor]:
    """Full weights on the CPU, keyed as in `LightningModule.state_dict()`.

    Reads a `.ckpt` file or a plain state-dict file (memory-mapped), a folder of `ModelParallelStrategy`, and a folder
    of `DeepSpeedStrategy`. Where ZeRO 1, 2 or 3 keeps fp32 masters beside bf16 or fp16 weights, the masters are
    returned; all else comes in the dtype it was saved in.

    Raises:
        Refused: `path` is missing, damaged, incomplete or none of these, or a pickle in it names more than plain data.
    """
    try:
        weights = {key: value.detach() for key, value in _entries(Path(path)).items() if isinstance(value, Tensor)}
    except (Refused, MemoryError):
        raise
    except Exception as error:  # a damaged file can fail anywhere
        raise Refused("ckpt", path, _rule(error), FIX) from error
    if not weights:
        raise Refused("ckpt", path, "holds no weights", FIX)
    return weights


def _rule(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"lacks the file {Path(str(error.filename)).name!r}"
    # Of torch's message only a dotted name is quoted: the rest may come from the file, escape codes included.
    if isinstance(error, pickle.UnpicklingError) and (named := re.search(r"GLOBAL ([\w.]+)", str(error))):
        return f"names {named[1]}: a checkpoint holds data only, nothing in it is executed"
    return f"is damaged, or of another format ({type(error).__name__})"


def _entries(path: Path) -> Mapping[str, Any]:
    if path.is_file():
        checkpoint = _plain(path)
        return checkpoint.get("state_dict", checkpoint)
    if (path / ".metadata").is_file():
        return _sharded(path)
    models = [path / "checkpoint" / name for name in (MODEL_WHOLE, MODEL_PARTED.format(0))]
    if any(file.is_file() for file in models):
        return _deepspeed(_only(*models))
    rule = "is neither a .ckpt file nor a checkpoint folder of Lightning" if path.exists() else "does not exist"
    raise Refused("ckpt", path, rule, FIX)


class _Record:
    """Stands in for every class a pickle may name: keeps the state it is given and does nothing."""

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {})


def _member(owner: Any, name: str) -> _Record:
    """Stands in for `getattr`, with which Python before 3.11.4 pickles the members of an enumeration."""
    return _Record()


class _Metadata(pickle.Unpickler):
    """Reads `.metadata` as records; the reader of torch would execute whatever it says."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module not in METADATA_MODULES:
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        return torch.Size if name == "Size" else _Record


def _plain(file: Path) -> Any:
    with file.open("rb") as stream:
        mapped = stream.read(2) == b"PK"  # a zip archive; files of old torch versions cannot be mapped
    inert: list[Any] = [(_Record, name) for name in DEEPSPEED_CLASSES]
    with torch.serialization.safe_globals([*inert, (_member, "builtins.getattr")]):
        return torch.load(str(file), map_location="cpu", weights_only=True, mmap=mapped)


def _sharded(folder: Path) -> dict[str, Tensor]:
    """Put the chunks of each tensor below `state_dict.` together; optimizer states lie beside them."""
    with (folder / ".metadata").open("rb") as stream:
        metadata = _Metadata(stream).load()
    # Entries without a size are pickled objects.
    sizes = {key: entry.size for key, entry in metadata.state_dict_metadata.items() if hasattr(entry, "size")}
    weights: dict[str, Tensor] = {}
    filled: Counter[str] = Counter()
    chunks = sorted(metadata.storage_data.items(), key=lambda chunk: chunk[1].relative_path)
    for file, members in groupby(chunks, key=lambda chunk: chunk[1].relative_path):
        with (folder / Path(file).name).open("rb") as stream:
            for index, place in members:
                if index.fqn not in sizes or not index.fqn.startswith("state_dict."):
                    continue
                stream.seek(place.offset)
                part = torch.load(io.BytesIO(stream.read(place.length)), map_location="cpu", weights_only=True)
                key = index.fqn.removeprefix("state_dict.")
                if key not in weights:
                    weights[key] = torch.empty(sizes[index.fqn], dtype=part.dtype)
                corner = zip(index.offset or (0,) * part.ndim, part.shape, strict=True)
                weights[key][tuple(slice(start, start + length) for start, length in corner)] = part
                filled[key] += part.numel()
    if any(filled[key] != weight.numel() for key, weight in weights.items()):
        raise ValueError("chunks do not cover every tensor")
    return weights


def _deepspeed(file: Path) -> dict[str, Tensor]:
    state = _plain(file)
    weights, groups, tied = dict(state["module"]), state["param_shapes"], state["shared_params"] or {}
    if file.name != MODEL_WHOLE:  # ZeRO-3: parameters in `module` are empty, buffers are whole
        weights = {name: weights[name] for name in state["buffer_names"]} | _gathered(file.parent, state)
    elif groups and any(weights[name].dtype != torch.float32 for shapes in groups for name in shapes):
        weights |= _masters(_shards(file.parent), groups)
    return weights | {alias: weights[name] for alias, name in tied.items() if name in weights}


def _only(*files: Path) -> Path:
    """The one file that is there; the first when none is, so that opening it tells what lacks."""
    there = [file for file in files if file.is_file()]
    if len(there) > 1:
        rule = f"{there[0].name} and {there[1].name} come from two runs, and one of them is stale"
        raise Refused("ckpt", there[0].parent, rule, "remove the files of the older run")
    return there[0] if there else files[0]


def _shards(folder: Path) -> list[dict[str, Any]]:
    """The optimizer states of all data-parallel ranks, in order of rank. Files of bf16 runs have a prefix."""
    name = _only(*(folder / (prefix + OPTIMIZER) for prefix in ("", "bf16_"))).name
    ranks = _plain(folder / name)["optimizer_state_dict"]["partition_count"]
    count = max(ranks) if isinstance(ranks, list) else ranks
    files = [folder / name.replace("rank_0", f"rank_{rank}", 1) for rank in range(count)]
    return [_plain(file)["optimizer_state_dict"] for file in files]


def _masters(shards: list[dict[str, Any]], groups: list[dict[str, torch.Size]]) -> dict[str, Tensor]:
    """ZeRO-1/2: each optimizer group is one flat fp32 vector, cut into one partition per rank."""
    weights: dict[str, Tensor] = {}
    paddings = shards[0].get("param_alignment_paddings") or [[0] * len(shapes) for shapes in groups]
    for index, shapes in enumerate(groups):
        flat, start = torch.cat([shard["single_partition_of_fp32_groups"][index] for shard in shards]), 0
        for (name, shape), padding in zip(shapes.items(), paddings[index], strict=True):
            weights[name] = flat.narrow(0, start, shape.numel()).view(shape)
            start += shape.numel() + padding
        if not 0 <= flat.numel() - start < 2 * len(shards):  # a group is padded to a multiple of 2 x ranks
            raise ValueError("partitions do not add up to the parameters")
    return weights


def _gathered(folder: Path, state: dict[str, Any]) -> dict[str, Tensor]:
    """ZeRO-3: each parameter is cut into equal pieces, one per rank, the last one padded."""
    shards, start, weights = _shards(folder), 0, {}
    for name, shape in (item for shapes in state["param_shapes"] for item in shapes.items()):
        length = math.ceil(shape.numel() / len(shards))
        pieces = [piece for shard in shards for piece in _span(shard["fp32_flat_groups"], start, length)]
        weights[name] = torch.cat(pieces)[: shape.numel()].view(shape)
        start += length
    if start != sum(group.numel() for group in shards[0]["fp32_flat_groups"]):
        raise ValueError("partitions do not add up to the parameters")
    ranks = [_plain(folder / MODEL_PARTED.format(rank)) for rank in range(len(shards))]
    for name, shape in (state["frozen_param_shapes"] or {}).items():
        pieces = [rank["frozen_param_fragments"][name] for rank in ranks]
        weights[name] = torch.cat(pieces)[: shape.numel()].view(shape)
    return weights


def _span(groups: Sequence[Tensor], start: int, length: int) -> Iterator[Tensor]:
    """Views of `length` elements from `start` on, counted through the flat `groups` one after another."""
    for group in groups:
        piece = group[start : start + length]
        yield piece
        start, length = max(start - group.numel(), 0), length - piece.numel()


def _misfits(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """What keeps `found` from filling `wanted`, in one sentence; empty when it fits."""
    both = [key for key in wanted if key in found]
    filled = {id(wanted[key]) for key in both}
    shapes = {key: (tuple(found[key].shape), tuple(wanted[key].shape)) for key in both}
    kinds = {
        "missing": [key for key in wanted if id(wanted[key]) not in filled],
        "unexpected": [ascii(key) for key in found if key not in wanted],
        "wrongly shaped": [f"{key} {saved} instead of {own}" for key, (saved, own) in shapes.items() if saved != own],
    }
    return "; ".join(f"{len(keys)} {kind}: {', '.join(keys[:5])}" for kind, keys in kinds.items() if keys)
