"""Plain weights from a checkpoint of any strategy. Nothing in a checkpoint is ever executed.

Classes that a pickle may name become inert records, any other name is refused. So neither DeepSpeed nor a process
group is needed to read what many processes wrote.
"""

import io
import math
import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .config import Refused

# Where the classes come from that torch.distributed.checkpoint pickles into `.metadata`.
METADATA_MODULES = {"pathlib", "pathlib._local", "torch", "torch.serialization"} | {
    f"torch.distributed.checkpoint.{module}" for module in ("filesystem", "metadata")
}
# What DeepSpeed pickles into its optimizer files, besides what torch.load allows anyway.
DEEPSPEED_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
MODEL_WHOLE, MODEL_PARTED = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_model_states.pt"
OPTIMIZER = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
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
    with _refusing(Path(path)) as path:
        weights = {key: value.detach() for key, value in _reader(path)(path).items() if isinstance(value, Tensor)}
        if not weights:
            raise Refused("ckpt", path, "holds no weights", FIX)
        return weights


@contextmanager
def _refusing(path: Path) -> Iterator[Path]:
    """Tell whatever goes wrong inside a file, and anything may, as a refusal."""
    try:
        yield path
    except (Refused, MemoryError):
        raise
    except Exception as error:
        rule, fix = f"is damaged, or of another format ({type(error).__name__})", FIX
        if isinstance(error, FileNotFoundError):
            rule = f"lacks the file {Path(str(error.filename)).name!r}"
        # Of torch's message only a dotted name is quoted: the rest may come from the file, escape codes included.
        elif isinstance(error, pickle.UnpicklingError) and (named := re.search(r"GLOBAL ([\w.]+)", str(error))):
            rule, fix = f"names {named[1]}: a checkpoint holds data, never code", "use a checkpoint that you trust"
        raise Refused("ckpt", path, rule, fix) from error


def _reader(path: Path) -> Callable[[Path], Mapping[str, Any]]:
    if path.is_file():
        return _read_file
    if (path / ".metadata").is_file():
        return _read_sharded
    if any((path / "checkpoint" / name.format(0)).is_file() for name in (MODEL_WHOLE, MODEL_PARTED)):
        return _read_deepspeed
    rule = "is neither a .ckpt file nor a checkpoint folder of Lightning" if path.exists() else "does not exist"
    raise Refused("ckpt", path, rule, FIX)


class _Record:
    """Stands in for every class a pickle may name: keeps the state it is given and does nothing."""

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


def _plain(file: Path, classes: Sequence[str] = ()) -> Any:
    """torch.load of plain data, where `classes` become records."""
    with file.open("rb") as stream:
        mapped = stream.read(2) == b"PK"  # a zip archive; files of old torch versions cannot be mapped
    with torch.serialization.safe_globals([(_Record, name) for name in classes]):
        return torch.load(str(file), map_location="cpu", weights_only=True, mmap=mapped)


def _read_file(path: Path) -> Mapping[str, Any]:
    checkpoint = _plain(path)
    return checkpoint.get("state_dict", checkpoint)


class _Metadata(pickle.Unpickler):
    """Reads `.metadata` as records; the reader of torch would execute whatever it says."""

    def find_class(self, module: str, name: str) -> Any:
        if module not in METADATA_MODULES:
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        return torch.Size if name == "Size" else _Record


def _read_sharded(folder: Path) -> dict[str, Tensor]:
    """Put the chunks of every tensor below `state_dict.` together; optimizer states lie beside them."""
    with (folder / ".metadata").open("rb") as stream:
        metadata = _Metadata(stream).load()
    tensors = {key: entry for key, entry in metadata.state_dict_metadata.items() if hasattr(entry, "size")}
    sizes = {key: entry.size for key, entry in tensors.items() if key.startswith("state_dict.")}
    chunks = [
        (Path(info.relative_path).name, info, key) for key, info in metadata.storage_data.items() if key.fqn in sizes
    ]
    weights: dict[str, Tensor] = {}
    filled: Counter[str] = Counter()
    for name, members in groupby(sorted(chunks, key=lambda chunk: chunk[0]), key=lambda chunk: chunk[0]):
        with (folder / name).open("rb") as stream:
            for _, info, key in members:
                stream.seek(info.offset)
                part = torch.load(io.BytesIO(stream.read(info.length)), map_location="cpu", weights_only=True)
                if key.fqn not in weights:
                    weights[key.fqn] = torch.empty(sizes[key.fqn], dtype=part.dtype)
                corner = zip(key.offset or (0,) * part.ndim, part.shape, strict=True)
                weights[key.fqn][tuple(slice(start, start + length) for start, length in corner)] = part
                filled[key.fqn] += part.numel()
    if any(filled[key] != size.numel() for key, size in sizes.items()):
        raise ValueError("chunks do not cover every tensor")
    return {key.removeprefix("state_dict."): value for key, value in weights.items()}


def _read_deepspeed(path: Path) -> dict[str, Tensor]:
    file = _only(path / "checkpoint", MODEL_WHOLE, MODEL_PARTED.format(0))
    state = _plain(file, DEEPSPEED_CLASSES)
    if state["mp_world_size"] != 1:
        raise Refused("ckpt", path, "DeepSpeed's model parallelism cuts single weights over files", FIX)
    weights, groups, tied = state["module"], state["param_shapes"], state["shared_params"] or {}
    if file.name != MODEL_WHOLE:  # ZeRO-3: parameters in `module` are empty, buffers are whole
        weights = {name: weights[name] for name in state["buffer_names"]} | _gathered(file.parent, state)
    elif groups and any(weights[name].dtype != torch.float32 for shapes in groups for name in shapes):
        weights = {**weights, **_masters(_shards(file.parent), groups)}
    return {**weights, **{alias: weights[name] for alias, name in tied.items() if name in weights}}


def _only(folder: Path, *names: str) -> Path:
    """The one of these files that is there. Both means two runs in one folder, one of them stale."""
    there = [folder / name for name in names if (folder / name).is_file()]
    if len(there) > 1:
        rule = f"{there[0].name} and {there[1].name} come from two runs"
        raise Refused("ckpt", folder, rule, "remove the files of the older run")
    return there[0] if there else folder / names[0]


def _shards(folder: Path) -> list[dict[str, Any]]:
    """The optimizer states of all data-parallel ranks, in order of rank. Files of bf16 runs have a prefix."""
    name = _only(folder, OPTIMIZER.format(0), "bf16_" + OPTIMIZER.format(0)).name
    shards = [_plain(folder / name, DEEPSPEED_CLASSES)["optimizer_state_dict"]]
    ranks = shards[0]["partition_count"]
    for rank in range(1, max(ranks) if isinstance(ranks, list) else ranks):
        file = folder / name.replace("rank_0_", f"rank_{rank}_", 1)
        shards.append(_plain(file, DEEPSPEED_CLASSES)["optimizer_state_dict"])
    return shards


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
    if frozen := state["frozen_param_shapes"]:
        ranks = [_plain(folder / MODEL_PARTED.format(rank), DEEPSPEED_CLASSES) for rank in range(len(shards))]
        for name, shape in frozen.items():
            whole = torch.cat([rank["frozen_param_fragments"][name] for rank in ranks])
            weights[name] = whole[: shape.numel()].view(shape)
    return weights


def _span(groups: Sequence[Tensor], start: int, length: int) -> Iterator[Tensor]:
    """Views of `length` elements from `start` on, counted through the flat `groups` one after another."""
    for group in groups:
        piece = group[start : start + length]
        yield piece
        start, length = max(start - group.numel(), 0), length - piece.numel()


def _misfits(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """What keeps `found` from filling `wanted`, in one sentence; empty when it fits."""
    names: dict[int, set[str]] = defaultdict(set)
    for key, value in wanted.items():
        names[id(value)].add(key)
    misfits = {
        "missing": [key for key, value in wanted.items() if found.keys().isdisjoint(names[id(value)])],
        "unexpected": [ascii(key) for key in found if key not in wanted],
        "wrongly shaped": [
            f"{key} {tuple(found[key].shape)} instead of {tuple(value.shape)}"
            for key, value in wanted.items()
            if key in found and found[key].shape != value.shape
        ],
    }
    lines = (
        f"{len(keys)} {kind}: {', '.join(keys[:5])}{', ...' * (len(keys) > 5)}"
        for kind, keys in misfits.items()
        if keys
    )
    return "; ".join(lines)
