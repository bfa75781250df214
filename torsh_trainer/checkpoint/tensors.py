"""Tensors on disk, in the format of torch.distributed.checkpoint.

Plain PyTorch reads these files with ``torch.distributed.checkpoint.load``. This module drives the
planners, reader and writer of that package itself, for three reasons: nothing communicates on
another thread than the loop's, what one rank cannot do is told to all, and metadata is read without
running code from it.

Importing this takes 0.6 s (DTensor comes along), so ``dcp`` does it at the first save or load.
"""

from __future__ import annotations

import enum
import io
import os
import pickle
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from torsh_trainer.checkpoint.integrity import METADATA, Digest
from torsh_trainer.checkpoint.plain import Path as Key
from torsh_trainer.checkpoint.plain import dotted, put
from torsh_trainer.errors import ResourceError


class Written(NamedTuple):
    """What one rank wrote."""

    results: list[WriteResult]
    files: dict[str, Digest]


class Planner(DefaultSavePlanner):
    """One rank's share of a checkpoint.

    Ranks may offer different tensors (ZeRO-1's optimizer states); what several offer is written
    once.
    """

    def __init__(self, tensors: Mapping[Key, Tensor], *, is_main: bool) -> None:
        super().__init__()
        self._staged: dict[Any, Tensor] = {}
        nested: dict[str, Any] = {}
        for path, tensor in tensors.items():
            put(nested, path, tensor)
        self.set_up_planner(nested, is_coordinator=is_main)
        self.offer: SavePlan = self.create_local_plan()
        """What this rank could write."""

    def take(self, plan: SavePlan) -> None:
        """Takes this rank's part of the common plan."""
        self.finish_plan(plan)

    def stage(self) -> None:
        """Copies what this rank will write, so that training may change the tensors."""
        for item in self.plan.items:
            tensor = super().resolve_data(item)
            assert isinstance(tensor, Tensor)
            self._staged[item.index] = tensor.detach().to("cpu", copy=True)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        staged = self._staged.get(write_item.index)
        return super().resolve_data(write_item) if staged is None else staged


def agree(planner: Planner, offers: list[SavePlan], folder: Path) -> list[SavePlan]:
    """Deals out what the ranks offer, so that everything is written once and evenly.

    Returns a plan for each rank; ``planner.metadata`` then says what the whole will hold.

    Raises:
        ValueError: the ranks' shards do not make up whole tensors.
    """
    plans, _ = planner.create_global_plan(offers)
    return _Writer(folder).prepare_global_plan(plans)


def write(planner: Planner, folder: Path) -> Written:
    """Writes this rank's files into ``folder`` and returns once they are on the disk.

    Raises:
        OSError: the disk refused.
    """
    writer = _Writer(folder)
    writer.set_up_storage_writer(is_coordinator=planner.is_coordinator)
    results = writer.write_data(planner.plan, planner)
    return Written(list(results.wait()), dict(writer.fs.digests))


def write_metadata(folder: Path, metadata: Metadata, results: list[list[WriteResult]]) -> None:
    """Writes where every piece of every tensor lies.

    Raises:
        OSError: the disk refused.
    """
    _Writer(folder).finish(metadata, results)


def read_metadata(folder: Path) -> Metadata:
    """Where every piece of every tensor lies.

    Raises:
        ResourceError: the file holds something else than such metadata.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, TypeError) as error:
        raise ResourceError(
            f"{path} cannot be read: {error}",
            fix="resume from another checkpoint with checkpoint.resume=PATH",
            path=str(path),
        ) from error
    assert isinstance(metadata, Metadata)
    return metadata


def shapes(metadata: Metadata) -> dict[Key, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of every tensor of a checkpoint."""
    return {
        tuple(map(str, metadata.planner_data[name])): (tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read(folder: Path, metadata: Metadata, into: Mapping[Key, Tensor]) -> None:
    """Fills the tensors of ``into`` in place; each rank reads what it holds.

    Raises:
        OSError: the disk refused.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader = FileSystemReader(folder)
    named = {dotted(path): tensor for path, tensor in into.items()}
    planner.set_up_planner(named, metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    plan = planner.finish_plan(planner.create_local_plan())
    reader.read_data(plan, planner).wait()


class _Summed(io.BufferedWriter):
    """A file that sums up what is written to it, and remembers when the disk refused."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"), buffer_size=1 << 20)
        self.size_bytes = 0
        self.crc = 0
        self.refused: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            written = super().write(data)
        except OSError as error:
            self.refused = error
            raise
        self.size_bytes += written
        self.crc = zlib.crc32(data, self.crc)
        return written


class _SummedFiles(FileSystem):
    """The local file system, keeping the digests of the files written through it."""

    def __init__(self) -> None:
        self.digests: dict[str, Digest] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb"
        target = Path(path)
        stream = _Summed(target)
        try:
            with stream:
                yield stream
        except RuntimeError as error:
            # torch.save loses the disk's own words: "unexpected pos 704 vs 598".
            raise (stream.refused or error) from error
        self.digests[target.name] = Digest(stream.size_bytes, f"{stream.crc:08x}")


class _Writer(FileSystemWriter):
    fs: _SummedFiles

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=True)
        self.fs = _SummedFiles()

    def storage_meta(self) -> StorageMeta:
        return (
            StorageMeta()
        )  # the default names a path of this machine, and is never the same twice


def _member(owner: Any, name: str) -> Any:
    """What stands in for getattr, by which some releases of Python (3.11.2) pickle an enum."""
    if isinstance(owner, type) and issubclass(owner, enum.Enum):
        return owner[name]
    raise pickle.UnpicklingError(f"it asks {owner!r} for {name}, which is no checkpoint metadata")


class _Unpickler(pickle.Unpickler):
    """Reads DCP's metadata, and refuses everything else that a pickle could name."""

    _metadata = "torch.distributed.checkpoint.metadata"
    _allowed = frozenset(
        {
            (_metadata, "BytesStorageMetadata"),
            (_metadata, "ChunkStorageMetadata"),
            (_metadata, "Metadata"),
            (_metadata, "MetadataIndex"),
            (_metadata, "StorageMeta"),
            (_metadata, "TensorProperties"),
            (_metadata, "TensorStorageMetadata"),
            (_metadata, "_MEM_FORMAT_ENCODING"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.serialization", "_get_layout"),
            ("torch", "Size"),
        }
    )

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in self._allowed:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no checkpoint metadata")
