"""The axes of a mesh: how many processes each has, and where a process stands on them.

A mesh is a box of processes. From the outermost axis to the innermost, which numbers consecutive
ranks: ``pp`` (pipeline stages), ``dp_replicate`` (replicas of the sharded model), ``dp_shard``
(shards of the parameters), ``cp`` (parts of a sequence), ``tp`` (parts of a layer), and those that
a plugin adds (``Axis``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, Unsupported

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Outermost first; those of plugins lie within the last."""

Meaning = Literal[
    "data", "loss", "gradient", "norm", "model", "tensor", "pipeline", "stage", "context"
]
MEANINGS: Mapping[Meaning, tuple[str, ...]] = {
    "data": ("dp_replicate", "dp_shard"),
    "loss": ("dp_replicate", "dp_shard"),
    "gradient": ("dp_replicate", "dp_shard", "cp"),
    "norm": ("pp", "dp_shard", "cp", "tp"),
    "model": ("pp", "cp", "tp"),
    "tensor": ("tp",),
    "pipeline": ("pp",),
    "stage": ("dp_replicate", "dp_shard", "cp", "tp"),
    "context": ("cp",),
}
"""Along which axes the processes of a group lie: ``data`` see other samples, ``loss`` have parts of
one loss, ``gradient`` summands of one gradient, ``norm`` parts of it, ``model`` the same samples,
``tensor`` parts of one layer, ``pipeline`` other layers of one model, ``stage`` the same layers, or
parts of them, ``context`` parts of one sequence.
"""

NOT_YET = {
    "ep": "parts of the experts",
}


@dataclass(frozen=True)
class Axis:
    """An axis that a plugin adds, along which processes have the same samples.

    ``meanings`` are the groups (``MEANINGS``) that extend along it: ``model`` always, ``loss``
    where they have parts of one loss, ``norm`` where they have parts of one gradient. Samples
    differ along ``dp_replicate`` and ``dp_shard`` alone.
    """

    name: str
    meanings: frozenset[Meaning] = frozenset({"model"})

    def __post_init__(self) -> None:
        assert self.name not in AXES, f"{self.name} is an axis of every mesh"
        assert "model" in self.meanings, "its processes have the same samples"
        assert "data" not in self.meanings, "its processes have the same samples"


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes, and this process's place: ``rank`` in [0, size).

    ``further`` are axes of plugins with their sizes, outermost first.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    further: tuple[tuple[Axis, int], ...] = ()
    rank: int = 0

    @classmethod
    def data_parallel(cls, world: World, *, shard: int = 1) -> Mesh:
        """Every process takes other samples; groups of ``shard`` consecutive ranks share a model.

        Raises:
            ConfigError: the world does not divide into groups of that size.
        """
        if shard < 1 or world.size % shard:
            raise ConfigError(
                f"{world.size} processes do not divide into sharding groups of {shard}",
                fix=f"set strategy.shard_size or mesh.dp_shard to a divisor of {world.size}",
            )
        return cls(dp_replicate=world.size // shard, dp_shard=shard, rank=world.rank)

    @property
    def sizes(self) -> dict[str, int]:
        """By axis, outermost first."""
        own = {axis: getattr(self, axis) for axis in AXES}
        return {**own, **{axis.name: size for axis, size in self.further}}

    def axes_of(self, meaning: Meaning) -> tuple[str, ...]:
        """The axes along which the group of that meaning extends."""
        further = (axis.name for axis, _ in self.further if meaning in axis.meanings)
        return (*MEANINGS[meaning], *further)

    @property
    def size(self) -> int:
        """How many processes there are."""
        return math.prod(self.sizes.values())

    @property
    def coordinates(self) -> dict[str, int]:
        """This process's place on each axis."""
        rest, places, sizes = self.rank, {}, self.sizes
        for axis in reversed(sizes):
            rest, places[axis] = divmod(rest, sizes[axis])
        return {axis: places[axis] for axis in sizes}

    @property
    def dp(self) -> int:
        """How many parts the samples of a step are divided into."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_rank(self) -> int:
        """Which of these parts is this process's."""
        places = self.coordinates
        return places["dp_replicate"] * self.dp_shard + places["dp_shard"]

    @property
    def sees_other_samples(self) -> bool:
        """Whether every process has samples of its own: no axis but those of data is above 1."""
        return self.dp == self.size

    def ranks(self, meaning: Meaning) -> tuple[int, ...]:
        """The ranks of this process's group of that meaning, ascending; itself among them."""
        found, stride = [self.rank], 1
        places, sizes, along = self.coordinates, self.sizes, self.axes_of(meaning)
        for axis in reversed(sizes):
            size = sizes[axis]
            if axis in along:
                found = [r + (i - places[axis]) * stride for r in found for i in range(size)]
            stride *= size
        return tuple(sorted(found))


@dataclass(frozen=True)
class MeshOptions:
    """Sizes of the axes of the mesh, by which processes divide the work.

    Null leaves a size to the strategy (``dp_shard``) or is what remains (``dp_replicate``); -1 is
    what remains, for one axis. ``dp_shard`` is how many processes share one copy of the parameters
    (``strategy.shard_size`` of fsdp), ``dp_replicate`` how many such copies there are. ``tp`` is
    how many processes share a layer, ``pp`` how many have the layers of one model in turn, ``cp``
    how many have parts of a sequence. ``ep`` is 1 for now. A subclass adds axes: ``further_axes``,
    and for each a field of its name with its size.

    Raises:
        ConfigError: a size is neither positive nor -1, or several are -1.
        Unsupported: an axis that nothing implements yet is above 1.
    """

    further_axes: ClassVar[tuple[Axis, ...]] = ()
    """Outermost first; a strategy has to name them in ``Strategy.model_axes``."""

    dp_replicate: int | None = None
    dp_shard: int | None = None
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        given = {
            axis: getattr(self, axis) for axis in (*self.data_sizes, "tp", "pp", "cp", *NOT_YET)
        }
        for axis, size in given.items():
            if size is not None and size < 1 and size != -1:
                raise ConfigError(
                    f"mesh.{axis}={size} is not a number of processes",
                    fix="give 1 or more, or -1 for what remains",
                )
        for further in self.further_axes:
            size = getattr(self, further.name)
            if size < 1:
                raise ConfigError(
                    f"mesh.{further.name}={size} is not a number of processes",
                    fix="give 1 or more",
                )
        for axis, what in NOT_YET.items():
            if given[axis] != 1:
                raise Unsupported(
                    f"mesh.{axis}={given[axis]}: nothing divides {what} over processes yet",
                    fix=f"set mesh.{axis}=1; mesh.dp_shard divides parameters, mesh.tp layers, "
                    "mesh.pp the model, mesh.cp sequences",
                )
        for axis, what in (("tp", "layers are"), ("pp", "the model is"), ("cp", "sequences are")):
            if given[axis] == -1:
                raise ConfigError(
                    f"mesh.{axis}=-1 leaves to the number of processes how {what} cut",
                    fix=f"set mesh.{axis}=1, or its size with mesh.dp_shard=-1 for what remains",
                )
        rest = [f"mesh.{axis}" for axis, size in given.items() if size == -1]
        if len(rest) > 1:
            raise ConfigError(
                f"{' and '.join(rest)} are both -1, and only one can be what remains",
                fix="give one of them its size",
            )

    @property
    def data_sizes(self) -> dict[str, int | None]:
        """The sizes asked for of the axes along which processes see other samples."""
        return {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard}

    @property
    def model_sizes(self) -> dict[str, int]:
        """The sizes of the axes along which processes see the same samples."""
        further = {axis.name: getattr(self, axis.name) for axis in self.further_axes}
        return {"pp": self.pp, "cp": self.cp, "tp": self.tp, **further}

    def mesh(self, *, dp_replicate: int, dp_shard: int = 1, rank: int) -> Mesh:
        """The mesh with these sizes for the samples, and all others as they are here."""
        return Mesh(
            pp=self.pp,
            dp_replicate=dp_replicate,
            dp_shard=dp_shard,
            cp=self.cp,
            tp=self.tp,
            further=tuple((axis, getattr(self, axis.name)) for axis in self.further_axes),
            rank=rank,
        )

    def data_of(self, world_size: int) -> tuple[int, int | None]:
        """On ``world_size`` processes: how many see other samples, and how many share one copy of
        the parameters (None: the strategy says).

        Raises:
            ConfigError: the sizes do not multiply to ``world_size``.
        """
        model = math.prod(self.model_sizes.values())
        replicate, shard = (None if s == -1 else s for s in (self.dp_replicate, self.dp_shard))
        if world_size % model:
            raise self._unfit(world_size)
        dp = world_size // model
        if shard is None and (replicate is not None or self.dp_shard == -1):
            shard = max(1, dp // (replicate or 1))
        if dp % (shard or 1) or (replicate and shard and replicate * shard != dp):
            raise self._unfit(world_size)
        return dp, shard

    def _unfit(self, world_size: int) -> ConfigError:
        sizes = {**self.data_sizes, **self.model_sizes}
        given = {axis: size for axis, size in sizes.items() if size is not None and size > 1}
        words = " x ".join(f"{axis}={size}" for axis, size in given.items())
        product = math.prod(given.values())
        total = f" = {product}" if len(given) > 1 else ""
        wrong = "does not divide" if world_size % product else "is not"
        return ConfigError(
            f"mesh: {words}{total} {wrong} the {world_size} processes of this job",
            fix=f"let the sizes multiply to {world_size}, or give one of them as -1",
            world_size=world_size,
            product=product,
        )
