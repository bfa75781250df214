"""What one rank writes of a checkpoint, planned once for all saves of one and the same state.

Importing this takes 0.6 s (torch.distributed.checkpoint and DTensor come along).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor

from torsh_trainer.checkpoint.base import Sum
from torsh_trainer.checkpoint.plain import Leaf, dotted_name
from torsh_trainer.checkpoint.plain import Path as Key
from torsh_trainer.checkpoint.shards import FlatShard
from torsh_trainer.checkpoint.tensors.flat import Box, boxes_of, piece
from torsh_trainer.checkpoint.tensors.hashes import sums_of
from torsh_trainer.checkpoint.tensors.rows import RowBox, find_scattered_rows
from torsh_trainer.checkpoint.tensors.staging import Staging
from torsh_trainer.errors import TrainingError

_FIX = "what ranks call by one name has to be one tensor, cut without gaps and overlaps"


class Planner(DefaultSavePlanner):
    """One rank's share of a checkpoint; it is planned anew only when something differs.

    Ranks may offer different tensors (ZeRO-1's optimizer states); what several offer is written
    once. With ``staging``, what is written is a copy that ``stage`` makes there. With ``hashes``
    it also gives the ``sums`` of what this rank writes.
    """

    def __init__(
        self, *, is_rank_zero: bool, staging: Staging | None = None, hashes: bool = False
    ) -> None:
        super().__init__()
        self.is_coordinator = is_rank_zero
        self._hashes = hashes
        self._sums: dict[str, Sum] | None = None
        self.state_dict: dict[str, Leaf] = {}
        self.staging = staging
        self.plain: Any = None
        """The plain values of this save, encoded."""
        self.offer = SavePlan([])
        """What this rank could write."""
        self._outline: list[tuple[Any, ...]] = []
        self._agreed = False
        self._boxes: dict[MetadataIndex, Box] = {}
        self._rows: dict[MetadataIndex, RowBox] = {}
        self._copies: dict[MetadataIndex, Tensor] = {}

    @property
    def whole_size_bytes(self) -> int:
        """What the tensors of all ranks take; known to the rank that has agreed a plan for all."""
        entries = self.metadata.state_dict_metadata.values()
        return sum(
            math.prod(entry.size) * entry.properties.dtype.itemsize
            for entry in entries
            if isinstance(entry, TensorStorageMetadata)
        )

    def hold(self, tensors: Mapping[Key, Leaf]) -> bool:
        """Takes the tensors of a save; true when the last plan does not fit them.

        Raises:
            TrainingError: a flat shard does not lie within its tensor.
        """
        self._copies = {}
        self.state_dict = {dotted_name(path): tensor for path, tensor in tensors.items()}
        before, self._agreed = self._agreed, False
        outline = [(name, *_outline(leaf)) for name, leaf in self.state_dict.items()]
        if before and outline == self._outline:
            self._agreed = True
            return False
        self._outline = outline
        self.mappings = {dotted_name(path): path for path in tensors}
        self.offer = self.create_local_plan()
        return True

    def create_local_plan(self) -> SavePlan:
        rows = {name: find_scattered_rows(leaf) for name, leaf in self.state_dict.items()}
        whole = {
            name: leaf
            for name, leaf in self.state_dict.items()
            if not (isinstance(leaf, FlatShard) or rows[name])
        }
        planned = create_default_local_save_plan(whole, self.is_coordinator).items
        # A shard of the whole: DCP's own kind for plain tensors may not meet a shard elsewhere.
        items = [replace(item, type=WriteItemType.SHARD) for item in planned]
        self._boxes, self._rows = {}, {}
        for name, leaf in self.state_dict.items():
            if isinstance(leaf, FlatShard):
                shape, dtype = leaf.global_shape, leaf.tensor.dtype
                for box in boxes_of(leaf, name):
                    items.append(item := _write_item(name, box, shape, dtype))
                    self._boxes[item.index] = box
            else:
                for part in rows[name]:
                    items.append(item := _write_item(name, part, leaf.shape, leaf.dtype))
                    self._rows[item.index] = part
        return SavePlan(items, planner_data=self.mappings)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        _check_alike(all_plans)
        try:
            plans, metadata = super().create_global_plan(all_plans)
        except ValueError as error:  # overlaps and gaps, with names and places
            raise TrainingError(str(error), fix=_FIX) from error
        _check_whole(metadata)
        return plans, metadata

    def take(self, plan: SavePlan) -> None:
        """Takes this rank's part of the common plan; the next save goes by it, if it can."""
        self.finish_plan(plan)
        self._agreed = True
        if self.staging is not None:
            self.staging.prepare(self._originals())

    def stage(self) -> None:
        """Copies what this rank will write, so that training may change the tensors.

        Raises:
            ResourceError: there is not enough memory.
        """
        assert self.staging is not None
        copies = self.staging.copy(self._originals())
        indices = [item.index for item in self.plan.items]
        if self._hashes and any(tensor.is_cuda for tensor in self._originals()):
            self._sums = sums_of(self.plan.items, self._original)  # quicker than of the copies
        self._copies = dict(zip(indices, copies, strict=True))
        self.state_dict = {}

    def sums(self) -> dict[str, Sum]:
        """By tensor, the hash of what this rank writes; empty without ``hashes``."""
        if not self._hashes:
            return {}
        known, self._sums = self._sums, None
        return sums_of(self.plan.items, self.piece) if known is None else known

    def sum_offered(self) -> dict[str, Sum]:
        """By tensor, the hash of what this rank holds, whoever writes it."""
        return sums_of(self.offer.items, self.piece)

    def release(self) -> None:
        """Lets go of the tensors of a save."""
        self.state_dict, self._copies, self.plain = {}, {}, None

    def close(self) -> None:
        """Lets go of everything, the memory for copies included."""
        self.release()
        if self.staging is not None:
            self.staging.close()

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.piece(write_item.index)

    def piece(self, index: MetadataIndex) -> Tensor:
        """The tensor to write, or its copy."""
        copied = self._copies.get(index)
        return self._original(index) if copied is None else copied

    def _originals(self) -> list[Tensor]:
        return [self._original(item.index) for item in self.plan.items]

    def _original(self, index: MetadataIndex) -> Tensor:
        leaf = self.state_dict[index.fqn]
        if isinstance(leaf, FlatShard):
            return piece(leaf, self._boxes[index])
        if index in self._rows:
            assert isinstance(leaf, DTensor)
            return self._rows[index].of(leaf.to_local().detach())
        found = self.lookup_object(index)
        assert isinstance(found, Tensor)
        return found


def _outline(leaf: Leaf) -> tuple[Any, ...]:
    """What a plan depends on."""
    if isinstance(leaf, FlatShard):
        return ("flat", leaf.global_shape, leaf.offset, *_outline(leaf.tensor))
    if isinstance(leaf, DTensor):
        return ("sharded", leaf.device_mesh, leaf.placements, leaf.shape, leaf.dtype, leaf.device)
    return (leaf.shape, leaf.dtype, leaf.device)


def _write_item(
    name: str, box: Box | RowBox, shape: Sequence[int], dtype: torch.dtype
) -> WriteItem:
    offsets, sizes = torch.Size(box.offsets), torch.Size(box.sizes)
    return WriteItem(
        MetadataIndex(name, offsets),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(offsets, sizes),
            TensorProperties(dtype),
            torch.Size(shape),
        ),
    )


def _check_alike(plans: Sequence[SavePlan]) -> None:
    """Pieces that begin at one place are one piece, or one of them would be dropped unseen.

    Raises:
        TrainingError: they differ; the message names the tensor.
    """
    known: dict[MetadataIndex, tuple[Any, ...]] = {}
    for plan in plans:
        for item in plan.items:
            data = item.tensor_data
            if data is None:
                continue
            mine = (data.size, data.chunk.sizes, data.properties.dtype)
            theirs = known.setdefault(item.index, mine)
            if mine != theirs:
                raise _unfit(
                    item.index.fqn,
                    f"where they begin at {list(item.index.offset or ())}, "
                    f"one holds {_describe_item(theirs)} and another {_describe_item(mine)}",
                )


def _check_whole(metadata: Metadata) -> None:
    """Every tensor is there to the last element; that pieces do not overlap is known already.

    Raises:
        TrainingError: a piece is missing; the message names the tensor.
    """
    for name in metadata.planner_data:
        entry = metadata.state_dict_metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise _unfit(name, "no rank holds any of it")
        held = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        if held != math.prod(entry.size):
            raise _unfit(name, f"they hold {held} of its {math.prod(entry.size)} elements")


def _describe_item(item: tuple[Any, ...]) -> str:
    size, sizes, dtype = item
    return f"{list(sizes)} of {list(size)} {str(dtype).removeprefix('torch.')}"


def _unfit(name: str, how: str) -> TrainingError:
    return TrainingError(
        f"the ranks' pieces of {name} do not make up one tensor: {how}",
        fix=_FIX,
        tensor=name,
    )
