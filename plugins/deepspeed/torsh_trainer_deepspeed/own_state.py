"""Models whose ``state_dict`` gives copies of their parameters, or packs them otherwise.

Where DeepSpeed has cut the parameters, such a model can be saved and loaded by its own methods
alone, with all of its values in it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torsh_trainer.checkpoint.shards import FlatShard
from torsh_trainer.comm.base import Communicator


def gives_copies(model: nn.Module, given: Mapping[str, Any]) -> bool:
    """Whether ``given``, the model's ``state_dict(keep_vars=True)``, has tensors that are neither a
    parameter nor a buffer of it, and lacks a parameter."""
    parameters = {id(p) for p in model.parameters()}
    values = {id(value) for value in given.values()}
    if parameters <= values:
        return False
    own = parameters | {id(buffer) for buffer in model.buffers()}
    return any(isinstance(v, Tensor) and id(v) not in own for v in given.values())


@contextlib.contextmanager
def whole_parameters(
    model: nn.Module,
    parts: Iterable[tuple[nn.Parameter, Tensor | FlatShard]],
    comm: Communicator,
) -> Iterator[None]:
    """Within, the parameters of ``model`` are whole, with the values of all ranks' ``parts``.

    Collective at its beginning. Takes the memory of the whole model on every rank.
    """
    before = [(p, p.data) for p in model.parameters()]
    wholes = [(p, _whole(part, comm)) for p, part in parts]
    try:
        for p, whole in wholes:
            p.data = whole
        yield
    finally:
        for p, data in before:
            p.data = data


def _whole(part: Tensor | FlatShard, comm: Communicator) -> Tensor:
    """A tensor of its own."""
    if not isinstance(part, FlatShard):
        return part.detach().clone()
    flat = comm.to_device(torch.zeros(math.prod(part.global_shape), dtype=part.tensor.dtype))
    flat.narrow(0, part.offset, part.tensor.numel()).copy_(part.tensor.detach().flatten())
    comm.all_reduce(flat)  # each number lies on one rank, and is zero on the others
    return flat.view(part.global_shape)


@torch.no_grad()
def put_whole(part: Tensor | FlatShard, whole: Tensor) -> None:
    """Writes what ``part`` holds of ``whole`` into it."""
    if isinstance(part, FlatShard):
        values = whole.detach().flatten().narrow(0, part.offset, part.tensor.numel())
        part.tensor.copy_(values.view_as(part.tensor))
    else:
        part.copy_(whole)
