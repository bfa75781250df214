"""Parameters that processes hold parts of, whole for a while."""

from __future__ import annotations

import enum
import functools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from torsh_trainer.errors import Unsupported

TORCHS_SAVE: Callable[..., None] = torch.save
"""What ``torch.save`` is without this."""

_UNSAVED: dict[str, None] = {}
"""Files that the script would have written with parts of parameters, and has not written whole."""

_SAVE_WHOLE = (
    "gather them by deepspeed.zero.GatheredParameters, or call engine.save_16bit_model(folder) or "
    "engine.save_checkpoint(folder), on every process"
)


class ZeroParamStatus(enum.Enum):
    """Whether a parameter is whole here, as DeepSpeed says it of those of stage 3."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class Init:
    """``zero.Init``: models are built whole here, and cut by ``deepspeed.initialize``."""

    def __init__(self, module: nn.Module | None = None, *args: Any, **kwargs: Any) -> None:
        self.module = module

    def __enter__(self) -> Init:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to undo."""


class WholeParameter(DTensor):
    """A parameter of stage 3 while it is gathered: whatever torch does to it, is done to
    ``ds_whole``, a plain tensor. A script that holds the parameter sees no other object."""

    __slots__ = ()
    ds_whole: nn.Parameter

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(_plain_of, (args, kwargs or {}))
        return func(*args, **kwargs)


def _plain_of(value: Any) -> Any:
    return value.ds_whole if type(value) is WholeParameter else value


def mark_cut(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives the parameters that stage 3 has cut what DeepSpeed's have, by which scripts know them;
    gathered they are in ``dtype``, in which the model computes."""
    for number, parameter in enumerate(model.parameters()):
        if isinstance(parameter, DTensor):
            cut: Any = parameter
            cut.ds_id, cut.ds_status = number, ZeroParamStatus.NOT_AVAILABLE
            cut.ds_shape, cut.ds_numel = parameter.shape, parameter.numel()
            cut.ds_dtype = dtype if parameter.is_floating_point() else parameter.dtype


class GatheredParameters:
    """Within, ``params`` are whole; with ``modifier_rank`` that process's values are all's then.

    Before ``deepspeed.initialize`` they are whole anyway, as they are below stage 3. What is done
    to those of stage 3 within is forgotten at its end, as it is in DeepSpeed. Collective.

    Raises:
        Unsupported: ``modifier_rank`` has changed what stage 3 has cut: DeepSpeed's masters would
            not follow.
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        if isinstance(params, Tensor):
            params = [params]
        elif isinstance(params, nn.Module):
            params = params.parameters()
        given = list(params) if enabled and isinstance(params, Iterable) else []
        self._params = list({id(parameter): parameter for parameter in given}.values())
        self._cut: list[Any] = []
        self._source = modifier_rank

    @torch.no_grad()
    def __enter__(self) -> None:
        self._cut = [one for one in self._params if type(one) is DTensor and hasattr(one, "ds_id")]
        for parameter in self._cut:
            whole: Any = nn.Parameter(
                parameter.full_tensor().to(parameter.ds_dtype).clone(),
                requires_grad=parameter.requires_grad,
            )
            parameter.ds_status = ZeroParamStatus.AVAILABLE
            parameter.ds_whole = whole
            parameter.ds_before = whole.detach().clone() if self._source is not None else None
            parameter.__class__ = WholeParameter

    @torch.no_grad()
    def __exit__(self, kind: object, *error: object) -> None:
        is_changed = False
        for parameter in self._cut:
            parameter.__class__ = DTensor
            parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
            before, whole = parameter.ds_before, parameter.ds_whole
            is_changed = is_changed or (before is not None and not torch.equal(before, whole))
            del parameter.ds_whole, parameter.ds_before
        if self._source is None or not dist.is_initialized() or kind is not None:
            return
        if self._cut:
            said = torch.tensor([float(is_changed)], device=self._cut[0].device)
            dist.broadcast(said, src=self._source)
            if said.item():
                raise Unsupported(
                    "parameters that stage 3 has cut are set within GatheredParameters, which "
                    "leaves their fp32 values in DeepSpeed as they were",
                    fix="set them before deepspeed.initialize",
                )
        for parameter in self._params:
            if not isinstance(parameter, DTensor):
                dist.broadcast(parameter.data, src=self._source)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Raises Unsupported where the parameter is cut: only its own module gathers it."""
    if isinstance(parameter, DTensor):
        raise Unsupported(
            "register_external_parameter at stage 3: a parameter is gathered by its own module",
            fix="use stage 2, or read the parameter within the forward of its module",
        )


def refuse_saved_parts() -> None:
    """Exchanges ``torch.save``, and what safetensors saves by: of a parameter that stage 3 has cut
    they would save a part."""
    torch.save = _save
    try:
        from safetensors import torch as safe
    except ImportError:
        return
    for name in ("_evaluate_tensors_for_save", "_flatten", "save", "save_file"):  # by release
        function = getattr(safe, name, None)
        if function is not None and not hasattr(function, "__wrapped__"):
            setattr(safe, name, _watch(function))


def _watch(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def refuse_parts(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if _holds_parts(tensors):
            raise Unsupported("safetensors of parameters that stage 3 has cut", fix=_SAVE_WHOLE)
        return function(tensors, *args, **kwargs)

    return refuse_parts


def _holds_parts(obj: Any) -> bool:
    return any(type(leaf) is DTensor for leaf in tree_leaves(obj))


@functools.wraps(TORCHS_SAVE)
def _save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
    """Writes no file with parts of parameters; ``check_saved`` tells at the end, unless the script
    has written it whole by then, as DeepSpeed-Chat does.

    Raises:
        Unsupported: something in ``obj`` is cut, and ``f`` has no name.
    """
    name = str(Path(f).absolute()) if isinstance(f, str | os.PathLike) else ""
    if not _holds_parts(obj):
        _UNSAVED.pop(name, None)
        TORCHS_SAVE(obj, f, *args, **kwargs)
        return
    if not name:
        raise Unsupported("torch.save of parameters that stage 3 has cut", fix=_SAVE_WHOLE)
    _UNSAVED[name] = None
    print(
        f"drop-in: {f} is not written yet: torch.save of parameters that stage 3 has cut would "
        f"save a part of each; {_SAVE_WHOLE}",
        flush=True,
    )


def check_saved() -> None:
    """Raises Unsupported: a file that the script meant to write was never written whole."""
    if _UNSAVED:
        names = ", ".join(os.path.relpath(name) for name in _UNSAVED)
        raise Unsupported(
            f"{names} was not written: torch.save of parameters that stage 3 has cut would save a "
            "part of each, and the script has not saved them whole since",
            fix=_SAVE_WHOLE,
        )


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """The whole fp32 values; None of one that is frozen. Collective where they are cut."""
    if not param.requires_grad:
        return None
    return param.full_tensor().detach() if isinstance(param, DTensor) else param.detach()


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """The whole gradient, between backward and step. Collective where it is cut."""
    grad = param.grad
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """Raises Unsupported: states are the engine's."""
    raise Unsupported(
        "safe_get_full_optimizer_state is not there under drop-in",
        fix="save_checkpoint saves optimizer states",
    )
