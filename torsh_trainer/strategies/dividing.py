"""What a strategy and the knobs of the mesh come to: which process has which part of the work."""

from __future__ import annotations

from dataclasses import replace

from torsh_trainer.environments.world import World
from torsh_trainer.mesh import Mesh, MeshOptions
from torsh_trainer.strategies.base import Strategy


def divide(world: World, strategy: Strategy, options: MeshOptions) -> tuple[Strategy, Mesh]:
    """The strategy as it will run, and the mesh of ``world``.

    Raises:
        ConfigError: sizes do not multiply to the number of processes.
        Unsupported: the strategy cannot honour an axis.
    """
    dp, dp_shard = options.data_of(world.size)
    if dp_shard is not None:
        strategy = strategy.with_shards(dp_shard)
    same_samples = {axis: size for axis, size in options.model_sizes.items() if size > 1}
    if not same_samples:
        return strategy, strategy.mesh(world)
    for axis, size in same_samples.items():
        if axis not in strategy.model_axes:
            raise strategy.refuse(
                f"mesh.{axis}={size}: it takes every process for one with samples of its own",
                use=f"use strategy={_WHO_CAN.get(axis, 'ddp or strategy=fsdp')}",
            )
    outline = options.mesh(dp_replicate=dp, rank=world.rank)
    data = strategy.mesh(replace(world, rank=outline.dp_rank, size=dp))
    return strategy, options.mesh(
        dp_replicate=data.dp_replicate, dp_shard=data.dp_shard, rank=world.rank
    )


_WHO_CAN = {"tp": "parallel or strategy=fsdp", "pp": "parallel", "cp": "parallel"}
"""What to take for an axis that divides a model."""
