"""Parameters that a loss trains and that no engine knows: those of the task, outside its model.

Nobody would put their gradients to zero, nor average them over ranks, nor save them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_trainer.errors import ConfigError
from torsh_trainer.tasks.base import Task

_DEEPEST = 3


def foreign_parameters(task: Task, model: nn.Module) -> dict[str, Tensor]:
    """Those that could be trained beside ``model``'s, by where they are found.

    Looked for in what the task holds and in the globals that its ``forward`` and ``loss`` name.
    """
    modules = {id(module) for module in model.modules()}
    own = {id(parameter) for parameter in model.parameters()}
    return {
        name: tensor
        for name, tensor in _find_held(task, modules)
        if tensor.requires_grad and tensor.is_leaf and id(tensor) not in own and tensor.grad is None
    }


def refuse_trained(foreign: Mapping[str, Tensor]) -> None:
    """After a backward.

    Raises:
        ConfigError: it has reached one of ``foreign``.
    """
    for name, tensor in foreign.items():
        if tensor.grad is not None:
            raise ConfigError(
                f"the loss has a gradient for {name}, which is not part of the model: it would be "
                "neither averaged over processes nor saved",
                fix="make it a part of what build_model returns, or freeze it: "
                f"{name}.requires_grad_(False)",
                parameter=name,
            )


def refuse_stepped(
    task: Task, optimizers: Mapping[str, Optimizer], parameters: Iterable[nn.Parameter]
) -> None:
    """Before the first step.

    Raises:
        ConfigError: an optimizer has a parameter that is none of ``parameters``.
    """
    own = {id(parameter) for parameter in parameters}
    for label, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                if id(tensor) not in own:
                    name = _name_of(task, tensor)
                    raise ConfigError(
                        f"the optimizer {label!r} has {name}, which is not part of the model: its "
                        "gradient would be neither averaged over processes nor put to zero",
                        fix="make it a part of what build_model returns, and build optimizers over "
                        "the parameters that build_optimizers is given",
                    )


def _name_of(task: Task, tensor: Tensor) -> str:
    for name, held in _find_held(task, set()):
        if held is tensor:
            return name
    return f"a parameter of shape {tuple(tensor.shape)}"


def _find_held(task: Task, modules: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Tensors that the task reaches beside ``modules``, by where they are."""
    yield from _within("task", vars(task), modules)
    for method in (type(task).forward, type(task).loss):
        code = getattr(method, "__code__", None)
        if code is not None:
            known = {n: method.__globals__[n] for n in code.co_names if n in method.__globals__}
            yield from _within(method.__module__, known, modules)


def _within(
    place: str, value: Any, modules: set[int], depth: int = 0
) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, nn.Module):
        for path, module in value.named_modules():
            if id(module) not in modules:
                for name, parameter in module.named_parameters(recurse=False):
                    yield ".".join(filter(None, (place, path, name))), parameter
    elif depth < _DEEPEST and isinstance(value, Mapping):
        for name, part in value.items():
            yield from _within(f"{place}.{name}", part, modules, depth + 1)
    elif depth < _DEEPEST and isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _within(f"{place}[{number}]", part, modules, depth + 1)
