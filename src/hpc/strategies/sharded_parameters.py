"""Let parameters that FSDP2 shards be changed and read as whole ones are, or raise where that is not possible.

Between two steps each rank holds its shard of a parameter, a DTensor. For a step FSDP gathers a whole copy, puts it in
the shard's place, and later frees it, together with what was changed in it.
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
from torch.distributed.tensor import DTensor

from hpc.config.errors import ConfigError
from hpc.privates import torch_sharding as privates
from hpc.privates.torch import has_tensor_hook, num_changes, num_storage_references
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
        shard, own_data = self._registered, privates.shard_data(self.parameter)
        local = privates.local_shard(shard)
        if shard is not self.parameter.sharded_param or (local.numel() and local.data_ptr() != own_data.data_ptr()):
            self.adopt()
        if has_tensor_hook(shard):
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
            privates.register_parameter(self.parameter, value)
        self._reset()

    def note_gathered(self) -> None:
        """Record the whole copy that FSDP has just gathered."""
        whole = privates.whole_parameter(self.parameter)
        if type(whole) is nn.Parameter:
            whole.__class__ = WholeParameter
        whole.is_data_used = False  # type: ignore[attr-defined]
        self._requires_grad = whole.requires_grad
        self._version = num_changes(whole)
        self._num_references = self._num_references or self._count_references()

    def keep_changes(self) -> None:
        """Write into the shard what was changed in the whole copy, which FSDP is about to free."""
        whole = privates.whole_parameter(self.parameter)
        self._replacement = None if self._registered is whole else self._registered
        if whole.requires_grad != self._requires_grad:
            self.parameter.sharded_param.requires_grad_(whole.requires_grad)
        if whole.is_data_used or num_changes(whole) != self._version:
            with torch.no_grad():
                self._write_shard(whole)

    def keep_replacement(self) -> None:
        """Adopt the parameter that the module was given in place of the whole copy, now that shards are back."""
        if self._replacement is not None:
            privates.register_parameter(self.parameter, self._replacement)
            self.adopt()

    def free_unless_referenced(self) -> None:
        """Free the whole copy, but not under an array or tensor that the researcher has kept of it.

        A copy that was gathered for a forward is freed all the same, as the graph refers to it.
        """
        storage = self._buffer.untyped_storage()
        is_forward = privates.is_gathered_for_forward(self.group) and torch.is_grad_enabled()
        is_referenced = self._count_references() > self._num_references
        # Two references are the attribute of FSDP's record, and the argument.
        is_referenced |= sys.getrefcount(privates.whole_parameter(self.parameter)) > 2
        if storage.resizable() and (is_forward or not is_referenced):  # an array of numpy makes it not resizable
            self._free()

    @property
    def is_reduced(self) -> bool:
        """Whether FSDP is about to average its gradient, or zeros, as the module may ask of it."""
        whole = privates.whole_parameter(self.parameter)
        if whole is not None and getattr(self.group, "reduce_scatter_unused_params", False):
            return whole.requires_grad
        return self.parameter.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)

    @property
    def name(self) -> str:
        return privates.parameter_name(self.parameter)

    @property
    def _registered(self) -> Any:
        return privates.registered_parameter(self.parameter)

    @property
    def _buffer(self) -> Tensor:
        return self.parameter.all_gather_outputs[0]

    def _count_references(self) -> int:
        return num_storage_references(self._buffer.untyped_storage())

    def _write_shard(self, whole: Tensor) -> None:
        """Copy this rank's part of a whole copy into the shard."""
        parameter, mesh = self.parameter, self.parameter.mesh_info
        local = privates.local_shard(whole)
        if local.data_ptr() != self._buffer.data_ptr():  # another tensor was assigned to `data`
            if local.shape != privates.whole_size(parameter):
                self._reject_shape(local)
            gathered = privates.view_as_whole(parameter, self._buffer)
            gathered.copy_(local)
            if isinstance(whole, DTensor):
                privates.set_local_shard(whole, gathered)
            else:
                DATA.__set__(whole, gathered)
        part = self._buffer.view(mesh.shard_mesh_size, -1)[mesh.shard_mesh_rank]
        if parameter.param_dtype is None and parameter.fsdp_placement.dim == 0:
            privates.shard_data(parameter).copy_(part)
            privates.let_gathers_wait(self.group)  # else it may be gathered again before the copy is done
        elif not torch.equal(part, privates.shard_data(parameter).to(part.dtype)):
            rule = "With strategy=fsdp and mixed precision, a parameter must not be changed within a step, which has a "
            rule += f"copy of it in {part.dtype}"
            fix = "the same lines in on_train_batch_end, or trainer.precision=32-true"
            raise ConfigError("model", self.name, rule, fix)

    def _reject_shape(self, value: Any) -> None:
        shape, given = privates.whole_size(self.parameter), tuple(getattr(value, "shape", ())) or type(value).__name__
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
            for group in privates.parameter_groups(part):
                _watch_group(group, partial(gathers.note, next(numbers)))
    return gathers


def _watch_group(group: Any, note: Callable[..., None]) -> None:
    watched = [WatchedParameter(group, parameter) for parameter in group.fsdp_params]
    unshard, post_backward = group.unshard, group.post_backward
    to_unsharded, to_sharded = privates.sharding_steps(group)

    def check_and_unshard(*args: Any, **kwargs: Any) -> None:
        for parameter in watched if group.is_sharded else ():
            parameter.check_shard()
        if group.is_sharded and not privates.is_gathering(group):
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
    privates.replace_sharding_steps(group, to_unsharded_and_note, keep_and_to_sharded)
