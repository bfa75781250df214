"""Parameters cut over ``tp``: each comes to the device whole, and a process keeps its part.

A part is a DTensor over the mesh of ``tp``, of the shape and the name of the whole, so that FSDP2
cuts it further, and checkpoints and optimizers see one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torsh_trainer.comm.base import Communicator
from torsh_trainer.deferred.recording import DeferredInit
from torsh_trainer.mesh import Groups
from torsh_trainer.strategies.placing import share_in_one
from torsh_trainer.strategies.tensor_parallel.functions import own_part
from torsh_trainer.strategies.tensor_parallel.layers import Cut


class Cutting:
    """Cuts the parameters of ``cuts`` over the processes of ``groups.tensor``.

    ``holders`` is where each is held. Without ``cuts`` it does what is done without ``tp``.
    """

    def __init__(self, model: nn.Module, cuts: Mapping[nn.Parameter, Cut], groups: Groups) -> None:
        self._cuts = dict(cuts)
        self._groups = groups
        self._holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in model.modules() if cuts else ():
            for key, parameter in module._parameters.items():
                if parameter is not None and parameter in self._cuts:
                    self._holders.setdefault(parameter, []).append((module, key))

    def place(
        self, parameters: Sequence[nn.Parameter], comm: Communicator, init: DeferredInit
    ) -> None:
        """Gives ``parameters`` rank 0's values on the device, and this process its parts of them.

        ``comm`` are the processes that see other samples. Collective over them, and over all
        processes where layers are cut.
        """
        if not self._cuts:
            share_in_one(parameters, comm, init)
            return
        share_in_one(parameters, self._groups.stage, init)
        for parameter in parameters:
            cut = self._cuts.pop(parameter, None)
            if cut is not None:
                self._replace(parameter, cut)

    @property
    def placement(self) -> Any:
        """For ``fully_shard``: along which dimension it cuts a parameter."""
        if not self._holders:
            return None
        # Imported here: it costs the start of every run that has no use for it.
        from torch.distributed.tensor.placement_types import Shard, _StridedShard

        def place(parameter: Any) -> Any:
            # Rows of several projections in turn cannot be named once they are cut again.
            mixed = any(isinstance(p, _StridedShard) for p in getattr(parameter, "placements", ()))
            return Shard(1) if mixed else None

        return place

    @torch.no_grad()
    def _replace(self, parameter: nn.Parameter, cut: Cut) -> None:
        whole = parameter.data
        part = as_part(own_part(whole, self._groups.tensor, cut.dim, cut.parts), whole, cut,
                       self._groups.tensor_mesh)  # fmt: skip
        new = nn.Parameter(part, requires_grad=parameter.requires_grad)
        for module, key in self._holders[parameter]:
            module._parameters[key] = new
        parameter.data = whole.new_empty(0)


def as_part(own: Tensor, whole: Tensor, cut: Cut, mesh: Any) -> Any:
    """This process's part of ``whole`` as a DTensor over ``mesh``, in memory of its own."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    mixed = cut.parts > 1
    placement = _StridedShard(cut.dim, split_factor=cut.parts) if mixed else Shard(cut.dim)
    held = own.clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(
        held, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
    )
