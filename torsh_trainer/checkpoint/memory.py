"""A state that stays in memory: copied from all ranks, and laid out for those that go on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torsh_trainer.checkpoint.plain import merge
from torsh_trainer.comm.base import Communicator

ENGINE = "engine"


def gather_state(state: Mapping[str, Any], comm: Communicator) -> dict[str, Any]:
    """``state`` with what every rank adds, copied to the CPU; collective.

    The engine's part must be the same on every rank, as where each holds the whole model.
    """
    own = {key: value for key, value in state.items() if key != ENGINE}
    everyone = comm.all_gather_object(copy_like(own, device=torch.device("cpu")))
    return {**merge(everyone), ENGINE: copy_like(state[ENGINE], device=torch.device("cpu"))}


def copy_like(kept: Any, *, like: Any = None, device: torch.device | None = None) -> Any:
    """A copy of ``kept``; its tensors lie where those of ``like`` do, else on ``device``.

    None for ``device`` leaves a tensor where it is.
    """
    if isinstance(kept, Tensor):
        place = like.device if isinstance(like, Tensor) else device or kept.device
        return kept.detach().to(place, copy=True)
    if isinstance(kept, Mapping):
        beside = like if isinstance(like, Mapping) else {}
        return {
            key: copy_like(value, like=beside.get(key), device=device)
            for key, value in kept.items()
        }
    return copy.deepcopy(kept)
