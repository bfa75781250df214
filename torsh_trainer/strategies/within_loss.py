"""What a loss does with parameters that FSDP2 has cut, and that it cannot do with shards.

After the forward parameters are shards again. An operation on a shard gives this process's part, or
fails; a gradient within the loss lets go of what the backward after it still needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torsh_trainer.errors import Unsupported

_MIXED = "mixed torch.Tensor and DTensor"
_USE = (
    "set strategy.find_unused_parameters=true, which keeps them whole until the backward has ended"
)


def refuse_second_order(root: nn.Module) -> None:
    """Has a gradient of which a gradient is taken (``create_graph``) refused below ``root``.

    Raises:
        Unsupported: from within the first such backward.
    """
    cut = (cast(Any, m) for m in root.modules() if hasattr(m, "_get_fsdp_state"))
    for state in dict.fromkeys(module._get_fsdp_state() for module in cut):
        _refuse_in(state)


def _refuse_in(state: Any) -> None:
    before: Any = state._pre_backward

    def check_gradient(gradient: Any) -> Any:
        if torch.is_grad_enabled():
            raise Unsupported(
                "strategy=fsdp cannot take a gradient with create_graph=True, as a gradient "
                "penalty does: its parameters are gone before the second backward",
                fix=f"{_USE}, or use strategy=ddp",
                strategy="fsdp",
            )
        return before(gradient)

    state._pre_backward = check_gradient


class ShardReadGuard(TorchFunctionMode):
    """Refuses any operation on a shard, from ``torch`` or a tensor's method."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        what = getattr(func, "__name__", "")
        if what not in _OF_A_TENSOR:
            for argument in args:
                for one in argument if isinstance(argument, list | tuple) else (argument,):
                    name = self._names.get(id(one))
                    # FSDP2 itself detaches what it gathers, which is a shard where layers are cut.
                    if hasattr(one, "placements") and (name is not None or what != "detach"):
                        raise _reads(name)
        return func(*args, **(kwargs or {}))


_OF_A_TENSOR = (
    "__get__",
    "__set__",
    "requires_grad_",
    "size",
    "dim",
    "numel",
    "__hash__",
    "stride",
)
"""What reads or sets something about a tensor, and no value."""


@contextlib.contextmanager
def in_words() -> Iterator[None]:
    """Says what torch means where a shard has come into an operation.

    Raises:
        Unsupported: it has.
    """
    try:
        yield
    except RuntimeError as error:
        if _MIXED not in str(error):
            raise
        raise _reads(None) from error


def _reads(name: str | None) -> Unsupported:
    what = "parameters" if name is None else f"the parameter {name!r}"
    return Unsupported(
        f"strategy=fsdp has cut {what}, of which the task reads values outside of the forward of "
        "its module, as a penalty on weights does",
        fix=f"{_USE}, and read after the model's forward; or use weight decay or strategy=ddp",
        strategy="fsdp",
    )
