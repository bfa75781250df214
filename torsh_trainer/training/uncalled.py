"""What users define under a name that nothing calls, where another one was meant."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

from torsh_trainer.callbacks.base import Callback
from torsh_trainer.errors import ConfigError, nearest
from torsh_trainer.tasks.base import DataSource, Task

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
    "course": "plan_program of torsh_trainer.training.program.ProgramTask",
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
    if task.brings_program:  # what is called there, its loop knows
        return
    _check_names(task, Task, _ELSEWHERE)
    _check_hooks_of_task(task)
    _check_weight(task)
    _check_state(task, Task)
    source = vars(task).get("data", getattr(type(task), "data", None))
    if isinstance(source, DataSource):
        _check_names(source, DataSource, _OTHER_SPLITS)


def _check_callback(callback: Callback) -> None:
    for name, where in _find_defined(callback, Callback):
        if name.startswith("on_") and not hasattr(Callback, name):
            raise _uncalled_error(where, name, nearest(name, _hooks()))


def _check_hooks_of_task(task: Task) -> None:
    for name, where in _find_defined(task, Task):
        is_hook = name.startswith("on_") and callable(vars(where)[name])
        if is_hook and not _is_named(name, task, Task):
            offer = f"a task has no hooks, a torsh_trainer.Callback has: {', '.join(_hooks())}."
            raise _uncalled_error(where, name, offer)


def _hooks() -> list[str]:
    return [hook for hook in vars(Callback) if hook.startswith("on_")]


def _check_names(given: Any, base: type, aliases: dict[str, str]) -> None:
    """Other names of what ``base`` knows, where the known one is left as it is."""
    known = [name for name in (*vars(base), *base.__annotations__) if not name.startswith("_")]
    own = {name for name, _ in _find_defined(given, base)} | set(vars(given))
    for name, value in vars(given).items():
        is_knob = isinstance(value, int | float | str | None)
        if name in aliases and aliases[name] not in own and not is_knob:
            raise _uncalled_error(type(given), name, f"did you mean {aliases[name]!r}?")
    for name, where in _find_defined(given, base):
        close = difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE)
        mistyped = callable(vars(where)[name]) and close
        meant = aliases.get(name) or (close[0] if mistyped else None)
        if name in known or meant is None or _is_named(name, given, base):
            continue
        if meant not in _find_defined_from(where, given) and not _is_inherited(name, where):
            raise _uncalled_error(where, name, f"did you mean {meant!r}?")


def _find_defined_from(where: type, given: Any) -> set[str]:
    """Names that ``where`` and what derives from it define, and those that ``given`` itself has.

    Not those of its bases: who misspells what a base defines meant to replace it.
    """
    lineage = type(given).__mro__
    return set(vars(given)).union(*(vars(kind) for kind in lineage[: lineage.index(where) + 1]))


def _is_inherited(name: str, where: type) -> bool:
    return any(name in vars(kind) for kind in where.__mro__[1:])


def _is_named(name: str, given: Any, base: type) -> bool:
    """Whether another method of the user's classes names it: it is a helper then."""
    kinds = [kind for kind in type(given).__mro__ if issubclass(kind, base)]
    methods = [(other, thing) for kind in kinds for other, thing in vars(kind).items()]
    return any(
        other != name and inspect.isfunction(thing) and name in _names_in(thing.__code__)
        for other, thing in methods
    )


def _names_in(code: CodeType) -> set[str]:
    within = [_names_in(part) for part in code.co_consts if isinstance(part, CodeType)]
    return set(code.co_names).union(*within)


def _find_defined(given: Any, base: type) -> Iterator[tuple[str, type]]:
    """Public names that the user's classes define, and no class beside ``base`` asks for."""
    lineage = type(given).__mro__
    foreign = {n for kind in lineage if not issubclass(kind, base) for n in vars(kind)}
    for kind in lineage:
        if issubclass(kind, base) and kind is not base:
            for name in vars(kind):
                if not name.startswith("_") and name not in foreign:
                    yield name, kind


def _check_weight(task: Task) -> None:
    own = {name for name, _ in _find_defined(task, Task)} | set(vars(task))
    if "weight" in own and "sample_weight" not in own:
        raise ConfigError(
            f"{type(task).__name__} defines weight, and its sample_weight of "
            f"{Task.sample_weight:g} says that all samples weigh the same: nothing calls it",
            fix="set sample_weight = None in it, or leave weight out",
        )


def _check_state(given: Any, base: type) -> None:
    """What is saved is loaded, and what is loaded was saved."""
    own = {name for name, _ in _find_defined(given, base)}
    for one, other in (("state_dict", "load_state_dict"), ("load_state_dict", "state_dict")):
        if one in own and other not in own and getattr(type(given), other) is getattr(base, other):
            raise ConfigError(
                f"{type(given).__name__} defines {one} without {other}: its state would be lost "
                "when a run goes on",
                fix=f"define {other} too",
            )


def _uncalled_error(where: type, name: str, offer: str) -> ConfigError:
    return ConfigError(
        f"{where.__name__}.{name}: nothing calls or reads that",
        fix=f"{offer} If it is a helper of your own, give it a name that begins with an underscore",
        name=name,
    )
