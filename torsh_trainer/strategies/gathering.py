"""Weights that FSDP2 gathers in the dtype that autocast computes with them in.

Autocast rounds a weight of a linear layer or a convolution before it is used. Rounded before the
gather it is the same number, in half the bytes; so is its gradient, which is in that dtype anyway
until autocast widens it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

_ROUNDED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers of which autocast rounds all that goes in."""


def find_rounded_by_autocast(model: nn.Module) -> set[str]:
    """Names of the fp32 parameters that nothing but such layers have, of torch's own classes.

    One with a hook is left out, which would see a gradient of another dtype.
    """
    only: dict[nn.Parameter, bool] = {}
    for module in model.modules():
        plain = type(module) in _ROUNDED and "forward" not in vars(module)
        for parameter in module._parameters.values():
            if parameter is not None:
                only[parameter] = only.get(parameter, True) and plain
    return {
        name
        for name, p in model.named_parameters()
        if only[p] and p.dtype is torch.float32 and not p._backward_hooks
    }


def gather_in(
    dtype: torch.dtype,
    units: Sequence[Any],
    names: Mapping[int, str],
    chosen: Collection[str],
) -> None:
    """Has FSDP2's ``units`` gather ``chosen`` in ``dtype``; ``names`` maps ``id(shard)`` to names.

    To be called again when FSDP2 has looked anew at the dtypes of a unit.
    """
    for unit in units:
        low = [part for part in unit.fsdp_params if names[id(part.sharded_param)] in chosen]
        for part in low:
            part.param_dtype = dtype
        if 0 < len(low) < len(unit.fsdp_params) and not hasattr(unit.post_backward, "widens"):
            unit.post_backward = _widening(unit, unit.post_backward)


def _widening(unit: Any, reduce: Any) -> Any:
    """Before ``reduce``: gradients of a unit are reduced in one, which takes one dtype."""

    def widen(*unused: Any) -> None:
        for part in unit.fsdp_params:
            if hasattr(part, "_unsharded_param"):
                part.accumulate_unsharded_grad_if_needed()
                part.to_accumulated_grad_if_needed()
        reduce(*unused)

    widen.widens = True  # type: ignore[attr-defined]
    return widen
