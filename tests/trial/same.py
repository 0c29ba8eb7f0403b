"""Whether two runs are the same, bit for bit: curves, tables, the last checkpoint with all its files, and file names.

It is the only comparison of runs. What may differ between equal runs is in `OWN` and `UNLIKE_FILES`, with its reason.
"""

import json
import re
from pathlib import Path
from typing import Any

from trial.curves import curves_differ

# In meta.pt times and the number of the attempt differ between equal runs. So do Lightning's batch counts of
# interrupted validations, which it does not use, and the planned length of training when it was saved. DeepSpeed never
# sets the padding at the end of a ZeRO-3 partition: its weights are compared as `weights.read` gives them, without it.
OWN = re.compile(
    r"^meta\.pt .*(attempt|'Timer|time_elapsed|seconds|val_loop\.batch_progress|'Hyperparameters.*length"
    r"|\['position'\]\['ends'\])"
    r"|\['fp32_flat_groups'\]"
)
# Logs, claims, attempts and samples of nodes, of which a run that goes on elsewhere has others; earlier forms of the
# config; the words typed last; bytecode, which whoever imports a copy of the code first may write.
UNLIKE_FILES = re.compile(
    r"\.log$|^claims/|^attempts\.jsonl$|^config-\d+\.yaml$|^overrides\.json$|^monitor/|^logs/|^errors/"
    r"|^tensorboard/node-|/__pycache__/"
)


def differences(
    reference: Path,
    run_dir: Path,
    *,
    moved: bool = False,
    tolerance: float = 0.0,
    others: re.Pattern[str] | None = None,
) -> list[str]:
    """Return one line per difference.

    Args:
        moved: the run went on with other ranks or another strategy: what depends on the layout is not compared.
        tolerance: of the values of a run that has moved.
        others: names of files that a trial itself, or another job, has put into the run directory.
    """
    return [
        *curves_differ(reference, run_dir, tolerance, moved),
        *_checkpoint(reference, run_dir, tolerance, moved),
        *_files(reference, run_dir, others),
    ]


def state(run_dir: Path, *, tensors_only: bool = False) -> dict[str, Any]:
    """Return every leaf of the last checkpoint by its path: weights, optimizers, callbacks, loops, state of ranks."""
    from torch.utils._pytree import keystr, tree_flatten_with_path

    from hpc.checkpoint import safe_unpickle, weights

    last = run_dir / "checkpoints" / "last.ckpt"
    leaves: dict[str, Any] = {}
    before, weights.PREFIX = weights.PREFIX, ""
    try:
        leaves |= weights.read(last)
    finally:
        weights.PREFIX = before
    for file in sorted(last.rglob("*.pt")) if not tensors_only else []:
        found, _ = tree_flatten_with_path(_opened(safe_unpickle.load_plain(file)))
        leaves |= {f"{file.relative_to(last)} {keystr(path)}": leaf for path, leaf in found}
    own = str(run_dir)  # where it lies is no part of a run; callbacks of Lightning have paths as keys, too
    return {
        key.replace(own, ""): leaf.replace(own, "") if isinstance(leaf, str) else leaf
        for key, leaf in leaves.items()
        if not OWN.search(key)
    }


def _opened(node: Any) -> Any:
    """Convert DeepSpeed's objects to dicts of their attributes."""
    if isinstance(node, dict):
        return {key: _opened(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_opened(value) for value in node]
    return _opened(vars(node)) if type(node).__name__ == "_InertObject" else node


def _checkpoint(reference: Path, run_dir: Path, tolerance: float, moved: bool) -> list[str]:
    wanted, found = state(reference, tensors_only=moved), state(run_dir, tensors_only=moved)
    if not wanted:
        return [f"{reference} has no weights"]
    lines = [f"last.ckpt: {key} is in one of them only" for key in sorted(wanted.keys() ^ found.keys())]
    lines += [
        line for key in wanted.keys() & found.keys() if (line := _leaf_differs(key, wanted[key], found[key], tolerance))
    ]
    return lines if moved else lines + _other_bytes(reference, run_dir)


def _leaf_differs(key: str, wanted: Any, found: Any, tolerance: float) -> str:
    """Return how a leaf differs, or "". NaN equals itself."""
    import torch

    if not isinstance(wanted, torch.Tensor) or not isinstance(found, torch.Tensor):
        alike = _step_of(repr(wanted)) == _step_of(repr(found))
        return "" if alike else f"last.ckpt: {key} is {str(found)[:80]} instead of {str(wanted)[:80]}"
    kinds = [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (found, wanted)]
    if kinds[0] != kinds[1]:
        return f"last.ckpt: {key} is {kinds[0]} instead of {kinds[1]}"
    if torch.equal(wanted, found) or torch.allclose(wanted, found, rtol=0, atol=tolerance, equal_nan=True):
        return ""
    return f"last.ckpt: {key} differs by {float((wanted.double() - found.double()).abs().max())}"


def _other_bytes(reference: Path, run_dir: Path) -> list[str]:
    """Compare the checksums of files in the last checkpoint.

    Not those of pickles, which are compared by content: their bytes differ if equal strings are distinct objects; and
    not .metadata, which holds the order in which ranks answered.
    """
    wanted, found = (
        json.loads((path / "checkpoints" / "last.ckpt" / "manifest.json").read_text())["files"]
        for path in (reference, run_dir)
    )
    names = {name for name in wanted | found if name != ".metadata" and not name.endswith(".pt")}
    return [f"last.ckpt: {name} has other bytes" for name in sorted(names) if wanted.get(name) != found.get(name)]


def _files(reference: Path, run_dir: Path, others: re.Pattern[str] | None) -> list[str]:
    wanted, found = _names(reference, others), _names(run_dir, others)
    lines = [f"the file {name} is in one run directory only" for name in sorted(wanted ^ found)]
    if "outcome finished" not in (run_dir / "verdict").read_text():
        lines.append("the verdict is not: finished")
    for link in ("last.ckpt", "best.ckpt"):
        a, b = (path / "checkpoints" / link for path in (run_dir, reference))
        if a.is_symlink() and (not a.exists() or _step_of(str(a.readlink())) != _step_of(str(b.readlink()))):
            lines.append(f"{link} leads to {a.readlink()} instead of {b.readlink()}")
    return lines


def _step_of(text: str) -> str:
    """Return names of checkpoints in a text without the attempts that have written them."""
    return re.sub(r"(step-\d{9})(-\d{3})+", r"\1", text)


def _names(run_dir: Path, others: re.Pattern[str] | None) -> set[str]:
    """Return the names of files, except those that may differ: earlier checkpoints, names with processes or times."""
    names = {str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if not path.is_dir() or path.is_symlink()}
    last = (run_dir / "checkpoints" / "last.ckpt").resolve().name
    kept = {name for name in names if not UNLIKE_FILES.search(name) and not (others and others.search(name))}
    kept = {name for name in kept if not name.startswith("checkpoints/step-") or f"/{last}/" in name}
    # The number of ranks, and of tensor files per rank, depends on the layout.
    return {
        re.sub(r"tfevents\..*", "tfevents", _step_of(name))
        for name in kept
        if not re.search(r"\.distcp$|rank-\d+\.pt$", name)
    }
