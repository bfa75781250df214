"""What a model does with a part of a layer's output that it may only do with all of it.

Between a layer that is cut by columns and the one that puts the parts together, each process has
other columns. What is drawn there, split there or put together otherwise would be another result,
without an error. The first forwards are watched, and some of those after them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torsh_trainer.data.draws import forward_generators
from torsh_trainer.errors import Unsupported
from torsh_trainer.strategies.outputs import tensors_in
from torsh_trainer.strategies.tensor_parallel.layers import CUT
from torsh_trainer.strategies.writes import DUE_FORWARDS

_ALONG_COLUMNS = frozenset(
    (
        "softmax",
        "log_softmax",
        "softmin",
        "mean",
        "sum",
        "norm",
        "vector_norm",
        "var",
        "std",
        "var_mean",
        "std_mean",
        "amax",
        "amin",
        "max",
        "min",
        "argmax",
        "argmin",
        "logsumexp",
        "cumsum",
        "cumprod",
        "prod",
        "normalize",
        "glu",
        "chunk",
        "split",
        "tensor_split",
        "unbind",
        "narrow",
        "select",
        "sort",
        "topk",
        "flip",
        "roll",
        "median",
    )
)
"""Operations that may go along the columns of a part."""


class PartWatch:
    """Watches forwards of ``model``, of which layers are cut, wherever they are called from."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._generators = forward_generators(device)
        self._forwards = {True: 0, False: 0}
        self._modes: list[_Follow] = []
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end, always_call=True)

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        self._forwards[model.training] += 1
        if self._forwards[model.training] in DUE_FORWARDS:
            self._modes.append(_Follow(self._generators))
            self._modes[-1].__enter__()

    def _end(self, model: nn.Module, inputs: Any, outputs: Any) -> None:
        if not self._modes:
            return
        self._modes.pop().__exit__(None, None, None)
        for tensor in tensors_in(outputs):
            found = getattr(tensor, CUT, None)
            if found is not None:
                raise Unsupported(
                    f"mesh.tp: what the model gives is a part of the output of {found[0]!r}, which "
                    "is colwise with nothing that is rowwise after it",
                    fix=f"give {found[0]!r} the style colwise_gather",
                )


class _Follow(TorchFunctionMode):
    """Marks what is computed from a part as a part, and refuses what a part is not for."""

    def __init__(self, generators: list[torch.Generator]) -> None:
        super().__init__()
        self._generators = generators

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = _flat((args, tuple(kwargs.values())))
        part = next((t for t in given if hasattr(t, CUT)), None)
        if part is None:
            return func(*args, **kwargs)
        name, parts, shape = getattr(part, CUT)
        what = getattr(func, "__name__", "")
        if what in ("__get__", "__set__", "size", "dim", "numel", "stride", "backward"):
            return func(*args, **kwargs)
        _refuse_own_parameters(name, what, given)
        if part.shape == shape and parts == 1:
            _refuse_along_columns(name, what, part, args[1:], kwargs)
        before = self._list_states()
        found = func(*args, **kwargs)
        if any(not torch.equal(b, now) for b, now in zip(before, self._list_states(), strict=True)):
            raise Unsupported(
                f"mesh.tp: {what} draws random numbers on a part of the output of {name!r}, where "
                "one process would draw for all of it",
                fix="set that dropout to 0, or give the layers around it colwise_gather",
            )
        for tensor in _flat((found,)):
            setattr(tensor, CUT, (name, parts, shape if tensor.shape == shape else None))
        return found

    def _list_states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return [tensor for one in value for tensor in _flat(one)]
    return []


def _refuse_own_parameters(name: str, what: str, given: list[Tensor]) -> None:
    if any(t.is_leaf and t.requires_grad for t in given):
        raise Unsupported(
            f"mesh.tp: a parameter that is whole is used ({what}) on a part of the output of "
            f"{name!r}, so that each process would have a part of its gradient",
            fix="give its module the style replicate_sum",
        )


def _refuse_along_columns(name: str, what: str, part: Tensor, more: Any, kwargs: Any) -> None:
    if _goes_along_columns(what, part.dim(), more, kwargs):
        raise Unsupported(
            f"mesh.tp: {what} goes along the columns of {name!r}, of which each process has its "
            "own",
            fix="give it the style colwise_gather, or parts where its output is several "
            "projections in one",
        )


def _goes_along_columns(what: str, dims: int, more: Any, kwargs: Any) -> bool:
    last = (-1, dims - 1)
    if what == "__getitem__":
        places = more[0] if isinstance(more[0], tuple) else (more[0],)
        reaches = len(places) == dims or (Ellipsis in places and places[-1] is not Ellipsis)
        return reaches and places[-1] != slice(None)
    if what in ("layer_norm", "rms_norm", "group_norm"):
        return True
    if what not in _ALONG_COLUMNS or (more and isinstance(more[0], Tensor)):
        return False
    said = more[1:] if what in _SIZE_FIRST else more[:1] if what in _DIM_FIRST else more
    named = [kwargs[key] for key in ("dim", "axis", "dims") if kwargs.get(key) is not None]
    along = [
        n for one in (*said, *named) for n in (one if isinstance(one, tuple | list) else [one])
    ]
    along = [n for n in along if isinstance(n, int) and not isinstance(n, bool)]
    if not along:
        return what not in _FIRST_BY_DEFAULT
    return any(n in last for n in along)


_SIZE_FIRST = ("chunk", "split", "tensor_split", "topk", "norm", "vector_norm", "roll", "normalize")
_DIM_FIRST = ("narrow", "select", "unbind", "sort", "glu", "softmax", "log_softmax")
_FIRST_BY_DEFAULT = ("chunk", "split", "tensor_split", "unbind", "flip", "roll")
"""Which of an operation's arguments are dimensions, and what one does without any."""
