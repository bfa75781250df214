"""Batch normalisation over the samples of all processes, on any device and backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import Unsupported


def synchronise(model: nn.Module, comm: Communicator) -> None:
    """Turns every BatchNorm of ``model`` into one over all processes' samples. Collective.

    Parameters, buffers and hooks stay as they are. A micro-batch is normalised together with those
    that other processes run at the same time.

    Raises:
        Unsupported: a module of that kind has a forward of its own.
    """
    norms = [(name, m) for name, m in model.named_modules() if isinstance(m, _BatchNorm)]
    if not norms:
        return
    among = comm.duplicate()  # its sums meet no others on the way
    for name, module in norms:
        if type(module).forward not in _FORWARDS:
            raise Unsupported(
                f"trainer.sync_batchnorm=true: {name!r} is a {type(module).__name__}, a batch "
                "normalisation with a forward of its own",
                fix="let it be one of torch's, or set trainer.sync_batchnorm=false: each process "
                "then normalises its own micro-batch",
            )
        if type(module) is not SyncBatchNorm:
            module.plain = type(module)  # type: ignore[assignment]
        module.__class__ = SyncBatchNorm
        module.meeting = Meeting(among)  # type: ignore[assignment]


def separate(model: nn.Module) -> None:
    """Takes ``synchronise`` back: every module is of its own class again."""
    for module in model.modules():
        if type(module) is SyncBatchNorm:
            module.__class__ = module.plain  # type: ignore[assignment]
            del module.meeting, module.plain


def count_normalised(model: nn.Module, micro_batch_size: int, dp_size: int) -> int:
    """How many samples a BatchNorm of ``model`` normalises together in training; 0 without one."""
    found = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training]
    if not found:
        return 0
    together = all(isinstance(m, (SyncBatchNorm, nn.SyncBatchNorm)) for m in found)
    return micro_batch_size * (dp_size if together else 1)


class Meeting:
    """Where the processes sum; one for all copies of a module."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def __deepcopy__(self, memo: Any) -> Meeting:
        return self


class SyncBatchNorm(_BatchNorm):
    """torch's BatchNorm, in arithmetic that runs on a CPU too, and without the samples of a filler.

    Sums and squares are taken in fp32 at least. The variance is that of distances from the common
    mean. Gradients flow through both, and may be differentiated again.
    """

    meeting: Meeting
    plain: type[nn.Module]
    counts = True
    """Whether the samples of the next forward count; a filler's do not."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or not input.shape[1]:
            raise ValueError(f"expected (samples, channels, ...), got {tuple(input.shape)}")

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: Tensor) -> Tensor:
        """(samples, channels, ...) -> the same shape, normalised over all but the channels.

        Raises:
            ValueError: all processes together have one value a channel.
        """
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return functional.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                eps=self.eps,
            )
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        channels = [1, -1] + [1] * (input.dim() - 2)
        rest = [0, *range(2, input.dim())]
        share = float(self.counts)
        count = share * input.numel() / input.shape[1]
        sums = torch.cat([wide.sum(rest) * share, wide.new_tensor([count])])
        sums = self._sum(sums)
        total = sums[-1].detach()
        if count <= 1 and 0 < total <= 1:  # only then is the device waited for
            raise ValueError(
                "Expected more than 1 value per channel when training, got input size "
                f"{tuple(input.shape)} on {self.meeting.comm.size} processes together"
            )
        any_counts = total > 0  # where all are fillers, nothing is to be divided or followed
        total = total.clamp(min=1.0)
        mean = sums[:-1] / total
        apart = wide - mean.view(channels)
        variance = self._sum(apart.square().sum(rest) * share) / total
        if self.training:
            unbiased = variance.detach() * (total / (total - 1).clamp(min=1.0))
            self._follow(mean.detach(), unbiased, any_counts)
        normalised = apart * torch.rsqrt(variance + self.eps).view(channels)
        if self.weight is not None:
            normalised = normalised * self.weight.to(wide.dtype).view(channels)
        if self.bias is not None:
            normalised = normalised + self.bias.to(wide.dtype).view(channels)
        return normalised.to(input.dtype)

    def _sum(self, values: Tensor) -> Tensor:
        summed: Tensor = _Sum.apply(values, self.meeting.comm)
        return summed

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor, counts: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        momentum = counts * (self.momentum or 0.0)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(counts.to(self.num_batches_tracked.dtype))
            if self.momentum is None:
                momentum = counts / self.num_batches_tracked.clamp(min=1)
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            running.lerp_(new.to(running.dtype), momentum.to(running.dtype))


class _Sum(torch.autograd.Function):
    """A sum over processes; so is its gradient, since each process has its part of the loss."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        summed = values.contiguous().clone()
        comm.all_reduce(summed)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Sum.apply(gradient, ctx.comm), None


_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward)
