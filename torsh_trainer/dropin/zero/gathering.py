"""Parameters that processes hold parts of, whole for a while."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from torsh_trainer.errors import Unsupported

TORCHS_SAVE: Callable[..., None] = torch.save
"""What ``torch.save`` is without this."""


class Init:
    """``zero.Init``: models are built whole here, and cut by ``deepspeed.initialize``."""

    def __init__(self, module: nn.Module | None = None, *args: Any, **kwargs: Any) -> None:
        self.module = module

    def __enter__(self) -> Init:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to undo."""


class GatheredParameters:
    """Within, ``params`` are whole; with ``modifier_rank`` that process's values are all's then.

    Before ``deepspeed.initialize`` they are whole anyway, as they are below stage 3.

    Raises:
        Unsupported: stage 3 has cut them.
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        if isinstance(params, Tensor):
            params = [params]
        elif isinstance(params, nn.Module):
            params = params.parameters()
        self._params = list(params) if enabled and isinstance(params, Iterable) else []
        self._source = modifier_rank

    def __enter__(self) -> None:
        if any(isinstance(parameter, DTensor) for parameter in self._params):
            raise Unsupported(
                "GatheredParameters after deepspeed.initialize at stage 3",
                fix="take values by deepspeed.utils.safe_get_full_fp32_param, or save them by "
                "engine.save_16bit_model",
            )

    @torch.no_grad()
    def __exit__(self, kind: object, *error: object) -> None:
        if self._source is not None and dist.is_initialized() and kind is None:
            for parameter in self._params:
                dist.broadcast(parameter.data, src=self._source)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Raises Unsupported where the parameter is cut: only its own module gathers it."""
    if isinstance(parameter, DTensor):
        raise Unsupported(
            "register_external_parameter at stage 3: a parameter is gathered by its own module",
            fix="use stage 2, or read the parameter within the forward of its module",
        )


def refuse_saved_parts() -> None:
    """Exchanges ``torch.save``: of a parameter that stage 3 has cut it would save a part."""
    torch.save = _save


@functools.wraps(TORCHS_SAVE)
def _save(obj: Any, *args: Any, **kwargs: Any) -> None:
    """Raises Unsupported: something in ``obj`` is cut."""
    if any(isinstance(leaf, DTensor) for leaf in tree_leaves(obj)):
        raise Unsupported(
            "torch.save of parameters that stage 3 has cut: a part of each would be saved",
            fix="call engine.save_16bit_model(folder) or engine.save_checkpoint(folder) on every "
            "process",
        )
    TORCHS_SAVE(obj, *args, **kwargs)


def safe_get_full_fp32_param(param: Tensor) -> Tensor:
    """The whole fp32 values. Collective where they are cut."""
    return param.full_tensor().detach() if isinstance(param, DTensor) else param.detach()


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """The whole gradient, between backward and step. Collective where it is cut."""
    grad = param.grad
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """Raises Unsupported: states are the engine's."""
    raise Unsupported(
        "safe_get_full_optimizer_state is not there under drop-in",
        fix="save_checkpoint saves optimizer states",
    )
