"""Models, optimizers, samplers and plain values that are kept together."""

from __future__ import annotations

import copy
from typing import Any

import torch

from torsh_trainer.dropin.horovod.common.elastic import ObjectState
from torsh_trainer.dropin.horovod.torch.elastic.sampler import ElasticSampler
from torsh_trainer.dropin.horovod.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from torsh_trainer.dropin.horovod.torch.mpi_ops import rank
from torsh_trainer.dropin.missing import refuse_unknown

__getattr__ = refuse_unknown(__name__)


class StateHandler:
    """How one thing is kept; by its ``state_dict``."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._saved: Any = None
        self.save()

    def save(self) -> None:
        """Keeps it as it is."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Goes back to what was kept."""
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        """Takes rank 0's."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Another takes its place."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """A model."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateHandler):
    """An optimizer."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(StateHandler):
    """A sampler."""

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


_handlers: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Which handler keeps what."""
    return _handlers


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Has others keep it."""
    global _handlers  # noqa: PLW0603  # Horovod's own interface
    _handlers = registry


class TorchState(ObjectState):
    """Every keyword is an attribute that is kept: by a handler, or as a plain value."""

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        kwargs = {**kwargs, "model": model, "optimizer": optimizer}
        self._handlers: dict[str, StateHandler] = {}
        plain = {}
        for name, value in kwargs.items():
            kind = next((made for kind, made in _handlers if isinstance(value, kind)), None)
            if kind is None:
                plain[name] = value
            else:
                self._handlers[name] = kind(value)
        for name, handler in self._handlers.items():
            object.__setattr__(self, name, handler.value)
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **plain)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_handlers", {}):
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)
