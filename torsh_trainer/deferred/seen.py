"""One operation on tensors, as a dispatch mode is told of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Generator, Tensor, UntypedStorage
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from torsh_trainer.deferred.tape import GeneratorReference, Reference, map_leaves

aten = torch.ops.aten

OVERWRITES = frozenset(
    {
        aten.bernoulli_.float,
        aten.cauchy_.default,
        aten.copy_.default,
        aten.exponential_.default,
        aten.fill_.Scalar,
        aten.fill_.Tensor,
        aten.geometric_.default,
        aten.log_normal_.default,
        aten.normal_.default,
        aten.random_.default,
        getattr(aten.random_, "from"),
        aten.random_.to,
        aten.uniform_.default,
        aten.zero_.default,
    }
)
"""Operations that write every element of their first argument and read none of it."""

LEAVE_EMPTY = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_permuted.default,
        aten.empty_strided.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)
"""Operations whose new memory has no values yet."""

SET = frozenset(getattr(aten.set_, name) for name in aten.set_.overloads())
"""Operations that give a tensor another storage, and write none."""

SAME_MEMORY = frozenset(
    {aten.alias.default, aten.detach.default, aten.lift_fresh.default, aten.view.default}
)
"""Operations that look at no memory, and give a tensor in the same."""

_TORCHS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = (int, float, complex, bool, str, type(None), Generator, *_TORCHS)


def is_plain(tensor: Tensor) -> bool:
    """Whether it has memory of the CPU, all by itself."""
    kind = type(tensor)
    return (
        not is_lazy(tensor)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and (kind is Tensor or kind.__torch_dispatch__ is Tensor.__torch_dispatch__)
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def storage_key(tensor: Tensor) -> int:
    """What two tensors have in common that lie in one storage, with memory in it or without."""
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()._cdata


class Seen:
    """``function(*args, **kwargs)``: ``plain`` are the tensors that are followed, in their order;
    ``why_not`` says why the call could not be made again, if it could not. A ``foreign`` one may
    use the memory of all of them as it likes, and later too, as collectives do."""

    def __init__(self, function: Any, args: Any, kwargs: Any) -> None:
        self.function = function
        self.args, self.kwargs = args, kwargs
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.plain = [tensor for tensor in tensors if is_plain(tensor)]
        self.storages = [leaf for leaf in leaves if isinstance(leaf, UntypedStorage)]
        self._generators = [leaf for leaf in leaves if isinstance(leaf, Generator)]
        self.why_not = ""
        others = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *_PLAIN))]
        self.foreign = getattr(function, "namespace", "") != "aten"
        if self.foreign or others:
            self.why_not = f"they pass through {function}, which cannot be called again"
        elif len(self.plain) < len(tensors):
            self.why_not = "they come from tensors of another device or kind"

    @cached_property
    def written(self) -> list[Tensor]:
        """The tensors among ``plain`` whose memory is written."""
        if self.foreign:
            return self.plain
        schema = self.function._schema
        if not schema.is_mutable:
            return []
        found = []
        for number, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = self.args[number : number + 1] or self.kwargs.get(argument.name)
                found += [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        return [tensor for tensor in found if is_plain(tensor)]

    def overwrites(self) -> range | None:
        """The bytes in the storage of the tensor ``written`` that get new values, where none of
        that storage is read; None where they are not known to lie side by side."""
        if self.function not in OVERWRITES or len(self.written) != 1:
            return None
        target = self.written[0]
        key = target.untyped_storage()._cdata
        holders = [t for t in self.plain if t.untyped_storage()._cdata == key]
        if len(holders) > 1 or not _is_dense(target):
            return None
        size = target.element_size()
        start = int(target.storage_offset()) * size
        return range(start, start + target.numel() * size)

    def writes(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is the one that is ``overwrites``."""
        return self.overwrites() is not None and tensor is self.written[0]

    @property
    def draws(self) -> bool:
        """Whether it takes random numbers."""
        return torch.Tag.nondeterministic_seeded in getattr(self.function, "tags", ())

    def generator_state(self) -> Tensor | None:
        """Of the generator that it takes random numbers from."""
        if not self.draws:
            return None
        source = self._generators[0] if self._generators else torch.default_generator
        return source.get_state() if source.device.type == "cpu" else None

    def call(self, reference: Callable[[Tensor], Reference]) -> tuple[Any, Any]:
        """``args`` and ``kwargs`` with references in the place of tensors."""

        def note_leaf(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return reference(leaf)
            return GeneratorReference() if isinstance(leaf, Generator) else leaf

        args, kwargs = map_leaves(note_leaf, (self.args, self.kwargs))
        return args, kwargs


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a range of memory, each with a place of its own."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def leaves_of(made: Any) -> Iterator[tuple[int, Tensor]]:
    """The plain tensors of an outcome, with their places among its leaves."""
    for place, leaf in enumerate(tree_leaves(made)):
        if isinstance(leaf, Tensor) and is_plain(leaf):
            yield place, leaf
