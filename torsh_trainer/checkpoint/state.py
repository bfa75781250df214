"""The plain values of a checkpoint, which lie in one file of their own, and all of a state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torsh_trainer.checkpoint.migration import migrate_state
from torsh_trainer.checkpoint.plain import Leaf, Path, decode, encode, put
from torsh_trainer.checkpoint.store.integrity import STATE, read_manifest
from torsh_trainer.checkpoint.store.places import StoragePath
from torsh_trainer.errors import ResourceError
from torsh_trainer.utils.files import parse_json

_PARTS = frozenset(
    {
        "callbacks",
        "config",
        "engine",
        "feed",
        "loop",
        "position",
        "rng",
        "schedule",
        "setup",
        "task",
    }
)


def plain_file(plain: Mapping[str, Any]) -> bytes:
    """The content of the file that holds ``plain``.

    Raises:
        ConfigError: something in it is not plain; the message says where.
    """
    return json.dumps(encode(plain), indent=1, allow_nan=False).encode()


def read_state(folder: StoragePath, tensors: Mapping[Path, Leaf] | None = None) -> dict[str, Any]:
    """The state of the checkpoint in ``folder``, as a release of today would have saved it.

    Of its tensors those in ``tensors`` are in it, and no others.

    Raises:
        ResourceError: the manifest is missing or damaged, or the file holds something else.
        OSError: the disk refused.
    """
    version = read_manifest(folder).version
    path = folder / STATE
    try:
        state: dict[str, Any] = decode(parse_json(path.read_text(encoding="utf-8")))
        _check_parts(state)
        for at, tensor in (tensors or {}).items():
            put(state, at, tensor)
        migrate_state(state, version)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ResourceError(
            f"{path} holds no state of a run: {error}",
            fix="resume from another one with checkpoint.resume=PATH",
            path=str(path),
        ) from error
    return state


def _check_parts(state: Any) -> None:
    """The parts that every run saves are of their kinds; what is in them, their readers know."""
    if not isinstance(state, dict):
        raise TypeError(f"it is a {type(state).__name__}")
    for name in _PARTS & state.keys():
        if not isinstance(state[name], dict):
            raise TypeError(f"its part {name} is a {type(state[name]).__name__}")
    for name, value in state.get("position", {}).items():
        if type(value) is not int or value < 0:
            raise TypeError(f"its {name} is no count")
