"""The largest elements of a tensor, found by a threshold that a sample estimates.

On a CPU ``torch.topk`` sorts, which costs seconds for tens of millions of elements. The share of a
random sample above a threshold is near the share of the whole above it, so a threshold is chosen
that lets a few more through than wanted; one pass collects them, and an exact top-k of those few
ends it. Wherever at least ``count`` came through, the result is that of an exact top-k: every
element that is larger than the threshold was a candidate.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torsh_trainer.comm.compression.wire import asks_host

_CHUNK = 1 << 17
"""Elements looked at in one go: scratch that stays in a core's cache."""
_HITS = 100
"""So many elements of the sample should lie above the threshold: it is then 8% off."""
_MARGIN = 1.4
"""Candidates aimed at, over those wanted: more than three standard deviations of the estimate."""
_TRIES = 3


def largest(values: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Places of the ``count`` elements of ``values`` (1-D) that are largest in magnitude.

    int64, in no order, each once; fewer only where the rest are zeros. ``generator`` (CPU) draws
    the sample: ranks and runs that bring the same one find the same.
    """
    size = values.numel()
    if count >= size:
        return torch.arange(size, device=values.device)
    if not asks_host(
        values
    ):  # they do not sort there, and each look at a sample waits for the device
        return _exact(values, count)
    ratio = count / size
    sample_size = math.ceil(_HITS / ratio)
    if 4 * sample_size > size:
        return _exact(values, count)
    places = torch.randint(size, (sample_size,), generator=generator).to(values.device)
    sample = values[places].abs_()
    share = _MARGIN * ratio
    for _ in range(_TRIES):
        hits = min(sample_size, math.ceil(share * sample_size))
        threshold = float(torch.topk(sample, hits, sorted=True).values[-1])
        candidates = above(values, threshold)
        if candidates.numel() >= count or threshold == 0.0:
            return candidates[_exact(values[candidates], count)]
        share *= 2.0  # an unlucky sample: lower the threshold
    return _exact(values, count)


def above(values: Tensor, threshold: float) -> Tensor:
    """Places of the elements with magnitude at least ``threshold`` and not zero, ascending."""
    size = values.numel()
    if values.device.type != "cpu" or size <= _CHUNK:
        return _reaches(values.abs(), threshold).nonzero().view(-1)
    scratch = values.new_empty(_CHUNK)
    found = []
    for begin in range(0, size, _CHUNK):
        part = values[begin : begin + _CHUNK]
        magnitudes = torch.abs(part, out=scratch[: part.numel()])
        found.append(_reaches(magnitudes, threshold).nonzero().view(-1).add_(begin))
    return torch.cat(found)


def _reaches(magnitudes: Tensor, threshold: float) -> Tensor:
    return magnitudes >= threshold if threshold > 0.0 else magnitudes > 0.0


def _exact(values: Tensor, count: int) -> Tensor:
    return torch.topk(values.abs(), min(count, values.numel()), sorted=False).indices
