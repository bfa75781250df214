"""Reading tensors of a checkpoint straight into the memory that they are wanted in.

torch.load would make a tensor of its own first: fresh memory, a page fault every few KiB, and one
more copy. Here the small header of a piece says what it looks like and where its bytes lie; of
those, what is wanted is read and nothing else.
"""

from __future__ import annotations

import ctypes
import io
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import find_state_dict_object

from torsh_trainer.checkpoint.plain import Leaf, dotted_name
from torsh_trainer.checkpoint.plain import Path as Key
from torsh_trainer.checkpoint.shards import FlatShard
from torsh_trainer.checkpoint.tensors.flat import Box, boxes_of, piece
from torsh_trainer.checkpoint.tensors.header import NoTensorError, read_header
from torsh_trainer.checkpoint.tensors.rows import RowBox, find_scattered_rows
from torsh_trainer.errors import ResourceError


class Wanted(NamedTuple):
    """A piece of a stored tensor, and the tensor that it goes into."""

    item: ReadItem
    target: Tensor


class PieceLocation(NamedTuple):
    """Where a piece of a tensor lies: a torch.save of its own within a file."""

    relative_path: str
    offset: int
    length: int


def plan_reads(metadata: Metadata, into: Mapping[Key, Leaf]) -> list[Wanted]:
    """What has to be read to fill ``into``, whatever way the checkpoint is cut.

    Raises:
        ResourceError: the checkpoint does not hold all of it.
    """
    found: list[Wanted] = []
    for path, leaf in into.items():
        name = dotted_name(path)
        pieces = list(_pieces(name, leaf, metadata))
        found += pieces
        held = sum(math.prod(one.item.lengths) for one in pieces)
        local = leaf.tensor if isinstance(leaf, FlatShard) else _local(leaf)
        if held < local.numel():
            raise ResourceError(
                f"the checkpoint holds {held} of the {local.numel()} elements of {name} "
                "that this rank needs",
                fix="resume from another one with checkpoint.resume=PATH",
                tensor=name,
            )
    return found


def _pieces(name: str, leaf: Leaf, metadata: Metadata) -> Iterator[Wanted]:
    boxed = _find_boxes(name, leaf)
    if boxed is None:
        for item in create_default_local_load_plan({name: leaf}, metadata).items:
            target = find_state_dict_object({name: leaf}, item.dest_index)
            yield Wanted(item, _narrow(target.detach(), item.dest_offsets, item.lengths))
        return
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    for box, target in boxed:
        chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        for item in create_read_items_for_chunk_list(name, entry, [chunk]):
            yield Wanted(item, _narrow(target, item.dest_offsets, item.lengths))


def _find_boxes(name: str, leaf: Leaf) -> list[tuple[Box | RowBox, Tensor]] | None:
    """The boxes that this rank holds of a tensor, each with its memory; None where DCP knows."""
    if isinstance(leaf, FlatShard):
        return [(box, piece(leaf, box)) for box in boxes_of(leaf, name)]
    rows = find_scattered_rows(leaf)
    return [(part, part.of(_local(leaf.detach()))) for part in rows] or None


def read_file(stream: io.BufferedIOBase, pieces: list[tuple[PieceLocation, Wanted]]) -> None:
    """Reads pieces that lie in one file, in the order of the file.

    Raises:
        ResourceError: the file is not what its metadata says.
        OSError: the disk refused.
    """
    scratch = _Scratch()
    for stored, (item, target) in sorted(pieces, key=lambda pair: pair[0].offset):
        try:
            header = read_header(stream, stored.offset, stored.length)
        except NoTensorError as error:
            raise _odd(stored, f"of {item.storage_index.fqn}, {error}") from error
        there = torch.empty_strided(header.shape, header.stride, dtype=header.dtype, device="meta")
        ends = [o + n for o, n in zip(item.storage_offsets, item.lengths, strict=True)]
        if len(ends) != there.dim() or any(e > n for e, n in zip(ends, there.shape, strict=True)):
            raise _odd(stored, f"{item.storage_index.fqn} has another shape there")
        part = _narrow(there, item.storage_offsets, item.lengths)
        if part.numel():
            first = header.begin + int(part.storage_offset()) * part.dtype.itemsize
            stream.seek(stored.offset + first)
            _fill(target, part, stream, scratch, stored)
        if header.conj:
            target.copy_(target.conj())
        if header.neg:
            target.neg_()


def _fill(
    target: Tensor,
    part: Tensor,
    stream: io.BufferedIOBase,
    scratch: _Scratch,
    stored: PieceLocation,
) -> None:
    """Reads the elements of ``part``, a tensor without data, from here on into ``target``."""
    extent = 1 + sum((n - 1) * step for n, step in zip(part.shape, part.stride(), strict=True))
    alike = target.stride() == part.stride() or (target.is_contiguous() and part.is_contiguous())
    if alike and target.is_cpu and target.dtype == part.dtype and extent == part.numel():
        _read_exactly(stream, _bytes_of(target), stored)
        return
    raw = scratch.of(extent * part.dtype.itemsize)
    _read_exactly(stream, _bytes_of(raw), stored)
    target.copy_(raw.view(part.dtype).as_strided(part.shape, part.stride()))


def _read_exactly(stream: io.BufferedIOBase, into: memoryview, stored: PieceLocation) -> None:
    while into:
        count = stream.readinto(into)
        if not count:
            raise _odd(stored, "it ends too early")
        into = into[count:]


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor without holes; numpy, which could give it, need not be there."""
    raw = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(raw)


class _Scratch:
    """Memory for what has to be converted or rearranged; kept, because new memory is slow."""

    def __init__(self) -> None:
        self._held = torch.empty(0, dtype=torch.uint8)

    def of(self, size_bytes: int) -> Tensor:
        if self._held.numel() < size_bytes:
            self._held = torch.empty(size_bytes, dtype=torch.uint8)
        return self._held[:size_bytes]


def _narrow(tensor: Tensor, offsets: torch.Size, lengths: torch.Size) -> Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def _local(tensor: Tensor) -> Tensor:
    """What this rank holds of it."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _odd(stored: PieceLocation, why: str) -> ResourceError:
    name = Path(stored.relative_path).name
    return ResourceError(
        f"{name} is not what the checkpoint's metadata says: {why}",
        fix="resume from another one with checkpoint.resume=PATH, or copy this one again",
    )
