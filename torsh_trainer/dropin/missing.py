"""What our modules answer to a name that they do not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torsh_trainer.dropin.names import engine_of


def refuse_unknown(module: str) -> Callable[[str], Any]:
    """A ``__getattr__`` for ``module``, by its own name: the sentence of what is not there."""
    engine = engine_of(".".join(module.split(".")[:3]))
    part = module.removeprefix(engine.root).removeprefix(".")

    def refuse(name: str) -> Any:
        if name.startswith("__"):  # asked by Python itself
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise AttributeError(engine.explain(part, name))

    return refuse
