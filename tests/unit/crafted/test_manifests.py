"""Manifests and states that lie, and what stands in the place of a file, are refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crafted.forging import DATA, forge, load, refused

from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.checkpoint.store import integrity
from torsh_trainer.checkpoint.store.retention import complete
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.errors import ConfigError

pytestmark = pytest.mark.timeout(240)


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


def test_a_newer_format_is_told_apart_from_damage(path: Path) -> None:
    forge_manifest(path, setting(version=99))
    with pytest.raises(ConfigError, match="format 99"):
        load(path)
