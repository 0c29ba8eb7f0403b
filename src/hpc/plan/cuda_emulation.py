"""What CUDA does differently from the CPU on which a step is traced: the casts of its autocast, and its attention.

The kernels are registered in torch's dispatcher, where both live: functions, methods and operators all arrive there,
also from within torch's own functions.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from hpc.privates.torch import OpOverload, has_kernel, remove_kernels, tree_map, without_cpu_autocast

ATEN = torch.ops.aten
# Operators that CUDA's autocast computes in fp32 (docs.pytorch.org/docs/stable/amp.html), as their names in ATen.
# fmt: off
IN_FP32 = (
    "acos", "asin", "binary_cross_entropy_with_logits", "cdist", "cosh", "cosine_embedding_loss", "cosine_similarity",
    "cross_entropy_loss", "dist", "erfinv", "exp", "expm1", "frobenius_norm", "group_norm", "hinge_embedding_loss",
    "huber_loss", "kl_div", "l1_loss", "layer_norm", "log", "log10", "log1p", "log2", "margin_ranking_loss", "mse_loss",
    "multi_margin_loss", "multilabel_margin_loss", "native_layer_norm", "nll_loss", "nll_loss2d", "norm",
    "nuclear_norm", "pdist", "poisson_nll_loss", "pow", "reciprocal", "renorm", "rsqrt", "sinh", "smooth_l1_loss",
    "soft_margin_loss", "softplus", "tan", "triplet_margin_loss",
)
# fmt: on
INTO_FP32 = ("cumprod", "cumsum", "log_softmax", "prod", "softmax", "sum")  # their `dtype` is fp32, their input stays
HALVES = (torch.float16, torch.bfloat16)


@contextmanager
def emulate_cuda() -> Iterator[None]:
    """Compute within the block, on the CPU, as CUDA does: under autocast, and attention with dropout.

    The block must hold backward, too, in which activation checkpointing computes again.
    """
    library = Library("aten", "IMPL")
    attention = ATEN.scaled_dot_product_attention.default

    def without_dropout(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, **options: Any,
    ) -> Tensor:  # fmt: skip
        """Compute attention as without dropout: CUDA's kernels do both alike, and the CPU's has no dropout, so that
        torch would compute and keep the whole matrix of weights."""
        return attention.decompose(query, key, value, attn_mask, 0.0, is_causal, **options)

    try:
        for names, make_kernel in ((IN_FP32, _fp32_kernel), (INTO_FP32, _fp32_output_kernel)):
            for operator in _operators(names):
                library.impl(operator, make_kernel(operator), "AutocastCPU")
        library.impl(attention, without_dropout, "AutogradCPU")
        yield
    finally:
        remove_kernels(library)


def _operators(names: tuple[str, ...]) -> Iterator[OpOverload]:
    """Yield the operators of these names for which the CPU's autocast does nothing."""
    for packet in (getattr(ATEN, name) for name in names):
        for operator in (getattr(packet, overload) for overload in packet.overloads() if "out" not in overload):
            # Some overloads are TorchScript's alone, and have no kernel.
            if has_kernel(operator) and not has_kernel(operator, "AutocastCPU"):
                yield operator


def _fp32_kernel(operator: OpOverload) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_cpu_autocast():
            args, kwargs = tree_map(lambda value: value.float() if _is_half(value) else value, (args, kwargs))
            return operator(*args, **kwargs)

    return kernel


def _fp32_output_kernel(operator: OpOverload) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_cpu_autocast():
            if _is_half(args[0]) and kwargs.get("dtype") is None:
                kwargs["dtype"] = torch.float32
            return operator(*args, **kwargs)

    return kernel


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in HALVES
