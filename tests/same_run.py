"""Print the differences of two runs that should be equal: python same_run.py PROJECT REFERENCE RUN

It compares weights, the optimizer state and random numbers of the last checkpoint, and all scalars except those of time
and hardware. The exit code is 1 if anything differs.
"""

import json
import sys
from pathlib import Path
from typing import Any


def scalars(run_dir: Path, purge: bool) -> dict[str, list[tuple[int, float]]]:
    """Return (step, value) by tag, as written or, if purged, as TensorBoard shows it after a restart."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), {"scalars": 0}, purge_orphaned_data=purge)
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.startswith(("perf/", "node/", "DeviceStatsMonitor"))]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def differences(reference: Path, run_dir: Path) -> list[str]:
    """Return one line per difference."""
    import torch

    from hpc.checkpoint import weights

    found = []
    for purge in (False, True):
        wanted, curves = scalars(reference, purge), scalars(run_dir, purge)
        for tag in sorted(wanted | curves):
            here, there = curves.get(tag, []), wanted.get(tag, [])
            if here != there:
                pairs = [(a, b) for a, b in zip(there, here, strict=False) if a != b]
                found.append(f"{tag}: {len(here)} points instead of {len(there)}, first {pairs[:1]}")
            if tag != "epoch" and len({step for step, _ in here}) != len(here):  # Lightning logs it with every metric
                found.append(f"{tag}: {len(here)} points of {len({step for step, _ in here})} steps")
    wanted, read = (weights.read(path / "checkpoints" / "last.ckpt") for path in (reference, run_dir))
    if not wanted or wanted.keys() != read.keys():
        found.append(f"weights: {sorted(wanted.keys() ^ read.keys())}")
    found += [f"{key}: other weights" for key in wanted.keys() & read.keys() if not torch.equal(wanted[key], read[key])]
    wanted, sums = (
        json.loads((path / "checkpoints" / "last.ckpt" / "manifest.json").read_text())["files"]
        for path in (reference, run_dir)
    )
    # meta.pt holds the number of the attempt, .metadata the order in which ranks answered.
    names = {name for name in wanted | sums if name not in ("meta.pt", ".metadata")}
    unlike = [name for name in sorted(names) if wanted.get(name) != sums.get(name)]
    return found + [line for name in unlike for line in contents_differ(reference, run_dir, name)]


def contents_differ(reference: Path, run_dir: Path, name: str) -> list[str]:
    """Return the differences in a file of the last checkpoint.

    Files of ranks are compared by content: the bytes of equal pickles differ if equal strings are distinct objects.
    """
    files = [path / "checkpoints" / "last.ckpt" / name for path in (reference, run_dir)]
    if not name.startswith("rank-") or not all(file.exists() for file in files):
        return [f"{name}: other bytes"]
    wanted, found = map(leaves, files)
    return [
        f"{name} {path}: other content"
        for path in sorted(wanted.keys() | found.keys())
        if not alike(path, wanted, found)
    ]


def leaves(file: Path) -> dict[str, Any]:
    import torch
    from torch.utils._pytree import keystr, tree_flatten_with_path

    return {keystr(path): leaf for path, leaf in tree_flatten_with_path(torch.load(file, weights_only=True))[0]}


def alike(path: str, wanted: dict[str, Any], found: dict[str, Any]) -> bool:
    import torch

    if path not in wanted or path not in found:
        return False
    here, there = wanted[path], found[path]
    if not isinstance(here, torch.Tensor) or not isinstance(there, torch.Tensor):
        return repr(here) == repr(there)  # NaN equals itself
    return here.dtype == there.dtype and torch.equal(here, there)


if __name__ == "__main__":
    project, *runs = map(Path, sys.argv[1:])
    sys.path.insert(0, str(project / "src"))
    lines = differences(*runs)
    print("\n".join(lines))
    sys.exit(bool(lines))
