"""``deepspeed.ops.adam``: torch's Adam with DeepSpeed's arguments."""

from __future__ import annotations

from typing import Any

import torch

from torsh_trainer.dropin.missing import refuse_unknown
from torsh_trainer.errors import Unsupported

__getattr__ = refuse_unknown(__name__)


class FusedAdam(torch.optim.Adam):
    """AdamW, or with ``adam_w_mode`` False Adam; the kernel is torch's.

    Raises:
        Unsupported: without bias correction, or with ``amsgrad``.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _check(type(self).__name__, bias_correction, amsgrad)
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=adam_w_mode,
        )


class DeepSpeedCPUAdam(torch.optim.Adam):
    """As ``FusedAdam``; states are where the parameters are.

    Raises:
        Unsupported: without bias correction, with ``amsgrad``, or with states in a lower dtype.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _check(type(self).__name__, bias_correction, amsgrad)
        if not fp32_optimizer_states:
            raise Unsupported("DeepSpeedCPUAdam with states below fp32", fix="leave it out")
        super().__init__(
            model_params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=adamw_mode,
        )


def _check(name: str, bias_correction: bool, amsgrad: bool) -> None:
    if not bias_correction:
        raise Unsupported(f"{name} without bias correction", fix="leave bias_correction out")
    if amsgrad:
        raise Unsupported(f"{name} with amsgrad, which DeepSpeed does not do", fix="leave it out")
