"""Notes what a loop does to a LightningModule: every hook with what it was given, every number.

``watch`` turns a module or a data module into one that notes its calls, in place and without a
change of meaning; ``Witness`` and ``Reader`` are callbacks, and ``Ledger`` a logger, that do the
same. None knows whose loop it watches, so that the notes of two loops can be laid side by side.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from torch import Tensor, nn
from torch.optim import Optimizer

RESTORES = ("on_validation_model_train", "on_test_model_train")
"""Not called unless overridden: instead, what was in training mode before is again."""

HOOKS = tuple(
    name
    for name, _ in inspect.getmembers(L.LightningModule, inspect.isfunction)
    if name.startswith("on_") and name not in RESTORES
)
"""What a LightningModule may do at fixed moments, as this release of Lightning lists it."""

DOERS = (
    "prepare_data",
    "setup",
    "teardown",
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "transfer_batch_to_device",
)
"""What does something unless it is overridden; overriding it with itself changes nothing."""

GIVEN = (
    *RESTORES,
    "configure_model",
    "configure_callbacks",
    "configure_optimizers",
    "training_step",
    "validation_step",
    "test_step",
    "predict_step",
    "train_dataloader",
    "val_dataloader",
    "test_dataloader",
    "predict_dataloader",
)
"""What means something only where the user wrote it."""

TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")

CALLBACK_HOOKS = tuple(
    name
    for name, _ in inspect.getmembers(L.Callback, inspect.isfunction)
    if name.startswith("on_") or name in ("setup", "teardown")
)


class Event(NamedTuple):
    """A call: whose hook, with what (types and shapes), and how things stood in the trainer."""

    who: str
    hook: str
    given: tuple[str, ...]
    state: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.who}.{self.hook}({', '.join(self.given)}) at {self.state}"


@dataclass
class Recording:
    """What was noted, in order: plain values, which pickle."""

    events: list[Event] = field(default_factory=list)
    logged: list[tuple[dict[str, float], int | None]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)
    metrics: list[tuple[str, dict[str, float]]] = field(default_factory=list)
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    predictions: list[Any] = field(default_factory=list)

    def note(self, who: str, hook: str, trainer: Any, given: Any) -> None:
        self.events.append(Event(who, hook, tuple(given), _standing(trainer)))

    @property
    def calls(self) -> list[str]:
        """The order of calls alone."""
        return [f"{event.who}.{event.hook}" for event in self.events]


# -- what is watched ------------------------------------------------------------------------------


def watch(thing: Any, recording: Recording, *, who: str) -> Any:
    """Makes ``thing``, a module or a data module, note its calls; it stays what it is.

    Hooks are noted whether overridden or not, what the user may leave out only where it stands.
    """
    base: Any = L.LightningModule if isinstance(thing, L.LightningModule) else L.LightningDataModule
    names = {name: hasattr(base, name) for name in (*HOOKS, *DOERS)}
    names |= {name: _written(thing, base, name) for name in GIVEN}
    if base is L.LightningDataModule:  # a module's transfers count only where it has none itself
        names |= {name: _written(thing, base, name) for name in TRANSFERS}
        names |= dict.fromkeys(("state_dict", "load_state_dict", "on_exception"), True)
    body = {
        name: _noting(type(thing), name, who, recording) for name, noted in names.items() if noted
    }
    thing.__class__ = type(type(thing).__name__, (type(thing),), body)
    return thing


def _written(thing: Any, base: type, name: str) -> bool:
    return getattr(type(thing), name, None) is not getattr(base, name, None)


def _noting(cls: type, name: str, who: str, recording: Recording) -> Callable[..., Any]:
    original = getattr(cls, name)

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A module's ``trainer`` raises where there is none yet, a data module's is None.
        trainer = vars(self).get("_trainer", vars(self).get("trainer"))
        recording.note(who, name, trainer, _described(args, kwargs))
        result = original(self, *args, **kwargs)
        if name == "training_step":
            loss = result["loss"] if isinstance(result, Mapping) and "loss" in result else result
            if isinstance(loss, Tensor):
                recording.losses.append(float(loss.detach()))
        return result

    # Its parameters are read by Lightning. No ``__wrapped__``: it would count as not overridden.
    noting.__name__, noting.__doc__ = name, original.__doc__
    noting.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return noting


class _Noting(L.Callback):
    """A callback that notes its calls and, where numbers have just become known, these."""

    def __init__(self, recording: Recording, who: str = "callback") -> None:
        self.recording = recording
        self.who = who

    @property
    def state_key(self) -> str:
        return self.who

    def state_dict(self) -> dict[str, Any]:
        return {"calls": 1}


NUMBERS_KNOWN = (
    "on_train_batch_end",
    "on_train_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_test_epoch_end",
    "on_test_end",
)


def _callback_hook(name: str) -> Callable[..., Any]:
    def hook(self: _Noting, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.recording.note(self.who, name, trainer, _described(args, kwargs))
        if name == "on_train_batch_end":
            groups = [group for one in trainer.optimizers for group in one.param_groups]
            self.recording.rates.append([float(group["lr"]) for group in groups])
        for kind in ("callback", "logged", "progress_bar") if name in NUMBERS_KNOWN else ():
            found = _numbers(getattr(trainer, f"{kind}_metrics"))
            self.recording.metrics.append((f"{self.who}.{name}: {kind}", found))

    hook.__name__ = name
    return hook


Witness = type("Witness", (_Noting,), {name: _callback_hook(name) for name in CALLBACK_HOOKS})
"""Defines every hook of a callback."""

Reader = type("Reader", (_Noting,), {name: _callback_hook(name) for name in NUMBERS_KNOWN})
"""Defines those alone at which numbers are read: nothing around the optimization."""


class Keeper(L.Callback):
    """Keeps the values with which training ends, whole where they are shards."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def on_train_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        state = trainer.strategy.lightning_module_state_dict()
        self.recording.parameters = {
            name: value.detach().cpu().clone() for name, value in state.items()
        }


class Ledger(Logger):
    """A logger that keeps what it is told."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    @property
    def name(self) -> str:
        return "ledger"

    @property
    def version(self) -> int:
        return 0

    @property
    @rank_zero_experiment
    def experiment(self) -> None:
        return None

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.recording.hyperparameters.update(dict(params))

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.recording.logged.append((_numbers(metrics), step))

    def finalize(self, status: str) -> None:
        self.recording.events.append(Event("logger", "finalize", (status,), ()))

    def save(self) -> None:
        pass


# -- values in words ------------------------------------------------------------------------------


def _described(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[str]:
    yield from map(described, args)
    for name, value in kwargs.items():
        yield f"{name}={described(value)}"


def described(value: Any) -> str:
    """A value by what a hook can rely on: type, shape, a number itself."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        parts = (f"{_placeless(key)}: {described(part)}" for key, part in value.items())
        return "{" + ", ".join(parts) + "}"
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return "[" + ", ".join(map(described, value)) + "]"
    if value is None or isinstance(value, (bool, int, float, str, torch.device)):
        return repr(_placeless(value))
    if isinstance(value, Optimizer):
        return type(value).__name__
    if isinstance(value, L.LightningModule):
        return "module"
    if callable(value) and not isinstance(value, nn.Module):
        return "callable"
    return type(value).__name__


def _placeless(value: Any) -> Any:
    """A path without where the run lies."""
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def _standing(trainer: Any) -> tuple[Any, ...]:
    """How far the trainer says it is; nothing where none is attached yet."""
    if trainer is None:
        return ()
    state = trainer.state
    return (
        str(getattr(state.fn, "value", state.fn)),
        str(getattr(state.stage, "value", state.stage)),
        trainer.current_epoch,
        trainer.global_step,
        "grad" if torch.is_grad_enabled() else "no grad",
    )


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


# -- two recordings side by side ------------------------------------------------------------------


class Within(NamedTuple):
    """How far numbers may be apart: in parts of the larger of the two, or at all."""

    relative: float = 0.0
    absolute: float = 0.0


THE_SAME_BITS = Within()


def differences(
    expected: Recording, found: Recording, within: Within = THE_SAME_BITS
) -> dict[str, str]:
    """Where two recordings part, by kind; empty where they agree."""
    told = {}
    for kind in ("events", "logged", "losses", "rates", "metrics"):
        first = _first_difference(getattr(expected, kind), getattr(found, kind), within)
        if first is not None:
            told[kind] = first
    for kind in ("hyperparameters", "parameters", "predictions"):
        if not same(getattr(expected, kind), getattr(found, kind), within):
            told[kind] = _apart(getattr(expected, kind), getattr(found, kind), within)[:600]
    return told


def _first_difference(expected: list[Any], found: list[Any], within: Within) -> str | None:
    for place, (one, other) in enumerate(zip(expected, found, strict=False)):
        if not same(one, other, within):
            before = f", after {expected[place - 1]}" if place else ""
            return f"{place}: {_apart(one, other, within)}{before}"[:1500]
    if len(expected) != len(found):
        place = min(len(expected), len(found))
        which, rest = ("missing", expected) if len(found) < len(expected) else ("more", found)
        return f"{place}: {which} {', '.join(map(str, rest[place : place + 3]))}"[:1500]
    return None


def same(one: Any, other: Any, within: Within) -> bool:
    """Whether two plain values agree; numbers ``within`` so much, NaN with itself."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(
            same(one[name], other[name], within) for name in one
        )
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(
            same(a, b, within) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _same_tensors(one, other, within)
    if isinstance(one, float) and isinstance(other, float) and one != other:
        both_nan = one != one and other != other
        return both_nan or abs(one - other) <= max(
            within.absolute, within.relative * max(abs(one), abs(other))
        )
    return bool(one == other)


def _same_tensors(one: Tensor, other: Tensor, within: Within) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = one.double(), other.double()
    bound = (within.relative * torch.maximum(one.abs(), other.abs())).clamp(min=within.absolute)
    agree = ((one - other).abs() <= bound) | (one == other) | (one.isnan() & other.isnan())
    return bool(agree.all())


def _apart(one: Any, other: Any, within: Within) -> str:
    """Two values that differ, in few words: of mappings what differs alone."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        names = [n for n in {**one, **other} if not same(one.get(n), other.get(n), within)]
        parts = [f"{n!r}: {one.get(n, _NONE)} is {other.get(n, _NONE)}" for n in names]
        return "; ".join(parts[:4]) + (f"; and {len(parts) - 4} more" if len(parts) > 4 else "")
    if isinstance(one, tuple) and isinstance(other, tuple) and not isinstance(one, Event):
        pairs = zip(one, other, strict=False)
        return f"{one[0] if isinstance(one[0], str) else one[1:]}: " + "; ".join(
            _apart(a, b, within) for a, b in pairs if not same(a, b, within)
        )
    return f"expected {one}, found {other}"


_NONE = "absent"
