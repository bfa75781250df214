"""A model is built for real, and the memory of its tensors is given back while that goes on.

Every operation on tensors of the CPU is seen and noted (see ``tape``). What is not in use has its
memory freed, once there is too much of it, and computed again when an operation asks for it. So a
constructor sees the numbers that it would see otherwise, and may look at them; random numbers are
drawn, not skipped. The idea of a record that is played back is that of torchdistx's deferred_init.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torsh_trainer.deferred.memory import (
    LEAST_BYTES,
    OUTSIDE,
    UNWRITTEN,
    USED,
    Memories,
    TrackedMemory,
    give_back,
    values_of,
)
from torsh_trainer.deferred.modes import Calls, Operations
from torsh_trainer.deferred.seen import (
    LEAVE_EMPTY,
    SAME_MEMORY,
    SET,
    Seen,
    is_plain,
    leaves_of,
    storage_key,
)
from torsh_trainer.deferred.tape import Content, Operation, Reference, Span, alone, unseen

RESIDENT_BYTES = 64 * 2**20
"""What was computed and is not in use holds so much, before its memory is given back."""

CONSTANT_BYTES = 2**20
"""Values from elsewhere are kept beside an operation that reads them, up to this size."""

_active: ContextVar[DeferredInit | None] = ContextVar("_active", default=None)


class DeferredInit:
    """A context in which a model is built: ``with DeferredInit() as init: model = build()``.

    ``leave(model)`` within it says whose parameters may be without memory when it ends; ``values``
    gives them, one by one. Whatever else was built has its memory then. Until ``values`` of such a
    parameter are in its place nothing but this class may touch it.
    """

    summary = ""
    """When it has ended: how much is without memory, how much is not, and why; empty for a small
    model."""

    def __init__(self) -> None:
        self._memories = Memories(RESIDENT_BYTES)
        self._count = 0
        self._left: dict[int, int] = {}  # storages of parameters: how many have their part in it
        self._named: dict[str, nn.Parameter] = {}
        self._stack = ExitStack()

    def __enter__(self) -> DeferredInit:
        self._stack.callback(_active.reset, _active.set(self))
        self._stack.enter_context(Operations(self.run))
        self._stack.enter_context(Calls(self.hold))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stack.close()
        if kind is not None:
            self._left.clear()
        elif any(not memory.resident for memory in self._memories):
            gc.collect()  # tensors in cycles that nobody holds would have a part in a storage
        with torch.no_grad():
            for memory in self._memories:
                storage = None if memory.resident else memory.storage()
                if storage is None:
                    continue
                # What has it beside these parameters and the name ``storage`` would read nothing.
                others = torch._C._storage_Use_Count(memory.key) - 1
                if others > self._left.get(memory.key, 0):
                    memory.why = "another tensor lies in their memory"
                    self._memories.fill(memory)
        self.summary = self._summarise()
        self._named.clear()  # it would keep whole parameters alive

    def leave(self, model: nn.Module) -> None:
        """Says whose parameters may be without memory afterwards."""
        self._named = dict(model.named_parameters())
        self._left = {}
        with torch._C.DisableTorchFunction():
            for parameter in filter(is_plain, self._named.values()):
                key = storage_key(parameter)
                self._left[key] = self._left.get(key, 0) + 1

    @torch.no_grad()
    def values(self, parameter: nn.Parameter) -> Tensor:
        """A tensor like ``parameter``: itself, detached, or computed in new memory.

        Raises:
            AssertionError: it came out differently than when it was built.
        """
        memory = self._of(parameter)
        if memory is None or memory.resident:
            return parameter.detach()
        return values_of(memory).tensor(
            parameter.dtype,
            parameter.shape,
            parameter.stride(),
            int(parameter.storage_offset()),
        )

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, into: Tensor) -> None:
        """Copies ``values`` to ``into``, contiguous, of as many elements and the same dtype.

        Without memory for another copy, where an initialisation can be computed there.
        """
        memory = self._of(parameter)
        start = int(into.storage_offset()) * into.element_size()
        if (
            memory is not None
            and memory.content is not None
            and not memory.resident
            and alone(memory.content)
            and parameter.is_contiguous()
            and is_plain(into)
            and into.numel() * into.element_size() == memory.nbytes
            and start % 4 == 0
        ):
            values_of(memory, into=Span(into.untyped_storage(), start))
        else:
            into.copy_(self.values(parameter).reshape(-1))
        give_back()

    def source(
        self, read: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """A tensor that ``read`` gives whenever it is needed, without memory until then."""
        with unseen():
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            if nbytes < LEAST_BYTES:
                return read()
            tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu")
            memory = self._memories.of(tensor.untyped_storage())
            content = Content(nbytes)
            self._note(functools.partial(_read, read, dtype), (), {}, makes=[(content, 0)])
            memory.follow(content)
            self._memories.free(memory)
            return tensor

    def hold(self, tensors: Iterable[Any], *, always: bool = False) -> None:
        """Has ``tensors`` their memory, for good where it is ``always``."""
        with unseen():
            for tensor in tensors:
                if isinstance(tensor, Tensor) and is_plain(tensor):
                    memory = self._memories.of(tensor.untyped_storage())
                    self._memories.fill(memory)
                    if always:
                        memory.keep(USED, pinned=True)
                    self._memories.use([memory])

    def _of(self, parameter: nn.Parameter) -> TrackedMemory | None:
        return self._memories.find(storage_key(parameter)) if is_plain(parameter) else None

    def _summarise(self) -> str:
        known, freed, whole = 0, False, []
        for name, parameter in self._named.items():
            tensor: Tensor = parameter
            if is_lazy(tensor):
                continue
            nbytes = tensor.numel() * tensor.element_size()
            memory = self._of(parameter)
            if memory is None or memory.why:
                whole.append((nbytes, name, OUTSIDE if memory is None else memory.why))
            else:
                known += nbytes
                freed = freed or not memory.resident
        said = [f"{_mib(known)} of them initialised unit by unit"] if freed else []
        size = sum(nbytes for nbytes, _, _ in whole)
        if size > RESIDENT_BYTES:
            _, name, why = max(whole)
            said.append(
                f"{_mib(size)} of them whole in the host memory of every process at the start, "
                f"such as {name}: {why}"
            )
        return "; ".join(said)

    # -- operations -----------------------------------------------------------------------------

    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        """What ``function``, an operation, gives; noted, so that it can be done again."""
        if function in SAME_MEMORY:
            return function(*args, **kwargs)
        seen = Seen(function, args, kwargs)
        storages = [*seen.storages, *(tensor.untyped_storage() for tensor in seen.plain)]
        memories = list(
            {storage._cdata: self._memories.of(storage) for storage in storages}.values()
        )
        begun = self._find_fresh(seen)
        if begun is not None and self._copies_later(seen, begun):
            return args[0]
        for memory in memories:
            self._memories.fill(memory, computed=memory is not begun)
        state = seen.generator_state()
        call = self._call(seen, begun)
        made = function(*args, **kwargs)
        if function not in SET:
            memories += self._record(seen, begun, call, made, state)
        self._memories.use(memories)
        return made

    def _find_fresh(self, seen: Seen) -> TrackedMemory | None:
        """What is overwritten whole, so that nothing before it counts."""
        part = seen.overwrites()
        if part is None:
            return None
        storage = seen.written[0].untyped_storage()
        memory = self._memories.of(storage)
        fixed = memory.pinned or (memory.resident and not storage.resizable())
        return None if fixed or part != range(memory.nbytes) else memory

    def _copies_later(self, seen: Seen, begun: TrackedMemory) -> bool:
        """Notes a copy of what has no memory, and does not make it."""
        if seen.function.name() != "aten::copy_" or len(seen.plain) < 2 or seen.why_not:
            return False
        source = self._memories.of(seen.plain[1].untyped_storage())
        if source.resident or begun.nbytes < LEAST_BYTES:
            return False
        call = self._call(seen, begun)
        assert call is not None
        begun.follow(call.into)
        call.into.operations.append(self._note(seen.function, *call.arguments, reads=call.reads))
        self._memories.free(begun)
        return True

    def _call(self, seen: Seen, begun: TrackedMemory | None) -> _Call | None:
        """The arguments of an operation as they are before it; None if it cannot be repeated."""
        if seen.why_not:
            return None
        contents: dict[int, Content] = {}
        into = Content(0 if begun is None else begun.nbytes)
        for tensor in seen.plain:
            storage = tensor.untyped_storage()
            memory = self._memories.of(storage)
            if memory is begun:
                contents[memory.key] = into
            elif memory.content is not None:
                contents[memory.key] = memory.content
            elif memory.partial is not None and seen.writes(tensor):
                contents[memory.key] = memory.partial
            elif memory.nbytes <= CONSTANT_BYTES:
                contents[memory.key] = Content(memory.nbytes, constant=storage.clone())
            else:
                seen.why_not = memory.why
                return None
        reads = [(one, len(one.operations)) for one in contents.values() if one is not into]
        return _Call(seen.call(functools.partial(_refer, contents)), tuple(reads), into)

    def _record(
        self,
        seen: Seen,
        begun: TrackedMemory | None,
        call: _Call | None,
        made: Any,
        state: Tensor | None,
    ) -> list[TrackedMemory]:
        """Notes what was done; what came out of it in new memory."""
        new: list[TrackedMemory] = []
        makes: list[tuple[Content, int]] = []
        empty = UNWRITTEN if seen.function in LEAVE_EMPTY else ""
        for place, tensor in leaves_of(made):
            storage = tensor.untyped_storage()
            if self._memories.find(storage._cdata) is None and storage.nbytes():
                memory = self._memories.of(storage, why=empty or seen.why_not)
                new.append(memory)
                if empty:
                    memory.partial = Content(memory.nbytes)
                elif call is not None:
                    content = Content(memory.nbytes)
                    memory.follow(content)
                    makes.append((content, place))
        written = [self._memories.of(tensor.untyped_storage()) for tensor in seen.written]
        if call is None or not (makes or written):
            for memory in written:
                memory.keep(seen.why_not, pinned=seen.foreign)
            return new
        operation = self._note(seen.function, *call.arguments, call.reads, makes, state)
        for memory, tensor in zip(written, seen.written, strict=True):
            memory.sum = None
            if tensor.untyped_storage().nbytes() != memory.nbytes:
                memory.keep("their memory was made larger", pinned=True)
            elif memory is begun:
                memory.follow(call.into)
                call.into.operations.append(operation)
            elif memory.content is not None:
                memory.content.operations.append(operation)
            elif memory.partial is not None:
                self._continue(memory, seen, operation)
        return new

    def _continue(self, memory: TrackedMemory, seen: Seen, operation: Operation) -> None:
        """A part of new memory was written."""
        part = seen.overwrites()
        if part is None or memory.partial is None:
            memory.partial = None
        else:
            memory.partial.operations.append(operation)
            memory.cover(part)

    def _note(
        self,
        run: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        reads: tuple[tuple[Content, int], ...] = (),
        makes: Sequence[tuple[Content, int]] = (),
        state: Tensor | None = None,
    ) -> Operation:
        self._count += 1
        operation = Operation(
            self._count, run, args, kwargs, reads, makes, state, torch.get_default_dtype()
        )
        for content, _ in makes:
            content.operations.append(operation)
        return operation


def read_later(read: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """``read()``, at once or, where a model is being built without memory, when it is needed."""
    active = _active.get()
    return read() if active is None else active.source(read, shape, dtype)


class _Call(NamedTuple):
    """The arguments of an operation, what they are read from, and what is overwritten whole."""

    arguments: tuple[Any, Any]
    reads: tuple[tuple[Content, int], ...]
    into: Content


def _refer(contents: Mapping[int, Content], tensor: Tensor) -> Reference:
    return Reference(
        contents[storage_key(tensor)],
        tensor.dtype,
        tuple(tensor.shape),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
    )


def _read(read: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
    """A tensor that has its memory for itself."""
    tensor = read().to(dtype).contiguous()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
