"""What a torch.save of one tensor says of it: its type, its shape, and where its bytes lie.

Such a file is a zip with a small pickle and the raw bytes. torch.load(weights_only=True) would run
no code from it either, but believes sizes: some KiB of deflated zeros, or a shape, make it ask for
more memory than there is. Here the pickle is read as data, and only plain strided tensors are
known, whose bytes lie there as they are.
"""

from __future__ import annotations

import io
import sys
import zipfile
from typing import Any, NamedTuple, NoReturn

import torch

from torsh_trainer.checkpoint.tensors.inert import GlobalName, Made, PairTable, PersistentId, read
from torsh_trainer.checkpoint.tensors.metadata import dtype_of

_LONGEST_PICKLE = 1 << 16
_LOCAL_HEADER_BYTES = 30
_STORAGES = {
    f"{kind}Storage": dtype
    for kind, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
        "ComplexDouble": torch.complex128,
        "ComplexFloat": torch.complex64,
    }.items()
}
_REBUILD_TYPED = GlobalName("torch._utils", "_rebuild_tensor_v2")
_REBUILD = GlobalName("torch._utils", "_rebuild_tensor_v3")  # of a storage that has no type


class NoTensorError(ValueError):
    """The bytes are no plain tensor; the words say why."""


class Header(NamedTuple):
    """A tensor without its data: ``begin`` is the byte of its first element.

    ``conj`` and ``neg``: what lies there is the conjugate, or the negative, of the tensor.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    begin: int
    conj: bool = False
    neg: bool = False

    @property
    def extent(self) -> int:
        """Elements from the first to the last one."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))


def read_header(stream: io.BufferedIOBase, offset: int, size_bytes: int) -> Header:
    """The header of the tensor that lies in ``stream`` at ``offset``, on ``size_bytes`` bytes.

    ``begin`` counts from ``offset``.

    Raises:
        NoTensorError: there lies something else.
    """
    file = _Window(stream, offset, size_bytes)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = _entries(archive, size_bytes)
        pickled = entries.get("data.pkl") or _refuse("it has no data.pkl")
        if "byteorder" in entries:
            order = _content(file, entries["byteorder"], size_bytes)
            if order != sys.byteorder.encode():
                _refuse(f"its numbers are in another order of bytes ({order[:10]!r})")
        value = read(_content(file, pickled, size_bytes))
    except (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError) as error:
        raise NoTensorError(str(error)) from error
    dtype, key, numel, arguments, flags = _tensor(value)
    data = entries.get(f"data/{key}") or _refuse(f"it has no data/{key}")
    if data.file_size != numel * dtype.itemsize:
        _refuse(f"its data has {data.file_size} bytes")
    first, shape, stride = arguments
    header = Header(dtype, shape, stride, 0, **flags)
    if first + header.extent > numel:
        _refuse("its shape reaches beyond its data")
    begin = _begin(file, data, size_bytes)
    return header._replace(begin=begin + first * dtype.itemsize)


class _Window(io.RawIOBase):
    """A part of a stream, as a file of its own."""

    def __init__(self, stream: io.BufferedIOBase, offset: int, size_bytes: int) -> None:
        super().__init__()
        self._stream, self._offset, self._size_bytes = stream, offset, size_bytes
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at}.get(whence, self._size_bytes)
        if at < 0:
            raise ValueError("a place before the first byte")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def readinto(self, into: Any, /) -> int:
        view = memoryview(into)
        view = view[: max(0, self._size_bytes - self._at)]
        self._stream.seek(self._offset + self._at)
        count = self._stream.readinto(view)
        self._at += count
        return count


def _entries(archive: zipfile.ZipFile, size_bytes: int) -> dict[str, zipfile.ZipInfo]:
    """The entries by name, without the folder that they lie in."""
    found: dict[str, zipfile.ZipInfo] = {}
    for entry in archive.infolist():
        name = entry.filename.partition("/")[2]
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            _refuse(f"{entry.filename} is compressed or encrypted")
        if entry.compress_size != entry.file_size or entry.file_size > size_bytes or name in found:
            _refuse(f"{entry.filename} is not what it says")
        found[name] = entry
    return found


def _begin(file: _Window, entry: zipfile.ZipInfo, size_bytes: int) -> int:
    """Where the bytes of an entry begin."""
    file.seek(entry.header_offset)
    local = file.read(_LOCAL_HEADER_BYTES)
    lengths = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
    begin = entry.header_offset + _LOCAL_HEADER_BYTES + lengths
    if not local.startswith(b"PK\3\4") or begin + entry.file_size > size_bytes:
        _refuse("its data lies outside of it")
    return begin


def _content(file: _Window, entry: zipfile.ZipInfo, size_bytes: int) -> bytes:
    """A small entry, without asking for its sum: the manifest has one of the whole file."""
    if entry.file_size > _LONGEST_PICKLE:
        _refuse("its pickle is too large for one tensor")
    file.seek(_begin(file, entry, size_bytes))
    return file.read(entry.file_size)


def _tensor(value: Any) -> tuple[torch.dtype, str, int, tuple[Any, Any, Any], dict[str, bool]]:
    """Type, name and length of the storage, (first element, shape, stride), conj and neg."""
    if not (isinstance(value, Made) and isinstance(value.args, tuple) and value.state is None):
        _refuse("it is no tensor")
    if value.by not in (_REBUILD_TYPED, _REBUILD):
        _refuse(f"it names {value.by if isinstance(value.by, GlobalName) else 'nothing'}"[:200])
    untyped = value.by == _REBUILD
    least = 7 if untyped else 6
    if not least <= len(value.args) <= least + 1:
        _refuse("it is no tensor")
    storage, first, shape, stride = value.args[:4]
    extra = value.args[least] if len(value.args) > least else None
    dtype, key, numel = _storage(storage, value.args[6] if untyped else None)
    plain = _is_count(first) and isinstance(shape, tuple) and isinstance(stride, tuple)
    if not (plain and all(map(_is_count, (*shape, *stride))) and len(shape) == len(stride)):
        _refuse("its shape is none")
    return dtype, key, numel, (first, shape, stride), _flags(extra)


def _storage(value: Any, dtype: Any) -> tuple[torch.dtype, str, int]:
    key = value.key if isinstance(value, PersistentId) else None
    if not (isinstance(key, tuple) and len(key) == 5 and key[0] == "storage"):
        _refuse("its data lies nowhere")
    _, kind, name, _, numel = key
    if not (isinstance(kind, GlobalName) and isinstance(name, str) and _is_count(numel)):
        _refuse("its data lies nowhere")
    if dtype is None:
        found = _STORAGES.get(kind.name) if kind.module == "torch" else None
    else:
        found = dtype_of(dtype) if isinstance(dtype, GlobalName) else None
        numel = numel // found.itemsize if found is not None else numel
    if found is None:
        _refuse(f"it names {kind if dtype is None else dtype}, which is no type"[:200])
    return found, name, numel


def _flags(value: Any) -> dict[str, bool]:
    if value is None:
        return {}
    pairs = value.pairs if isinstance(value, PairTable) else [("", None)]
    if any(name not in ("conj", "neg") or type(flag) is not bool for name, flag in pairs):
        _refuse("it is more than a plain tensor")
    return dict(pairs)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _refuse(why: str) -> NoReturn:
    raise NoTensorError(why)
