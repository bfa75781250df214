"""Batch normalisation over the samples of all processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from torsh_trainer.dropin.horovod.torch.mpi_ops import (
    Sum,
    allgather,
    allreduce_,
    size,
)
from torsh_trainer.dropin.missing import refuse_unknown

__getattr__ = refuse_unknown(__name__)


class SyncBatchNorm(_BatchNorm):
    """Normalises by mean and variance of all processes' samples, on the host as well as on a GPU.

    Where it trains on one process, and in evaluation, it is torch's BatchNorm.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """``input`` of shape (samples, channels, ...), normalised."""
        self._check_input_dim(input)
        counts = self.training and self.track_running_stats
        if counts and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:
            seen = int(self.num_batches_tracked) if self.num_batches_tracked is not None else 1
            momentum = 1.0 / max(seen, 1)
        by_batch = self.training or not self.track_running_stats
        if not by_batch or size() == 1:
            return F.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                by_batch,
                momentum,
                self.eps,
            )
        running = (self.running_mean, self.running_var) if self.track_running_stats else None
        return _Normalise.apply(input, self.weight, self.bias, running, momentum, self.eps)


class _Normalise(torch.autograd.Function):
    """Values and gradients of batch normalisation over all processes.

    ``y = (x - mean) / std * weight + bias``; with ``g = dy * weight`` and means over all samples,
    ``dx = (g - mean(g) - (x - mean) / std^2 * mean(g * (x - mean))) / std``.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Any, bias: Any, running: Any, momentum: float, eps: float
    ) -> Tensor:
        axes = [axis for axis in range(input.dim()) if axis != 1]
        wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        channels = wide.shape[1]
        var, mean = torch.var_mean(wide, axes, correction=0)
        mine = torch.cat([mean, var, mean.new_tensor([wide.numel() // channels])])
        told = allgather(mine.unsqueeze(0), name="sync_batch_norm.moments")
        means, variances, counts = told[:, :channels], told[:, channels:-1], told[:, -1:]
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        var = ((variances + (means - mean) ** 2) * counts).sum(0) / total
        if running is not None:
            running_mean, running_var = running
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            unbiased = var * (total / (total - 1).clamp(min=1))
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
        shape = [1, channels] + [1] * (input.dim() - 2)
        inverse = (var + eps).rsqrt()
        ctx.save_for_backward(input, weight, mean, inverse, total)
        normal = (wide - mean.view(shape)) * inverse.view(shape)
        if weight is not None:
            normal = normal * weight.view(shape)
        if bias is not None:
            normal = normal + bias.view(shape)
        return normal.to(input.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        input, weight, mean, inverse, total = ctx.saved_tensors
        axes = [axis for axis in range(input.dim()) if axis != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        centred = input.to(mean.dtype) - mean.view(shape)
        given = grad_output.to(mean.dtype)
        sum_dy = given.sum(axes)
        sum_dy_xmu = (given * centred).sum(axes)
        grad_input = grad_weight = grad_bias = None
        if weight is not None and ctx.needs_input_grad[1]:
            grad_weight = (sum_dy_xmu * inverse).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = sum_dy.to(weight.dtype if weight is not None else sum_dy.dtype)
        if ctx.needs_input_grad[0]:
            sums = allreduce_(torch.cat([sum_dy, sum_dy_xmu]), op=Sum, name="sync_batch_norm.sums")
            mean_dy, mean_dy_xmu = (sums / total).chunk(2)
            factor = inverse if weight is None else inverse * weight
            inner = given - mean_dy.view(shape)
            inner = inner - centred * (inverse**2 * mean_dy_xmu).view(shape)
            grad_input = (inner * factor.view(shape)).to(input.dtype)
        return grad_input, grad_weight, grad_bias, None, None, None
