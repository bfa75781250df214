"""Lightning under its other name: ``pytorch_lightning``'s classes as ``lightning.pytorch``'s.

Both distributions hold the same code, in two hierarchies of classes that do not know each other.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from typing import Any

import lightning
from lightning.fabric.accelerators import Accelerator

from torsh_trainer.errors import ConfigError, Unsupported

_NAME = "pytorch_lightning"


def adopt(thing: Any) -> Any:
    """``thing`` itself, once its class stands on ``lightning`` where it stood on the other.

    Bases are exchanged in the classes of the user's, so that ``isinstance`` and ``super()`` mean
    ``lightning`` from then on; an object of one of Lightning's own classes gets that of the same
    name.

    Raises:
        ConfigError: the two are of different versions, or one has what the other lacks.
    """
    kind = type(thing)
    if thing is None or not any(map(_is_others, kind.__mro__)):
        return thing
    _check_versions()
    if _is_others(kind):
        thing.__class__ = _counterpart(kind)
        return thing
    _rebase(kind)
    return thing


def _rebase(kind: type) -> None:
    if _is_others(kind) or not any(map(_is_others, kind.__mro__)):
        return
    for base in kind.__bases__:
        _rebase(base)
    if any(map(_is_others, kind.__bases__)):
        kind.__bases__ = tuple(
            _counterpart(base) if _is_others(base) else base for base in kind.__bases__
        )


def _is_others(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == _NAME


def _counterpart(kind: type) -> type:
    name = "lightning.pytorch" + kind.__module__.removeprefix(_NAME)
    try:
        found: Any = importlib.import_module(name)
        for part in kind.__qualname__.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{kind.__module__}.{kind.__qualname__} has no counterpart in lightning",
            fix="import it from lightning.pytorch",
        ) from error
    assert isinstance(found, type)
    return found


def _check_versions() -> None:
    theirs, ours = sys.modules[_NAME].__version__, lightning.__version__
    if theirs.split(".")[:2] != ours.split(".")[:2]:
        raise ConfigError(
            f"the module stands on {_NAME} {theirs}, and this trainer on lightning {ours}",
            fix=f"pip install '{_NAME}=={ours}', or import lightning.pytorch in it",
        )


# -- its Trainer ----------------------------------------------------------------------------------


def register(names: Iterable[str]) -> None:
    """Makes our names known to the other Trainer, where it is: each says that it cannot be."""
    if _NAME not in sys.modules:
        return
    registry = importlib.import_module(f"{_NAME}.strategies").StrategyRegistry
    for name in names:
        registry.register(f"torsh_{name}", _refuse, description="of ToRSh Trainer", override=True)


def introduce(kind: type) -> None:
    """Has the other Trainer take a strategy for one of its own, up to its accelerator."""
    if _NAME in sys.modules:
        importlib.import_module(f"{_NAME}.strategies").Strategy.register(kind)


def check_accelerator(accelerator: Any) -> None:
    """Makes sure that a Trainer of ``lightning`` gives this strategy its accelerator.

    Raises:
        Unsupported: it is the other one.
    """
    if accelerator is not None and not isinstance(accelerator, Accelerator):
        _refuse()


def _refuse(*_: Any, **__: Any) -> None:
    raise Unsupported(
        f"our strategies run in the Trainer of lightning, and this one is {_NAME}'s",
        fix=f"import lightning.pytorch as pl in the place of {_NAME}, in all of the script",
    )
