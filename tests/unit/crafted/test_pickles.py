"""Pickles that would run code, hang or take all memory: none does, each is refused by its name."""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from crafted.forging import DATA, forge, put_piece, refused, zipped
from torch.distributed.checkpoint.metadata import (
    Metadata,
)

from torsh_trainer.checkpoint.tensors.header import NoTensorError, read_header
from torsh_trainer.checkpoint.tensors.inert import NotInertError, read
from torsh_trainer.checkpoint.tensors.metadata import NoMetadataError, parse

pytestmark = pytest.mark.timeout(240)


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


def test_a_pickle_read_as_data_names_what_it_would_call() -> None:
    made = read(pickle.dumps(Call(os.mkdir, "canary")))
    assert str(made.by) == "posix.mkdir"
    assert made.args == ("canary",)
    with pytest.raises(NotInertError):
        read(b"\x80\x04N")
