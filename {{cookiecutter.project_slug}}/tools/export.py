"""Write a run's weights as one safetensors file: python tools/export.py RUN_DIR OUT.safetensors [--step N | --best]

They come from the newest whole checkpoint, of any strategy, with one tensor in memory at a time.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from hpc.checkpoint import on_disk
from hpc.config import errors
from hpc.config.errors import ConfigError
from hpc.run import attempt_log

if TYPE_CHECKING:
    pass

# The format's names for torch's dtypes, widest first. It has no others that weights come in.
DTYPES = {
    "float64": "F64", "int64": "I64", "float32": "F32", "int32": "I32", "bfloat16": "BF16", "float16": "F16",
    "int16": "I16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def main() -> None:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="a run directory, or a checkpoint")
    parser.add_argument("out", type=Path, metavar="OUT.safetensors")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step, not the newest")
    which.add_argument("--best", action="store_true", help="the best checkpoint, not the newest")
    parser.add_argument("--force", action="store_true", help="overwrite OUT.safetensors")
    words = parser.parse_args()
    if words.out.exists() and not words.force:
        raise ConfigError("OUT", words.out, "is there already", "another name, or --force")
    path = chosen(words.run, words.step, words.best)
    from hpc.checkpoint import weights  # torch from here on

    size = write(weights.saved_tensors(path), words.out, described(words.run, path))
    print(errors.printable(f"{words.out}: {size} bytes from {path}"))


def chosen(run: Path, step: int | None = None, best: bool = False) -> Path:
    """The checkpoint that is meant. A newest one that is damaged is reported, and the one before is taken.

    Raises:
        ConfigError: there is none, or the one that was asked for is damaged.
    """
    if not (run / "checkpoints").is_dir():
        if step is not None or best:
            rule = "is no run directory: --step and --best have nothing to choose from"
            raise ConfigError("RUN_DIR", run, rule, "a run directory, or a checkpoint alone")
        own = on_disk.read_manifest(run)
        return _whole(own) if own else run
    there = on_disk.list_checkpoints(
        run, [event for event in attempt_log.read_events(run) if event.get("event") == "start"]
    )
    if best:
        named = on_disk.read_manifest(
            run / "checkpoints" / "best.ckpt"
        )  # a folder, where links were followed in a copy
        there = [found for found in there if named and found.files == named.files and found.step == named.step]
    elif step is not None:
        steps = ", ".join(str(found.step) for found in there) or "none"
        there = [found for found in there if found.step == step]
        if not there:
            raise ConfigError("--step", step, f"is none of the checkpoints of {run}: {steps}", "--step <one of these>")
    for found in there:
        try:
            return _whole(found)
        except ConfigError as rejected:
            if step is not None or best:
                raise
            sys.stderr.write(f"warning: {found.path} is damaged and not used: {rejected.rule}\n")
    rule = f"has no {'best' if best else 'whole'} checkpoint"
    raise ConfigError("RUN_DIR", run, rule, "leave --best out" if best else "the directory of a run that saved one")


def _whole(found: on_disk.Checkpoint) -> Path:
    if flaw := on_disk.find_flaw(found):
        raise ConfigError("RUN_DIR", found.path, flaw, "another checkpoint: --step N")
    return found.path


def described(run: Path, path: Path) -> dict[str, str]:
    """What the file says about its origin; `format` is what other programs look for."""
    known = on_disk.read_manifest(path)
    step = {"step": str(known.step)} if known else {}
    return {"format": "pt", "run": run.resolve().name, "checkpoint": path.resolve().name, **step}


def write(tensors: Mapping[str, "SavedTensor"], out: Path, notes: Mapping[str, str]) -> int:
    """Write tensor after tensor, aside and then renamed; the number of bytes.

    The format knows no two names for one tensor: tied parameters are written under both, so that the file loads into
    any program, whichever name it asks for.

    Raises:
        ConfigError: a tensor cannot be read or has no place in the format, or the file cannot be written.
    """
    # The widest first: so each begins at a multiple of its elements' size.
    order = sorted(tensors, key=lambda name: (_rank(name, tensors[name]), name))
    header: dict[str, object] = {"__metadata__": dict(notes)}
    end = 0
    for name in order:
        saved, start = tensors[name], end
        end += prod(saved.shape) * saved.dtype.itemsize
        dtype = DTYPES[str(saved.dtype).removeprefix("torch.")]
        header[name] = {"dtype": dtype, "shape": list(saved.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    aside = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        with aside.open("xb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                stream.write(_bytes(tensors[name]))
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(out)
    except OSError as error:
        raise ConfigError("OUT", out, str(error.strerror or error), "a file in a directory with room for it") from None
    finally:
        aside.unlink(missing_ok=True)
    return 8 + len(text) + end


def _rank(name: str, saved: "SavedTensor") -> int:
    dtype = str(saved.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigError("RUN_DIR", saved.path, f"{name!a} is of type {dtype}", f"one of {', '.join(DTYPES)}")
    return list(DTYPES).index(dtype)


def _bytes(saved: "SavedTensor") -> memoryview:
    import torch

    tensor = saved.read()
    if (tensor.dtype, tensor.shape) != (saved.dtype, saved.shape):
        raise ConfigError("RUN_DIR", saved.path, "is damaged: a tensor is not as announced", "another checkpoint")
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


if __name__ == "__main__":
    with errors.exit_on_config_error():
        main()
