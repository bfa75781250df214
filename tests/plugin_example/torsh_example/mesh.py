"""An axis of the mesh: every sample is seen by several processes, which compute the same."""

from __future__ import annotations

from dataclasses import dataclass

from torsh_trainer.mesh import Axis, MeshOptions


@dataclass(frozen=True)
class TwinMesh(MeshOptions):
    """``twin`` consecutive processes compute the same thing, as a host that errs would show."""

    further_axes = (Axis("twin"),)

    twin: int = 1
