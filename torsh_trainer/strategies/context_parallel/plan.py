"""Which arguments of a model's forward have tokens along a dimension, and which are given whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torsh_trainer.errors import ConfigError, Unsupported, nearest
from torsh_trainer.mesh import Mesh
from torsh_trainer.tasks.base import Task

KNOWN: Mapping[str, int] = {
    "tokens": 1,
    "targets": 1,
    "input_ids": 1,
    "inputs_embeds": 1,
    "token_type_ids": 1,
    "attention_mask": 1,
    "position_ids": 1,
    "positions": 0,
}
"""Along which dimension arguments of these names have their tokens, where nobody says otherwise."""

PLACES = ("positions", "position_ids")
"""TokenArguments by which a model is told where its tokens stand: (tokens,) and (1, tokens)."""
TARGETS = "targets"
"""With which a model gives the sum of the losses of its tokens, as ``LanguageModel`` asks."""


class ContextPlan(NamedTuple):
    """``dims`` by name: along which dimension an argument has tokens, None for one without."""

    dims: Mapping[str, int | None]
    source: str


def find_context_plan(
    model: nn.Module, task: Task, table: Mapping[str, Any], mesh: Mesh
) -> ContextPlan:
    """The plan of the task, of ``table`` (``strategy.context_plan``) or of the model, the first
    there is, beside the names that are known.

    Raises:
        ConfigError: it says something that is no dimension, or of no argument of the forward.
    """
    own = getattr(model, "context_plan", None)
    found: list[tuple[Callable[[], Mapping[str, Any]], str]] = [
        (lambda: task.context_plan(mesh), "of the task"),
        (lambda: table, "strategy.context_plan"),
        (own if callable(own) else dict, "the model's own"),
    ]
    given, source = next(
        ((plan, source) for ask, source in found if (plan := ask())), ({}, "by known names")
    )
    names = parameters_of(model)
    for name, dim in given.items():
        if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int) or dim < 0):
            raise ConfigError(
                f"the context plan ({source}) says {dim!r} of {name!r}, which is no dimension",
                fix="give the number of the dimension that tokens lie along, from 0 on, or null "
                "for an argument without",
            )
        if name not in names and not _takes_any(model):
            raise ConfigError(
                f"the context plan ({source}) names {name!r}, and {type(model).__name__}.forward "
                "has no such argument",
                fix=nearest(name, names),
            )
    return ContextPlan({**KNOWN, **given}, source)


def parameters_of(model: nn.Module) -> list[str]:
    """The names of what ``model``'s forward takes; of one in its place that passes all on, too."""
    names = list(inspect.signature(model.forward).parameters)
    if _takes_any(model):
        own = inspect.signature(type(model).forward).parameters
        names += [name for name in own if name not in ("self", *names)]
    return names


def _takes_any(model: nn.Module) -> bool:
    kinds = inspect.signature(model.forward).parameters.values()
    return any(p.kind is p.VAR_KEYWORD for p in kinds)


class TokenArguments(NamedTuple):
    """The arguments of one call, by name; ``tokens`` is how many a sequence has, and ``dims`` along
    which dimension an argument has them."""

    values: dict[str, Any]
    dims: dict[str, int]
    tokens: int
    device: torch.device


def read_arguments(
    model: str, signature: inspect.Signature, plan: ContextPlan, args: Any, kwargs: Any
) -> TokenArguments:
    """The arguments of a call of the forward of ``model``, a class.

    Raises:
        ConfigError: of an argument nobody knows where its tokens are, or they do not agree.
        Unsupported: there are arguments without a name.
    """
    values = _by_name(model, signature, args, kwargs)
    dims: dict[str, int] = {}
    for name, value in values.items():
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        if not tensors or (name in plan.dims and plan.dims[name] is None):
            continue
        first = tensors[0]
        dim = plan.dims.get(name)
        if dim is None or value is not first:
            what = f"a tensor of shape {list(first.shape)}" if value is first else "tensors within"
            raise ConfigError(
                f"mesh.cp: the model is called with {name!r}, {what}, and nobody says which of its "
                "dimensions are tokens",
                fix=f"say it: 'strategy.context_plan={{{name}: 1}}', or null where it has none "
                "(or by context_plan of the task or the model)",
            )
        if dim >= first.dim():
            raise ConfigError(
                f"mesh.cp: the context plan ({plan.source}) says that {name!r} has tokens along "
                f"dimension {dim}, and it has the shape {list(first.shape)}",
                fix="give another dimension in strategy.context_plan",
            )
        dims[name] = dim
    sizes = {name: values[name].shape[dim] for name, dim in dims.items()}
    if not sizes:
        raise ConfigError(
            f"mesh.cp: {model} is called without a tensor that has tokens",
            fix="say in strategy.context_plan which argument has them, or set mesh.cp=1",
        )
    if len(set(sizes.values())) > 1:
        said = ", ".join(f"{name!r} has {size}" for name, size in sizes.items())
        raise ConfigError(
            f"mesh.cp: the arguments of {model} do not agree on how many tokens there are: {said}",
            fix="give other dimensions in strategy.context_plan, or null for what is given whole",
        )
    first = values[next(iter(sizes))]
    return TokenArguments(values, dims, next(iter(sizes.values())), first.device)


def _by_name(model: str, signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    bound = signature.bind(*args, **kwargs)
    values = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            values.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL or kind is inspect.Parameter.POSITIONAL_ONLY:
            raise Unsupported(
                f"mesh.cp: {model}.forward takes {name!r} by its place alone, and what has tokens "
                "is known by name",
                fix="give the arguments of forward names, or set mesh.cp=1",
            )
        else:
            values[name] = value
    return values
