"""Pickles read as data: what they name is never imported, and what they call is never called.

Python's own unpickler is a small machine that a file programs. A list of allowed names makes it
safer, but not harmless: it sets attributes on what it is allowed to name, makes a memo as large as
the file asks for, and hashes what takes for ever to hash. This one builds lists of what a pickle
says, in time and memory that are linear in its size, and leaves it to the caller to believe any.

Needs no torch.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


class NotInertError(ValueError):
    """The bytes are no pickle, or one that no plain value comes as; the words say where."""


class GlobalName(NamedTuple):
    """What a pickle calls a class, a function or a constant."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class PersistentId(NamedTuple):
    """What a pickle says lies elsewhere (a persistent id)."""

    key: Any


@dataclass(eq=False)
class Made:
    """What a pickle wants called: ``by`` whom, with which arguments, and the state set on it."""

    by: Any
    args: Any
    state: Any = None


@dataclass(eq=False)
class PairTable:
    """A dict, as its pairs: keys are not hashed, and may come twice."""

    pairs: list[tuple[Any, Any]]


def read(data: bytes) -> Any:
    """What ``data`` holds: numbers, strings, lists, tuples, ``PairTable`` of a dict, the above.

    Raises:
        NotInertError: it ends too early, or asks for something that plain values never need.
    """
    machine = _Machine(data)
    while (code := machine.take(1)[0]) != _STOP:
        step = _STEPS.get(code)
        if step is None:
            raise NotInertError(f"code {code:#04x} at byte {machine.at - 1} has no place in it")
        step(machine)
    value = machine.pop()
    if machine.stack or machine.marks:
        raise NotInertError("it ends with something left over")
    return value


class _Machine:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):
            raise NotInertError("it ends too early")
        piece = self.data[self.at : end]
        self.at = end
        return piece

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def line(self) -> str:
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise NotInertError("it ends too early")
        piece = self.take(end + 1 - self.at)[:-1]
        return _text(piece)

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise NotInertError(f"it takes what is not there, before byte {self.at}")
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        if not self.marks:
            raise NotInertError(f"it takes what is not there, before byte {self.at}")
        begin = self.marks.pop()
        items = self.stack[begin:]
        del self.stack[begin:]
        return items

    def top(self, kind: type[Any]) -> Any:
        """The value on top, which has to be a ``kind``."""
        value = self.pop()
        self.push(value)
        if not isinstance(value, kind):
            raise NotInertError(f"it adds to what holds nothing, before byte {self.at}")
        return value

    def recall(self, index: int) -> None:
        if index not in self.memo:
            raise NotInertError(f"it recalls what it never kept, before byte {self.at}")
        self.push(self.memo[index])

    def keep(self, index: int) -> None:
        self.memo[index] = value = self.pop()
        self.push(value)


def _text(piece: bytes) -> str:
    try:
        return piece.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise NotInertError("a string in it is no UTF-8") from error


def _long(m: _Machine) -> None:
    m.push(int.from_bytes(m.take(m.number("<B")), "little", signed=True))


def _tuple(count: int) -> Callable[[_Machine], None]:
    def step(m: _Machine) -> None:
        items = [m.pop() for _ in range(count)]
        m.push(tuple(reversed(items)))

    return step


def _append(m: _Machine) -> None:
    value = m.pop()
    m.top(list).append(value)


def _appends(m: _Machine) -> None:
    items = m.pop_to_mark()
    m.top(list).extend(items)


def _set_item(m: _Machine) -> None:
    value, key = m.pop(), m.pop()
    m.top(PairTable).pairs.append((key, value))


def _set_items(m: _Machine) -> None:
    items = m.pop_to_mark()
    if len(items) % 2:
        raise NotInertError(f"a key without a value, before byte {m.at}")
    m.top(PairTable).pairs.extend(zip(items[::2], items[1::2], strict=True))


def _global(m: _Machine) -> None:
    module = m.line()
    m.push(GlobalName(module, m.line()))


def _stack_global(m: _Machine) -> None:
    name, module = m.pop(), m.pop()
    if not (isinstance(name, str) and isinstance(module, str)):
        raise NotInertError(f"a name that is no string, before byte {m.at}")
    m.push(GlobalName(module, name))


def _call(m: _Machine) -> None:
    args, by = m.pop(), m.pop()
    m.push(Made(by, args))


def _build(m: _Machine) -> None:
    state = m.pop()
    made = m.top(Made)
    if made.state is not None:
        raise NotInertError(f"a state set twice, before byte {m.at}")
    made.state = state


_STOP = ord(".")
_STEPS: dict[int, Callable[[_Machine], object]] = {
    0x80: lambda m: m.take(1),  # PROTO
    0x95: lambda m: m.take(8),  # FRAME: a hint for reading ahead
    ord("("): lambda m: m.marks.append(len(m.stack)),
    ord("0"): lambda m: m.pop(),
    ord("1"): lambda m: m.pop_to_mark(),
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("J"): lambda m: m.push(m.number("<i")),
    ord("K"): lambda m: m.push(m.number("<B")),
    ord("M"): lambda m: m.push(m.number("<H")),
    0x8A: _long,  # LONG1: up to 255 bytes
    ord("G"): lambda m: m.push(m.number(">d")),
    ord("X"): lambda m: m.push(_text(m.take(m.number("<I")))),
    0x8C: lambda m: m.push(_text(m.take(m.number("<B")))),
    0x8D: lambda m: m.push(_text(m.take(m.number("<Q")))),
    ord("B"): lambda m: m.push(m.take(m.number("<I"))),
    ord("C"): lambda m: m.push(m.take(m.number("<B"))),
    ord(")"): lambda m: m.push(()),
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    ord("t"): lambda m: m.push(tuple(m.pop_to_mark())),
    ord("]"): lambda m: m.push([]),
    ord("a"): _append,
    ord("e"): _appends,
    ord("}"): lambda m: m.push(PairTable([])),
    ord("s"): _set_item,
    ord("u"): _set_items,
    ord("q"): lambda m: m.keep(m.number("<B")),
    ord("r"): lambda m: m.keep(m.number("<I")),
    0x94: lambda m: m.keep(len(m.memo)),  # MEMOIZE
    ord("h"): lambda m: m.recall(m.number("<B")),
    ord("j"): lambda m: m.recall(m.number("<I")),
    ord("c"): _global,
    0x93: _stack_global,
    ord("R"): _call,
    0x81: _call,  # NEWOBJ: a class instead of a function
    ord("b"): _build,
    ord("Q"): lambda m: m.push(PersistentId(m.pop())),  # BINPERSID
}
