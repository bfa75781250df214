"""What was seen of the construction of tensors, and how it is computed again, bit for bit."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map


@dataclass(eq=False)
class Content:
    """The bytes of one storage, from one operation that wrote them all to the next.

    ``operations`` have written them, in their order; the first made the storage or wrote all of it.
    A ``constant`` was there before anything was recorded.
    """

    nbytes: int
    operations: list[Operation] = field(default_factory=list)
    constant: UntypedStorage | None = None


class Span(NamedTuple):
    """A part of a storage, from the byte ``start`` on."""

    storage: UntypedStorage
    start: int = 0

    def tensor(
        self, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], offset: int = 0
    ) -> Tensor:
        """A tensor there; ``offset`` and ``strides`` are in elements."""
        places = offset + self.start // dtype.itemsize
        empty = torch.empty(0, dtype=dtype, device="cpu")
        return empty.set_(self.storage, places, torch.Size(shape), tuple(strides))

    def bytes(self, nbytes: int) -> Tensor:
        """So many of them, as uint8."""
        return self.tensor(torch.uint8, (nbytes,), (1,))


class Reference(NamedTuple):
    """A tensor among the arguments of an operation."""

    content: Content
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def tensor(self, span: Span) -> Tensor:
        """It, in the memory given."""
        return span.tensor(self.dtype, self.shape, self.strides, self.offset)


class GeneratorReference(NamedTuple):
    """A generator among the arguments of an operation; its state is the operation's."""


@dataclass(eq=False)
class Operation:
    """A call that can be made again: ``run(*args, **kwargs)``.

    ``reads`` are contents with the number of operations that had written them. ``makes`` are those
    of new storages, with the places of their tensors among the leaves of the outcome. ``state`` is
    that of the random number generator before a call that draws.
    """

    number: int
    run: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    reads: tuple[tuple[Content, int], ...]
    makes: Sequence[tuple[Content, int]] = ()
    state: Tensor | None = None
    default_dtype: torch.dtype = torch.float32

    @property
    def contents(self) -> Iterator[Content]:
        """All that it needs or makes, some of them twice."""
        for content, _ in (*self.reads, *self.makes):
            yield content
        for leaf in tree_leaves((self.args, self.kwargs), is_leaf=_is_reference):
            if isinstance(leaf, Reference):
                yield leaf.content


def compute(content: Content, *, into: Span | None = None) -> Span:
    """The bytes of ``content`` as they are by now, in new memory or ``into`` what is given.

    No other memory is written, and random number generators are as they were. ``into`` is for
    contents that stand ``alone``.
    """
    operations = _operations_for(content)
    last = {held: operation for operation in operations for held in operation.contents}
    memory: dict[Content, Span] = {} if into is None else {content: into}
    with torch.no_grad(), _without_traces():
        for operation in operations:
            _run(operation, memory)
            for held in {*operation.contents}:
                if last[held] is operation and held is not content:
                    memory.pop(held, None)
        return _memory_of(content, memory)


def alone(content: Content) -> bool:
    """Whether it was written in place alone, so that it may be written anywhere."""
    return not any(operation.makes for operation in content.operations)


@contextmanager
def unseen() -> Iterator[None]:
    """Without the modes of torch that see, or change, what is called within."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def checksum(span: Span, nbytes: int) -> int:
    """A number that other bytes would hardly have: the sum of all words."""
    words, rest = divmod(nbytes, 4)
    pieces = span.tensor(torch.int32, (words,), (1,)).split(2**20)  # a sum copies what it widens
    total = sum(int(piece.sum(dtype=torch.int64)) for piece in pieces)
    return total + sum(span.tensor(torch.uint8, (rest,), (1,), 4 * words).tolist())


def _operations_for(content: Content) -> list[Operation]:
    """All that have a part in ``content``, the first one first."""
    pending: list[tuple[int, Operation]] = []
    found: dict[int, Operation] = {}

    def want(wanted: Content, count: int) -> None:
        for operation in wanted.operations[:count]:
            if operation.number not in found:
                found[operation.number] = operation
                heapq.heappush(pending, (-operation.number, operation))

    want(content, len(content.operations))
    while pending:
        for read, count in heapq.heappop(pending)[1].reads:
            want(read, count)
    return [found[number] for number in sorted(found)]


def _run(operation: Operation, memory: dict[Content, Span]) -> None:
    generator = None
    if operation.state is not None:
        torch.default_generator.set_state(operation.state)
        generator = torch.Generator()
        generator.set_state(operation.state)

    def fill_in(leaf: Any) -> Any:
        if isinstance(leaf, Reference):
            return leaf.tensor(_memory_of(leaf.content, memory))
        return generator if isinstance(leaf, GeneratorReference) else leaf

    args, kwargs = map_leaves(fill_in, (operation.args, operation.kwargs))
    torch.set_default_dtype(operation.default_dtype)
    made = tree_leaves(operation.run(*args, **kwargs))
    for content, place in operation.makes:
        storage = made[place].untyped_storage()
        assert storage.nbytes() == content.nbytes, operation.run
        memory[content] = Span(storage)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """``tree`` with ``function`` of its leaves, of which references are some."""
    return tree_map(function, tree, is_leaf=_is_reference)


def _is_reference(value: Any) -> bool:
    return isinstance(value, Reference | GeneratorReference)


def _memory_of(content: Content, memory: dict[Content, Span]) -> Span:
    if content not in memory:
        constant = content.constant
        new = UntypedStorage(content.nbytes, device="cpu") if constant is None else constant.clone()
        memory[content] = Span(new)
    return memory[content]


@contextmanager
def _without_traces() -> Iterator[None]:
    """Calls within are seen by nobody, and leave the default generator and dtype as they were."""
    state, dtype = torch.default_generator.get_state(), torch.get_default_dtype()
    try:
        with unseen():
            yield
    finally:
        torch.default_generator.set_state(state)
        torch.set_default_dtype(dtype)
