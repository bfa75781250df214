"""What users define under a name that nothing calls, where another one was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from torsh_trainer.callbacks.base import Callback
from torsh_trainer.errors import ConfigError, nearest
from torsh_trainer.task import DataSource, Task

_ELSEWHERE = {
    "training_step": "loss",
    "validation_step": "evaluate",
    "evaluation_step": "evaluate",
    "evaluate_step": "evaluate",
    "eval_step": "evaluate",
    "test_step": "evaluate",
    "predict_step": "predict",
    "configure_model": "build_model",
    "configure_optimizers": "build_optimizers",
    "train_dataloader": "data",
    "val_dataloader": "data",
    "optimiser": "optimizer",
}
"""What other trainers call it, or other spellings, and what a task calls it."""

_OTHER_SPLITS = {
    "training": "train",
    "val": "eval",
    "valid": "eval",
    "validation": "eval",
    "evaluation": "eval",
    "testing": "test",
    "prediction": "predict",
    "collate_fn": "collate",
}
_ALIKE = 0.85
"""From this ratio on two names are one, mistyped: of difflib, 1 for equal names."""


def refuse_uncalled(task: Task, callbacks: Sequence[Callback]) -> None:
    """Returns where all that stands under such a name is called.

    Raises:
        ConfigError: names what nothing calls, and what was probably meant.
    """
    for callback in callbacks:
        _check_callback(callback)
        _check_state(callback, Callback)
    if type(task).course is not Task.course:  # what is called there, its loop knows
        return
    _check_names(task, Task, _ELSEWHERE)
    _check_weight(task)
    _check_state(task, Task)
    source = vars(task).get("data", getattr(type(task), "data", None))
    if isinstance(source, DataSource):
        _check_names(source, DataSource, _OTHER_SPLITS)


def _check_callback(callback: Callback) -> None:
    for name, where in _defined(callback, Callback):
        if name.startswith("on_") and not hasattr(Callback, name):
            hooks = [hook for hook in vars(Callback) if hook.startswith("on_")]
            raise _uncalled(where, name, nearest(name, hooks))


def _check_names(given: Any, base: type, aliases: dict[str, str]) -> None:
    """Other names of what ``base`` knows, where the known one is left as it is."""
    known = [name for name in (*vars(base), *base.__annotations__) if not name.startswith("_")]
    own = {name for name, _ in _defined(given, base)} | set(vars(given))
    for name, value in vars(given).items():
        is_knob = isinstance(value, int | float | str | None)
        if name in aliases and aliases[name] not in own and not is_knob:
            raise _uncalled(type(given), name, f"did you mean {aliases[name]!r}?")
    for name, where in _defined(given, base):
        close = difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE)
        mistyped = callable(vars(where)[name]) and close
        meant = aliases.get(name) or (close[0] if mistyped else None)
        if name not in known and meant is not None and meant not in own:
            raise _uncalled(where, name, f"did you mean {meant!r}?")


def _defined(given: Any, base: type) -> Iterator[tuple[str, type]]:
    """Public names that the user's classes define, and no class beside ``base`` asks for."""
    lineage = type(given).__mro__
    foreign = {n for kind in lineage if not issubclass(kind, base) for n in vars(kind)}
    for kind in lineage:
        if issubclass(kind, base) and kind is not base:
            for name in vars(kind):
                if not name.startswith("_") and name not in foreign:
                    yield name, kind


def _check_weight(task: Task) -> None:
    own = {name for name, _ in _defined(task, Task)} | set(vars(task))
    if "weight" in own and "sample_weight" not in own:
        raise ConfigError(
            f"{type(task).__name__} defines weight, and its sample_weight of "
            f"{Task.sample_weight:g} says that all samples weigh the same: nothing calls it",
            fix="set sample_weight = None in it, or leave weight out",
        )


def _check_state(given: Any, base: type) -> None:
    """What is saved is loaded, and what is loaded was saved."""
    own = {name for name, _ in _defined(given, base)}
    for one, other in (("state_dict", "load_state_dict"), ("load_state_dict", "state_dict")):
        if one in own and other not in own and getattr(type(given), other) is getattr(base, other):
            raise ConfigError(
                f"{type(given).__name__} defines {one} without {other}: its state would be lost "
                "when a run goes on",
                fix=f"define {other} too",
            )


def _uncalled(where: type, name: str, offer: str) -> ConfigError:
    return ConfigError(
        f"{where.__name__}.{name}: nothing calls or reads that",
        fix=f"{offer} If it is a helper of your own, give it a name that begins with an underscore",
        name=name,
    )
