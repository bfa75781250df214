"""The metadata of torch.distributed.checkpoint, read without running code, and believed in nothing.

Its file is a pickle. It is read as data (see ``inert``), the objects that it means are made here,
and what it claims is held against the sizes of the files that it talks about.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torsh_trainer.checkpoint.plain import dotted_name
from torsh_trainer.checkpoint.tensors.inert import GlobalName, Made, NotInertError, PairTable, read

_MODULE = "torch.distributed.checkpoint.metadata"
_STORAGE = GlobalName("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_SIZE = GlobalName("torch", "Size")
_MOST_CUTS = 8
"""Dimensions in which one tensor may be cut; meshes have three or four."""


class NoMetadataError(ValueError):
    """The bytes are no metadata of a checkpoint, or claim what cannot be; the words say what."""


def parse(data: bytes, sizes: Mapping[str, int]) -> Metadata:
    """The metadata that ``data`` holds, about files of the given ``sizes`` in bytes.

    Raises:
        NoMetadataError: it holds something else; or a piece lies outside of these files or of its
            tensor, or the pieces of a tensor do not make it up.
    """
    try:
        metadata = _metadata(read(data))
    except NotInertError as error:
        raise NoMetadataError(str(error)) from error
    _check_files(metadata.storage_data, sizes)
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            _check_tensor(name, entry, metadata)
    return metadata


# -- what it means --------------------------------------------------------------------------------


def _metadata(value: Any) -> Metadata:
    found = _fields(value, GlobalName(_MODULE, "Metadata"))
    for part in ("state_dict_metadata", "storage_data", "planner_data"):
        if part not in found:
            _refuse(f"it has no {part}")
    entries = _dict(found["state_dict_metadata"], _string, _entry)
    paths = _dict(found["planner_data"], _string, _path)
    for name, path in paths.items():
        if dotted_name(path) != name:
            _refuse(f"it gives {name} another name")
    if missing := [name for name in entries if name not in paths]:
        _refuse(f"it does not say where {missing[0]} belongs")
    return Metadata(entries, paths, _dict(found["storage_data"], _index, _place))


def _entry(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if _is_made(value, GlobalName(_MODULE, "BytesStorageMetadata")):
        return BytesStorageMetadata()
    found = _fields(
        value, GlobalName(_MODULE, "TensorStorageMetadata"), "properties", "size", "chunks"
    )
    chunks = found["chunks"]
    if not isinstance(chunks, list):
        _refuse("the pieces of a tensor are no list")
    return TensorStorageMetadata(
        _properties(found["properties"]), _size(found["size"]), [_chunk(one) for one in chunks]
    )


def _properties(value: Any) -> TensorProperties:
    if not _is_made(value, GlobalName(_MODULE, "TensorProperties")):
        _refuse("a tensor has no properties")
    state = value.state
    if not (isinstance(state, tuple) and state and isinstance(state[0], GlobalName)):
        _refuse("a tensor has no type")
    dtype = dtype_of(state[0])
    if dtype is None:
        _refuse(f"it names {state[0]}, which is no type of a tensor")
    return TensorProperties(dtype)


def dtype_of(name: GlobalName) -> torch.dtype | None:
    """The type that a pickle names ``torch.float32``; None where there is no such type."""
    found = getattr(torch, name.name, None) if name.module == "torch" else None
    return found if isinstance(found, torch.dtype) else None


def _chunk(value: Any) -> ChunkStorageMetadata:
    found = _fields(value, GlobalName(_MODULE, "ChunkStorageMetadata"), "offsets", "sizes")
    return ChunkStorageMetadata(_size(found["offsets"]), _size(found["sizes"]))


def _index(value: Any) -> MetadataIndex:
    found = _fields(value, GlobalName(_MODULE, "MetadataIndex"), "fqn")
    offset, index = found.get("offset"), found.get("index")
    return MetadataIndex(
        _string(found["fqn"]),
        None if offset is None else _size(offset),
        None if index is None else _count(index),
    )


def _place(value: Any) -> _StorageInfo:
    found = _fields(value, _STORAGE, "relative_path", "offset", "length")
    if found.get("transform_descriptors"):
        _refuse("its files are compressed or encrypted, which only the program that did it reads")
    return _StorageInfo(
        _string(found["relative_path"]), _count(found["offset"]), _count(found["length"])
    )


def _path(value: Any) -> tuple[str, ...]:
    if not isinstance(value, tuple) or not all(type(part) in (str, int) for part in value):
        _refuse("the place of a tensor is no path")
    return tuple(map(str, value))


def _size(value: Any) -> torch.Size:
    """A shape, or where a piece begins: as torch.Size pickles itself, or as a tuple."""
    if _is_made(value, _SIZE) and len(value.args) == 1:
        value = value.args[0]
    if not isinstance(value, tuple | list):
        _refuse("a shape is no tuple")
    return torch.Size([_count(number) for number in value])


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        _refuse("a size or a place is no number of that kind")
    return value


def _string(value: Any) -> str:
    if not isinstance(value, str):
        _refuse("a name is no string")
    return value


def _dict(value: Any, key: Callable[[Any], Any], item: Callable[[Any], Any]) -> dict[Any, Any]:
    if not isinstance(value, PairTable):
        _refuse("a table is missing")
    made = {key(k): item(v) for k, v in value.pairs}
    if len(made) != len(value.pairs):
        _refuse("it says one thing twice")
    return made


def _fields(value: Any, kind: GlobalName, *needed: str) -> dict[str, Any]:
    if not _is_made(value, kind):
        _refuse(f"it names {_describe_value(value)} where {kind.name} belongs")
    found = _dict(value.state, _string, lambda field: field)
    if missing := [name for name in needed if name not in found]:
        _refuse(f"{kind.name} has no {missing[0]}")
    return found


def _is_made(value: Any, kind: GlobalName) -> bool:
    return isinstance(value, Made) and value.by == kind and isinstance(value.args, tuple)


def _describe_value(value: Any) -> str:
    """What stands in the place of something else, in a word."""
    if isinstance(value, Made):
        value = value.by
    return str(value)[:100] if isinstance(value, GlobalName) else f"a {type(value).__name__}"


# -- whether it can be ----------------------------------------------------------------------------


def _check_files(places: Mapping[MetadataIndex, Any], sizes: Mapping[str, int]) -> None:
    """Every piece lies in a file of the checkpoint, and no byte is two pieces'."""
    per_file: dict[str, list[tuple[int, int]]] = {}
    for at, place in places.items():
        size = sizes.get(place.relative_path)
        if size is None:
            _refuse(f"{at.fqn} is to lie in {place.relative_path!r}, which is no file of it")
        if place.offset + place.length > size:
            _refuse(f"{at.fqn} is to lie beyond the end of {place.relative_path}")
        per_file.setdefault(place.relative_path, []).append((place.offset, place.length))
    for name, spans in per_file.items():
        spans.sort()
        for (offset, length), (after, _) in itertools.pairwise(spans):
            if offset + length > after:
                _refuse(f"two tensors are to lie in one place of {name}")


def _check_tensor(name: str, entry: TensorStorageMetadata, metadata: Metadata) -> None:
    itemsize = entry.properties.dtype.itemsize
    for chunk in entry.chunks:
        if len(chunk.offsets) != len(entry.size) or len(chunk.sizes) != len(entry.size):
            _refuse(f"a piece of {name} has other dimensions than the whole")
        parts = zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
        if any(offset + length > size for offset, length, size in parts):
            _refuse(f"a piece of {name} is larger than the whole")
        place = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
        if place is None:
            _refuse(f"it does not say where a piece of {name} lies")
        if math.prod(chunk.sizes) * itemsize > place.length:
            _refuse(f"a piece of {name} has more bytes than its file gives it")
    if not _tiles(entry.size, entry.chunks):
        _refuse(f"the pieces of {name} do not make it up")


def _tiles(whole: torch.Size, chunks: Iterable[ChunkStorageMetadata]) -> bool:
    """Whether boxes fill ``whole``, without gaps and overlaps.

    They do if their volumes add up to its own, and the corners that an odd number of boxes have
    are its own corners: then each point is in an odd number of boxes, hence in one.
    """
    boxes = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    if sum(math.prod(box.sizes) for box in boxes) != math.prod(whole):
        return False
    cut = [d for d, size in enumerate(whole) if any(box.sizes[d] != size for box in boxes)]
    if len(cut) > _MOST_CUTS:
        _refuse(f"a tensor is cut in {len(cut)} dimensions")
    corners: Counter[tuple[int, ...]] = Counter()
    for box in boxes:
        ends = [(box.offsets[d], box.offsets[d] + box.sizes[d]) for d in cut]
        corners.update(itertools.product(*ends))
    odd = {corner for corner, count in corners.items() if count % 2}
    return not boxes or odd == set(itertools.product(*((0, whole[d]) for d in cut)))


def _refuse(why: str) -> NoReturn:
    raise NoMetadataError(why)
