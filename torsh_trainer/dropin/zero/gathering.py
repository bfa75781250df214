"""Parameters that processes hold parts of, whole for a while."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from torsh_trainer.errors import Unsupported


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

    Raises:
        Unsupported: torch cannot put a whole parameter into the place of its part.
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
        self._swapped: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> None:
        for parameter in self._params:
            if isinstance(parameter, DTensor):
                whole = nn.Parameter(
                    parameter.detach().full_tensor().clone(), parameter.requires_grad
                )
                _swap(parameter, whole)
                self._swapped.append((parameter, whole))

    @torch.no_grad()
    def __exit__(self, kind: object, *error: object) -> None:
        if self._source is not None and dist.is_initialized() and kind is None:
            for parameter in self._params:
                dist.broadcast(parameter.data, src=self._source)
        for parameter, held in self._swapped:
            _swap(parameter, held)  # ``held`` has the whole values now
            if self._source is not None and isinstance(parameter, DTensor):
                part = distribute_tensor(
                    held.detach(), parameter.device_mesh, parameter.placements, src_data_rank=None
                )
                parameter.to_local().copy_(part.to_local())
        self._swapped.clear()


def _swap(one: Tensor, other: Tensor) -> None:
    try:
        torch.utils.swap_tensors(one, other)
    except RuntimeError as error:
        raise Unsupported(
            f"GatheredParameters of a parameter that something else holds on to ({error})",
            fix="take values by deepspeed.utils.safe_get_full_fp32_param",
        ) from error


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Raises Unsupported where the parameter is cut: only its own module gathers it."""
    if isinstance(parameter, DTensor):
        raise Unsupported(
            "register_external_parameter at stage 3: a parameter is gathered by its own module",
            fix="use stage 2, or read the parameter within the forward of its module",
        )


def safe_get_full_fp32_param(param: Tensor) -> Tensor:
    """The whole fp32 values. Collective where they are cut."""
    return param.detach().full_tensor() if isinstance(param, DTensor) else param.detach()


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
