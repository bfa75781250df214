"""Activation checkpointing: what a forward kept is dropped, and computed again in the backward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torsh_trainer.errors import Unsupported
from torsh_trainer.strategies.buffers import Slot, copy_of, has_changed, slots_of


def recompute_in_backward(module: nn.Module, *, compiles: bool) -> None:
    """Drops what ``module``'s forwards keep and computes it again in backward.

    The forward is replaced on the instance, so parameter names stay as they are. ``compiles`` says
    that torch.compile follows.

    Raises:
        Unsupported: it does, and the module has buffers that a forward may change.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    slots = list(slots_of(module))
    if compiles:
        _refuse_state(slots)
    elif slots:
        options["context_fn"] = _Replay(slots).contexts
    module.forward = functools.partial(checkpoint, module.forward, **options)


def _refuse_state(slots: list[Slot]) -> None:
    """torch.compile takes no context around a second run; buffers no state holds are constants."""
    for slot in slots:
        if slot.key not in slot.module._non_persistent_buffers_set:
            raise Unsupported(
                "trainer.activation_checkpointing=true under trainer.compile would run twice in "
                f"a step what changes the buffer {slot.key!r} of a {type(slot.module).__name__}",
                fix="leave one of the two out, or leave that module out by "
                "trainer.checkpoint_modules",
            )


class _Replay:
    """Has the second run of a forward see the buffers of the first, and leave no trace in them.

    Without it BatchNorm's running statistics move twice, and what a forward reads from a buffer
    that it also changes is another value in its second run, and so is the gradient.
    """

    def __init__(self, slots: list[Slot]) -> None:
        self._slots = slots
        self._changing: list[Slot] | None = None  # known after the first forward

    def contexts(self) -> tuple[Any, Any]:
        """Around the first run of one forward, and around the second."""
        before: dict[Slot, Tensor] = {}
        return self._first(before), self._again(before)

    @contextlib.contextmanager
    def _first(self, before: dict[Slot, Tensor]) -> Iterator[None]:
        watched = self._slots if self._changing is None else self._changing
        before.update(copy_of(watched))
        fixed = [] if self._changing is None else [s for s in self._slots if s not in before]
        versions = [None if s.tensor is None else s.tensor._version for s in fixed]
        yield
        for slot, version in zip(fixed, versions, strict=True):
            if slot.tensor is None or slot.tensor._version != version:
                raise Unsupported(
                    f"activation checkpointing cannot run a forward twice that changes the buffer "
                    f"{slot.name!r} now, and did not in the first step",
                    fix="leave that module out by trainer.checkpoint_modules, or change it in "
                    "every forward",
                )
        if self._changing is None:
            self._changing = [s for s, old in before.items() if has_changed(s.tensor, old)]
            for slot in set(before) - set(self._changing):
                del before[slot]

    @contextlib.contextmanager
    def _again(self, before: dict[Slot, Tensor]) -> Iterator[None]:
        now = {slot: slot.module._buffers[slot.key] for slot in before}
        for slot, tensor in before.items():  # tensors of its own: a backward may keep them
            slot.module._buffers[slot.key] = tensor
        try:
            yield
        finally:
            for slot, current in now.items():
                slot.module._buffers[slot.key] = current
