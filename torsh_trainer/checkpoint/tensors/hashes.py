"""Hashes of the tensors that a rank holds, and the file in which a checkpoint keeps them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from torsh_trainer.checkpoint.base import MODULUS, Sum
from torsh_trainer.checkpoint.tensors.hashing import ALGORITHM, hash_of
from torsh_trainer.utils.files import parse_json

Sums = Mapping[str, Sum]


def sums_of(items: Iterable[WriteItem], find: Callable[[MetadataIndex], Tensor]) -> dict[str, Sum]:
    """By name what the pieces ``items`` add up to; each device is read once."""
    pieces: list[tuple[str, int, Tensor]] = []
    for item in items:
        data = item.tensor_data
        assert data is not None, "a checkpoint writes no other bytes than those of tensors"
        piece = find(item.index)
        added = hash_of(piece, data.chunk.offsets, data.size)
        pieces.append((item.index.fqn, piece.numel(), added))
    by_name: dict[str, Sum] = {}
    numbers = _read([added for _, _, added in pieces])
    for (name, elements, _), number in zip(pieces, numbers, strict=True):
        before = by_name.get(name, Sum(0, 0))
        by_name[name] = Sum(before.elements + elements, (before.hash + number) % MODULUS)
    return by_name


def _read(numbers: Sequence[Tensor]) -> list[int]:
    by_device: dict[torch.device, list[int]] = {}
    for place, number in enumerate(numbers):
        by_device.setdefault(number.device, []).append(place)
    read = [0] * len(numbers)
    for places in by_device.values():
        values = torch.stack([numbers[place] for place in places]).tolist()
        for place, value in zip(places, values, strict=True):
            read[place] = value
    return read


def hashes_file(metadata: Metadata, parts: Iterable[Sums]) -> bytes:
    """The content of the file with a hash for each tensor, of what all ranks have written."""
    totals: dict[str, int] = {}
    for part in parts:
        for name, (_, number) in part.items():
            totals[name] = (totals.get(name, 0) + number) % MODULUS
    hashes = {
        name: f"{totals[name]:016x}"
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and name in totals
    }
    return json.dumps({"algorithm": ALGORITHM, "hashes": hashes}, indent=1).encode()


def parse_hashes(content: str, metadata: Metadata) -> dict[str, Sum] | None:
    """The inverse of ``hashes_file``; None where another release has hashed in another way.

    Raises:
        ValueError: it is something else.
    """
    said = parse_json(content)
    if not isinstance(said, dict) or not isinstance(said.get("hashes"), dict):
        raise ValueError("it holds no hashes")
    if said.get("algorithm") != ALGORITHM:
        return None
    found: dict[str, Sum] = {}
    for name, entry in metadata.state_dict_metadata.items():
        number = said["hashes"].get(name)
        if isinstance(entry, TensorStorageMetadata) and isinstance(number, str):
            found[name] = Sum(math.prod(entry.size), int(number, 16))
    return found
