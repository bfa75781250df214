"""``loss.backward()`` in the place of ``engine.backward(loss)``, as DeepSpeed takes it.

A tensor's ``backward`` is exchanged in the processes of the job. It looks for what an engine
returned among what led to the tensor, and has that engine run the backward: gradients that it does
not know of would not be averaged over processes. What begins a backward otherwise is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torsh_trainer.errors import ConfigError

TORCHS: Callable[..., None] = Tensor.backward
"""What ``Tensor.backward`` is without this."""
_MARK = "torsh_trainer.engine"


class Watching(Protocol):
    """An engine that hears of backwards through what it returned."""

    def backward_plainly(self, tensor: Tensor, run: Callable[[Tensor], object]) -> None:
        """The script has called ``tensor.backward()``; ``run`` does what that does."""

    def enter_backward(self, gradient: Tensor) -> Tensor | None:
        """A backward comes to what the engine returned; None leaves the gradient as it is."""


def watch(outputs: Any, engine: Watching) -> None:
    """Marks the tensors in ``outputs`` of a training forward as those of ``engine``."""
    known = weakref.ref(engine)

    def enter(gradient: Tensor) -> Tensor | None:
        found = known()
        return None if found is None else found.enter_backward(gradient)

    for leaf in [outputs] if isinstance(outputs, Tensor) else tree_leaves(outputs):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            _notes_of(leaf.grad_fn)[_MARK] = known
            leaf.register_hook(enter)


def install() -> None:
    """Exchanges ``Tensor.backward``; again it changes nothing."""
    Tensor.backward = _backward  # type: ignore[method-assign]


def refusal(what: str) -> ConfigError:
    """The error for gradients that the engine would not average."""
    return ConfigError(
        f"{what}: DeepSpeed averages what its engine computes", fix="call engine.backward(loss)"
    )


def refuse_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Within a backward: when it has ended, makes sure that it has left no gradients.

    Raises:
        ConfigError: it has, in the backward.
    """
    before = [_state(p.grad) for p in parameters]

    def check() -> None:
        if any(_state(p.grad) != was for p, was in zip(parameters, before, strict=True)):
            raise refusal("torch.autograd.backward on the engine's outputs")

    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(check))  # after whatever else ends this backward


def _state(gradient: Tensor | None) -> tuple[int, int] | None:
    return None if gradient is None else (id(gradient), gradient._version)


def _backward(
    self: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    given = {
        "gradient": gradient,
        "retain_graph": retain_graph,
        "create_graph": create_graph,
        "inputs": inputs,
    }
    run = partial(TORCHS, **{k: v for k, v in given.items() if v is not None and v is not False})
    engine = _find(self)
    if engine is None:
        run(self)
    else:
        engine.backward_plainly(self, run)


def _find(tensor: Tensor) -> Watching | None:
    """The engine whose outputs ``tensor`` was computed from; the nearest where there are two."""
    waiting: list[Any] = [tensor.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        known = _notes_of(node).get(_MARK)
        if known is not None:
            found: Watching | None = known()
            return found
        waiting += [following for following, _ in node.next_functions]
    return None


def _notes_of(node: Any) -> dict[str, Any]:
    """What torch keeps beside a node of the graph, as long as the node is there."""
    notes: dict[str, Any] = node.metadata
    return notes
