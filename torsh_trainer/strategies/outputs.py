"""Tensors in what a unit of FSDP2 returns, wherever they are.

FSDP2 gathers a unit again, and later reduces its gradients, from hooks on the tensors of its
output that pytree finds. What it cannot look into, such as an object of torch.distributions, would
leave the parameters without a gradient, and nobody would be told.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torsh_trainer.errors import Unsupported

_VALUES = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    enum.Enum,
    type,
    slice,
    torch.dtype,
    torch.device,
    torch.Generator,
    nn.Module,
    types.ModuleType,
)
"""What holds no tensor of a forward: values, and a module, which is a forward's own business."""


def hook_hidden_outputs(root: nn.Module) -> None:
    """Has FSDP2 know the tensors within objects too, in every unit of ``root``."""
    hooked = set()
    for name, module in root.named_modules():
        if hasattr(module, "_get_fsdp_state"):
            state = cast(Any, module)._get_fsdp_state()
            if state not in hooked:
                _hook(state, name or type(module).__mro__[2].__name__)
                hooked.add(state)
            if len(state._modules) > 1:
                _hook_each(module, state)


def _hook_each(module: nn.Module, state: Any) -> None:
    """Has a backward that comes to ``module``, one of several of a unit, gather the unit.

    FSDP2 waits for the output of the module that ran last, which a loss may leave out.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def register(module: nn.Module, args: Any, output: Any) -> Any:
        recomputes = state._training_state.name == "PRE_BACKWARD"
        return output if recomputes else state._register_pre_backward_hook(output)

    module.register_forward_hook(register)


def _hook(state: Any, name: str) -> None:
    register = state._register_pre_backward_hook

    def register_grad(output: Any) -> Any:
        if torch.is_grad_enabled() and not isinstance(output, Tensor):
            for leaf in tree_leaves(output):
                if not isinstance(leaf, (Tensor, *_VALUES)):
                    _hook_one(leaf, state, name)
        return register(output)

    state._register_pre_backward_hook = register_grad


def _hook_one(thing: Any, state: Any, name: str) -> None:
    """Hooks for the tensors within ``thing``, which pytree takes for one value.

    Raises:
        Unsupported: there is none in it, and so no way to know when its backward comes.
    """
    found = list(tensors_in(thing))
    parts = [part for unit in state._fsdp_param_groups for part in unit.fsdp_params]
    if not found and any(part.sharded_param.requires_grad for part in parts):
        raise Unsupported(
            f"strategy=fsdp cannot look into what {name!r} returns: a "
            f"{type(thing).__name__} in which there is no tensor",
            fix="return tensors, in tuples, lists or dictionaries if you like, or use strategy=ddp",
        )
    for tensor in found:
        if tensor.requires_grad:
            tensor.register_hook(state._pre_backward)


def tensors_in(thing: Any) -> Iterator[Tensor]:
    """Every tensor that an object holds, each once: in attributes, slots, containers, closures."""
    seen: set[int] = set()
    waiting = [thing]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, _VALUES):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            yield one
        else:
            waiting.extend(_within(one))


def _within(thing: Any) -> list[Any]:
    if isinstance(thing, Mapping):
        found = list(thing.values())
    elif isinstance(thing, (list, tuple, set, frozenset)):
        found = list(thing)
    elif isinstance(thing, functools.partial):
        found = [thing.func, *thing.args, *thing.keywords.values()]
    elif isinstance(thing, types.MethodType):
        found = [thing.__self__, thing.__func__]
    elif isinstance(thing, types.FunctionType):
        found = [cell.cell_contents for cell in thing.__closure__ or () if _is_filled(cell)]
    else:
        found = []
    slots = (s for kind in type(thing).__mro__ for s in _names(vars(kind).get("__slots__", ())))
    found += [getattr(thing, slot) for slot in slots if hasattr(thing, slot)]
    return found + list(getattr(thing, "__dict__", {}).values())


def _names(slots: Any) -> list[str]:
    return [slots] if isinstance(slots, str) else list(slots)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
