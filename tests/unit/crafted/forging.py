"""A checkpoint forged to do harm, and what its loading has to come to.

Checksums are no defence here: whoever writes the files writes the manifest too.
"""

from __future__ import annotations

import io
import pickle
import resource
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.checkpoint.store import integrity
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.errors import ResourceError

DATA = "__0_0.distcp"
LIMIT_BYTES = 1 << 30  # what a load of a few KiB may ask for beyond what is there already


def load(path: Path) -> torch.Tensor:
    """The tensor of a checkpoint, through all checks, within bounds of memory."""
    target = {"model": {"w": torch.zeros(100)}, "rng": {}, "position": {"step": 0}}
    saver = DcpCheckpointer(path.parent, LocalCommunicator())
    with bounded_memory():
        assert saver.find(str(path)) == path
        loaded: torch.Tensor = saver.load(target, path=path)["model"]["w"]
    return loaded


@contextmanager
def bounded_memory() -> Iterator[None]:
    """The kernel refuses more memory than some beyond what is in use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def forge(path: Path, **changes: bytes) -> None:
    """Writes files, and a manifest that vouches for everything."""
    for name, content in changes.items():
        (path / {"metadata": ".metadata", "data": DATA, "state": "state.json"}[name]).write_bytes(
            content
        )
    manifest = integrity.read_manifest(path)
    files = {name: integrity.digest(path / name) for name in manifest.files}
    integrity.write_manifest(path, replace(manifest, files=files))
    integrity.verify(path)


def refused(path: Path, name: str, words: str = "") -> None:
    """Loading stops in one sentence that names the file, and nothing has happened."""
    with pytest.raises(ResourceError) as caught:
        load(path)
    assert name in caught.value.sentence
    assert words in caught.value.sentence
    assert len(caught.value.sentence) < 1000
    assert "\n" not in caught.value.sentence
    assert not list(Path.cwd().iterdir()), "something ran"


def metadata_of(path: Path) -> Metadata:
    """As torch itself reads it; this one is ours."""
    found: Metadata = pickle.loads((path / ".metadata").read_bytes())
    return found


def forge_metadata(path: Path, change: Callable[[Metadata], object]) -> None:
    metadata = metadata_of(path)
    change(metadata)
    forge(path, metadata=pickle.dumps(metadata))


def place(metadata: Metadata, name: str) -> _StorageInfo:
    found: _StorageInfo = next(at for i, at in metadata.storage_data.items() if i.fqn == name)
    return found


def put_piece(path: Path, content: bytes) -> None:
    """Puts ``content`` where the tensor w lies, at the end of its file."""
    data = (path / DATA).read_bytes()

    def change(metadata: Metadata) -> None:
        vars(place(metadata, "model.w")).update(offset=len(data), length=max(400, len(content)))

    filled = content + bytes(max(0, 400 - len(content)))
    (path / DATA).write_bytes(data + filled)
    forge_metadata(path, change)


def zipped(files: dict[str, bytes], how: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", how) as archive:
        for name, content in files.items():
            archive.writestr(f"archive/{name}", content)
    return file.getvalue()
