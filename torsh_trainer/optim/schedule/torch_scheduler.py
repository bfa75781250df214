"""A scheduler of torch, or a user's own in torch's manner, driven as a schedule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor
from torch.optim import Optimizer, lr_scheduler

from torsh_trainer.errors import ConfigError, nearest
from torsh_trainer.optim.schedule.base import RunningSchedule, StatefulSchedule
from torsh_trainer.optim.schedule.shapes import check
from torsh_trainer.utils.lookup import NO_OPTIONS, import_object, with_keywords

SETTINGS = ("lr", "momentum", "betas")
"""What torch's schedulers change in a parameter group."""


@dataclass(frozen=True, init=False)
class TorchSchedule(StatefulSchedule):
    """``scheduler(optimizer, **options)``, one for each optimizer.

    ``TorchSchedule("StepLR", step_size=1000)``: ``scheduler`` is a name in
    torch.optim.lr_scheduler, the import path of a class or a function that returns a scheduler, or
    that callable itself. Its other arguments are given beside ours, or as the mapping ``options``
    (a configuration has them there). ``interval`` says when it steps: after each update (step),
    each epoch, or each evaluation; ``metric`` names what its ``step`` receives where that takes a
    metric (ReduceLROnPlateau).

    Raises:
        ConfigError: there is no such scheduler, or it does not take these options.
    """

    name: ClassVar[str] = "torch"
    scheduler: str | Callable[..., Any] = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    interval: Literal["step", "epoch", "evaluate"] = "step"
    metric: str = "loss"

    keywords_are_options: ClassVar[bool] = True

    def __init__(
        self,
        scheduler: str | Callable[..., Any] = "",
        *,
        options: Mapping[str, Any] = NO_OPTIONS,
        interval: Literal["step", "epoch", "evaluate"] = "step",
        metric: str = "loss",
        **keywords: Any,
    ) -> None:
        given = {
            "scheduler": scheduler,
            "options": with_keywords(options, keywords, owner="TorchSchedule"),
            "interval": interval,
            "metric": metric,
        }
        for name, value in given.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        intervals = ("step", "epoch", "evaluate")
        check("interval", self.interval, self.interval in intervals, "step, epoch or evaluate")
        if not self.scheduler:
            raise ConfigError(
                "schedule=torch needs schedule.scheduler",
                fix="name a class of torch.optim.lr_scheduler, or the import path of your own",
            )

    def start(
        self, optimizers: Mapping[str, Optimizer], *, total: int | None = None
    ) -> RunningSchedule:
        make = self._maker()
        self._check_options(make)
        try:
            schedulers = {name: make(o, **self.options) for name, o in optimizers.items()}
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"schedule.scheduler={self._label(make)} cannot be made: {error}",
                fix="correct schedule.options",
            ) from error
        takes_metric = [
            "metrics" in inspect.signature(s.step).parameters for s in schedulers.values()
        ]
        if any(takes_metric) and self.interval != "evaluate":
            raise ConfigError(
                f"schedule.scheduler={self._label(make)} follows a metric",
                fix="set schedule.interval=evaluate, and schedule.metric to its name",
            )
        return _Running(self, optimizers, schedulers, takes_metric=any(takes_metric))

    def _maker(self) -> Callable[..., Any]:
        if not isinstance(self.scheduler, str):
            return self.scheduler
        if "." in self.scheduler or ":" in self.scheduler:
            found = import_object(self.scheduler, option="schedule.scheduler")
        else:
            names = {name.lower(): name for name in lr_scheduler.__all__}
            name = names.get(self.scheduler.lower())
            if name is None:
                raise ConfigError(
                    f"schedule.scheduler={self.scheduler} is not in torch.optim.lr_scheduler",
                    fix=nearest(self.scheduler, names.values()) + " Or give an import path",
                )
            found = getattr(lr_scheduler, name)
        if not callable(found):
            raise ConfigError(
                f"schedule.scheduler={self.scheduler} is not a class or a function",
                fix="it is called as scheduler(optimizer, **options)",
            )
        return found

    def _check_options(self, make: Callable[..., Any]) -> None:
        parameters = inspect.signature(make).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return
        names = [p.name for p in parameters][1:]
        for option in self.options:
            if option not in names:
                raise ConfigError(
                    f"schedule.options: {self._label(make)} has no {option!r}",
                    fix=nearest(option, names),
                )

    def _label(self, make: Callable[..., Any]) -> str:
        return self.scheduler if isinstance(self.scheduler, str) else make.__name__


class _Running(RunningSchedule):
    def __init__(
        self,
        knobs: TorchSchedule,
        optimizers: Mapping[str, Optimizer],
        schedulers: Mapping[str, Any],
        *,
        takes_metric: bool,
    ) -> None:
        self._knobs = knobs
        self._optimizers = optimizers
        self._schedulers = schedulers
        self._takes_metric = takes_metric

    def on_update(self) -> None:
        if self._knobs.interval == "step":
            self._step()

    def on_epoch(self) -> None:
        if self._knobs.interval == "epoch":
            self._step()

    def on_evaluate(self, metrics: Mapping[str, float]) -> None:
        if self._knobs.interval != "evaluate":
            return
        if not self._takes_metric:
            self._step()
            return
        if self._knobs.metric not in metrics:
            raise ConfigError(
                f"schedule.metric={self._knobs.metric} is not a metric of the evaluation",
                fix=nearest(self._knobs.metric, metrics),
            )
        for scheduler in self._schedulers.values():
            scheduler.step(metrics[self._knobs.metric])

    def _step(self) -> None:
        for scheduler in self._schedulers.values():
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {
            "schedulers": {name: _plain(s.state_dict()) for name, s in self._schedulers.items()},
            "groups": {
                name: [
                    {key: _number(group[key]) for key in SETTINGS if key in group}
                    for group in optimizer.param_groups
                ]
                for name, optimizer in self._optimizers.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, scheduler in self._schedulers.items():
            scheduler.load_state_dict(dict(state["schedulers"][name]))
        for name, optimizer in self._optimizers.items():
            for group, saved in zip(optimizer.param_groups, state["groups"][name], strict=True):
                for key, value in saved.items():
                    group[key] = tuple(value) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """What of a scheduler's state is plain; the rest is rebuilt by its constructor."""
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            return _DROPPED
        kept = {key: _plain(part) for key, part in value.items()}
        return {key: part for key, part in kept.items() if part is not _DROPPED}
    if isinstance(value, list | tuple):
        parts = [_plain(v) for v in value]
        return _DROPPED if any(part is _DROPPED for part in parts) else parts
    return value if value is None or isinstance(value, bool | int | float | str) else _DROPPED


def _number(value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value)
    return [float(part) for part in value] if isinstance(value, tuple | list) else float(value)


_DROPPED = object()
