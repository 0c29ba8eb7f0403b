"""Private attributes of torch that this package uses, and why."""

from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_iter,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

# Tensors without content, operations as torch dispatches them, nested containers: torch has no other names for these.
__all__ = ["DataDependentOutputException", "DynamicOutputShapeException", "FakeTensor", "FakeTensorMode"]
__all__ += ["OpOverload", "TorchDispatchMode", "unset_fake_temporarily"]
__all__ += ["TreeSpec", "tree_flatten", "tree_iter", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]

# Where torch keeps the hooks of forward and backward, and those of gradients: it has no way to suspend or list them.
MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
BatchNorm = nn.modules.batchnorm._BatchNorm  # the one class that all batch norms share
CLONE = torch._C.TensorBase.clone  # that `Parameter.__deepcopy__` calls, below all that Python can override


def has_gradient_hook(parameter: nn.Parameter) -> bool:
    """Return whether somebody has registered a hook for the gradient of a parameter."""
    return any(getattr(parameter, name) for name in GRADIENT_HOOKS)


def has_tensor_hook(parameter: Any) -> bool:
    """Return whether a parameter has a hook of `register_hook`, which is not called of a parameter that is sharded."""
    return bool(parameter._backward_hooks)


def num_changes(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place, except through its `data`; 0 of a tensor for inference."""
    return 0 if tensor.is_inference() else tensor._version


def forward_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the hooks before and after a forward, by key, to replace some of them."""
    return module._forward_pre_hooks, module._forward_hooks


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the buffers of a module without those of its parts, by their attributes."""
    return module._buffers


def remove_ddp_hooks(ddp: DistributedDataParallel) -> None:
    """Remove the hooks by which DDP reduces gradients, before its module is wrapped anew; nothing else removes them."""
    ddp._remove_autograd_hooks()


def require_reduced_gradients(ddp: DistributedDataParallel) -> None:
    """Raise `RuntimeError` if DDP still waits for gradients, which it would say itself in the next forward only."""
    ddp._check_reducer_finalized()


def compile_blocks_alone(max_variants: int) -> None:
    """Let Dynamo compile blocks one by one, in so many variants each, after which it would run them uncompiled.

    DDP sends a bucket of gradients when the blocks in it are done. Dynamo need not split the blocks for that, and it
    fails where activations are checkpointed.
    """
    torch._dynamo.config.optimize_ddp = False
    torch._dynamo.config.recompile_limit = max_variants


def is_in_backward() -> bool:
    """Return whether autograd computes gradients now, in this thread."""
    return torch._C._current_graph_task_id() != -1


def make_fake_store() -> Any:
    """Return the store of a process group whose other ranks do not exist; torch has it for its own tests."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a key of a storage, which several tensors may share, also where it has no address."""
    return storage._cdata


def num_storage_references(storage: torch.UntypedStorage) -> int:
    """Return how many tensors, arrays and graphs keep a storage alive."""
    return torch._C._storage_Use_Count(storage._cdata)


def record_memory(is_on: bool) -> None:
    """Record from now on, or no longer, which code allocates a GPU's memory."""
    torch.cuda.memory._record_memory_history(enabled="all" if is_on else None)


def write_memory_snapshot(path: str) -> None:
    """Write what was recorded, for https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(path)


def operation_schema(operation: Any) -> Any:
    """Return the schema of an operation, which says what it writes and which outputs are views."""
    return operation._schema


def operation_packet(operation: OpOverload) -> Any:
    """Return an operation without its overload, by which formulas for FLOPs are listed."""
    return operation._overloadpacket


def has_kernel(operation: OpOverload, key: str | None = None) -> bool:
    """Return whether an operation can be called at all, or has a kernel of its own for a dispatch key."""
    name = operation.name()
    if key is None:
        return torch._C._dispatch_has_kernel(name)
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def without_cpu_autocast() -> Any:
    """Return a context in which a kernel for autocast on the CPU calls the operation below it."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def remove_kernels(library: torch.library.Library) -> None:
    """Remove the kernels that a library has registered, at once; else they stay until it is collected."""
    library._destroy()
