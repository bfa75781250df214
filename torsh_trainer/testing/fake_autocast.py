"""Autocast for a device that has none: kernels that cast as CUDA's do.

The lists are those of torch's ``ATen/autocast_mode.h`` (AT_FORALL_LOWER_PRECISION_FP, _FP32,
_FP32_SET_OPT_DTYPE, _PROMOTE). CUDA keeps the cast of a weight until the autocast block ends; here
a weight that is used twice is cast twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_LOWER = (
    "_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d "
    "conv_transpose3d convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot "
    "linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell "
    "_thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
    "scaled_dot_product_attention"
)
_FULL = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow "
    "softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm "
    "cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss "
    "margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss "
    "multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp"
)
_FULL_BY_DTYPE = "prod softmax log_softmax cumprod cumsum sum"
_PROMOTED = (
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot "
    "scatter_add cat stack"
)
_KEY = torch._C._dispatch_key_parse("AutocastPrivateUse1")
_KEEP: list[Any] = []  # a library's kernels go with it


def install(device_type: str) -> None:
    """Gives ``device_type``, the PrivateUse1 backend of this process, autocast; once a process."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, _KEY.name)
    library = torch.library.Library("aten", "IMPL")
    _KEEP.extend((everything, library))
    kinds = ((_LOWER, _lower), (_FULL, _full), (_FULL_BY_DTYPE, _by_dtype), (_PROMOTED, _widest))
    for names, cast in kinds:
        for name in names.split():
            packet = getattr(torch.ops.aten, name)
            for overload in packet.overloads():
                if not overload.endswith("out"):
                    kernel = _casting(getattr(packet, overload), cast, device_type)
                    library.impl(getattr(packet, overload), kernel, _KEY.name)


def _casting(op: Any, cast: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY)):
            args, kwargs = cast(op, args, kwargs, device_type)
            return op(*args, **kwargs)

    return kernel


def _lower(op: Any, args: Any, kwargs: Any, device_type: str) -> Any:
    return _cast((args, kwargs), torch.get_autocast_dtype(device_type), device_type)


def _full(op: Any, args: Any, kwargs: Any, device_type: str) -> Any:
    return _cast((args, kwargs), torch.float32, device_type)


def _by_dtype(op: Any, args: Any, kwargs: Any, device_type: str) -> Any:
    """The operator computes in fp32 by its own ``dtype``, without a cast before it."""
    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if "dtype" not in names or not _eligible(args[0], device_type):
        return args, kwargs
    return (), given | {"dtype": given.get("dtype") or torch.float32}


def _widest(op: Any, args: Any, kwargs: Any, device_type: str) -> Any:
    floats = [leaf for leaf in tree_leaves((args, kwargs)) if _eligible(leaf, device_type)]
    if len({leaf.dtype for leaf in floats}) < 2:
        return args, kwargs
    return _cast((args, kwargs), torch.float32, device_type)


def _eligible(leaf: Any, device_type: str) -> bool:
    return (
        isinstance(leaf, Tensor)
        and leaf.is_floating_point()
        and leaf.dtype is not torch.float64
        and leaf.device.type == device_type
    )


def _cast(tree: Any, dtype: torch.dtype, device_type: str) -> Any:
    return tree_map(lambda leaf: leaf.to(dtype) if _eligible(leaf, device_type) else leaf, tree)
