"""Batches on their way to the device, whatever they are made of; they keep their types."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torsh_trainer.errors import ConfigError

T = TypeVar("T")

_PLAIN = (str, bytes, bool, int, float, complex, type(None), type)
_MOST_PARTS = 1000
"""So many parts of an object that nobody can move are searched for tensors."""


class Mover:
    """Moves batches to ``device``, on the stream in use; on a CPU they stay as they are.

    Calling it moves one batch: tensors, mappings, sequences, named tuples, dataclasses, what is
    registered with torch's pytree, and objects with a method ``to(device)``, in one another.

    Raises:
        ConfigError: an object holds tensors, and nothing says how to move it.
    """

    ahead = 0
    """How many steps are moved before the one that is handed out."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.moves = device.type != "cpu"

    def __call__(self, batch: Any) -> Any:
        return self._visit(batch) if self.moves else batch

    def mark(self) -> Any:
        """Ends what was moved since the last mark; ``arrive`` with it before that is used."""

    def arrive(self, mark: Any) -> None:
        """What ``mark`` ends may be used from now on; the host waits for nothing."""

    def in_turn(self, made: Iterator[T]) -> Iterator[T]:
        """What ``made`` gives, as it arrives: it calls this mover for what is in it."""
        return made

    def _visit(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._move(value)
        if isinstance(value, _PLAIN):
            return value
        if _has_method(value, "to"):
            return self._move_by_itself(value)
        changed = change_parts(value, self._visit)
        if changed is value and holds_tensors(value):
            raise self._move_error(value)
        return changed

    def _move(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    def _move_by_itself(self, value: Any) -> Any:
        try:
            try:
                moved = value.to(self.device, non_blocking=True)
            except TypeError:  # its own signature
                moved = value.to(self.device)
        except Exception as error:
            if holds_tensors(value):
                raise self._move_error(value) from error
            return value  # its ``to`` is about something else
        return value if moved is None else moved

    def _move_error(self, value: Any) -> ConfigError:
        return ConfigError(
            f"a batch holds a {type(value).__qualname__} with tensors in it, and nothing moves "
            f"them to {self.device}",
            fix="give it a method to(device), or make it a dataclass, a named tuple or a dict",
        )


class StreamMover(Mover):
    """Moves a step ahead on a CUDA stream of its own, beside what the device computes.

    Memory of the tensors is kept for the stream that uses them (``record_stream``). An object that
    moves itself is moved on the stream in use: nobody sees its memory.
    """

    ahead = 1

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._side = torch.cuda.Stream(device)
        self._moved: list[Tensor] = []

    def _move(self, tensor: Tensor) -> Tensor:
        with torch.cuda.stream(self._side):
            moved = tensor.to(self.device, non_blocking=True)
        if moved is not tensor:
            self._moved.append(moved)
        return moved

    def mark(self) -> Any:
        moved, self._moved = self._moved, []
        return self._side.record_event(), moved

    def arrive(self, mark: Any) -> None:
        event, moved = mark
        using = torch.cuda.current_stream(self.device)
        using.wait_event(event)
        for tensor in moved:
            tensor.record_stream(using)

    def in_turn(self, made: Iterator[T]) -> Iterator[T]:
        waiting: tuple[T, Any] | None = None
        for one in made:
            following = one, self.mark()
            if waiting is not None:
                self.arrive(waiting[1])
                yield waiting[0]
            waiting = following
        if waiting is not None:
            self.arrive(waiting[1])
            yield waiting[0]


def mover_to(device: torch.device) -> Mover:
    """What moves batches to ``device`` best."""
    return StreamMover(device) if device.type == "cuda" else Mover(device)


class ToPin:
    """A batch on its way out of a loader process: torch's thread pins it, and types are kept.

    By itself that thread makes lists of tuples, and passes dataclasses by.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def pin_memory(self) -> Any:
        """The batch itself, pinned."""
        return pin(self._batch)


def pin(value: Any) -> Any:
    """``value`` with its tensors in page-locked memory, where it is known how to get at them."""
    if isinstance(value, _PLAIN) or (isinstance(value, Tensor) and value.device.type != "cpu"):
        return value
    if _has_method(value, "pin_memory"):
        return value.pin_memory()
    return change_parts(value, pin)


def _has_method(value: Any, name: str) -> bool:
    """Not of a dict: transformers' ``BatchEncoding.to`` changes the batch that it was given."""
    return not isinstance(value, dict | UserDict) and callable(getattr(value, name, None))


def change_parts(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value of the same type with each part as ``change`` gives it; itself where it has none."""
    kind = type(value)
    if kind in pytree.SUPPORTED_NODES:  # dict, list, tuple and what libraries have registered
        return pytree.tree_map(change, value, is_leaf=lambda part: part is not value)
    if isinstance(value, Mapping):
        parts = {key: change(part) for key, part in value.items()}
        if not hasattr(value, "update"):
            return kind(parts)
        changed: Any = copy.copy(value)
        changed.update(parts)
        return changed
    if isinstance(value, tuple):
        items = [change(part) for part in value]
        return kind._make(items) if hasattr(kind, "_make") else kind(items)
    if isinstance(value, list):
        changed = copy.copy(value)
        changed[:] = [change(part) for part in value]
        return changed
    if isinstance(value, set | frozenset):
        return kind(change(part) for part in value)
    if dataclasses.is_dataclass(value):
        changed = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):  # a frozen one, or one with slots, may be set like this
                object.__setattr__(changed, field.name, change(getattr(value, field.name)))
        return changed
    return value


def holds_tensors(value: Any) -> bool:
    """Whether there is a tensor among the attributes of an object and the parts of those."""
    waiting, seen = [value], set[int]()
    while waiting and len(seen) < _MOST_PARTS:
        one = waiting.pop()
        if isinstance(one, Tensor):
            return True
        if isinstance(one, _PLAIN) or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Mapping):
            waiting += list(one.values())[:_MOST_PARTS]
        elif isinstance(one, tuple | list | set | frozenset):
            waiting += list(one)[:_MOST_PARTS]
        else:
            waiting += list(getattr(one, "__dict__", {}).values())
            slots = (name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ()))
            waiting += [getattr(one, name) for name in slots if hasattr(one, name)]
    return False
