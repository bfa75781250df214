"""Metadata that lies is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crafted.forging import forge_metadata, metadata_of, place, refused
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torsh_trainer.checkpoint.tensors.metadata import NoMetadataError, parse

pytestmark = pytest.mark.timeout(240)


def into(**changes: Any) -> Callable[[Metadata], object]:
    """The place of the tensor w, changed."""
    return lambda metadata: vars(place(metadata, "model.w")).update(changes)


def claim(name: str, size: list[int], *pieces: tuple[list[int], list[int]]) -> Any:
    """A tensor of another size, in pieces of (offsets, sizes) that all lie where it did."""

    def change(metadata: Metadata) -> None:
        entry, at = metadata.state_dict_metadata[name], place(metadata, name)
        assert isinstance(entry, TensorStorageMetadata)
        entry.size = torch.Size(size)
        entry.chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in pieces]
        for index in [i for i in metadata.storage_data if i.fqn == name]:
            del metadata.storage_data[index]
        step = at.length // max(1, len(pieces))
        for number, (offsets, _) in enumerate(pieces):
            info = _StorageInfo(at.relative_path, at.offset + number * step, step)
            metadata.storage_data[MetadataIndex(name, offsets)] = info

    return change


LIES: dict[str, Callable[[Metadata], object]] = {
    "a file above": into(relative_path="../../etc/passwd"),
    "a file of the system": into(relative_path="/etc/passwd"),
    "a file in a folder": into(relative_path="sub/__0_0.distcp"),
    "no file at all": into(relative_path=""),
    "the folder": into(relative_path="."),
    "a name with a zero byte": into(relative_path="__0_0.distcp\0"),
    "a path that is no text": into(relative_path=7),
    "a place beyond the end": into(offset=1 << 40),
    "more than the file has": into(length=1 << 40),
    "a place before the first byte": into(offset=-8),
    "a negative length": into(length=-1),
    "a length of 2^70": into(length=1 << 70),
    "a place that is true": into(offset=True),
    "a place that is a float": into(offset=0.0),
    "an extension that decodes": into(transform_descriptors=["zstd"]),
    "a free tensor of 2^40 numbers": claim("rng.rank_0.torch", [1 << 40], ([0], [1 << 40])),
    "a free tensor without pieces": claim("rng.rank_0.torch", [1 << 40]),
    "dimensions whose product is beyond 2^64": claim(
        "rng.rank_0.torch", [1 << 33, 1 << 33, 0, 1 << 33], ([0] * 4, [1 << 33] * 4)
    ),
    "a piece that reaches beyond the whole": claim("model.w", [100], ([10], [100])),
    "a piece of other dimensions": claim("model.w", [100], ([0, 0], [10, 10])),
    "two pieces in one place": claim("model.w", [100], ([0], [50]), ([25], [50])),
    "a gap": claim("model.w", [100], ([0], [40]), ([60], [40])),
    "a piece without a place": lambda m: m.storage_data.clear(),
    "two tensors in one place of the file": lambda m: vars(place(m, "model.w")).update(
        vars(place(m, "rng.rank_0.torch"))
    ),
    "a tensor of another name": lambda m: m.planner_data.update({"model.w": ("model", "v")}),
    "a tensor without a path": lambda m: m.planner_data.clear(),
    "a path of odd parts": lambda m: m.planner_data.update({"model.w": ("model", None)}),
    "a type that is none": lambda m: setattr(
        m.state_dict_metadata["model.w"], "properties", torch.Size([1])
    ),
    "no table of tensors": lambda m: setattr(m, "state_dict_metadata", [1, 2]),
    "no table of places": lambda m: setattr(m, "storage_data", None),
}


@pytest.mark.parametrize("lie", LIES)
def test_metadata_that_lies_is_refused(lie: str, path: Path) -> None:
    forge_metadata(path, LIES[lie])
    refused(path, ".metadata")


def test_pieces_that_lie_one_beside_the_other_are_no_lie() -> None:
    """A tensor cut in two dimensions, in pieces of all shapes."""
    cuts = [((0, 0), (2, 5)), ((2, 0), (3, 2)), ((2, 2), (3, 3))]
    chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in cuts]
    entry = TensorStorageMetadata(TensorProperties(torch.int8), torch.Size([5, 5]), chunks)
    places = {
        MetadataIndex("t", o): _StorageInfo("f", 100 * i, 100) for i, (o, _) in enumerate(cuts)
    }
    sound = Metadata({"t": entry}, {"t": ("t",)}, places)
    assert parse(pickle.dumps(sound), {"f": 300}).state_dict_metadata["t"] == entry
    entry.chunks[2] = ChunkStorageMetadata(torch.Size((2, 2)), torch.Size((3, 2)))
    with pytest.raises(NoMetadataError, match="do not make it up"):
        parse(pickle.dumps(sound), {"f": 300})


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_reads_as_torch_reads_it_whatever_pickled_it(protocol: int, path: Path) -> None:
    theirs = metadata_of(path)
    sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    for dumps in (pickle.dumps, pickle._dumps):  # type: ignore[attr-defined]
        mine = parse(dumps(theirs, protocol), sizes)
        assert mine.state_dict_metadata == theirs.state_dict_metadata
        assert mine.storage_data == theirs.storage_data
        assert mine.planner_data == theirs.planner_data
