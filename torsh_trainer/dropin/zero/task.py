"""A script's model and optimizer as the task of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torsh_trainer.errors import ConfigError
from torsh_trainer.optim.optimizers import OptimizerSpec
from torsh_trainer.tasks.base import DataSource, Task

MAIN = "main"


class GivenModel(Task):
    """A model that is made already, and its optimizer: the script's own, or what ``spec`` says.

    ``chosen`` are the parameters, or groups of them, that the script has given; None: all.
    """

    data = DataSource()

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | None,
        spec: OptimizerSpec | None,
        chosen: Sequence[Any] | None,
    ) -> None:
        self._module, self._optimizer, self._spec, self._chosen = module, optimizer, spec, chosen
        self._names = {id(p): name for name, p in module.named_parameters()}

    def build_model(self) -> nn.Module:
        return self._module

    def build_optimizers(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> Mapping[str, Optimizer]:
        """One optimizer, over the parameters as the engine holds them.

        Raises:
            ConfigError: it holds parameters of something else, or has stepped already.
        """
        held = dict(named_parameters)
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["params"] = [self._now(p, held) for p in group["params"]]
            return {MAIN: self._optimizer}
        assert self._spec is not None
        groups = None if self._chosen is None else _as_groups(self._chosen)
        if groups is None or (len(groups) == 1 and set(groups[0]) == {"params"}):
            wanted = None if groups is None else {id(p) for p in groups[0]["params"]}
            left = [
                (n, p)
                for n, p in held.items()
                if wanted is None or any(self._names.get(w) == n for w in wanted)
            ]
            return {MAIN: self._spec.build(left)}
        made = self._spec.build(list(held.items()))
        made.param_groups.clear()
        for group in groups:
            params = [self._now(p, held) for p in group["params"]]
            made.add_param_group({**group, "params": params})
        return {MAIN: made}

    def _now(self, parameter: Any, held: Mapping[str, nn.Parameter]) -> nn.Parameter:
        name = self._names.get(id(parameter))
        if name is None:
            raise ConfigError(
                "the optimizer holds a parameter of another model",
                fix="give deepspeed.initialize the model whose parameters it has",
            )
        now = held.get(name, parameter)
        if now is not parameter and self._optimizer is not None and self._optimizer.state:
            raise ConfigError(
                "the optimizer has stepped before its model is cut over the processes",
                fix="call deepspeed.initialize before the first step",
            )
        return now


def _as_groups(chosen: Sequence[Any]) -> list[dict[str, Any]]:
    if chosen and isinstance(chosen[0], Mapping):
        groups = [dict(group) for group in chosen]
        for group in groups:
            params = group["params"]
            group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
        return [group for group in groups if group["params"]]
    return [{"params": list(chosen)}]


def describe_optimizer(optimizer: Optimizer) -> dict[str, Any] | None:
    """The optimizer as a block of a configuration, for what depends on its rate and decay."""
    rates = {float(group["lr"]) for group in optimizer.param_groups}
    decays = {float(group.get("weight_decay", 0.0)) for group in optimizer.param_groups}
    if len(rates) > 1 or len(decays) > 1:
        return None
    params: dict[str, Any] = {"lr": rates.pop(), "weight_decay": decays.pop()}
    if isinstance(optimizer, torch.optim.Adam):
        decoupled = bool(optimizer.defaults.get("decoupled_weight_decay"))
        params.update(torch_adam=True, adam_w_mode=decoupled)
        return {"type": "AdamW" if decoupled else "Adam", "params": params}
    if isinstance(optimizer, torch.optim.SGD):
        return {"type": "SGD", "params": params}
    return None
