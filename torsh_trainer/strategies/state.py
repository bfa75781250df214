"""Optimizer and model state by parameter name, free of the engine that holds it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_trainer.errors import ConfigError, nearest
from torsh_trainer.tasks.weights import take_values

log = logging.getLogger(__name__)


GroupNames = Sequence[Sequence[str]]
"""Names of the parameters of each group of an optimizer."""


def optimizer_state(
    optimizer: Optimizer, names: Mapping[int, str], groups: GroupNames | None = None
) -> dict[str, Any]:
    """``{"state": {parameter name: {slot: value}}, "groups": [settings, "params": names]}``.

    ``names`` maps ``id(parameter)`` to its name. Under ZeRO-1 the state holds this rank's share.
    ``groups`` are the names in each group, where other processes hold some of its parameters.

    Raises:
        ConfigError: the optimizer keeps something that belongs to no parameter.
    """
    held = local_optimizer(optimizer)
    for key in held.state:
        if id(key) not in names:
            raise ConfigError(
                f"optimizer {type(held).__name__} keeps state under {key!r:.40}, which is no "
                "parameter, and a checkpoint holds optimizer state by parameter",
                fix="keep it in a parameter's state or among the settings of a group",
            )
    state = {
        names[id(p)]: {slot: _densify(value) for slot, value in slots.items()}
        for p, slots in held.state.items()
        if slots
    }
    told = []
    for group, own in zip(
        optimizer.param_groups, groups or _name_groups(optimizer, names), strict=True
    ):
        settings = {k: _number(v) for k, v in group.items() if k not in ("params", "param_names")}
        told.append({**settings, "params": list(own)})
    return {"state": state, "groups": told}


def _name_groups(optimizer: Optimizer, names: Mapping[int, str]) -> GroupNames:
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _densify(value: Any) -> Any:
    """A slot that a sparse gradient has left sparse, whole: a checkpoint holds no other."""
    return value.to_dense() if isinstance(value, Tensor) and value.is_sparse else value


def _number(setting: Any) -> Any:
    """A setting as a checkpoint holds it: a learning rate may be a tensor."""
    if isinstance(setting, Tensor) and setting.numel() == 1:
        return setting.item()
    if type(setting) in (tuple, list):
        return type(setting)(map(_number, setting))
    return setting


def _like(held: Any, setting: Any) -> Any:
    """``setting`` as the group holds it: a tensor stays the one that it is."""
    if isinstance(held, Tensor) and not isinstance(setting, Tensor):
        return held.fill_(setting) if held.numel() == 1 else setting
    if type(held) is type(setting) and type(held) in (tuple, list) and len(held) == len(setting):
        return type(held)(map(_like, held, setting))
    return setting


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """What a copy of an optimizer takes over: not the ``step`` that a scheduler has put on it.

    That one counts steps, and steps the optimizer that it was made for.
    """
    return {name: value for name, value in vars(optimizer).items() if name != "step"}


def load_optimizers(
    optimizers: Mapping[str, Optimizer],
    state: Mapping[str, Any],
    names: Mapping[int, str],
    groups: Mapping[str, GroupNames] | None = None,
) -> None:
    """Puts back what ``optimizer_state`` gave for every optimizer of that name.

    ``groups`` are as there, by optimizer.

    Raises:
        ConfigError: the checkpoint holds other optimizers than this run.
    """
    if set(optimizers) != set(state):
        missing = sorted(set(optimizers) ^ set(state))
        raise ConfigError(
            f"the checkpoint's optimizers are {sorted(state)}, this run's {sorted(optimizers)}",
            fix=nearest(missing[0], state),
        )
    for name, optimizer in optimizers.items():
        saved = state[name]
        held = local_optimizer(optimizer)
        parameters = {names[id(p)]: p for g in optimizer.param_groups for p in g["params"]}
        mine = {names[id(p)] for g in held.param_groups for p in g["params"]}
        for parameter_name in mine & set(saved["state"]):
            held.state[parameters[parameter_name]] = dict(saved["state"][parameter_name])
        for parameter_name in mine - set(saved["state"]):
            held.state.pop(parameters[parameter_name], None)
        load_groups(optimizer, saved["groups"], names, None if groups is None else groups[name])


def load_groups(
    optimizer: Optimizer,
    saved: Sequence[Mapping[str, Any]],
    names: Mapping[int, str],
    groups: GroupNames | None = None,
) -> None:
    """Settings (lr, momentum, ...) that the parameters of a group were saved with.

    GroupNames are matched by parameter, whatever their number and order. Where parameters that were
    saved with different values of a setting now share a group, the run's own value stays, and the
    log says so. What an optimizer writes into its groups while it steps comes back, too.
    """
    by_parameter = {name: group for group in saved for name in group["params"]}
    for group, mine in zip(
        optimizer.param_groups, groups or _name_groups(optimizer, names), strict=True
    ):
        sources = {name: by_parameter[name] for name in mine if name in by_parameter}
        written = {key for source in sources.values() for key in source}
        for key in sorted({*group, *written}):
            held = {name: source[key] for name, source in sources.items() if key in source}
            if key in _NOT_LOADED or not held:
                continue
            values = list(held.values())
            if all(_equal(value, values[0]) for value in values):
                group[key] = _like(group.get(key), values[0])
            else:
                log.warning(
                    "%s was saved as %s and shares a group now: it is %s from here on",
                    key,
                    _by_value(held),
                    group.get(key),
                )


_NOT_LOADED = ("params", "param_names", "fused", "foreach", "capturable")
"""What a group holds beside settings of the update: names, and how a step is computed here."""


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    return bool(one == other)


def _by_value(held: Mapping[str, Any]) -> str:
    """``0.1 for a, b; 0.0 for c``."""
    groups: dict[str, list[str]] = {}
    for name, value in held.items():
        groups.setdefault(str(value), []).append(name)
    return "; ".join(
        f"{value} for {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
        for value, names in groups.items()
    )


def materialise_slots(optimizer: Optimizer) -> None:
    """Creates the optimizer's state tensors without changing a parameter.

    A step with zero gradients and a zero learning rate makes torch's optimizers allocate what a
    checkpoint is then read into; learning rates and gradients are put back.
    """
    held = local_optimizer(optimizer)
    if any(held.state.values()):
        return
    gradients = [(p, p.grad) for g in held.param_groups for p in g["params"]]
    settings: list[dict[str, Any]] = [
        {key: group[key] for key in ("lr", "weight_decay") if key in group}
        for group in held.param_groups
    ]
    for parameter, _ in gradients:
        parameter.grad = _no_gradient(parameter, held)
    for group in held.param_groups:
        for key in ("lr", "weight_decay"):
            if key in group:
                group[key] = torch.zeros_like(group[key]) if isinstance(group[key], Tensor) else 0.0
    held.step()
    for group, saved in zip(held.param_groups, settings, strict=True):
        group.update(saved)
    for parameter, gradient in gradients:
        parameter.grad = gradient


def _no_gradient(parameter: Tensor, optimizer: Optimizer) -> Tensor:
    """Zeros, of the kind that the optimizer takes."""
    if not isinstance(optimizer, torch.optim.SparseAdam):
        return torch.zeros_like(parameter)
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = parameter.detach().new_empty((0, *parameter.shape[1:]))
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


def load_model(model: nn.Module, source: Mapping[str, Any]) -> None:
    """Gives ``model`` the values of ``source``, named as in its ``state_dict``, by its own loading.

    ``state_dict`` may give copies, and more than tensors: only the module knows where they go.

    Raises:
        ConfigError: the names differ, or the module cannot take the values.
    """
    target = model.state_dict()
    if set(target) != set(source):
        odd = sorted(set(target) ^ set(source))
        raise ConfigError(
            f"the checkpoint and the model differ in {len(odd)} tensors, {odd[0]!r} among them",
            fix="resume with the model that was saved, or load it by trainer.pretrained",
        )
    take_values(model, source)


def local_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer that has this rank's state, which may be one within ``optimizer``."""
    return getattr(optimizer, "optim", optimizer)
