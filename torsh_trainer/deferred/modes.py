"""How torch tells of what is done to tensors: operations, and calls that are none."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_GIVE_MEMORY = frozenset(
    {
        Tensor.__array__,
        Tensor.__dlpack__,
        Tensor.__reduce_ex__,
        Tensor.data_ptr,
        Tensor.numpy,
        Tensor.share_memory_,
        Tensor.storage,
        Tensor.untyped_storage,
        Tensor._typed_storage,
    }
)
"""Ways to a tensor's memory that are no operation, after which anything may happen to it."""


class Operations(TorchDispatchMode):
    """Has every operation done by ``run(function, args, kwargs)``."""

    supports_higher_order_operators = True

    def __init__(self, run: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return self._run(function, args, kwargs or {})


class Calls(TorchFunctionMode):
    """Has ``hold(tensors, always=...)`` called before memory is read without an operation."""

    def __init__(self, hold: Callable[..., None]) -> None:
        super().__init__()
        self._hold = hold

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _GIVE_MEMORY:
            self._hold(args[:1], always=True)
        elif function is Tensor.tolist or _is_python(function):
            self._hold(tree_leaves((args, kwargs)))
        return function(*args, **(kwargs or {}))


def _is_python(function: Any) -> bool:
    """Whether it is a method of Tensor in Python, within which calls are not seen."""
    return isinstance(function, FunctionType) and function.__module__ == "torch._tensor"
