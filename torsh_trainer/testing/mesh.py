"""A mesh on which several processes have the same samples, before any engine divides a layer."""

from __future__ import annotations

from dataclasses import dataclass

from torsh_trainer.mesh import Axis, MeshOptions


@dataclass(frozen=True)
class ReplicatedModel(MeshOptions):
    """``model_replicate`` consecutive processes compute the same thing on the same samples.

    It stands in for the axes that divide a model, where a strategy or a plugin is to show that it
    keeps to the processes that see other samples.
    """

    further_axes = (Axis("model_replicate"),)

    model_replicate: int = 1
