"""The dictionary that checkpoint hooks of a module and of callbacks are given, and make of it.

Lightning gives them all that it saves, the weights included, and saves what they leave. Here
weights and optimizers lie in a checkpoint in pieces of their own. Only where somebody has such a
hook are they put together; what the hooks leave is kept with marks in the place of weights that are
as they were, and weights that it no longer names are left out of the pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from torsh_trainer.checkpoint.marks import mark_tensors, weights_in
from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError
from torsh_trainer_lightning.loop.facade import Facade
from torsh_trainer_lightning.loop.table import defines, hooks_of
from torsh_trainer_lightning.whole import is_cut

SAVE, LOAD = "on_save_checkpoint", "on_load_checkpoint"
WEIGHTS, OPTIMIZERS = "state_dict", "optimizer_states"
NEEDED = ("loops", "lr_schedulers", "pytorch-lightning_version")
"""What a run that goes on reads, beside weights and optimizers."""


def is_hooked(facade: Facade, hook: str) -> bool:
    """Whether the module or a callback has such a hook."""
    own = defines(facade.lightning_module, hook, LightningModule)
    return own or bool(hooks_of(facade.callbacks, hook))


class Whole:
    """Weights and states of optimizers as Lightning's dictionary has them, and whether they change.

    Collective. Where they are cut over ranks, rank 0 has the values, and other ranks tensors of the
    meta device, of the same shapes; with ``everywhere`` all ranks have the values, of their own.
    """

    def __init__(self, facade: Facade, comm: Communicator, *, everywhere: bool) -> None:
        strategy: Any = facade.strategy
        weights = strategy.lightning_module_state_dict()
        states = [strategy.optimizer_state(optimizer) for optimizer in facade.optimizers]
        lacking = [not held for held in (weights, *states)]
        if any(any(one) for one in comm.all_gather_object(lacking)):
            told = (weights, states) if everywhere else _on_meta((weights, states))
            first = comm.broadcast_object(told)
            if not comm.world.is_rank_zero:
                weights = weights or first[0]
                states = [one or other for one, other in zip(states, first[1], strict=True)]
        if everywhere:  # a hook may change them, or look at them after others were loaded
            weights, states = _copy_tree(weights), _copy_tree(states)
        self.entries = {WEIGHTS: weights, OPTIMIZERS: states}
        self._given = {name: (value, _version(value)) for name, value in weights.items()}
        self._names = {id(value): name for name, value in weights.items()}
        self._places = {_place(v): n for n, v in weights.items() if _place(v) is not None}
        self._leaves = dict(_leaves(states))

    def name_of(self, value: Any) -> str | None:
        """The weight that a tensor is, unchanged; None: it is no weight.

        Raises:
            ConfigError: it is a part of a weight.
        """
        name = self._names.get(id(value))
        if name is None:
            name = self._places.get(_place(value))
        if name is None:
            if is_cut(value):
                raise ConfigError("it is a part of a tensor that is cut over the processes")
            return None
        given, version = self._given[name]
        same = isinstance(given, Tensor) and _version(given) == version
        return name if same else None

    def keep(self, weights: Any) -> Any:
        """What hooks have left as ``state_dict``, with marks; None: all weights, as they were."""
        left = mark_tensors(weights, self.name_of)
        if not isinstance(weights, Mapping) or list(weights) != list(self._given):
            return left
        for name, value in weights.items():
            given, _ = self._given[name]
            if value is not given or (isinstance(given, Tensor) and left[name] is value):
                return left
        return None

    def missing_in(self, left: Any) -> frozenset[str]:
        """Weights that ``left``, the dictionary with marks, no longer names."""
        tensors = {name for name, (given, _) in self._given.items() if isinstance(given, Tensor)}
        return frozenset(tensors - weights_in(left))

    def is_own(self, states: Any) -> bool:
        """Whether hooks have left the states of the optimizers as they were."""
        now = dict(_leaves(states))
        return now.keys() == self._leaves.keys() and all(
            _same(now[path], held) for path, held in self._leaves.items()
        )


def call_hooks(facade: Facade, state: dict[str, Any]) -> dict[str, str]:
    """Calls all hooks before a save, as Lightning does; who has set which entry, by its key."""
    module, by_key = facade.lightning_module, {}
    before, module._current_fx_name = module._current_fx_name, SAVE
    try:
        for who, what, hook in _saving(facade):
            held = dict(state)
            with facade.profiler.profile(what):
                hook(state)
            for key in {**held, **state}:
                if key not in held or key not in state or state[key] is not held[key]:
                    by_key[key] = who
    finally:
        module._current_fx_name = before
    return by_key


def savers(facade: Facade) -> str:
    """All who have a hook before a save, for a sentence."""
    module = facade.lightning_module
    own = [module] if defines(module, SAVE, LightningModule) else []
    held: list[Any] = [*own, *(c for c in facade.callbacks if hooks_of([c], SAVE))]
    return ", ".join(_name_hook(one) for one in held) or "a hook"


def _saving(facade: Facade) -> Iterator[tuple[str, str, Callable[[dict[str, Any]], Any]]]:
    module: Any = facade.lightning_module
    for callback in facade.callbacks:

        def tell_callback(state: dict[str, Any], callback: Any = callback) -> None:
            callback.on_save_checkpoint(facade, module, state)

        yield _name_hook(callback), f"[Callback]{callback.state_key}.{SAVE}", tell_callback
    name = type(module).__name__
    yield _name_hook(module), f"[LightningModule]{name}.{SAVE}", module.on_save_checkpoint


def _name_hook(holder: Any) -> str:
    return f"{type(holder).__name__.removeprefix('FSDP')}.{SAVE}"


# -- trees ----------------------------------------------------------------------------------------


def _copy_tree(tree: Any) -> Any:
    return _map_tree(tree, lambda tensor: tensor.detach().clone())


def _on_meta(tree: Any) -> Any:
    return _map_tree(tree, lambda tensor: torch.empty_like(tensor, device="meta"))


def _map_tree(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        copy = tree.copy()  # of its own class, with what a state_dict says of its versions
        copy.update({key: _map_tree(value, change) for key, value in tree.items()})
        return copy
    if type(tree) in (list, tuple):
        return type(tree)(_map_tree(value, change) for value in tree)
    return tree


def _leaves(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, (*at, key))
    elif isinstance(tree, list | tuple):
        yield at, len(tree)
        for index, value in enumerate(tree):
            yield from _leaves(value, (*at, index))
    else:
        yield at, (tree, _version(tree))


def _same(now: Any, held: Any) -> bool:
    if not isinstance(held, tuple) or not isinstance(now, tuple):
        return bool(now == held)
    value, version = now
    if isinstance(value, Tensor) or isinstance(held[0], Tensor):
        return value is held[0] and version == held[1]
    return bool(value is held[0] or value == held[0])


def _version(value: Any) -> int:
    """How often a tensor was changed in place; one from inference mode does not count."""
    if not isinstance(value, Tensor) or value.is_inference():
        return 0
    return int(value._version)


def _place(value: Any) -> Any:
    """Where the numbers of a plain tensor lie; None: nobody can say."""
    if not isinstance(value, Tensor) or is_cut(value) or value.device.type == "meta":
        return None
    if value.layout is not torch.strided or not value.data_ptr():
        return None
    return value.device, value.data_ptr(), value.shape, value.stride(), value.dtype
