"""Export a run's weights to one file, which other programs read: choose the checkpoint, and the form by its name."""

import sys
from pathlib import Path
from typing import Any

from hpc.checkpoint import on_disk
from hpc.config.errors import ConfigError
from hpc.run import attempt_log
from hpc.system.files import complete_file

SUFFIXES = (".safetensors", ".pt", ".ckpt")
# Entries of a checkpoint that only resuming needs.
OF_THE_RUN = {"loops", "callbacks", "optimizer_states", "lr_schedulers", "position", "scheduled", "attempt"}
OF_THE_RUN |= {"ddp", "unused", "averaged", "averaged_since", "MixedPrecision", "state_dict"}


def export(run: Path, out: Path, *, step: int | None = None, best: bool = False) -> tuple[Path, int]:
    """Write the weights of a run as one file; return the checkpoint that they come from, and the bytes of the file.

    Args:
        out: its name decides: `.safetensors`, with one tensor in memory at a time; `.pt`, a state_dict; `.ckpt`, a
            checkpoint of weights as Lightning's own, for `load_from_checkpoint` and a plain Trainer.
        run: a run directory, or a checkpoint.
        step: the checkpoint of this step, not the newest.
        best: the best checkpoint, not the newest.

    Raises:
        ConfigError: there is no such checkpoint, it is damaged, or the file cannot be written.
    """
    if out.suffix not in SUFFIXES:
        rule = f"must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}, which says what is written"
        raise ConfigError("OUT", out, rule, f"{out}.ckpt for Lightning's load_from_checkpoint")
    path = choose_checkpoint(run, step=step, best=best)
    from hpc.checkpoint import safetensors_file, weights  # torch from here on

    if out.suffix == ".safetensors":
        return path, safetensors_file.write(weights.saved_tensors(path), out, notes=_origin(run, path))
    state = weights.read(path)
    return path, _write(_as_lightning(path, state) if out.suffix == ".ckpt" else state, out)


def _as_lightning(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Return what Lightning's `save_checkpoint(weights_only=True)` would write, with what the module's hooks added."""
    from importlib.metadata import version

    from hpc.checkpoint import load_hooks

    rest = load_hooks.read_rest(path)
    step = getattr(on_disk.read_manifest(path), "step", 0)
    defaults = {"epoch": 0, "global_step": step, "pytorch-lightning_version": version("lightning")}
    return defaults | {key: value for key, value in rest.items() if key not in OF_THE_RUN} | {"state_dict": state}


def _write(content: dict[str, Any], out: Path) -> int:
    import torch

    try:
        with complete_file(out) as temporary:
            torch.save(content, temporary)
        return out.stat().st_size
    except (OSError, RuntimeError) as error:  # torch raises the latter where it cannot create a file
        rule, given = "must be a file that can be written", f"{out} ({error})"
        raise ConfigError("OUT", given, rule, "a file in a directory with space for it") from None


def choose_checkpoint(run: Path, *, step: int | None = None, best: bool = False) -> Path:
    """Return the checkpoint to export. If the newest one is damaged, print a warning and take the one before.

    Raises:
        ConfigError: there is none, or the one that was requested is damaged.
    """
    if not (run / "checkpoints").is_dir():
        if step is not None or best:
            rule = "must be a run directory if --step or --best is given"
            raise ConfigError("RUN_DIR", run, rule, "a run directory, or a checkpoint without --step and --best")
        checkpoint = on_disk.read_manifest(run)
        return _checked(checkpoint) if checkpoint else run
    checkpoints = on_disk.list_checkpoints(run, attempt_log.read_starts(run))
    if best:
        link = on_disk.read_manifest(run / "checkpoints" / on_disk.BEST)  # a folder, if a copy has followed the link
        checkpoints = [
            checkpoint
            for checkpoint in checkpoints
            if link and (checkpoint.files, checkpoint.step) == (link.files, link.step)
        ]
    elif step is not None:
        steps = ", ".join(str(checkpoint.step) for checkpoint in checkpoints) or "none"
        checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint.step == step]
        if not checkpoints:
            rule = f"must be the step of a checkpoint of {run}, which has these: {steps}"
            raise ConfigError("--step", step, rule, "--step <one of these>")
    for checkpoint in checkpoints:
        try:
            return _checked(checkpoint)
        except ConfigError as error:
            if step is not None or best:
                raise
            sys.stderr.write(f"warning: {checkpoint.path} is damaged and not used: {error.rule.partition(': ')[2]}\n")
    rule = f"must hold a {'best' if best else 'whole'} checkpoint, but it has none"
    raise ConfigError("RUN_DIR", run, rule, "leave out --best" if best else "the directory of a run that saved one")


def _checked(checkpoint: on_disk.Checkpoint) -> Path:
    if flaw := on_disk.find_flaw(checkpoint):
        rule = f"cannot be exported, as it is damaged: {flaw}"
        raise ConfigError("RUN_DIR", checkpoint.path, rule, "another checkpoint: --step N")
    return checkpoint.path


def _origin(run: Path, path: Path) -> dict[str, str]:
    """Return the notes for the file about its origin; other programs look for `format`."""
    checkpoint = on_disk.read_manifest(path)
    step = {"step": str(checkpoint.step)} if checkpoint else {}
    return {"format": "pt", "run": run.resolve().name, "checkpoint": path.resolve().name, **step}
