"""What a rank asks for, and what all of them are told, as plain values; without torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)
"""Horovod's numbers of its reductions."""

ALL = 0
"""The number of the process set of all processes."""

Part = tuple[str, tuple[int, ...]]
"""Dtype and shape of a tensor."""


@dataclass(frozen=True)
class Request:
    """One rank's wish for one collective; ranks that say the same ``name`` in ``members`` meet.

    ``parts`` are the tensors: several where they are reduced together. ``splits`` are the rows for
    each member (alltoall), ``root`` a rank of the whole job (broadcast).
    """

    name: str
    kind: str
    parts: tuple[Part, ...] = ()
    op: int = SUM
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    members: int = ALL
    splits: tuple[int, ...] = ()
    device: str = "cpu"

    @classmethod
    def from_plain(cls, value: dict[str, Any]) -> Request:
        """The inverse of ``asdict`` after a journey as JSON."""
        parts = tuple((dtype, tuple(shape)) for dtype, shape in value["parts"])
        return cls(**{**value, "parts": parts, "splits": tuple(value["splits"])})


@dataclass(frozen=True)
class Decision:
    """All members of ``request`` have asked for it: it is done now, in this order, or refused.

    ``request`` is that of the first member, and serves those that take part without having asked.
    ``by_rank`` are each member's rows: the first dimensions of its parts (allgather), or its splits
    (alltoall). ``value`` is the answer of a join. ``error`` is Horovod's sentence; ``ended`` says
    that a process that is gone is the reason.
    """

    request: Request
    by_rank: tuple[tuple[int, ...], ...] = ()
    value: int = -1
    error: str = ""
    ended: bool = False

    @classmethod
    def from_plain(cls, value: dict[str, Any]) -> Decision:
        """The inverse of ``asdict`` after a journey as JSON."""
        rows = tuple(tuple(each) for each in value["by_rank"])
        return cls(**{**value, "request": Request.from_plain(value["request"]), "by_rank": rows})


def encode(kind: str, values: Sequence[Request | Decision] = ()) -> bytes:
    """A message: its length in four bytes, and JSON, which can carry no code."""
    text = json.dumps([kind, [asdict(value) for value in values]]).encode()
    return len(text).to_bytes(4, "big") + text


def decode(text: bytes) -> tuple[str, list[Any]]:
    """What ``encode`` was given, without its length."""
    kind, values = json.loads(text)
    read: Any = Decision.from_plain if kind == "decisions" else Request.from_plain
    return kind, [read(value) for value in values]
