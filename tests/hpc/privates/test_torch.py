"""Check that this version of torch has what `hpc.privates.torch` and `torch_sharding` read."""

import inspect
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.library import Library
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from hpc.privates import torch as privates
from hpc.privates import torch_sharding

ATEN = torch.ops.aten
# What is read of FSDP2 and DTensor, by class: private names, and those that strategies/sharded_parameters.py replaces.
SHARDED = {
    FSDPModule: ("_get_fsdp_state",),
    FSDPState: ("_pre_forward", "_post_forward", "_state_ctx", "_fsdp_param_group"),
    FSDPParamGroup: (
        "_training_state", "_to_unsharded", "_to_sharded", "_all_gather_result", "_wait_all_gather_streams_on_event",
        "fsdp_params", "unshard", "post_backward", "is_sharded", "is_unsharded", "reduce_grads", "device_handle",
    ),
    FSDPParam: (
        "_sharded_param_data", "_unsharded_param", "_setattr_on_modules", "_module_info", "_param_fqn", "_orig_size",
        "_contiguous_orig_stride", "reset_sharded_param", "free_unsharded_param", "all_gather_outputs", "mesh_info",
        "unsharded_accumulated_grad", "fsdp_placement", "param_dtype", "sharded_param",
    ),
    DTensor: ("_local_tensor", "_op_dispatcher"),
}  # fmt: skip


def check_hooks() -> None:
    layer = nn.Linear(2, 2)
    assert not privates.has_gradient_hook(layer.weight)
    layer.weight.register_post_accumulate_grad_hook(lambda _: None)
    layer.bias.register_hook(lambda _: None)
    assert privates.has_gradient_hook(layer.weight) and privates.has_gradient_hook(layer.bias)
    layer.register_forward_pre_hook(lambda *_: None)
    layer.register_forward_hook(lambda *_: None)
    layer.register_full_backward_pre_hook(lambda *_: None)
    layer.register_full_backward_hook(lambda *_: None)
    assert [len(hooks) for hooks in privates.forward_hooks(layer)] == [1, 1]
    assert [len(getattr(layer, name)) for name in privates.MODULE_HOOKS] == [1, 1, 1, 1]


def check_tensors() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.register_post_accumulate_grad_hook(lambda _: None)
    assert not privates.has_tensor_hook(parameter)
    parameter.register_hook(lambda _: None)
    assert privates.has_tensor_hook(parameter)
    before = privates.num_changes(parameter)
    with torch.no_grad():
        parameter.add_(1)
    assert privates.num_changes(parameter) == before + 1
    with torch.inference_mode():
        assert privates.num_changes(torch.zeros(1)) == 0


def check_parts() -> None:
    norm = nn.BatchNorm1d(2)
    assert isinstance(norm, privates.BatchNorm) and isinstance(nn.SyncBatchNorm(2), privates.BatchNorm)
    assert list(privates.own_buffers(nn.Sequential(norm))) == []
    assert list(privates.own_buffers(norm)) == ["running_mean", "running_var", "num_batches_tracked"]


def check_ddp() -> None:
    for name in ("_remove_autograd_hooks", "_check_reducer_finalized"):
        assert callable(getattr(DistributedDataParallel, name))
    assert "init_sync" in inspect.signature(DistributedDataParallel).parameters


def check_compiler() -> None:
    config = torch._dynamo.config
    with pytest.MonkeyPatch.context() as patch:
        for name in ("optimize_ddp", "recompile_limit"):
            patch.setattr(config, name, getattr(config, name))
        privates.compile_blocks_alone(7)
        assert (config.optimize_ddp, config.recompile_limit) == (False, 7)


def check_storages() -> None:
    tensor = torch.zeros(3)
    view, storage = tensor[1:], tensor.untyped_storage()
    assert privates.storage_key(storage) == privates.storage_key(view.untyped_storage())
    before = privates.num_storage_references(storage)
    another = tensor[:1]
    assert privates.num_storage_references(storage) == before + 1, another


def check_sharded_tensors() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=privates.make_fake_store())
    try:
        tensor = torch.zeros(4, 2)
        sharded = distribute_tensor(tensor, init_device_mesh("cpu", (2,)), [Shard(0)])
        assert torch_sharding.local_shard(sharded).shape == (2, 2) and torch_sharding.local_shard(tensor) is tensor
        torch_sharding.set_local_shard(sharded, torch.ones(2, 2))
        assert sharded.to_local().sum() == 4
    finally:
        dist.destroy_process_group()
    assert ATEN.is_same_size.default in torch_sharding.dtensor_handlers()  # of torch's own


def check_backward() -> None:
    seen: list[bool] = []
    tensor = torch.zeros(1, requires_grad=True)
    tensor.register_hook(lambda _: seen.append(privates.is_in_backward()))
    tensor.sum().backward()
    assert seen == [True] and not privates.is_in_backward()


def check_copies() -> None:
    class Noting(TorchFunctionMode):
        def __torch_function__(
            self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
        ) -> object:
            called.append(func)
            return func(*args, **(kwargs or {}))  # type: ignore[operator]

    called: list[object] = []
    with Noting():
        deepcopy(nn.Parameter(torch.zeros(1)))
    assert privates.CLONE in called


def check_operations() -> None:
    add = ATEN.add_.Tensor
    assert privates.operation_schema(add).returns[0].alias_info.is_write
    assert privates.operation_packet(add) is ATEN.add_
    exponent = ATEN.exp.default
    assert privates.has_kernel(exponent) and not privates.has_kernel(exponent, "AutocastCPU")
    library = Library("aten", "IMPL")
    library.impl(exponent, lambda tensor: tensor, "AutocastCPU")
    assert privates.has_kernel(exponent, "AutocastCPU")
    privates.remove_kernels(library)
    assert not privates.has_kernel(exponent, "AutocastCPU")
    with torch.autocast("cpu", torch.bfloat16), privates.without_cpu_autocast():
        assert (torch.zeros(1, 1) @ torch.zeros(1, 1)).dtype == torch.float32


def check_memory() -> None:
    for name in ("_record_memory_history", "_dump_snapshot"):
        assert callable(getattr(torch.cuda.memory, name))


def check_sharding() -> None:
    for kind, names in SHARDED.items():
        source = inspect.getsource(inspect.getmodule(kind) or kind)
        missing = [
            name for name in names if not (hasattr(kind, name) or f"self.{name}" in source or f"{name}:" in source)
        ]
        assert not missing, f"{kind.__name__} has no {missing}"
    assert callable(torch._C._storage_Use_Count)


CHECKS = [
    check_hooks,
    check_tensors,
    check_parts,
    check_ddp,
    check_compiler,
    check_storages,
    check_backward,
    check_copies,
]
CHECKS += [check_operations, check_memory, check_sharding, check_sharded_tensors]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_this_version_has_what_is_read(check: Callable[[], None]) -> None:
    try:
        check()
    except (AttributeError, TypeError, AssertionError) as error:
        pytest.fail(f"torch {torch.__version__} differs: {type(error).__name__}: {error}")
