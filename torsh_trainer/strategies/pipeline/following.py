"""What a stage computes from tensors without values, in the forwards that are watched."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from torsh_trainer.errors import Unsupported

OUTSIDE = "_torsh_outside"
"""The attribute of a tensor without values: the module that would have computed it."""


class Forward(Protocol):
    """One forward of a stage."""

    stage: int
    has_begun: bool
    """Whether it has come to where the stage begins."""


_OF_SHAPES = frozenset(
    (
        *("__get__", "__set__", "size", "dim", "numel", "stride", "ndimension", "__len__"),
        *("is_floating_point", "is_complex", "get_device", "element_size", "is_contiguous"),
        *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
        *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"),
    )
)
"""What looks at no value of a tensor."""


class FollowOutside(TorchFunctionMode):
    """Marks what is computed from tensors without values, and refuses it within the stage."""

    def __init__(self, passage: Forward) -> None:
        super().__init__()
        self._passage = passage

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        what = getattr(func, "__name__", "")
        outside = next(
            (
                leaf
                for leaf in tree_leaves((args, kwargs))
                if isinstance(leaf, Tensor) and OUTSIDE in vars(leaf)
            ),
            None,
        )
        if outside is None or what in _OF_SHAPES:
            return func(*args, **kwargs)
        name = vars(outside)[OUTSIDE]
        if self._passage.has_begun:
            raise Unsupported(
                f"mesh.pp: stage {self._passage.stage} uses ({what}) what {name!r} of an earlier "
                "stage has computed, beside what the module at which it begins is called with",
                fix="name modules in strategy.split that are called with all that goes on from "
                "there, or set mesh.pp=1",
            )
        found = func(*args, **kwargs)
        for leaf in tree_leaves((found,)):
            if isinstance(leaf, Tensor):
                setattr(leaf, OUTSIDE, name)
        return found
