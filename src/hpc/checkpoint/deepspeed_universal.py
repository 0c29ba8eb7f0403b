"""A DeepSpeed checkpoint resumed on another number of ranks, through DeepSpeed's universal checkpoint.

DeepSpeed rejects optimizer states that another number of ranks saved. Its converter takes them apart by parameter, and
an engine of any size loads the parts that it needs. What the engine forgets on this way is restored here.
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
CONVERTED = {"exp_avg", "exp_avg_sq"}  # the states of a parameter that the converter knows, beside the count of steps


def optimizer_state_names(engine: Any) -> list[str]:
    """Return the names of the states that the engine's optimizer keeps for parameters."""
    optimizer = getattr(engine.optimizer, "optimizer", None)  # there is none in a test
    return sorted({name for state in optimizer.state.values() for name in state}) if optimizer else []


def reject_unconvertible_states(
    names: Sequence[str] | None, devices: int, *, num_ranks_saved: int, num_ranks: int, checkpoint: Path
) -> None:
    """Raise `ConfigError` for states that DeepSpeed would not move to another number of ranks.

    Args:
        names: the result of `optimizer_state_names` when the checkpoint was saved; None: it was not noted.
        devices: of a node, as they are typed now.
        num_ranks_saved: number of ranks that saved the checkpoint.
        num_ranks: number of ranks now.
    """
    if names is None or set(names) - {"step"} == CONVERTED:
        return
    adam, kept = ", ".join(sorted(CONVERTED)), ", ".join(names) or "no state"
    rule = f"must keep the number of ranks at {num_ranks_saved}, not {num_ranks}: DeepSpeed moves only the "
    rule += f"states of Adam ({adam}) to another number, and this optimizer keeps {kept}"
    fix = f"{num_ranks_saved} ranks, or a new run from its weights: ckpt={checkpoint}"
    raise ConfigError("trainer.devices", devices, rule, fix)


def load_universal(engine: Any, checkpoint: Path) -> dict[str, Any]:
    """Restore weights, buffers and the states of the optimizer and its loss scaler; all ranks call it together.

    Args:
        engine: the DeepSpeedEngine, of the ZeRO stage that saved the checkpoint.
        checkpoint: folder of DeepSpeedStrategy. Rank 0 needs space beside it for the weights and the optimizer states
            once more, until all ranks have read them.

    Returns:
        All else that the strategy saved: `client_state` of `engine.load_checkpoint`.

    Raises:
        ConfigError: a file names more than data.
    """
    with (
        safe_unpickle.convert_unpickling_errors(checkpoint),
        safe_unpickle.allow_deepspeed_classes(),
        _universal_checkpoint(checkpoint) as folder,
    ):
        engine._config.load_universal_checkpoint = True
        try:
            _, client_state = engine.load_checkpoint(folder, tag=TAG, load_lr_scheduler_states=False)
        finally:
            engine._config.load_universal_checkpoint = False
        _restore_groups(engine.optimizer.optimizer, folder)
    _restore_buffers_and_frozen(engine.module, checkpoint)
    return client_state


@contextmanager
def _universal_checkpoint(checkpoint: Path) -> Iterator[Path]:
    """Give the folder of the converted checkpoint until all ranks have read it; they call it together."""
    is_first = dist.get_rank() == 0
    folder = [_make_folder(checkpoint.resolve()) if is_first else None]
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


def _make_folder(checkpoint: Path) -> Path:
    """Make a folder beside the checkpoint; if this process is killed, the next one to save or convert removes it."""
    prefix = f"{checkpoint.name}.universal-"
    for leftover in checkpoint.parent.glob(f"{prefix}*{PART}"):
        shutil.rmtree(leftover, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=prefix, suffix=PART, dir=checkpoint.parent))


def convert(checkpoint: Path, folder: Path) -> None:
    """Write the universal checkpoint into an empty folder; one process calls it."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.checkpoint import ds_to_universal

    options = Namespace(input_folder=str(checkpoint / TAG), output_folder=str(folder / TAG))
    # More workers would be forks of a process that has threads and a GPU. The missing state is that of other kinds of
    # parallelism.
    vars(options).update(num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False)
    vars(options).update(inject_missing_state=True, strict=True)
    with open(os.devnull, "w") as null, redirect_stdout(null), redirect_stderr(null):
        ds_to_universal.main(options)


def _restore_groups(optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Give each group its own hyperparameters and count of steps: stage 3 gives all groups those of the first."""
    saved = torch.load(folder / TAG / "zero" / "optimizer_state.pt", map_location="cpu", weights_only=True)
    for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in saved_group.items() if key != "params"})
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):  # one tensor for all parameters, which each would count up
            state["step"] = state["step"].clone()


@torch.no_grad()
def load_weights(engine: Any, checkpoint: Path) -> None:
    """Load only the weights, from a checkpoint of any other strategy or stage. Raises `ConfigError`."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_set_full_fp32_param

    weights.reject_other_model(engine.module, checkpoint)
    own = dict([*engine.module.named_buffers(), *engine.module.named_parameters()])
    for name, saved in weights.saved_tensors(checkpoint).items():
        if name not in own:
            continue  # the second name of a tied parameter
        value = saved.read()
        with GatheredParameters([own[name]], modifier_rank=0):
            own[name].copy_(value)
        if own[name].requires_grad:  # the optimizer's fp32 copy
            safe_set_full_fp32_param(own[name], value.float())


@torch.no_grad()
def _restore_buffers_and_frozen(module: nn.Module, checkpoint: Path) -> None:
    """Restore buffers and frozen parameters, which the engine leaves out."""
    from deepspeed.runtime.zero import GatheredParameters

    saved = weights.saved_tensors(checkpoint)
    for name, value in [*module.named_buffers(), *module.named_parameters()]:
        if value.requires_grad or name not in saved:
            continue
        with GatheredParameters([value], modifier_rank=0):
            value.copy_(saved[name].read())
