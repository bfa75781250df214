"""The storages of tensors that are followed: freed while nothing uses them, and filled again."""

from __future__ import annotations

import ctypes
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from torch import UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from torsh_trainer.deferred.tape import Content, Span, checksum, compute, unseen

LEAST_BYTES = 64 * 2**10
"""Smaller storages keep their memory."""

OUTSIDE = "their values come from outside of torch's operations"
UNWRITTEN = "not all of their values are set"
USED = "their memory is used without torch's operations"


@dataclass(eq=False)
class TrackedMemory:
    """What is known of a storage.

    Without ``content`` its bytes cannot be computed again, and ``why`` says the reason. One that is
    ``pinned`` is never freed, whatever is written. ``sum`` is the checksum of the bytes, if known.
    ``partial`` is what has been written of new memory while parts of it are still without values.
    """

    weak: StorageWeakRef
    nbytes: int
    content: Content | None = None
    why: str = ""
    pinned: bool = False
    resident: bool = True
    sum: int | None = None
    partial: Content | None = None
    written: list[range] = field(default_factory=list)

    @property
    def key(self) -> int:
        """As ``storage_key`` of its tensors."""
        return self.weak.cdata

    def storage(self) -> UntypedStorage | None:
        """None when nothing holds it any more."""
        found: UntypedStorage | None = UntypedStorage._new_with_weak_ptr(self.key)
        return found

    def follow(self, content: Content) -> None:
        """Its bytes are ``content`` from here on."""
        self.content, self.why, self.sum = content, "", None
        self.partial = None
        self.written.clear()

    def cover(self, part: range) -> None:
        """Those bytes of ``partial`` have values from here on."""
        assert self.partial is not None
        self.written.append(part)
        end = 0
        for part in sorted(self.written, key=lambda part: part.start):
            if part.start > end:
                return
            end = max(end, part.stop)
        if end == self.nbytes:
            self.follow(self.partial)

    def keep(self, why: str, *, pinned: bool = False) -> None:
        """Nothing is known of its bytes from here on."""
        self.content, self.partial, self.sum = None, None, None
        self.why = self.why or why
        self.pinned = self.pinned or pinned


class Memories:
    """All that are known; those that may be freed hold ``most`` bytes, and what is in use."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[int, TrackedMemory] = {}
        self._recent: OrderedDict[int, TrackedMemory] = OrderedDict()  # have memory, which may go
        self._recent_bytes = 0

    def __iter__(self) -> Iterator[TrackedMemory]:
        return iter(list(self._known.values()))

    def find(self, key: int) -> TrackedMemory | None:
        """That of a storage, if it has been seen."""
        return self._known.get(key)

    def of(self, storage: UntypedStorage, *, why: str = OUTSIDE) -> TrackedMemory:
        """That of ``storage``, of which nothing is known when it is seen first, and ``why``."""
        memory = self._known.get(storage._cdata)
        if memory is None:
            memory = TrackedMemory(StorageWeakRef(storage), storage.nbytes(), why=why)
            self._known[memory.key] = memory
        return memory

    def fill(self, memory: TrackedMemory, *, computed: bool = True) -> None:
        """Gives it memory, and its bytes where they are to be ``computed``."""
        if memory.resident:
            return
        values = values_of(memory) if computed else None
        storage = memory.storage()
        assert storage is not None
        storage.resize_(memory.nbytes)
        memory.resident = True
        if values is not None:
            Span(storage).bytes(memory.nbytes).copy_(values.bytes(memory.nbytes))

    def free(self, memory: TrackedMemory) -> None:
        """Takes its memory, whatever is in there."""
        self._forget(memory.key)
        storage = memory.storage()
        if storage is not None:
            storage.resize_(0)
            memory.resident = False

    def use(self, touched: Iterable[TrackedMemory]) -> None:
        """Frees what was not in use for longest, where there is too much."""
        used = set()
        for memory in touched:
            used.add(memory.key)
            if memory.content is None or memory.nbytes < LEAST_BYTES or not memory.resident:
                self._forget(memory.key)
                continue
            if memory.key not in self._recent:
                self._recent_bytes += memory.nbytes
            self._recent[memory.key] = memory
            self._recent.move_to_end(memory.key)
        if self._recent_bytes > self._most:
            self._make_room(used)

    def _make_room(self, used: set[int]) -> None:
        for memory in list(self._known.values()):
            if memory.weak.expired():
                self._forget(memory.key)
                del self._known[memory.key]
        for memory in list(self._recent.values()):
            if self._recent_bytes <= self._most:
                break
            if memory.key not in used:
                self._dismiss(memory)
        give_back()

    def _dismiss(self, memory: TrackedMemory) -> None:
        storage = memory.storage()
        if storage is None:
            self._forget(memory.key)
        elif not storage.resizable():
            self._forget(memory.key)
            memory.keep(USED, pinned=True)
        else:
            if memory.sum is None:
                memory.sum = checksum(Span(storage), memory.nbytes)
            self.free(memory)

    def _forget(self, key: int) -> None:
        memory = self._recent.pop(key, None)
        if memory is not None:
            self._recent_bytes -= memory.nbytes


def give_back() -> None:
    """Has the C library give the pages of freed memory back, which it would keep for itself."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], object] | None:
    """None where the C library is not GNU's."""
    found: Callable[[int], object] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found


def values_of(memory: TrackedMemory, *, into: Span | None = None) -> Span:
    """The bytes that it had, in new memory or, of contents that stand alone, where they are to be.

    Raises:
        AssertionError: they are not the same as they were.
    """
    assert memory.content is not None
    span = compute(memory.content, into=into)
    with unseen():
        assert memory.sum is None or memory.sum == checksum(span, memory.nbytes), (
            "a tensor came out differently when its initialisation was computed again"
        )
    return span
