"""Let parameters that FSDP2 shards be changed and read as whole ones are, or raise where that is not possible.

Between two steps each rank holds its shard of a parameter, a DTensor. For a step FSDP gathers a whole copy, puts it in
the shard's place, and later frees it, together with what was changed in it. torch has no public way to notice that:
all private attributes of FSDP2 that the project uses are in this file and gathering.py, those of DTensor in
sharded_tensors.py.
"""

import sys
import zlib
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from hpc.config.errors import ConfigError
from hpc.privates.torch import num_storage_references
from hpc.strategies.sharded_tensors import DATA, shard_like


class WholeParameter(nn.Parameter):
    """A gathered parameter. Its `_version` does not count changes through `data`, so it notes that `data` was used."""

    is_data_used = False

    @property
    def data(self) -> Tensor:
        self.is_data_used = True
        return DATA.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        self.is_data_used = True
        DATA.__set__(self, value)


class WatchedParameter:
    """A parameter that FSDP shards, and what its whole copy was like when it was gathered.

    Args:
        group: the parameters that FSDP gathers together.
        parameter: FSDP's record of this one.
    """

    def __init__(self, group: Any, parameter: Any) -> None:
        self.group, self.parameter = group, parameter
        self._version, self._requires_grad, self._num_references = 0, True, 0
        self._replacement: Any = None
        self._reset, parameter.reset_sharded_param = parameter.reset_sharded_param, self.adopt
        self._free, parameter.free_unsharded_param = parameter.free_unsharded_param, self.free_unless_referenced

    def check_shard(self) -> None:
        """Take up a shard that was put in place of FSDP's own since the last step, by any kind of assignment."""
        shard, own_data = self._registered, self.parameter._sharded_param_data
        if shard is not self.parameter.sharded_param or (
            shard._local_tensor.numel() and shard._local_tensor.data_ptr() != own_data.data_ptr()
        ):
            self.adopt()
        if shard._backward_hooks:
            rule = (
                "With strategy=fsdp, a parameter must have no hook for its gradient (register_hook): it is not called"
            )
            fix = "register_post_accumulate_grad_hook, which gets the shard of all ranks' gradient; or strategy=ddp, "
            fix += "where a hook gets the gradient of its rank's own samples"
            raise ConfigError("model", self.name, rule, fix)

    def adopt(self) -> None:
        """Let FSDP use the parameter that the module has now; a whole one is sharded."""
        value = self._registered
        if not isinstance(value, DTensor):
            if getattr(value, "shape", None) != self.parameter.sharded_param.shape:
                self._reject_shape(value)
            value = nn.Parameter(shard_like(self.parameter.sharded_param, value), requires_grad=value.requires_grad)
            self.parameter._setattr_on_modules(value)
        self._reset()

    def note_gathered(self) -> None:
        """Record the whole copy that FSDP has just gathered."""
        whole = self.parameter._unsharded_param
        if type(whole) is nn.Parameter:
            whole.__class__ = WholeParameter
        whole.is_data_used = False  # type: ignore[attr-defined]
        self._requires_grad = whole.requires_grad
        self._version = 0 if whole.is_inference() else whole._version
        self._num_references = self._num_references or self._count_references()

    def keep_changes(self) -> None:
        """Write into the shard what was changed in the whole copy, which FSDP is about to free."""
        whole = self.parameter._unsharded_param
        self._replacement = None if self._registered is whole else self._registered
        if whole.requires_grad != self._requires_grad:
            self.parameter.sharded_param.requires_grad_(whole.requires_grad)
        if whole.is_data_used or (not whole.is_inference() and whole._version != self._version):
            with torch.no_grad():
                self._write_shard(whole)

    def keep_replacement(self) -> None:
        """Adopt the parameter that the module was given in place of the whole copy, now that shards are back."""
        if self._replacement is not None:
            self.parameter._setattr_on_modules(self._replacement)
            self.adopt()

    def free_unless_referenced(self) -> None:
        """Free the whole copy, but not under an array or tensor that the researcher has kept of it.

        A copy that was gathered for a forward is freed all the same, as the graph refers to it.
        """
        storage = self._buffer.untyped_storage()
        is_forward = self.group._training_state is TrainingState.FORWARD and torch.is_grad_enabled()
        is_referenced = self._count_references() > self._num_references
        is_referenced |= sys.getrefcount(self.parameter._unsharded_param) > 2  # its attribute there, and the argument
        if storage.resizable() and (is_forward or not is_referenced):  # an array of numpy makes it not resizable
            self._free()

    @property
    def is_reduced(self) -> bool:
        """Whether FSDP is about to average its gradient, or zeros, as the module may ask of it."""
        whole = getattr(self.parameter, "_unsharded_param", None)
        if whole is not None and getattr(self.group, "reduce_scatter_unused_params", False):
            return whole.requires_grad
        return self.parameter.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)

    @property
    def name(self) -> str:
        return self.parameter._param_fqn or self.parameter._module_info.param_name

    @property
    def _registered(self) -> Any:
        info = self.parameter._module_info
        return getattr(info.module, info.param_name)

    @property
    def _buffer(self) -> Tensor:
        return self.parameter.all_gather_outputs[0]

    def _count_references(self) -> int:
        return num_storage_references(self._buffer.untyped_storage())

    def _write_shard(self, whole: Tensor) -> None:
        """Copy this rank's part of a whole copy into the shard."""
        parameter, mesh = self.parameter, self.parameter.mesh_info
        local = whole._local_tensor if isinstance(whole, DTensor) else whole
        if local.data_ptr() != self._buffer.data_ptr():  # another tensor was assigned to `data`
            if local.shape != parameter._orig_size:
                self._reject_shape(local)
            gathered = self._buffer.as_strided(parameter._orig_size, parameter._contiguous_orig_stride)
            gathered.copy_(local)
            if isinstance(whole, DTensor):
                whole._local_tensor = gathered
            else:
                DATA.__set__(whole, gathered)
        part = self._buffer.view(mesh.shard_mesh_size, -1)[mesh.shard_mesh_rank]
        if parameter.param_dtype is None and parameter.fsdp_placement.dim == 0:
            parameter._sharded_param_data.copy_(part)
            event = self.group.device_handle.Event()
            event.record()
            self.group._wait_all_gather_streams_on_event(event)  # else it may be gathered again before the copy is done
        elif not torch.equal(part, parameter._sharded_param_data.to(part.dtype)):
            rule = "With strategy=fsdp and mixed precision, a parameter must not be changed within a step, which has a "
            rule += f"copy of it in {part.dtype}"
            fix = "the same lines in on_train_batch_end, or trainer.precision=32-true"
            raise ConfigError("model", self.name, rule, fix)

    def _reject_shape(self, value: Any) -> None:
        shape, given = tuple(self.parameter._orig_size), tuple(getattr(value, "shape", ())) or type(value).__name__
        rule = f"Once it is sharded, a parameter must keep its shape {shape}; it was replaced by {given}"
        raise ConfigError("model", self.name, rule, "the final shape in __init__, setup or configure_model")


class Gathers:
    """The order in which this rank has gathered and reduced groups of parameters, as all ranks must do.

    Attributes:
        checksum: of all that was noted.
    """

    checksum = 0

    def note(self, *what: object) -> None:
        self.checksum = zlib.crc32(repr(what).encode(), self.checksum)


def watch(module: nn.Module) -> Gathers:
    """Keep what is changed in the parameters of a sharded module."""
    gathers, numbers = Gathers(), count()
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state = part._get_fsdp_state()
            for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:  # torch 2.10 has one
                if group is not None:
                    _watch_group(group, partial(gathers.note, next(numbers)))
    return gathers


def _watch_group(group: Any, note: Callable[..., None]) -> None:
    watched = [WatchedParameter(group, parameter) for parameter in group.fsdp_params]
    unshard, to_unsharded, to_sharded = group.unshard, group._to_unsharded, group._to_sharded
    post_backward = group.post_backward

    def check_and_unshard(*args: Any, **kwargs: Any) -> None:
        for parameter in watched if group.is_sharded else ():
            parameter.check_shard()
        if group.is_sharded and group._all_gather_result is None:
            note("gathered")
        unshard(*args, **kwargs)

    def to_unsharded_and_note() -> None:
        if group.is_unsharded:
            return
        to_unsharded()
        for parameter in watched:
            parameter.note_gathered()

    def keep_and_to_sharded() -> None:
        if group.is_sharded:
            return
        for parameter in watched:
            parameter.keep_changes()
        to_sharded()
        for parameter in watched:
            parameter.keep_replacement()

    def note_and_reduce(*args: Any) -> None:
        trained = [number for number, one in enumerate(watched) if one.is_reduced] if group.reduce_grads else []
        if trained:
            note("reduced", trained)
        post_backward(*args)

    group.unshard, group.post_backward = check_and_unshard, note_and_reduce
    group._to_unsharded, group._to_sharded = to_unsharded_and_note, keep_and_to_sharded
