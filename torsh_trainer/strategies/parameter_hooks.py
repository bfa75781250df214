"""Hooks that a user has put on parameters, which FSDP2 would drop with the parameters it replaces.

A hook belongs to what a backward comes to: the whole parameter that a unit gathers. It sees what it
sees in plain PyTorch, the gradient of this process's micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from torsh_trainer.errors import Unsupported
from torsh_trainer.strategies.base import Job, Strategy
from torsh_trainer.strategies.outputs import tensors_in

Hooks = Mapping[str, list[Callable[[Tensor], Tensor | None]]]
"""By the name of their parameter."""


def hooks_of(model: nn.Module, uncut: Iterable[nn.Parameter], job: Job, knobs: Strategy) -> Hooks:
    """The hooks of all parameters but ``uncut``, which keep theirs.

    Raises:
        Unsupported: one is of a kind that cannot move, or holds a parameter itself.
    """
    kept = set(uncut)
    own = {id(p) for p in model.parameters()}
    found: dict[str, list[Callable[[Tensor], Tensor | None]]] = {}
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise _hook_error(knobs, name, "that is called once its gradient was accumulated")
        if parameter in kept or not parameter._backward_hooks:
            continue
        if job.precision.params != "fp32":
            raise _hook_error(knobs, name, f"beside precision.params={job.precision.params}")
        found[name] = list(parameter._backward_hooks.values())
        if any(id(tensor) in own for hook in found[name] for tensor in tensors_in(hook)):
            raise _hook_error(knobs, name, "that holds a parameter, which will be cut")
    return found


def carry_over(hooks: Hooks, parts: Iterable[Any], names: Mapping[int, str]) -> None:
    """Puts ``hooks`` on what FSDP2 gathers; ``names`` maps ``id(shard)`` to the parameter's."""
    for part in parts:
        own = hooks.get(names[id(part.sharded_param)])
        if own:
            _put(own, part)


def _put(hooks: list[Callable[[Tensor], Tensor | None]], part: Any) -> None:
    make = part.init_unsharded_param

    def make_hooked() -> None:
        make()
        part.init_unsharded_param = make
        whole, trains = part.unsharded_param, part.unsharded_param.requires_grad
        whole.requires_grad_(True)
        for hook in hooks:
            whole.register_hook(hook)
        whole.requires_grad_(trains)

    part.init_unsharded_param = make_hooked  # the whole parameter is made by the first gathering


def _hook_error(knobs: Strategy, name: str, why: str) -> Unsupported:
    return knobs.refuse(f"a hook on the parameter {name!r} {why}", use="use strategy=ddp")
