"""Checkpoints that somebody made to do harm: none runs code, and each is refused by its name.

Checksums are no defence here: whoever writes the files writes the manifest too.
"""

from __future__ import annotations

import copyreg
import io
import json
import os
import pickle
import random
import resource
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.checkpoint.store import integrity
from torsh_trainer.checkpoint.store.retention import complete
from torsh_trainer.checkpoint.tensors.header import NoTensorError, read_header
from torsh_trainer.checkpoint.tensors.inert import NotInertError, read
from torsh_trainer.checkpoint.tensors.metadata import NoMetadataError, parse
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.errors import ConfigError, ResourceError

DATA = "__0_0.distcp"
LIMIT_BYTES = 1 << 30  # what a load of a few KiB may ask for beyond what is there already
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an attack makes, it makes here."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A sound checkpoint of two tensors, one of them free of any template."""
    state = {
        "model": {"w": torch.arange(100.0)},
        "rng": {"rank_0": {"torch": torch.arange(9)}},
        "position": {"step": 1},
    }
    saver = DcpCheckpointer(tmp_path / "checkpoints", LocalCommunicator())
    saved = saver.save(1, state, {"loss": 0.5})
    saver.close()
    assert isinstance(saved, Path)
    return saved


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


def test_the_sound_one_loads(path: Path) -> None:
    forge(path)
    assert torch.equal(load(path), torch.arange(100.0))


# -- pickles that run code ------------------------------------------------------------------------

MKDIR = b"os\nmkdir\n"


class Call:
    """Pickles as a call."""

    def __init__(self, by: Callable[..., Any], *args: Any) -> None:
        self.call = (by, args)

    def __reduce__(self) -> Any:
        return self.call


class Deep:
    """Pickles as a state that a class of torch's takes, with a call amid it."""

    def __reduce__(self) -> Any:
        return Metadata, ({"w": Call(os.mkdir, "canary")},)


def chained() -> bytes:
    """``getattr(__import__("os"), "mkdir")("canary")``, from builtins alone."""
    return pickle.dumps(Call(CallLater("mkdir"), "canary"))


class CallLater:
    """Pickles as ``getattr(__import__("os"), name)``, and so stands for what that gives."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any) -> None:
        """A pickle wants what it calls to be callable."""

    def __reduce__(self) -> Any:
        return getattr, (Call(__import__, "os"), self.name)


def short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def in_torch_save(payload: Any) -> bytes:
    """A pickle within a pickle: torch's old way to keep a storage."""
    file = io.BytesIO()
    torch.save(payload, file, _use_new_zipfile_serialization=False)
    return pickle.dumps(Call(LoadFromBytes(), file.getvalue()))


class LoadFromBytes:
    """Pickles as torch.storage._load_from_bytes."""

    def __call__(self, *args: Any) -> None:
        """A pickle wants what it calls to be callable."""

    def __reduce__(self) -> str:
        return "_load_from_bytes"


LoadFromBytes.__module__ = "torch.storage"


ATTACKS: dict[str, bytes] = {
    "os.system": pickle.dumps(Call(os.system, "mkdir canary")),
    "os.mkdir in protocol 0": pickle.dumps(Call(os.mkdir, "canary"), protocol=0),
    "eval": pickle.dumps(Call(eval, "__import__('os').mkdir('canary')")),
    "exec": pickle.dumps(Call(exec, "import os; os.mkdir('canary')")),
    "getattr, from one to the next": chained(),
    "within a class that belongs there": pickle.dumps(Deep()),
    "a name put together": b"\x80\x04" + short("os") + short("mkdir") + b"\x93"
    + short("canary") + b"\x85R.",
    "a dotted name": b"\x80\x04" + short("torch") + short("os.mkdir") + b"\x93"
    + short("canary") + b"\x85R.",
    "INST": b"(S'canary'\ni" + MKDIR + b".",
    "OBJ": b"(c" + MKDIR + b"S'canary'\no.",
    "a memo that swaps what is called": b"\x80\x02ctorch\nSize\nq\x00c" + MKDIR
    + b"q\x00h\x00" + b"X\x06\x00\x00\x00canary\x85R.",
    "an extension code": b"\x80\x02\x82\xf0X\x06\x00\x00\x00canary\x85R.",
}  # fmt: skip


@pytest.fixture
def extension() -> Iterator[None]:
    """Somebody has registered a number for a function."""
    copyreg.add_extension("os", "mkdir", 240)
    yield
    copyreg.remove_extension("os", "mkdir", 240)


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_pickle_that_python_would_run_is_refused_as_metadata(attack: str, path: Path) -> None:
    forge(path, metadata=ATTACKS[attack])
    refused(path, ".metadata")


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("attack", ATTACKS)
def test_python_does_run_it(attack: str) -> None:
    try:
        pickle.loads(ATTACKS[attack])
    except Exception as error:  # noqa: BLE001 - after the deed
        print(error)
    assert Path("canary").is_dir()


def test_a_pickle_that_sets_attributes_of_a_class_changes_nothing(path: Path) -> None:
    module = "torch.distributed.checkpoint.metadata"
    # BUILD with a pair sets attributes of whatever it is given, a class included.
    attack = (
        b"\x80\x04"
        + short(module)
        + short("Metadata")
        + b"\x93N}"
        + short("owned")
        + b"K\x01s\x86b."
    )
    assert pickle.loads(attack).owned == 1  # type: ignore[attr-defined]
    del Metadata.owned  # type: ignore[attr-defined]
    forge(path, metadata=attack)
    refused(path, ".metadata")
    assert not hasattr(Metadata, "owned")


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_pickle_in_the_place_of_a_tensor_is_refused(attack: str, path: Path) -> None:
    put_piece(path, zipped({"data.pkl": ATTACKS[attack], "data/0": bytes(400)}))
    refused(path, DATA)
    put_piece(path, ATTACKS[attack])  # as torch saved before it used zip
    refused(path, DATA)


BOMBS = {
    "nothing": b"",
    "half of one": pickle.dumps(Metadata({}, {}, {}))[:-40],
    "a memo of four billion places": b"\x80\x04}r\xff\xff\xff\xff.",
    "a string of 4 GB": b"\x80\x04X\xff\xff\xff\xff.",
    "bytes of 2^60": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b".",
    "a text of 2^60": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b".",
    "a frame of 2^62": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"}.",
    "a number of 2 GB": b"\x80\x04\x8b\xff\xff\xff\x7f.",
    "tuples that double sixty times, as a key": b"\x80\x04}"
    + b"".join([b")q\x00", *(b"0h\x00h\x00\x86q\x00" for _ in range(60))]) + b"K\x01s.",
    "a hundred thousand lists in one another": b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "a list in itself": b"\x80\x04]q\x00h\x00a.",
    "a recall of nothing": b"\x80\x04h\x07.",
    "a stack that is empty": b"\x80\x04R.",
    "a mark that is missing": b"\x80\x04tb.",
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_pickle_that_would_hang_or_take_all_memory_is_refused(bomb: str, path: Path) -> None:
    put_piece(path, zipped({"data.pkl": BOMBS[bomb], "data/0": bytes(400)}))
    refused(path, DATA)
    forge(path, metadata=BOMBS[bomb])
    refused(path, ".metadata")


def test_spoilt_metadata_is_read_or_refused_and_nothing_else(path: Path) -> None:
    rng = random.Random(3)
    sound = (path / ".metadata").read_bytes()
    sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    assert set(parse(sound, sizes).state_dict_metadata) == {"model.w", "rng.rank_0.torch"}
    outcomes = {True: 0, False: 0}
    for _ in range(4000):
        try:
            parse(spoilt(sound, rng), sizes)
            outcomes[True] += 1
        except NoMetadataError:
            outcomes[False] += 1
    assert outcomes[False] > 2000


def test_a_spoilt_tensor_is_read_or_refused_and_nothing_else() -> None:
    rng = random.Random(4)
    file = io.BytesIO()
    torch.save(torch.arange(5.0), file)
    sound = file.getvalue()
    refusals = 0
    for _ in range(2000):
        content = spoilt(sound, rng)
        try:
            header = read_header(io.BytesIO(content), 0, len(content))
            assert header.begin + header.extent * header.dtype.itemsize <= len(content)
        except NoTensorError:
            refusals += 1
    assert refusals > 200


def spoilt(sound: bytes, rng: random.Random) -> bytes:
    content = bytearray(sound)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(content))
        change = rng.randrange(4)
        if change == 0:
            content[at] = rng.randrange(256)
        elif change == 1:
            content[at] ^= 1 << rng.randrange(8)
        elif change == 2:
            del content[at : at + rng.randrange(1, 9)]
        else:
            content[at:at] = rng.randbytes(rng.randrange(1, 9))
        if not content:
            return b""
    return bytes(content)


# -- metadata that lies ---------------------------------------------------------------------------


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


# -- tensors that lie -----------------------------------------------------------------------------


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


# -- JSON -----------------------------------------------------------------------------------------


def forge_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest, and makes its own checksum fit."""
    content = json.loads((path / "manifest.json").read_text())
    del content["crc32"]
    change(content)
    content["crc32"] = integrity._crc(content)
    (path / "manifest.json").write_text(json.dumps(content))


def setting(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda content: content.update(values)


def file_called(name: str, **entry: Any) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["files"].update(
        {name: {"size_bytes": 3, "crc32": "00000000", **entry}}
    )


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a file above": file_called("../../../etc/passwd"),
    "a file of the system": file_called("/etc/passwd"),
    "the folder above": file_called(".."),
    "a file without a name": file_called(""),
    "itself": file_called("manifest.json"),
    "a negative size": file_called("x", size_bytes=-1),
    "a size that is a text": file_called("x", size_bytes="3"),
    "a size that is true": file_called("x", size_bytes=True),
    "a size of 10^400": file_called("x", size_bytes=10**400),
    "a checksum that is a number": file_called("x", crc32=7),
    "more about a file": file_called("x", code="import os"),
    "files in a list": setting(files=[]),
    "no files": setting(files={}),
    "a step that is a text": setting(step="1"),
    "a negative step": setting(step=-1),
    "a step that is infinite": setting(step=float("inf")),
    "an order that is a text": setting(sequence="9"),
    "an order that is nothing": setting(sequence=None),
    "a version that is a text": setting(version="1"),
    "a version of zero": setting(version=0),
    "metrics in a list": setting(metrics=[1]),
    "a metric that is a text": setting(metrics={"loss": "0.1"}),
    "facts that are a text": setting(facts="x"),
    "a run that is a number": setting(run=5),
    "something unknown": setting(unknown=1),
    "a part that is missing": lambda content: content.pop("world_size"),
}


@pytest.mark.parametrize("lie", MANIFESTS)
def test_a_manifest_that_lies_is_refused_and_hides_no_other_checkpoint(
    lie: str, path: Path
) -> None:
    saver = DcpCheckpointer(path.parent, LocalCommunicator())
    saver.save(2, {"model": {"w": torch.zeros(100)}}, {})
    saver.close()
    forge_manifest(path, MANIFESTS[lie])
    refused(path, "manifest.json" if not lie.startswith("a size of") else "x is missing")
    saver = DcpCheckpointer(path.parent, LocalCommunicator())
    assert saver.find("auto") == path.with_name("step-00000002")
    assert [one.manifest.step for one in complete(path.parent)] == [2]


TEXTS: dict[str, bytes] = {
    "nothing": b"",
    "a list": b"[]",
    "a number": b"7",
    "a text": b'"x"',
    "no text": b"\xff\xfe\x00",
    "a hundred thousand lists in one another": b"[" * 100_000 + b"]" * 100_000,
    "objects in one another": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "a key twice": b'{"position": {"step": 1}, "position": {"step": 2}}',
    "a number of a million digits": b'{"position": {"step": ' + b"9" * 1_000_000 + b"}}",
    "NaN": b'{"position": {"step": NaN}}',
}
STATES: dict[str, bytes] = {
    **TEXTS,
    "a float of a list": b'{"task": {"$float": [1]}}',
    "bytes that are none": b'{"task": {"a": {"$bytes": "!"}}}',
    "a tuple of a number": b'{"task": {"a": {"$tuple": 5}}}',
    "a dict with a list for a key": b'{"task": {"a": {"$dict": [[[1], 2]]}}}',
    "a dict of odd pairs": b'{"task": {"a": {"$dict": [[1, 2, 3]]}}}',
    "a position that is a text": b'{"position": {"step": "1"}}',
    "a negative position": b'{"position": {"step": -1}}',
    "a part that is a list": b'{"engine": []}',
    "a text where a tensor belongs": b'{"rng": {"rank_0": "x"}}',
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_manifest_of_odd_json_is_refused(text: str, path: Path) -> None:
    (path / "manifest.json").write_bytes(TEXTS[text])
    refused(path, "manifest.json")
    assert complete(path.parent) == []


@pytest.mark.parametrize("text", STATES)
def test_a_state_of_odd_json_is_refused(text: str, path: Path) -> None:
    forge(path, state=STATES[text])
    refused(path, "state.json")


@pytest.mark.parametrize("name", ["manifest.json", "state.json", ".metadata", DATA])
@pytest.mark.parametrize("kind", ["pipe", "folder", "link to itself", "endless"])
def test_what_is_no_file_is_refused_and_not_waited_for(name: str, kind: str, path: Path) -> None:
    (path / name).unlink()
    if kind == "pipe":
        os.mkfifo(path / name)
    elif kind == "folder":
        (path / name).mkdir()
    elif kind == "endless":
        (path / name).symlink_to("/dev/zero")
    else:
        (path / name).symlink_to(name)
    refused(path, name)


def test_a_manifest_larger_than_any_is_refused_unread(path: Path) -> None:
    with (path / "manifest.json").open("wb") as file:
        file.truncate(1 << 40)  # a sparse file: it takes no room
    refused(path, "manifest.json")


def test_a_pickle_read_as_data_names_what_it_would_call() -> None:
    made = read(pickle.dumps(Call(os.mkdir, "canary")))
    assert str(made.by) == "posix.mkdir"
    assert made.args == ("canary",)
    with pytest.raises(NotInertError):
        read(b"\x80\x04N")


def test_a_newer_format_is_told_apart_from_damage(path: Path) -> None:
    forge_manifest(path, setting(version=99))
    with pytest.raises(ConfigError, match="format 99"):
        load(path)
