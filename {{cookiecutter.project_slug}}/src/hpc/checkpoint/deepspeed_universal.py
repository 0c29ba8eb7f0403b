"""A DeepSpeed checkpoint continued on another number of ranks, through DeepSpeed's universal checkpoint.

DeepSpeed rejects to load optimizer states that another number of ranks saved. Its converter takes them apart by
parameter, and an engine of any size loads what it needs of that. What the engine forgets on this way is made up for.
"""

import os
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc.checkpoint import safe_unpickle, weights
from hpc.checkpoint.on_disk import PART
from hpc.config.errors import ConfigError

TAG = "checkpoint"  # the folder that Lightning has DeepSpeed write into
CONVERTED = {"exp_avg", "exp_avg_sq"}  # the states of a parameter that its converter knows, beside the count of steps


def states(engine: Any) -> list[str]:
    """Return the names of what the engine's optimizer keeps for parameters."""
    optimizer = getattr(engine.optimizer, "optimizer", None)  # there is none in a test
    return sorted({name for kept in optimizer.state.values() for name in kept}) if optimizer else []


def reject_other_states(names: Sequence[str] | None, devices: int, ranks: tuple[int, int], checkpoint: Path) -> None:
    """Raise `ConfigError` for states that would not arrive at another number of ranks.

    Args:
        names: what `states` returned when the checkpoint was saved; None: it was not noted.
        devices: of a node, as they are typed now.
        ranks: how many there were, and are now.
    """
    if names is None or set(names) - {"step"} == CONVERTED:
        return
    were, are = ranks
    rule = f"DeepSpeed moves only the states of Adam ({', '.join(sorted(CONVERTED))}) to another number of ranks, so "
    rule += f"there must be {were} as before, not {are}: this optimizer keeps {', '.join(names) or 'none'}"
    raise ConfigError(
        "trainer.devices", devices, rule, f"{were} ranks, or a new run from its weights: ckpt={checkpoint}"
    )


def load(engine: Any, checkpoint: Path) -> dict[str, Any]:
    """Restore weights, buffers and the states of the optimizer and its loss scaler; all ranks call it together.

    Args:
        engine: the DeepSpeedEngine, of the ZeRO stage that saved the checkpoint.
        checkpoint: folder of DeepSpeedStrategy. Rank 0 needs space beside it for the weights and the optimizer states
            once more, until all ranks have read them.

    Returns:
        What the strategy saved besides: `client_state` of `engine.load_checkpoint`.

    Raises:
        ConfigError: a file names more than data.
    """
    with safe_unpickle.rejections(checkpoint), safe_unpickle.allowing_deepspeed(), _converted(checkpoint) as folder:
        engine._config.load_universal_checkpoint = True
        try:
            _, client_state = engine.load_checkpoint(folder, tag=TAG, load_lr_scheduler_states=False)
        finally:
            engine._config.load_universal_checkpoint = False
        _groups(engine.optimizer.optimizer, folder)
    _untrained(engine.module, checkpoint)
    return client_state


@contextmanager
def _converted(checkpoint: Path) -> Iterator[Path]:
    """The universal checkpoint, until all ranks have read it; they call it together."""
    is_first = dist.get_rank() == 0
    folder = [_new_folder(checkpoint.resolve()) if is_first else None]
    try:
        if folder[0]:
            convert(checkpoint, folder[0])
        dist.broadcast_object_list(folder)
        assert folder[0]
        yield folder[0]
        dist.barrier()
    finally:
        if is_first and folder[0]:
            shutil.rmtree(folder[0], ignore_errors=True)


def _new_folder(checkpoint: Path) -> Path:
    """Beside the checkpoint: where this process is killed, the next one that saves or converts removes it by name."""
    prefix = f"{checkpoint.name}.universal-"
    for left in checkpoint.parent.glob(f"{prefix}*{PART}"):
        shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=prefix, suffix=PART, dir=checkpoint.parent))


def convert(checkpoint: Path, folder: Path) -> None:
    """Write the universal checkpoint into an empty folder; call it from one process."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.checkpoint import ds_to_universal

    options = Namespace(input_folder=str(checkpoint / TAG), output_folder=str(folder / TAG))
    # More workers would be forks of a process that has threads and a GPU. The missing state is that of other kinds of
    # parallelism.
    vars(options).update(num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False)
    vars(options).update(inject_missing_state=True, strict=True)
    with open(os.devnull, "w") as silence, redirect_stdout(silence), redirect_stderr(silence):
        ds_to_universal.main(options)


def _groups(optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Give each group its own hyperparameters and count of steps: stage 3 gives all those of the first."""
    saved = torch.load(folder / TAG / "zero" / "optimizer_state.pt", map_location="cpu")
    for group, own in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in own.items() if key != "params"})
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):  # one tensor for all, which each would count up
            state["step"] = state["step"].clone()


@torch.no_grad()
def fill(engine: Any, checkpoint: Path) -> None:
    """Only the weights, from a checkpoint of any other strategy or stage. Raises `ConfigError`."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_set_full_fp32_param

    weights.reject_other_model(engine.module, checkpoint)
    own = dict([*engine.module.named_buffers(), *engine.module.named_parameters()])
    for name, saved in weights.tensors(checkpoint).items():
        if name not in own:
            continue  # the second name of a tied parameter
        value = saved.read()
        with GatheredParameters([own[name]], modifier_rank=0):
            own[name].copy_(value)
        if own[name].requires_grad:  # what the optimizer holds besides
            safe_set_full_fp32_param(own[name], value.float())


@torch.no_grad()
def _untrained(module: nn.Module, checkpoint: Path) -> None:
    """Restore buffers and frozen parameters, of which the engine takes no notice."""
    from deepspeed.runtime.zero import GatheredParameters

    found = weights.tensors(checkpoint)
    for name, value in [*module.named_buffers(), *module.named_parameters()]:
        if value.requires_grad or name not in found:
            continue
        with GatheredParameters([value], modifier_rank=0):
            value.copy_(found[name].read())
