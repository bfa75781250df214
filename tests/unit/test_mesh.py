"""Axes of a mesh: arithmetic, groups by meaning beside torch's own mesh, what is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, Unsupported
from torsh_trainer.mesh import MEANINGS, Axis, Groups, Mesh, MeshOptions
from torsh_trainer.strategies.base import Strategy
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.dividing import divide
from torsh_trainer.strategies.fsdp import FSDP
from torsh_trainer.testing.mesh import ReplicatedModel
from torsh_trainer.training.program import ProgramTask
from torsh_trainer.training.run_parts import _check_program
from torsh_trainer.utils import registry

SHAPES: list[dict[str, int]] = [
    {"dp_replicate": 4},
    {"dp_shard": 4},
    {"dp_replicate": 2, "dp_shard": 3},
    {"dp_replicate": 2, "model_replicate": 2},
    {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 3, "model_replicate": 2},
]


def world(rank: int, size: int) -> World:
    return World(rank=rank, size=size, local_rank=rank, local_size=size)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(f"{k}={v}" for k, v in s.items()))
def test_places_and_groups_are_those_of_torchs_device_mesh(shape: dict[str, int]) -> None:
    sizes = dict(shape)
    copies = sizes.pop("model_replicate", 1)
    mesh = Mesh(**sizes, further=((Axis("model_replicate"), copies),))
    grid = torch.arange(mesh.size).view([*mesh.sizes.values()])
    for rank in range(mesh.size):
        mine = replace(mesh, rank=rank)
        place = tuple(int(i) for i in (grid == rank).nonzero()[0])
        assert tuple(mine.coordinates.values()) == place
        for meaning in MEANINGS:
            axes = mesh.axes_of(meaning)
            # All of an axis that the meaning goes along, this process's place on the others.
            cut = [slice(None) if a in axes else i for a, i in zip(mesh.sizes, place, strict=True)]
            assert list(mine.ranks(meaning)) == sorted(grid[tuple(cut)].flatten().tolist())
        assert mine.ranks("data").index(rank) == mine.dp_rank


@dataclass(frozen=True)
class SplitLoss(MeshOptions):
    further_axes = (Axis("chunk", frozenset({"model", "loss"})), Axis("copy"))

    chunk: int = 1
    copy: int = 1


def test_an_axis_of_a_plugin_lies_within_ours_and_extends_the_groups_that_it_names() -> None:
    mesh = SplitLoss(chunk=2, copy=3).mesh(dp_replicate=2, rank=4)
    assert {axis: size for axis, size in mesh.sizes.items() if size > 1} == {
        "dp_replicate": 2,
        "chunk": 2,
        "copy": 3,
    }
    assert (mesh.size, mesh.dp, mesh.dp_rank) == (12, 2, 0)
    assert mesh.ranks("data") == (4, 10)
    assert mesh.ranks("loss") == (1, 4, 7, 10)
    assert mesh.ranks("norm") == (4,)
    assert mesh.ranks("model") == (0, 1, 2, 3, 4, 5)


def test_the_size_of_a_plugins_axis_is_checked_as_ours_are() -> None:
    with pytest.raises(ConfigError, match=r"mesh\.chunk=0 is not a number of processes"):
        SplitLoss(chunk=0)
    with pytest.raises(ConfigError, match="chunk=2 does not divide the 3 processes of this job"):
        divide(world(0, 3), DDP(), SplitLoss(chunk=2))
    with pytest.raises(Unsupported, match=r"strategy=ddp cannot honour mesh\.chunk=2"):
        divide(world(0, 4), DDP(), SplitLoss(chunk=2))


@pytest.mark.parametrize("rank", range(8))
def test_torch_numbers_the_axes_in_the_same_order(rank: int) -> None:
    mesh = Mesh(dp_replicate=2, dp_shard=2, tp=2, rank=rank)
    axes = ("dp_replicate", "dp_shard", "tp")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    try:
        theirs = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=axes)
        assert list(theirs.get_coordinate() or ()) == [mesh.coordinates[axis] for axis in axes]
        shard = dist.get_process_group_ranks(theirs.get_group("dp_shard"))
        copies = ReplicatedModel(model_replicate=2)
        beside = copies.mesh(dp_replicate=2, dp_shard=2, rank=rank)
        assert tuple(shard) == beside.ranks("norm")
    finally:
        dist.destroy_process_group()


def test_one_process_that_stands_in_for_several_meets_nobody() -> None:
    comm = LocalCommunicator()
    groups = Groups(Mesh(dp_replicate=4, rank=3), comm)
    assert all(groups.group(meaning) is comm for meaning in MEANINGS)


@pytest.mark.parametrize(
    ("strategy", "options", "size", "expected"),
    [
        (DDP(), {}, 4, (4, 1)),
        (DDP(), {"dp_replicate": -1}, 4, (4, 1)),
        (DDP(), {"dp_replicate": 4, "dp_shard": 1}, 4, (4, 1)),
        (FSDP(), {}, 4, (1, 4)),
        (FSDP(shard_size=2), {}, 4, (2, 2)),
        (FSDP(), {"dp_shard": 2}, 4, (2, 2)),
        (FSDP(shard_size=2), {"dp_shard": 2}, 4, (2, 2)),
        (FSDP(), {"dp_shard": -1}, 4, (1, 4)),
        (FSDP(), {"dp_replicate": 2}, 8, (2, 4)),
        (FSDP(), {"dp_replicate": 2, "dp_shard": -1}, 8, (2, 4)),
        (FSDP(), {"dp_replicate": -1, "dp_shard": 2}, 8, (4, 2)),
    ],
)
def test_sizes_left_out_are_the_strategys_or_what_remains(
    strategy: Strategy, options: dict[str, int], size: int, expected: tuple[int, int]
) -> None:
    for rank in range(size):
        running, mesh = divide(world(rank, size), strategy, MeshOptions(**options))
        assert (mesh.dp_replicate, mesh.dp_shard) == expected
        assert mesh.dp_rank == mesh.rank == rank
        # What the strategy makes of the communicator it is given is the same mesh.
        assert running.mesh(world(rank, size)) == mesh


def test_processes_with_the_same_samples_share_a_place_among_the_data() -> None:
    meshes = [
        divide(world(r, 8), FSDP(shard_size=2), ReplicatedModel(model_replicate=2))[1]
        for r in range(8)
    ]
    assert [m.dp_rank for m in meshes] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {(m.dp, m.dp_replicate, m.dp_shard) for m in meshes} == {(4, 2, 2)}


@pytest.mark.parametrize(
    ("strategy", "options", "size", "words"),
    [
        (DDP(), {"dp_replicate": 3}, 8, "mesh: dp_replicate=3 does not divide the 8 processes"),
        (FSDP(), {"dp_replicate": 3}, 2, "mesh: dp_replicate=3 does not divide the 2 processes"),
        (FSDP(), {"dp_replicate": 4, "dp_shard": -1}, 2, "mesh: dp_replicate=4 does not divide"),
        (FSDP(), {"dp_shard": 3}, 8, "mesh: dp_shard=3 does not divide the 8 processes"),
        (
            FSDP(),
            {"dp_replicate": 2, "dp_shard": 2},
            8,
            "mesh: dp_replicate=2 x dp_shard=2 = 4 is not the 8 processes",
        ),
        (FSDP(), {"dp_replicate": -1, "dp_shard": -1}, 8, "are both -1"),
        (FSDP(), {"dp_shard": 0}, 8, "mesh.dp_shard=0 is not a number of processes"),
        (FSDP(shard_size=4), {"dp_shard": 2}, 8, "strategy.shard_size=4, and the mesh has"),
        (DDP(), {"dp_shard": 2}, 8, "strategy=ddp cannot honour mesh.dp_shard=2"),
        (DDP(), {"tp": 2}, 8, "strategy=ddp cannot honour mesh.tp=2"),
        (FSDP(), {"tp": -1}, 8, "mesh.tp=-1 leaves to the number of processes how layers are cut"),
        (FSDP(), {"tp": 3}, 8, "mesh: tp=3 does not divide the 8 processes"),
        (DDP(), {"pp": -1}, 8, "mesh.pp=-1"),
        (FSDP(), {"cp": 2}, 8, "mesh.cp=2"),
        (FSDP(), {"ep": 2}, 8, "mesh.ep=2"),
    ],
)
def test_a_mesh_that_does_not_fit_is_one_sentence(
    strategy: Strategy, options: dict[str, int], size: int, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        divide(world(0, size), strategy, MeshOptions(**options))
    assert words in str(caught.value)


KEEP_APART = {"ddp", "fsdp", "gloo", "mpi", "nccl", "parallel"}
"""Strategies that the contract on data 2 x model 2 holds (nccl's engine is gloo's)."""


@pytest.mark.parametrize("name", registry.STRATEGIES.names())
def test_a_strategy_honours_processes_with_the_same_samples_or_refuses_by_name(name: str) -> None:
    options = ReplicatedModel(model_replicate=2)
    strategy = registry.strategy_class(name)()
    if name in KEEP_APART:
        assert divide(world(2, 4), strategy, options)[1].dp == 2
        return
    with pytest.raises(Unsupported, match=f"strategy={name} cannot honour mesh.model_replicate=2"):
        divide(world(2, 4), strategy, options)


def test_a_task_with_a_loop_of_its_own_refuses_processes_with_the_same_samples() -> None:
    mesh = divide(world(0, 4), DDP(), ReplicatedModel(model_replicate=2))[1]
    context: Any = SimpleNamespace(
        spec=SimpleNamespace(stages=("fit",)), comm=SimpleNamespace(world=world(0, 4)), mesh=mesh
    )
    with pytest.raises(Unsupported, match="only 2 of 4 processes see other samples"):
        _check_program(object.__new__(ProgramTask), context)


def test_copies_of_a_model_that_do_not_divide_the_processes_are_refused() -> None:
    with pytest.raises(ConfigError, match="model_replicate=2 does not divide the 3 processes"):
        divide(world(0, 3), DDP(), ReplicatedModel(model_replicate=2))
