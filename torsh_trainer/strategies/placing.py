"""A model that comes to its device in pieces: what is not a parameter first, then unit by unit.

A model that is cut over processes need not fit a device whole, not even for a moment.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torsh_trainer.comm.base import Communicator
from torsh_trainer.deferred.recording import DeferredInit
from torsh_trainer.errors import ConfigError


def move_all_but_parameters(model: nn.Module, device: torch.device) -> nn.Module:
    """``model.to(device)``, with parameters left where they are.

    A module with an ``_apply`` of its own (``nn.LSTM``, which keeps its weights in one piece on a
    GPU) knows best, and is moved with its parameters.

    Raises:
        ConfigError: a parameter has no values, since it was built on the device ``meta``.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ConfigError(
                f"the parameter {name!r} has no values: it is on the device meta",
                fix="have build_model give it values: build the model on the CPU",
            )
    moves_itself = {
        part
        for module in model.modules()
        if type(module)._apply is not nn.Module._apply
        for part in module.modules()
    }
    left = [(m, dict(m._parameters)) for m in model.modules() if m not in moves_itself]
    try:
        for module, _ in left:
            module._parameters.clear()
        return model.to(device)
    finally:
        for module, parameters in left:
            module._parameters.update(parameters)


@torch.no_grad()
def share_in_one(
    parameters: Sequence[nn.Parameter], comm: Communicator, init: DeferredInit
) -> None:
    """Rank 0's values, as ``init`` has them, on the communicator's device, in one broadcast for
    each dtype.

    Afterwards parameters of one dtype are contiguous views of one tensor, and what held them
    before is free. Collective.
    """
    if comm.size == 1:
        for parameter in parameters:
            _set_values(parameter, comm.to_device(init.values(parameter)).contiguous())
        return
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for dtype, alike in by_dtype.items():
        sizes = [p.numel() for p in alike]
        flat = torch.empty(sum(sizes), dtype=dtype, device=comm.device)
        for parameter, part in zip(alike, flat.split(sizes), strict=True):
            if comm.rank == 0:
                init.write(parameter, part)
        comm.broadcast(flat, src=0)
        for parameter, part in zip(alike, flat.split(sizes), strict=True):
            _set_values(parameter, part.view(parameter.shape))


def _set_values(parameter: nn.Parameter, values: Tensor) -> None:
    """As ``nn.Module.to`` does, which knows devices whose tensors are of a kind of their own."""
    if torch._has_compatible_shallow_copy_type(parameter.data, values):
        parameter.data = values
    else:
        torch.utils.swap_tensors(parameter, nn.Parameter(values, parameter.requires_grad))
