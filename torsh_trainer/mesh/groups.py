"""The groups of a mesh by what they mean, as communicators."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.mesh.axes import Meaning, Mesh


class Groups:
    """The processes that this one shares a meaning with (``MEANINGS``), among those of ``comm``.

    A group of all processes is ``comm`` itself, so that where every process sees other samples
    nothing is made. Else making this is collective. ``whole`` is ``comm``.
    """

    def __init__(self, mesh: Mesh, comm: Communicator) -> None:
        # One process may stand in for a run of several (a preview), and meets nobody.
        self.mesh = Mesh() if comm.size == 1 else mesh
        assert self.mesh.size == comm.size, "a mesh of other processes"
        self.whole = comm
        self._made: dict[tuple[int, ...], Communicator] = {}
        if not self.mesh.sees_other_samples:
            for meaning in _MADE_AT_ONCE:  # in one order on all processes
                self.group(meaning)

    def group(self, meaning: Meaning) -> Communicator:
        """The communicator of that meaning; collective where it is asked for the first time."""
        ranks = self.mesh.ranks(meaning)
        if len(ranks) == self.whole.size:
            return self.whole
        if ranks not in self._made:
            self._made[ranks] = self._make(meaning, ranks)
        return self._made[ranks]

    @property
    def data(self) -> Communicator:
        """Processes that see other samples."""
        return self.group("data")

    @property
    def loss(self) -> Communicator:
        """Processes that have parts of one loss."""
        return self.group("loss")

    @property
    def gradient(self) -> Communicator:
        """Processes whose gradients are summed, or averaged: they see other samples or tokens."""
        return self.group("gradient")

    @property
    def context(self) -> Communicator:
        """Processes that have parts of one sequence."""
        return self.group("context")

    @property
    def norm(self) -> Communicator:
        """Processes that have parts of one gradient."""
        return self.group("norm")

    @property
    def model(self) -> Communicator:
        """Processes that have the same samples."""
        return self.group("model")

    @property
    def tensor(self) -> Communicator:
        """Processes that have parts of one layer."""
        return self.group("tensor")

    @property
    def pipeline(self) -> Communicator:
        """Processes that have other layers of one model, by their stage."""
        return self.group("pipeline")

    @property
    def stage(self) -> Communicator:
        """Processes that have the same layers, or parts of them; all where there is one stage."""
        return self.whole if self.mesh.pp == 1 else self.group("stage")

    def close(self) -> None:
        """Lets go of the groups that were made here."""
        for comm in self._made.values():
            comm.close()
        self._made.clear()

    def _make(self, meaning: Meaning, ranks: tuple[int, ...]) -> Communicator:
        if meaning in _MAY_BE_ALONE and math.prod(self._sizes(meaning)) == 1:
            return LocalCommunicator(self.whole.device)
        if meaning == "norm" and self.mesh.dp_shard == len(ranks):
            return self.whole.part_of(self.data_mesh.get_group("dp_shard"))  # FSDP2's own
        made = self.whole.split(ranks)
        assert made is not None
        return made

    def _sizes(self, meaning: Meaning) -> list[int]:
        return [self.mesh.sizes[axis] for axis in self.mesh.axes_of(meaning)]

    @cached_property
    def device_mesh(self) -> Any:
        """torch's mesh of all axes above 1, and ``dp_shard``; collective.

        The process has a process group of torch.distributed.
        """
        # Imported here: it costs the start of every run that has no use for it.
        from torch.distributed.device_mesh import init_device_mesh

        sizes = self.mesh.sizes
        axes = tuple(axis for axis in sizes if sizes[axis] > 1 or axis == "dp_shard")
        kind = self.whole.device.type
        shape = tuple(sizes[axis] for axis in axes)
        return init_device_mesh(kind, shape, mesh_dim_names=axes)

    @property
    def data_mesh(self) -> Any:
        """torch's mesh over which FSDP2 cuts and replicates parameters; collective at first."""
        whole = self.device_mesh
        names = tuple(n for n in ("dp_replicate", "dp_shard") if n in whole.mesh_dim_names)
        if self.mesh.cp > 1:  # which has other gradients of the same parameters
            return self._shards_over_context
        return whole if names == whole.mesh_dim_names else whole[names]

    @cached_property
    def _shards_over_context(self) -> Any:
        """As ``data_mesh``, where parameters are cut over ``dp_shard`` and ``cp`` together."""
        whole = self.device_mesh
        flat = whole["dp_shard", "cp"]._flatten("dp_shard_cp")
        return whole["dp_replicate", "dp_shard_cp"] if self.mesh.dp_replicate > 1 else flat

    @property
    def tensor_mesh(self) -> Any:
        """torch's mesh over which layers are cut, where ``tp`` is above 1; collective at first."""
        return self.device_mesh["tp"]


_MADE_AT_ONCE: tuple[Meaning, ...] = (
    *("data", "loss", "gradient", "model", "tensor", "pipeline", "context"),
)
_MAY_BE_ALONE: tuple[Meaning, ...] = ("norm", "model", "tensor", "pipeline", "stage", "context")
"""Of which a process may be the only one: it needs no group of its own then."""
