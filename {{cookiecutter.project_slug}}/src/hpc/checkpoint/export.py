"""Export a run's weights to one file: choose the checkpoint, and note its origin in the file."""

import sys
from pathlib import Path

from hpc.checkpoint import on_disk
from hpc.config.errors import ConfigError
from hpc.run import attempt_log


def export(run: Path, out: Path, *, step: int | None = None, best: bool = False) -> tuple[Path, int]:
    """Write the weights of a run as a safetensors file; return the checkpoint that they come from, and their bytes.

    Args:
        run: a run directory, or a checkpoint.
        step: the checkpoint of this step, not the newest.
        best: the best checkpoint, not the newest.

    Raises:
        ConfigError: there is no such checkpoint, it is damaged, or the file cannot be written.
    """
    path = choose_checkpoint(run, step=step, best=best)
    from hpc.checkpoint import safetensors_file, weights  # torch from here on

    return path, safetensors_file.write(weights.saved_tensors(path), out, notes=_origin(run, path))


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
