"""Activation checkpointing: what a forward kept is dropped, and computed again in the backward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torsh_trainer.errors import Unsupported
from torsh_trainer.strategies.buffers import BufferSlot, copy_of, has_changed, slots_of


def recompute_in_backward(module: nn.Module, *, compiles: bool, keeps_products: bool) -> None:
    """Drops what ``module``'s forwards keep and computes it again in backward.

    With ``keeps_products`` the outputs of matrix products and of attention are kept, which cost the
    most to compute. The forward is replaced on the instance, so parameter names stay as they are.
    ``compiles`` says that torch.compile follows.

    Raises:
        Unsupported: it does, and the module has buffers that a forward may change.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    slots = list(slots_of(module))
    replay = _Replay(slots).contexts if slots and not compiles else None
    if compiles:
        _refuse_state(slots)
    if keeps_products and compiles:  # which knows this function, and none around it
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    elif keeps_products:
        options["context_fn"] = functools.partial(_keeping, replay)
    elif replay is not None:
        options["context_fn"] = replay
    module.forward = functools.partial(checkpoint, module.forward, **options)


_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operation in _PRODUCTS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _keeping(replay: Callable[[], tuple[Any, Any]] | None) -> tuple[Any, Any]:
    """Around the first run of one forward, and around the second, which takes what was kept."""
    first, again = create_selective_checkpoint_contexts(_policy)
    before, after = replay() if replay else (contextlib.nullcontext(), contextlib.nullcontext())
    return _both(before, first), _both(after, again)


@contextlib.contextmanager
def _both(outer: Any, inner: Any) -> Iterator[None]:
    try:
        with outer, inner:
            yield
    except RuntimeError as error:
        if "has been mutated" not in str(error):
            raise
        raise Unsupported(
            "trainer.activation_checkpointing=selective keeps the outputs of matrix products, and "
            "the model changes one in place, as nn.ReLU(inplace=True) does",
            fix="change it out of place, or set trainer.activation_checkpointing=true",
        ) from error


def _refuse_state(slots: list[BufferSlot]) -> None:
    """torch.compile takes no context around a second run; buffers no state holds are constants."""
    for slot in slots:
        if slot.key not in slot.module._non_persistent_buffers_set:
            raise Unsupported(
                "trainer.activation_checkpointing under trainer.compile would run twice in "
                f"a step what changes the buffer {slot.key!r} of a {type(slot.module).__name__}",
                fix="leave one of the two out, or leave that module out by "
                "trainer.checkpoint_modules",
            )


class _Replay:
    """Has the second run of a forward see the buffers of the first, and leave no trace in them.

    Without it BatchNorm's running statistics move twice, and what a forward reads from a buffer
    that it also changes is another value in its second run, and so is the gradient.
    """

    def __init__(self, slots: list[BufferSlot]) -> None:
        self._slots = slots
        self._changing: list[BufferSlot] | None = None  # known after the first forward

    def contexts(self) -> tuple[Any, Any]:
        """Around the first run of one forward, and around the second."""
        before: dict[BufferSlot, Tensor] = {}
        return self._first(before), self._again(before)

    @contextlib.contextmanager
    def _first(self, before: dict[BufferSlot, Tensor]) -> Iterator[None]:
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
    def _again(self, before: dict[BufferSlot, Tensor]) -> Iterator[None]:
        now = {slot: slot.module._buffers[slot.key] for slot in before}
        for slot, tensor in before.items():  # tensors of its own: a backward may keep them
            slot.module._buffers[slot.key] = tensor
        try:
            yield
        finally:
            for slot, current in now.items():
                slot.module._buffers[slot.key] = current
