"""Flat shards: what ranks hold as intervals of flattened tensors is saved and loaded as tensors."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.checkpoint.shards import FlatShard
from torsh_trainer.checkpoint.store.integrity import read_manifest
from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.errors import TorshError
from torsh_trainer.testing.ranks import shared_pool
from torsh_trainer.testing.state import whole_state

SHAPES = {
    "scalar": (),
    "one": (1,),
    "bias": (11,),
    "matrix": (5, 7),
    "wide": (2, 31),
    "conv": (4, 3, 2, 5),
    "ones": (1, 1, 9),
    "empty": (0, 3),
}


def tensors(seed: int = 0) -> dict[str, Tensor]:
    """Whole tensors, no two elements of one alike; one of them of two bytes an element."""
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {**found, "half": found["conv"].bfloat16()}


def state_of(model: dict[str, Any]) -> dict[str, Any]:
    """A model, and slots cut as it is."""
    slots = {name: {"exp_avg": _negative(leaf)} for name, leaf in model.items()}
    return {"engine": {"model": model, "optimizer": {"main": {"state": slots}}}}


def _negative(leaf: Any) -> Any:
    return leaf._replace(tensor=-leaf.tensor) if isinstance(leaf, FlatShard) else -leaf


def flat(whole: dict[str, Tensor], rank: int, ranks: int, seed: int) -> dict[str, FlatShard]:
    """This rank's intervals; the cuts are anywhere, and some intervals are empty."""
    draw = random.Random(seed)
    found = {}
    for name, tensor in whole.items():
        count = tensor.numel()
        cuts = [0, *sorted(draw.randint(0, count) for _ in range(ranks - 1)), count]
        piece = tensor.flatten()[cuts[rank] : cuts[rank + 1]].clone()
        found[name] = FlatShard(name, tuple(tensor.shape), cuts[rank], piece)
    return found


def sharded(whole: dict[str, Tensor], ranks: int) -> dict[str, Tensor]:
    """As FSDP cuts: by rows, unevenly; a tensor without rows stays whole."""
    mesh = init_device_mesh("cpu", (ranks,))
    return {
        name: distribute_tensor(tensor, mesh, [Shard(0)]) if tensor.dim() else tensor
        for name, tensor in whole.items()
    }


def held(layout: str, seed: int, comm: Communicator) -> dict[str, Any]:
    """The tensors of ``seed`` as this rank holds them under a layout."""
    whole, world = tensors(seed), comm.world
    if layout.startswith("flat"):
        return state_of(flat(whole, world.rank, world.size, seed=int(layout[4:])))
    return state_of(sharded(whole, world.size) if layout == "rows" else whole)


def different(found: Any, expected: Any, name: str = "") -> list[str]:
    """Names of tensors that are not the same, bit for bit."""
    if isinstance(expected, dict):
        parts = (different(found[key], expected[key], f"{name}.{key}") for key in expected)
        return [*itertools.chain(*parts), *sorted(found.keys() ^ expected.keys())]
    same = found.dtype == expected.dtype and torch.equal(found, expected)
    return [] if same else [name]


# -- what the ranks do ----------------------------------------------------------------------------


def save(comm: Communicator, folder: Path, layout: str, mode: str = "sync") -> None:
    saver = DcpCheckpointer(folder, comm, CheckpointOptions(mode=mode))  # type: ignore[arg-type]
    state = held(layout, 0, comm)
    saver.save(1, state, {})
    for shard in state["engine"]["model"].values() if mode == "async" else ():
        if isinstance(shard, FlatShard):
            shard.tensor.zero_()  # a thread may still be writing
    saver.close()


def load(comm: Communicator, folder: Path, layout: str) -> list[str]:
    """Loads over other values; what is not as it was saved."""
    target = held(layout, 1, comm)
    expected = held(layout, 0, comm)
    before = whole_state(target, comm)
    loaded = DcpCheckpointer(folder, comm).load(target)
    whole = whole_state(loaded, comm)
    assert different(before, whole), "it held that already"
    for name, leaf in loaded["engine"]["model"].items():
        assert leaf is target["engine"]["model"][name], f"{name} was not filled in place"
        assert isinstance(leaf, FlatShard) == layout.startswith("flat")
        assert isinstance(leaf, DTensor) == (layout == "rows" and leaf.dim() > 0)
    return different(whole, whole_state(expected, comm))


def refused(comm: Communicator, folder: Path, pieces: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Saves a tensor of 6 elements of which each rank holds [start, stop)."""
    start, stop = pieces[comm.world.rank]
    shard = FlatShard("w", (2, 3), start, torch.arange(float(stop - start)))
    saver = DcpCheckpointer(folder, comm)
    try:
        saver.save(1, {"model": {"fine": torch.ones(3), "w": shard}}, {})
    except TorshError as error:
        return {"text": str(error), "steps": saver.steps(), "left": _left(folder)}
    return {"text": None}


def _left(folder: Path) -> list[str]:
    """Folders of a save; the lock of a run is none."""
    if not folder.exists():
        return []
    return [path.name for path in folder.iterdir() if path.is_dir()]


# -- what came of it ------------------------------------------------------------------------------


SAVED_BY = [(4, "flat1"), (4, "flat2"), (2, "flat3"), (2, "rows"), (4, "rows"), (2, "whole")]


@pytest.fixture(scope="module", params=SAVED_BY, ids=lambda saved: f"{saved[0]}-{saved[1]}")
def checkpoint(request, tmp_path_factory) -> Path:
    ranks, layout = request.param
    folder = tmp_path_factory.mktemp(f"{ranks}-{layout}")
    shared_pool(ranks).run(save, folder, layout)
    return folder


@pytest.mark.matrix(8)
@pytest.mark.parametrize(
    ("ranks", "layout"), [(4, "flat5"), (2, "flat6"), (2, "rows"), (2, "whole")]
)
def test_whatever_ranks_saved_others_load_in_any_layout_bit_for_bit(checkpoint, ranks, layout):
    assert shared_pool(ranks).run(load, checkpoint, layout) == [[]] * ranks


def test_one_process_loads_it_whole_and_so_does_plain_pytorch(checkpoint):
    assert load(LocalCommunicator(), checkpoint, "whole") == []
    state = state_of(tensors(1))
    dcp.load(state, checkpoint_id=checkpoint / "step-00000001", no_dist=True)
    assert different(state, state_of(tensors(0))) == []


def test_one_process_may_hold_flat_shards_too(tmp_path):
    save(LocalCommunicator(), tmp_path, "flat1")
    assert load(LocalCommunicator(), tmp_path, "flat2") == []
    assert load(LocalCommunicator(), tmp_path, "whole") == []


def test_an_asynchronous_save_holds_the_moment_of_the_call(tmp_path):
    shared_pool(2).run(save, tmp_path, "flat1", "async")
    assert load(LocalCommunicator(), tmp_path, "whole") == []


def test_what_replicas_hold_alike_is_written_once(tmp_path):
    def save_replicas(comm: Communicator, folder: Path) -> None:
        half = flat({"w": torch.arange(30_000.0)}, comm.world.rank % 2, 2, seed=1)
        DcpCheckpointer(folder, comm).save(1, half, {})

    shared_pool(4).run(save_replicas, tmp_path)
    files = read_manifest(tmp_path / "step-00000001").files
    written = sum(file.size_bytes for name, file in files.items() if name.endswith(".distcp"))
    assert 30_000 * 4 <= written < 30_000 * 4 * 1.1
    target = {"w": torch.zeros(30_000)}
    DcpCheckpointer(tmp_path, LocalCommunicator()).load(target)
    assert torch.equal(target["w"], torch.arange(30_000.0))


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([(0, 2), (3, 6)], "5"),  # a gap
        ([(0, 5), (4, 6)], "overlapping"),
        ([(0, 4), (3, 6)], "one holds"),  # both have pieces that begin at (1, 0)
        ([(0, 4), (0, 6)], "one holds"),  # replicas, cut differently
        ([(0, 2), (2, 7)], "elements 2 to 7 of 6"),
        ([(0, 0), (0, 0)], "no rank holds any of it"),
    ],
    ids=["gap", "overlap", "overlap at one place", "other lengths", "beyond", "nothing"],
)
def test_pieces_that_do_not_make_up_a_tensor_are_refused_by_its_name_on_all_ranks(
    tmp_path, pieces, words
):
    first, second = shared_pool(2).run(refused, tmp_path, pieces)
    assert first == second
    assert "model.w" in first["text"]
    assert words in first["text"]
    assert "fine" not in first["text"]
    assert first["steps"] == first["left"] == []


def test_a_gap_is_found_on_one_process_and_a_whole_is_none(tmp_path):
    gap = refused(LocalCommunicator(), tmp_path, [(0, 5)])
    assert "model.w" in gap["text"]
    assert "5 of its 6 elements" in gap["text"]
    assert refused(LocalCommunicator(), tmp_path, [(0, 6)])["text"] is None


def test_a_flat_shard_of_another_shape_does_not_fit(tmp_path):
    save(LocalCommunicator(), tmp_path, "whole")
    target = held("flat1", 1, LocalCommunicator())
    shard = target["engine"]["model"]["matrix"]
    assert math.prod(shard.global_shape) == 35
    target["engine"]["model"]["matrix"] = shard._replace(global_shape=(7, 5))
    with pytest.raises(TorshError, match=r"engine\.model\.matrix \(\[5, 7\] .* there, \[7, 5\]"):
        DcpCheckpointer(tmp_path, LocalCommunicator()).load(target)
