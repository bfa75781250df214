"""What travels to worker processes, as bytes."""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import cloudpickle

from torsh_trainer.errors import ConfigError


def pickle_call(entry: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """A cloudpickle of ``(entry, args)``.

    What is defined in a module that a worker cannot import (``__main__``, a notebook, a file
    that was loaded by its path) travels by value.

    Raises:
        ConfigError: something in it cannot be sent to another process.
    """
    try:
        with _by_value(_unreachable()):
            return cloudpickle.dumps((entry, tuple(args)))
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, NotImplementedError) as e:
        raise ConfigError(
            f"this run cannot be sent to worker processes: {e}",
            fix="pass plain values, and what makes the rest (a lock, an open file) in the worker; "
            "or run alone with launcher=inline",
        ) from e


def _unreachable() -> list[ModuleType]:
    """Loaded modules whose top-level name no finder knows."""
    tops: dict[str, list[ModuleType]] = {}
    for name, module in list(sys.modules.items()):
        # A module without a file is built in, a namespace, or made by a library for itself.
        if getattr(module, "__file__", None) and name != "__main__":
            tops.setdefault(name.partition(".")[0], []).append(module)
    return [m for top, modules in tops.items() if not _findable(top) for m in modules]


def _findable(top: str) -> bool:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if find is not None and find(top, None) is not None:
            return True
    return False


@contextlib.contextmanager
def _by_value(modules: Sequence[ModuleType]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module in modules:
            if sys.modules.get(module.__name__) is module:
                cloudpickle.register_pickle_by_value(module)
                stack.callback(cloudpickle.unregister_pickle_by_value, module)
        yield
