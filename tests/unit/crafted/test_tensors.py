"""Tensors that lie are refused."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from crafted.forging import DATA, forge, load, put_piece, refused, zipped

from torsh_trainer.checkpoint.tensors.header import read_header

pytestmark = pytest.mark.timeout(240)


def test_the_sound_one_loads(path: Path) -> None:
    forge(path)
    assert torch.equal(load(path), torch.arange(100.0))


class Storage:
    """Pickles as the storage of a tensor lying in ``data/0``."""

    def __init__(self, numel: Any, key: str = "0", kind: str = "FloatStorage") -> None:
        self.id = ("storage", Named("torch", kind), key, "cpu", numel)


class Named:
    """Pickles as a name."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


class Pickler(pickle._Pickler):  # type: ignore[name-defined,misc]
    """Writes names as they are said, wherever they lead."""

    def persistent_id(self, value: Any) -> Any:
        return value.id if isinstance(value, Storage) else None

    def save(self, value: Any, *args: Any, **more: Any) -> None:
        if isinstance(value, Named):
            self.write(f"c{value.module}\n{value.name}\n".encode())
        elif isinstance(value, Reduced):
            self.save(value.by)
            self.save(value.args)
            self.write(b"R")
        else:
            super().save(value, *args, **more)


class Reduced:
    """Pickles as a call of a name."""

    def __init__(self, by: Named, *args: Any) -> None:
        self.by, self.args = by, args


def dumped(value: Any) -> bytes:
    file = io.BytesIO()
    Pickler(file, 2).dump(value)
    return file.getvalue()


def tensor(
    numel: Any = 100,
    first: Any = 0,
    shape: Any = (100,),
    stride: Any = (1,),
    *,
    more: tuple[Any, ...] = (),
    by: str = "_rebuild_tensor_v2",
    **storage: Any,
) -> bytes:
    hooks = Reduced(Named("collections", "OrderedDict"))
    made = Reduced(
        Named("torch._utils", by),
        Storage(numel, **storage),
        first,
        shape,
        stride,
        False,
        hooks,
        *more,
    )
    return dumped(made)


FLOATS = torch.arange(100.0).numpy().tobytes()


def test_a_tensor_put_together_by_hand_is_read(path: Path) -> None:
    put_piece(path, zipped({"data.pkl": tensor(), "data/0": FLOATS}))
    assert torch.equal(load(path), torch.arange(100.0))


ZIP_BOMB = zipped({"data.pkl": tensor(), "data/0": bytes(1 << 28)}, zipfile.ZIP_DEFLATED)
TENSORS: dict[str, bytes] = {
    "deflated zeros": ZIP_BOMB,
    "a deflated pickle": zipped(
        {"data.pkl": tensor() + bytes(1 << 24), "data/0": FLOATS}, zipfile.ZIP_DEFLATED
    ),
    "a pickle of megabytes": zipped({"data.pkl": tensor() + bytes(1 << 20), "data/0": FLOATS}),
    "no data": zipped({"data.pkl": tensor()}),
    "no pickle": zipped({"data/0": FLOATS}),
    "less data than said": zipped({"data.pkl": tensor(), "data/0": FLOATS[:-4]}),
    "more numbers than data": zipped({"data.pkl": tensor(1 << 40), "data/0": FLOATS}),
    "data of another name": zipped({"data.pkl": tensor(key="../0"), "data/0": FLOATS}),
    "a shape beyond the data": zipped({"data.pkl": tensor(shape=(101,)), "data/0": FLOATS}),
    "a step beyond the data": zipped({"data.pkl": tensor(stride=(1 << 40,)), "data/0": FLOATS}),
    "a first number beyond the data": zipped({"data.pkl": tensor(first=1), "data/0": FLOATS}),
    "a negative first number": zipped({"data.pkl": tensor(first=-4), "data/0": FLOATS}),
    "a negative shape": zipped({"data.pkl": tensor(shape=(-1,)), "data/0": FLOATS}),
    "a negative step": zipped({"data.pkl": tensor(first=99, stride=(-1,)), "data/0": FLOATS}),
    "another shape": zipped({"data.pkl": tensor(shape=(50,)), "data/0": FLOATS}),
    "other dimensions": zipped(
        {"data.pkl": tensor(shape=(10, 10), stride=(10, 1)), "data/0": FLOATS}
    ),
    "a type that is none": zipped({"data.pkl": tensor(kind="os"), "data/0": FLOATS}),
    "another function": zipped({"data.pkl": tensor(by="_rebuild_sparse_tensor"), "data/0": FLOATS}),
    "a memory of 2^40": zipped(
        {"data.pkl": dumped(Reduced(Named("torch", "Tensor"), 1 << 40)), "data/0": FLOATS}
    ),
    "an array of 2^40": zipped(
        {"data.pkl": dumped(Reduced(Named("builtins", "bytearray"), 1 << 40)), "data/0": FLOATS}
    ),
    "attributes": zipped({"data.pkl": tensor(more=({"conj": 1, "evil": True},)), "data/0": FLOATS}),
    "the order of another machine": zipped(
        {"data.pkl": tensor(), "byteorder": b"big", "data/0": FLOATS}
    ),
    "no zip": b"PK\3\4" + bytes(500),
}


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_twice_in_the_archive_is_refused(path: Path) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for content in (tensor(), tensor(1 << 40)):
            archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/data/0", FLOATS)
    put_piece(path, file.getvalue())
    refused(path, DATA)


@pytest.mark.parametrize("lie", TENSORS)
def test_a_tensor_that_lies_is_refused(lie: str, path: Path) -> None:
    put_piece(path, TENSORS[lie])
    refused(path, DATA)


def test_what_torch_saves_of_every_kind_of_tensor_has_the_header_that_torch_reads() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    kinds = [
        *(torch.ones(3, 2).to(t) for t in (torch.float8_e4m3fn, torch.uint16, torch.bfloat16)),
        *(torch.ones(5).to(t) for t in (torch.bool, torch.int8, torch.float64, torch.complex64)),
        base.t(),
        base[1:, 2:4],
        torch.ones(1, 3).expand(4, 3),
        torch.empty(0, 3),
        torch.tensor(7),
    ]
    for kind in kinds:
        file = io.BytesIO()
        file.write(b"before")
        begin = file.tell()
        torch.save(kind, file)
        size = file.tell() - begin
        header = read_header(file, begin, size)
        assert (header.dtype, header.shape) == (kind.dtype, tuple(kind.shape))
        assert header.stride == kind.stride()
        raw = file.getvalue()[begin + header.begin :][: header.extent * kind.itemsize]
        held = torch.frombuffer(bytearray(raw or b"\0" * 16), dtype=kind.dtype)
        held = held.as_strided(kind.shape, kind.stride())
        wide = torch.complex64 if kind.is_complex() else torch.float64
        assert torch.equal(held.to(wide), kind.to(wide))
