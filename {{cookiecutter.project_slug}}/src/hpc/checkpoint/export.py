"""Export a run's weights to one file: the checkpoint that is meant, and what the file says about its origin."""

import sys
from pathlib import Path

from hpc.checkpoint import on_disk
from hpc.config.errors import ConfigError
from hpc.run import directory


def export(run: Path, out: Path, *, step: int | None = None, best: bool = False) -> tuple[Path, int]:
    """Write the weights of a run as a safetensors file; return the checkpoint that they come from, and their bytes.

    Args:
        run: a run directory, or a checkpoint.
        step: the checkpoint of this step, not the newest.
        best: the best checkpoint, not the newest.

    Raises:
        ConfigError: there is no such checkpoint, it is damaged, or the file cannot be written.
    """
    path = choose(run, step=step, best=best)
    from hpc.checkpoint import safetensors_file, weights  # torch from here on

    return path, safetensors_file.write(weights.tensors(path), out, notes=_origin(run, path))


def choose(run: Path, *, step: int | None = None, best: bool = False) -> Path:
    """Return the checkpoint that is meant. A newest one that is damaged is reported, and the one before is taken.

    Raises:
        ConfigError: there is none, or the one that was asked for is damaged.
    """
    if not (run / "checkpoints").is_dir():
        if step is not None or best:
            rule = "is no run directory: --step and --best have nothing to choose from"
            raise ConfigError("RUN_DIR", run, rule, "a run directory, or a checkpoint alone")
        own = on_disk.read(run)
        return _whole(own) if own else run
    there = on_disk.known(run, [event for event in directory.events(run) if event.get("event") == "start"])
    if best:
        named = on_disk.read(run / "checkpoints" / "best.ckpt")  # a folder, where links were followed in a copy
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
    if flaw := on_disk.flaw(found):
        raise ConfigError("RUN_DIR", found.path, flaw, "another checkpoint: --step N")
    return found.path


def _origin(run: Path, path: Path) -> dict[str, str]:
    """Return what the file says about its origin; `format` is what other programs look for."""
    known = on_disk.read(path)
    step = {"step": str(known.step)} if known else {}
    return {"format": "pt", "run": run.resolve().name, "checkpoint": path.resolve().name, **step}
