"""torch's ZeroRedundancyOptimizer, whose small parameters travel in one message a process.

It sends each by itself: with many small ones a step would wait for messages, not for values.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer

SMALL_BYTES = 64 * 1024
"""A larger one goes by itself: to copy it would cost as much as a message."""


class PackedZeroRedundancyOptimizer(ZeroRedundancyOptimizer):
    """The same values everywhere; what differs is how they travel."""

    @torch.no_grad()
    def _sync_params(self) -> None:
        # torch's name for what ends a step; by another name its own way is taken.
        works: list[Any] = []
        arriving: list[tuple[Tensor, list[Tensor]]] = []
        own: Any = self  # torch types neither of these
        group = own.process_group
        for rank, groups in enumerate(own._partition_parameters()):
            parameters = [p.data for one in groups for p in one["params"]]
            source = dist.get_global_rank(group, rank)
            for parts in _pack(parameters):
                message = (
                    parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
                )
                if len(parts) > 1:
                    arriving.append((message, parts))
                works.append(dist.broadcast(message, src=source, group=group, async_op=True))
        for work in works:
            work.wait()
        for message, parts in arriving:
            pieces = message.split([part.numel() for part in parts])
            views = [piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)]
            torch._foreach_copy_(parts, views)


def _pack(parameters: list[Tensor]) -> list[list[Tensor]]:
    """What travels together: small ones of a dtype and device, the others alone."""
    packed: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    alone = []
    for parameter in parameters:
        if parameter.numel() * parameter.element_size() <= SMALL_BYTES:
            packed.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        else:
            alone.append([parameter])
    return [*packed.values(), *alone]
