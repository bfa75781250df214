"""Tensors on disk, in the format of torch.distributed.checkpoint.

Plain PyTorch reads these files with ``torch.distributed.checkpoint.load``. This module drives the
planners, reader and writer of that package itself, for three reasons: nothing communicates on
another thread than the loop's, what one rank cannot do is told to all, and metadata is read without
running code from it.

Importing this takes 0.6 s (DTensor comes along), so ``dcp`` does it at the first save or load.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import get_crc32_options, set_crc32_options

from torsh_trainer.checkpoint.base import Sum
from torsh_trainer.checkpoint.plain import Leaf
from torsh_trainer.checkpoint.plain import Path as Key
from torsh_trainer.checkpoint.store.integrity import METADATA, Digest
from torsh_trainer.checkpoint.store.places import StoragePath, sizes
from torsh_trainer.checkpoint.store.summing import RunningSum
from torsh_trainer.checkpoint.tensors.metadata import NoMetadataError, parse
from torsh_trainer.checkpoint.tensors.planner import Planner
from torsh_trainer.checkpoint.tensors.reading import PieceLocation, Wanted, plan_reads, read_file
from torsh_trainer.errors import ResourceError
from torsh_trainer.utils.files import of_file


class Written(NamedTuple):
    """What one rank wrote."""

    results: list[WriteResult]
    files: dict[str, Digest]
    plain: Any
    """Its plain values, encoded."""
    sums: dict[str, Sum]
    """By tensor, the hash of what it wrote; empty where nothing was to be hashed."""

    def pack(self) -> Any:
        """As JSON can hold it."""
        results = [
            [
                *(one.index.fqn, one.index.offset, one.index.index, one.size_in_bytes),
                *(one.storage_data.relative_path, one.storage_data.offset, one.storage_data.length),
            ]
            for one in self.results
        ]
        files = {name: [file.size_bytes, file.crc32] for name, file in self.files.items()}
        sums = {name: list(one) for name, one in self.sums.items()}
        return {"results": results, "files": files, "plain": self.plain, "sums": sums}

    @classmethod
    def unpack(cls, said: Any) -> Written:
        """The inverse of ``pack``."""
        results = [
            WriteResult(
                MetadataIndex(name, None if at is None else torch.Size(at), number),
                size_bytes,
                StorageInfo(path, offset, length),
            )
            for name, at, number, size_bytes, path, offset, length in said["results"]
        ]
        files = {name: Digest(*file) for name, file in said["files"].items()}
        sums = {name: Sum(*one) for name, one in said["sums"].items()}
        return cls(results, files, said["plain"], sums)


def agree(planner: Planner, offers: list[SavePlan]) -> list[SavePlan]:
    """Deals out what the ranks offer, so that everything is written once and evenly.

    Returns a plan for each rank; ``planner.metadata`` then says what the whole will hold.

    Raises:
        TrainingError: the ranks' pieces do not make up whole tensors; the message names one.
    """
    plans, _ = planner.create_global_plan(offers)
    return _Writer(Path()).prepare_global_plan(plans)


def write_tensors(planner: Planner, folder: StoragePath) -> Written:
    """Writes this rank's files into ``folder`` and returns once they are safe there.

    Raises:
        OSError: the disk refused; a remote store raises what its library raises.
    """
    writer = _Writer(folder)
    writer.set_up_storage_writer(is_coordinator=planner.is_coordinator)
    try:
        sums = planner.sums()
        with _pieces_not_summed():
            results = writer.write_data(planner.plan, planner)
        return Written(list(results.wait()), dict(writer.fs.digests), planner.plain, sums)
    finally:
        planner.release()


@contextmanager
def _pieces_not_summed() -> Iterator[None]:
    """Each piece is a zip with a sum of its own, and it would take a quarter of the time.

    The manifest has one of the whole file. torch keeps this setting by thread.
    """
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def metadata_file(metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> bytes:
    """The content of the file that says where every piece of every tensor lies."""
    writer = _Writer(Path())
    writer.sync_files = False
    writer.fs = kept = _Kept()
    writer.finish(metadata, [list(some) for some in results])
    return kept.content.getvalue()


def read_metadata(folder: StoragePath) -> Metadata:
    """Where every piece of every tensor lies.

    Raises:
        ResourceError: the file holds something else than such metadata.
    """
    path = folder / METADATA
    try:
        files = {name: size for name, size in sizes(folder).items() if size is not None}
        return parse(path.read_bytes() if METADATA in files else b"", files)
    except (OSError, NoMetadataError) as error:
        raise ResourceError(
            f"{path} cannot be read: {error}",
            fix="resume from another checkpoint with checkpoint.resume=PATH",
            path=str(path),
        ) from error


def shapes(metadata: Metadata) -> dict[Key, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of every tensor of a checkpoint."""
    return {
        tuple(map(str, metadata.planner_data[name])): (tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read(folder: StoragePath, metadata: Metadata, into: Mapping[Key, Leaf]) -> None:
    """Fills the tensors of ``into`` in place; each rank reads what it holds.

    Raises:
        ResourceError: the checkpoint does not hold what its metadata says.
        OSError: the disk refused.
    """
    per_file: dict[str, list[tuple[PieceLocation, Wanted]]] = {}
    for piece in plan_reads(metadata, into):
        info = metadata.storage_data[piece.item.storage_index]
        if getattr(info, "transform_descriptors", None):
            raise ResourceError(
                f"{folder} is compressed ({info.transform_descriptors}), and only plain files "
                "are read here",
                fix="save it again with torch.distributed.checkpoint without extensions",
            )
        stored = PieceLocation(info.relative_path, info.offset, info.length)
        per_file.setdefault(stored.relative_path, []).append((stored, piece))
    for name, pieces in per_file.items():
        with (folder / Path(name).name).open("rb") as stream:
            read_file(stream, pieces)


class _Summed(io.BufferedWriter):
    """A file that sums up what is written to it, and remembers when the disk refused."""

    def __init__(self, path: StoragePath) -> None:
        super().__init__(path.open("wb", buffering=0), buffer_size=1 << 20)
        self.size_bytes = 0
        self.sum = RunningSum()
        self.refused: Exception | None = None
        self._is_closed = False

    def close(self) -> None:
        if not self._is_closed:  # a file that cannot say so itself is closed twice otherwise
            self._is_closed = True
            self.sum.close()
            super().close()

    def write(self, data: Any, /) -> int:
        try:
            with self.sum.adding(data):
                written = super().write(data)
        except Exception as error:  # every library of a store has errors of its own
            self.refused = error
            raise
        self.size_bytes += written
        return written


class _SummedFiles(FileSystem):
    """Files of any place, with the digests of those written through it."""

    def __init__(self) -> None:
        self.digests: dict[str, Digest] = {}

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb"
        target: StoragePath = path
        stream = _Summed(target)
        try:
            with stream:
                yield stream
        except (RuntimeError, OSError) as error:
            # torch.save loses the disk's own words: "unexpected pos 704 vs 598".
            refused = stream.refused or error
            if isinstance(target, Path) and isinstance(refused, OSError):
                raise of_file(refused, target) from error
            raise refused from None if refused is error else error
        self.digests[target.name] = Digest(stream.size_bytes, f"{stream.sum.crc:08x}")


class _Kept(_SummedFiles):
    """A file that stays in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.content = io.BytesIO()

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb"
        yield self.content

    def exists(self, path: Any) -> bool:
        return False

    def rename(self, path: Any, new_path: Any) -> None:
        """It has no name."""


class _Writer(FileSystemWriter):
    fs: _SummedFiles

    def __init__(self, folder: StoragePath) -> None:
        # What a store has taken is safe there; a file of this machine is synced.
        super().__init__(Path(), sync_files=isinstance(folder, Path))
        self.fs = _SummedFiles()
        self.path: Any = folder

    def storage_meta(self) -> StorageMeta:
        return (
            StorageMeta()
        )  # the default names a path of this machine, and is never the same twice
